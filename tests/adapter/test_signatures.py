"""A signature fits wherever the format finds its checkpoint, and no format is imported whose signature does not fit."""

import json
import subprocess
import sys
from importlib import import_module

import pytest
from helpers.fixture_places import DCP, FIXTURES

from reshard.adapter import registry
from reshard.errors import ReshardError
from reshard.storage.files import LocalFiles

SIGNATURES = import_module("reshard.formats.signatures").SIGNATURES
FOLDERS = sorted({path.parent for path in FIXTURES.rglob("*")} | {path.parent.parent for path in FIXTURES.rglob("*/*")})


def test_every_format_has_a_signature():
    assert sorted(SIGNATURES) == registry.names()


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_a_signature_fits_wherever_the_format_finds_or_refuses_something(name):
    for folder in FOLDERS:
        files = LocalFiles(folder)
        try:
            found = registry.named(name).detect(files)
        except ReshardError as refusal:
            found = str(refusal)
        assert not found or name in registry._fitting(files), (folder, found)


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_every_signature_is_needed_somewhere(name):
    assert any(name not in registry._fitting(LocalFiles(folder)) for folder in FOLDERS)


def run(script, *arguments):
    return json.loads(subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True).stdout)


def test_opening_a_checkpoint_imports_no_file_of_another_format():
    script = "import json, sys, reshard; reshard.open(sys.argv[1]).content; print(json.dumps([*sys.modules]))"
    packages = {name.split(".")[2] for name in run(script, DCP / "fsdp2" / "checkpoint") if name.startswith("reshard.formats.")}
    assert packages == {"dcp", "signatures"}


OPENED = """
import json, sys, reshard
files = set()
sys.setprofile(lambda frame, event, argument: files.add(frame.f_code.co_filename))
reshard.open(sys.argv[1])
sys.setprofile(None)
modules = {module.__file__: name for name, module in sys.modules.items() if name.partition(".")[0] == "reshard"}
print(json.dumps(sorted(modules[path] for path in files & modules.keys())))
"""


def test_opening_a_checkpoint_runs_few_files():
    """In a fresh process; the top levels of modules count."""
    assert 40 < len(run(OPENED, DCP / "fsdp2" / "checkpoint")) <= 70


TRACED = """
import json, sys, threading
called = set()
def note(frame, event, argument):
    if event == "call" and frame.f_code.co_name != "<module>":
        called.add(frame.f_code.co_filename)
sys.setprofile(note)
threading.setprofile(note)
import reshard
reshard.convert(reshard.plan(sys.argv[1], to="vllm", tp=2, model=sys.argv[2]), sys.argv[3])
sys.setprofile(None)
modules = {module.__file__: name for name, module in sys.modules.items() if name.partition(".")[0] == "reshard"}
print(json.dumps(sorted(modules[path] for path in called & modules.keys())))
"""


def test_a_conversion_calls_into_few_files_and_none_of_a_third_format(tmp_path):
    """In all threads of a fresh process. The bodies of classes count as calls, the top levels of modules do not."""
    case = DCP / "fsdp2"
    modules = run(TRACED, case / "checkpoint", case / "model", tmp_path / "out")
    assert {name.split(".")[2] for name in modules if name.startswith("reshard.formats.")} == {"dcp", "vllm"}
    assert 50 < len(modules) <= 109
