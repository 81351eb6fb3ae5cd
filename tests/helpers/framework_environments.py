"""The frame of the slow checks: an environment with the real framework, made where there is none, and checks that are counted."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.borrowed_packages import borrow, requirements_of

ROOT = Path(__file__).resolve().parents[2]
LONG = "--long" in sys.argv
"""Whether all cases are checked, and not only those for which CI has the time."""

# What the package is made of, plugin included.
PACKAGE = ("pyproject.toml", "setup.py", "README.md", "reshard", "formats", "cli", "plugins")

TORCH = "torch==2.13.0"
# Packages are not compiled before they are imported, and are then compiled once, even where this is set.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Each check as (what, passed, detail), from reshard's command, the framework's interpreter and a folder to work in.
Checks = Callable[[Path, Path, Path], Iterator[tuple[str, bool, str]]]


@dataclass(frozen=True)
class Environment:
    """What pip installs to have a framework, after torch; the options and the variables that it needs for that."""

    framework: str
    requirements: Path
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    with_torch: bool = True

    @property
    def folder(self) -> Path:
        return ROOT / f".venv-{self.framework.lower()}"

    def python(self) -> Path:
        """The interpreter, made now if it is not there. Parts of .ci/run that run beside each other share it, so one makes it at a time."""
        ready, python = self.folder / "installed", self.folder / "bin" / "python"
        with self.folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not ready.exists():
                self._make(python)
                ready.touch()
        return python

    def _make(self, python: Path) -> None:
        began = time.monotonic()
        shutil.rmtree(self.folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.folder], check=True)
        wanted = requirements_of(self.requirements) + ([Requirement(TORCH)] if self.with_torch else [])
        # Without dependencies, those of torch alone are there.
        whole = {"torch"} if "--no-deps" in self.options else {canonicalize_name(each.name) for each in wanted}
        linked = borrow(self.folder, wanted, whole, finished())
        pip = [*pip_for(python), "--no-compile"]
        # torch first: it must be the build for CPUs, which a framework's requirements could replace.
        if self.with_torch and "torch" not in linked:
            subprocess.run([*pip, TORCH], check=True)
        subprocess.run([*pip, *self.options, "-r", self.requirements], check=True, env={**os.environ, **self.variables})
        print(f"made the {self.framework} environment in {time.monotonic() - began:.0f} s", flush=True)


def pip_for(python: Path) -> list[str | Path]:
    """The start of a command that installs into an environment without pip: by that of the tree, or of the Python that runs."""
    own = ROOT / ".venv" / "bin" / "python"
    return [own if own.exists() else sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]


def finished() -> list[Path]:
    """The environments of this tree that have this Python, and are made."""
    libraries = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    return [path.parent for path in sorted(ROOT.glob(".venv*/installed")) if (path.parent / libraries).is_dir()]


def run_checks(checks: Checks, environment: Environment, about: str) -> int:
    """The command line of a file of checks, which `about` describes; the exit code is 0 if there were any and all passed."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reshard", type=Path, default=ROOT / ".venv" / "bin" / "reshard")
    made = f"made in {environment.folder.name} if not given"
    parser.add_argument("--python", type=Path, help=f"of an environment that has {environment.framework}; {made}")
    parser.add_argument("--long", action="store_true", help="check all cases; default: those for which CI has the time")
    options = parser.parse_args()
    python = options.python or environment.python()
    results: list[bool] = []
    with tempfile.TemporaryDirectory() as work:
        for what, passed, detail in checks(options.reshard, python, Path(work)):
            results.append(passed)
            print(f"{'ok  ' if passed else 'FAIL'} {what}{'' if passed else ': ' + detail}", flush=True)
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if results and all(results) else 1


def installed(python: Path, work: Path) -> Path:
    """A folder that makes a copy of this tree importable, entry points included; vLLM's environment stays as it is."""
    source, target = work / "package", work / "site"
    source.mkdir()
    for name in PACKAGE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    # Built by the setuptools that torch brings.
    subprocess.run([*pip_for(python), "--no-build-isolation", "--no-deps", "--target", target, source], check=True)
    return target
