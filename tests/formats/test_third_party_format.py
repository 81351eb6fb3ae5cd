"""A package of somebody else (tests/third_party) brings a format with an option of its own; nothing in reshard names either. It runs the
laws of reshard.testing; here each law is seen to fail."""

import inspect
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.fixture_places import HF
from helpers.reshard_command import command, result_tree

from reshard.adapter import registry
from reshard.errors import ReshardError
from reshard.testing import FormatCase, FormatLaws, read_truth

PACKAGE = Path(__file__).resolve().parent.parent / "third_party"
LLAMA = HF / "llama"


def install(site, *modules, points, name):
    """Install modules as pip does, with their entry points, in the directory `site`. Nothing is built, so no network is needed."""
    for module in modules:
        if module.is_dir():
            shutil.copytree(module, site / module.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(module, site)
    information = site / f"{name.replace('-', '_')}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{key} = {value}" for key, value in points.items()]
    (information / "entry_points.txt").write_text("\n".join(["[reshard.formats]", *lines, ""]))


@pytest.fixture
def run(tmp_path):
    """The command `reshard` where the package is installed; `run.site` is where."""
    site = tmp_path / "site"
    site.mkdir()
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    install(site, PACKAGE / "reshard_raw", points=project["entry-points"]["reshard.formats"], name=project["name"])

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "140"}
        return subprocess.run(command(*arguments), env=environment, capture_output=True, text=True)

    run.site = site
    return run


def test_it_is_listed(run):
    listed = json.loads(run("formats", "--json").stdout)["formats"]
    assert {"name": "raw", "reads": True, "writes": True, "summary": "one file of elements and a JSON table"} in listed


@pytest.mark.parametrize("name", ["convert", "plan"])
def test_help_shows_its_option_under_its_name(run, name):
    sections = run(name, "--help").stdout.split("\n\n")
    (section,) = [text for text in sections if "--alignment" in text]
    assert section.startswith("Only for raw:") and "Start each tensor at a multiple of N bytes." in section


def test_the_option_reaches_the_layout(run, tmp_path):
    result = run("convert", LLAMA, tmp_path / "out", "--to", "raw", "--alignment", 4096)
    assert result.returncode == 0, result.stderr
    table = json.loads((tmp_path / "out" / "weights.json").read_text())
    offsets = sorted(entry["byte_offset"] for entry in table.values())
    assert len(offsets) > 10 and not any(offset % 4096 for offset in offsets)
    assert offsets[1] == 16_384, "the first tensor has 16,000 bytes"


def test_python_takes_the_option_as_a_keyword(run, tmp_path):
    script = "import reshard, sys; reshard.convert(reshard.plan(sys.argv[1], to='raw', alignment=4096), sys.argv[2])"
    arguments = [command()[0], "-c", script, LLAMA, tmp_path / "python"]
    subprocess.run(arguments, env={**os.environ, "PYTHONPATH": str(run.site)}, check=True)
    assert run("convert", LLAMA, tmp_path / "command", "--to", "raw", "--alignment", 4096).returncode == 0
    assert (tmp_path / "python" / "weights.raw").read_bytes() == (tmp_path / "command" / "weights.raw").read_bytes()


BY_METHODS = """
import reshard_raw

class Raw(reshard_raw.Raw):
    def read(self, files, hints):
        from reshard_raw.read import read
        return read(files, hints)

    def lay_out(self, content, target, companions):
        from reshard_raw.write import lay_out
        return lay_out(content, target, companions)

FORMAT = Raw()
"""
"""The class as formats were written before 0.3: with methods, and not by the names of files."""


@pytest.mark.parametrize("way", ["by files", "by methods"])
def test_every_command_takes_what_it_wrote(run, tmp_path, way):
    """It is detected, verified, and converts to what the source converts to, byte by byte."""
    if way == "by methods":
        (run.site / "raw_by_methods.py").write_text(BY_METHODS)
        (run.site / "reshard_raw-1.0.dist-info" / "entry_points.txt").write_text("[reshard.formats]\nraw = raw_by_methods:FORMAT\n")


def test_what_it_wrote_converts_to_what_the_source_converts_to(run, tmp_path):
    assert run("convert", LLAMA, tmp_path / "raw", "--to", "raw").returncode == 0
    for source in (LLAMA, tmp_path / "raw"):
        assert run("convert", source, tmp_path / f"vllm-{source.name}", "--to", "vllm", "--tp", 2).returncode == 0
    assert result_tree(tmp_path / "vllm-llama") == result_tree(tmp_path / "vllm-raw")


