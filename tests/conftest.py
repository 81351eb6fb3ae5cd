"""Settings of all tests, and what is left out where torch is not installed (`.ci/run wheel`)."""

import gc
import os
import shutil
import signal
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests make blocks smaller in reshard.geometry.boxes; these modules must have taken the real size before.
import reshard.engine.pool
import reshard.engine.transfer  # noqa: F401
from reshard import secrets

# Machines are slow at times, and no test is timed.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Thousands of conversions are synced to the disk; where the disk is memory, nobody waits for it.
MEMORY = Path("/dev/shm")
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4_000_000_000:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# A shell lets its jobs in the background ignore Ctrl-C, and what they start would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# pytest-xdist sets it, and lines would be wrapped; tests of widths set it themselves. Without xdist, GNU readline, which pytest loads, puts
# it where os.environ does not see it, and child processes inherit it.
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")

# A package of somebody else: its tests run where it is installed (tests/formats/test_third_party_format.py).
collect_ignore = ["third_party"]

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_TORCH = find_spec("torch") is None
# What of reshard imports torch: `.torch()` of a view.
NEEDS_TORCH = {"reshard/engine/views.py"}
REASON = "Skipped: without torch. The test compares with torch itself, or reads a view as a torch tensor"


def is_expected(files):
    """Whether an import of torch in the innermost of these files is expected: in a test, in another package, or in NEEDS_TORCH."""
    inside = [Path(file).relative_to(ROOT).as_posix() for file in files if Path(file).is_relative_to(ROOT) and ".venv" not in str(file)]
    return bool(inside) and (inside[-1].startswith("tests/") or inside[-1] in NEEDS_TORCH)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nothing that is imported or collected is garbage: looking through all of it took a fifth of the time, in each worker."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


# A test with at least so many cases is sampled: one case in so many runs in `make test`, the others in `.ci/run slow`. A test whose cases
# each show something else, such as another damage that is refused, is marked `distinct`, and all of them run.
MANY, ONE_IN = 6, 4


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark as slow what repeats a test at more places: of a function with many cases, all but each fourth, in the order of its cases."""
    cases = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("slow") and not item.get_closest_marker("distinct"):
            cases[item.path, item.originalname, item.cls].append(item)
    for of_one in cases.values():
        for number, item in enumerate(of_one if len(of_one) >= MANY else ()):
            if number % ONE_IN:
                item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Without torch, leave out files that import it at their top, directly or through another file of the tests."""
    report = yield
    if WITHOUT_TORCH and report.failed and "No module named 'torch" in str(report.longrepr):
        files = [line.split(":")[0] for line in str(report.longrepr).split("\n") if ": in <module>" in line]
        if is_expected([ROOT / file for file in files]):
            report.outcome, report.longrepr = "skipped", (str(collector.path), 0, REASON)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Without torch, leave out tests that need it. Where anything else imports it, the test fails."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    is_missing = WITHOUT_TORCH and isinstance(error, ModuleNotFoundError) and error.name.split(".")[0] == "torch"
    if is_missing and is_expected([entry.path for entry in call.excinfo.traceback]):
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, REASON)
    return report


@pytest.fixture(autouse=True)
def no_secrets_of_other_tests():
    """A process remembers the values that opened a store, and masks them from then on; some tests open one with a word."""
    secrets._remembered.clear()
    secrets._given.cache_clear()