def test_its_own_tests_pass(run, tmp_path):
    """The laws, as its author runs them: outside of this repository, with the format installed."""
    for name in ("test_laws.py", "fixture"):
        (shutil.copytree if (PACKAGE / name).is_dir() else shutil.copy)(PACKAGE / name, tmp_path / name)
    arguments = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", tmp_path / "test_laws.py"]
    done = subprocess.run(arguments, env={**os.environ, "PYTHONPATH": str(run.site)}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and f"{len(LAWS)} passed" in done.stdout, done.stdout


LAWS = sorted(name for name in dir(FormatLaws) if name.startswith("test_"))
# Law -> file, what is in it, and what stands there in a format that breaks the law.
BROKEN = {
    "test_every_tensor_reads_bit_exactly": ("read.py", "row_major(box.sizes)", "row_major(box.sizes)[::-1]"),
    "test_every_element_lies_in_one_place": ("read.py", "Shards.of([piece])", "Shards.of([])"),
    "test_the_index_is_read_without_the_weights": (
        "read.py", "    builder = ", "    files.read_into(WEIGHTS, 0, memoryview(bytearray(8)))\n    builder = "
    ),
    "test_a_missing_file_is_named": ("read.py", "raise missing(files, WEIGHTS)", "raise CheckpointError('a file is missing')"),
    "test_a_truncated_file_is_refused": ("read.py", "if end != size:", "if end == size + 1:"),
    "test_a_flipped_length_is_refused_or_harmless": ("read.py", "except ValueError as error:", "except ZeroDivisionError as error:"),
    "test_the_way_there_and_back_is_the_identity": (
        "write.py", '"byte_offset": item.byte_offset}', '"byte_offset": item.byte_offset ^ 64}'
    ),
    "test_what_is_written_is_read_back": ("write.py", '"shape": item.tensor.shape,', '"shape": item.tensor.shape[::-1],'),
    "test_a_second_conversion_writes_the_same_bytes": (
        "write.py", "json.dumps(table)", '(json.dumps(table) + " " * (__import__("time").perf_counter_ns() % 1009))'
    ),
    "test_options_are_declared_and_others_refused": ("__init__.py", "multiple of N bytes.", "multiple of N bytes"),
    "test_it_is_not_loaded_for_another_format": ("__init__.py", "\nclass Raw", "\nfrom . import read as _reader\n\nclass Raw"),
}  # fmt: skip


@pytest.fixture
def case(run, monkeypatch):
    """The case of the package, which is installed in this process, too. Its files may be edited until it is opened."""
    monkeypatch.syspath_prepend(run.site)
    registry.others.cache_clear()
    yield FormatCase("raw", PACKAGE / "fixture" / "checkpoint", read_truth(PACKAGE / "fixture" / "truth.json"), options={"alignment": 64})
    registry.others.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "reshard_raw"]:
        del sys.modules[name]


@pytest.mark.parametrize("law", LAWS)
def test_each_law_fails_on_a_format_that_breaks_it(law, run, case, tmp_path):
    file, old, new = BROKEN[law]
    path = run.site / "reshard_raw" / file
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    copied = replace(case, checkpoint=shutil.copytree(case.checkpoint, tmp_path / "copied"))
    given = {"case": case, "copied": copied, "tmp_path": tmp_path}
    law = getattr(FormatLaws(), law)
    with pytest.raises((AssertionError, ReshardError, ValueError, pytest.fail.Exception)):
        law(**{name: given[name] for name in inspect.signature(law).parameters})


def test_help_loads_neither_its_reader_nor_its_writer(run):
    script = (
        "import importlib, sys; importlib.import_module('reshard.cli.main').run(['convert', '--help']);"
        "sys.exit('reshard_raw' not in sys.modules or 'reshard_raw.read' in sys.modules)"
    )
    subprocess.run([command()[0], "-c", script], env={**os.environ, "PYTHONPATH": str(run.site)}, check=True, capture_output=True)


LOADED = "import sys, reshard; print(reshard.open(sys.argv[1]).format, 'reshard_raw' in sys.modules)"


def test_with_a_signature_it_is_imported_only_where_that_fits(run, tmp_path):
    def opened(source):
        arguments = [command()[0], "-c", LOADED, source]
        return subprocess.run(arguments, env={**os.environ, "PYTHONPATH": str(run.site)}, check=True, capture_output=True, text=True).stdout

    assert run("convert", LLAMA, tmp_path / "raw", "--to", "raw").returncode == 0
    assert opened(LLAMA) == "hf True\n"
    (run.site / "raw_signatures.py").write_text('SIGNATURES = {"raw": ("weights.raw",)}\n')
    with open(run.site / "reshard_raw-1.0.dist-info" / "entry_points.txt", "a") as points:
        points.write("[reshard.signatures]\nraw = raw_signatures:SIGNATURES\n")
    assert (opened(LLAMA), opened(tmp_path / "raw")) == ("hf False\n", "raw True\n")


def test_the_option_is_refused_for_another_format(run, tmp_path):
    result = run("convert", LLAMA, tmp_path / "out", "--to", "hf", "--alignment", 4096)
    assert result.returncode == 2 and not (tmp_path / "out").exists()
    assert "--alignment does not apply to hf" in result.stderr and "option of raw" in result.stderr


def test_a_wrong_value_names_the_option(run, tmp_path):
    result = run("convert", LLAMA, tmp_path / "out", "--to", "raw", "--alignment", "wide")
    assert result.returncode == 2 and "--alignment wide" in result.stderr and "number" in result.stderr


@pytest.mark.parametrize(
    "module, expected",
    [
        ("FORMAT = object()\n", ("is not a Format but an object of the class object", "reshard.adapter.format.Format")),
        ("import a_module_that_is_not_installed\n", ("cannot be loaded", "a_module_that_is_not_installed")),
        ("", ("cannot be loaded", "FORMAT")),
    ],
    ids=["another class", "import error", "no such name"],
)
def test_a_package_whose_entry_point_is_not_a_format_is_named(run, tmp_path, module, expected):
    (tmp_path / "broken.py").write_text(module)
    install(run.site, tmp_path / "broken.py", points={"broken": "broken:FORMAT"}, name="reshard-broken")
    result = run("inspect", LLAMA)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    for words in (*expected, "broken:FORMAT", "reshard-broken"):
        assert words in result.stderr, result.stderr


OTHER = """
from reshard.adapter.format import Option
from reshard_raw import Raw

class Other(Raw):
    name = "other"
    options = (Option("alignment", "number", "Start each tensor at a multiple of N {unit}."),)

    def detect(self, files):
        return None

FORMAT = Other()
"""


def install_other(run, tmp_path, unit):
    """A second package, with an option of the same name."""
    (tmp_path / "reshard_other.py").write_text(OTHER.format(unit=unit))
    install(run.site, tmp_path / "reshard_other.py", points={"other": "reshard_other:FORMAT"}, name="reshard-other")


def test_two_packages_that_mean_different_things_by_one_option_are_named(run, tmp_path):
    install_other(run, tmp_path, "elements")
    result = run("convert", LLAMA, tmp_path / "out", "--to", "hf")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    for words in ("--alignment", "different meanings", "other", "raw"):
        assert words in result.stderr, result.stderr


def test_two_packages_that_mean_the_same_by_one_option_share_it(run, tmp_path):
    install_other(run, tmp_path, "bytes")
    assert "Only for other, raw:" in run("convert", "--help").stdout


def test_a_package_with_the_name_of_a_format_of_reshard_is_not_used(run, tmp_path):
    (tmp_path / "reshard_taken.py").write_text("raise SystemExit('it was imported')\n")
    install(run.site, tmp_path / "reshard_taken.py", points={"hf": "reshard_taken:FORMAT"}, name="reshard-taken")
    assert json.loads(run("inspect", LLAMA, "--json").stdout)["format"] == "hf"


@pytest.fixture
def others():
    """What other packages offer; asked again at the end."""
    asked = (registry.others, registry._may_have_others)
    for each in asked:
        each.cache_clear()
    yield registry.others
    for each in asked:
        each.cache_clear()


@pytest.mark.parametrize("kind", ["a folder", "a zip file"])
def test_packages_are_found(others, kind, tmp_path, monkeypatch):
    files = {"METADATA": "Name: theirs\nVersion: 1.0\n", "entry_points.txt": "[reshard.tested]\none = json:loads\n"}
    if kind == "a folder":
        install(tmp_path, points={}, name="theirs")
        (tmp_path / "theirs-1.0.dist-info" / "entry_points.txt").write_text(files["entry_points.txt"])
    else:
        with zipfile.ZipFile(tmp_path / "packages.zip", "w") as archive:
            for name, text in files.items():
                archive.writestr(f"theirs-1.0.dist-info/{name}", text)
    monkeypatch.syspath_prepend(tmp_path if kind == "a folder" else tmp_path / "packages.zip")
    (point,) = others("reshard.tested").values()
    assert (point.name, point.value, point.dist.name) == ("one", "json:loads", "theirs") and point.load()("1") == 1
