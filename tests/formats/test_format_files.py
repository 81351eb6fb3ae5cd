"""read.py and write.py of a format's folder are found by their names, and their functions are the format's methods."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module

import pytest
from helpers.fixture_places import HF

from reshard.adapter import registry
from reshard.adapter.format import Format, Hints
from reshard.adapter.serving_format import ServingFormat
from reshard.errors import UnsupportedError
from reshard.storage.files import LocalFiles

BY_FILE = {"reader": ("read", "read_memory", "check_values"), "writer": ("lay_out", "lay_out_memory")}
FORMATS = {name: found for name, found in registry.formats().items() if not isinstance(found, ServingFormat)}


def functions_of(found, file):
    """Name -> function, of those that are found in one of the two files of a format."""
    functions = ((name, found._function(getattr(found, file), name)) for name in BY_FILE[file])
    return {name: function for name, function in functions if function is not None}


@pytest.mark.parametrize("name", FORMATS)
def test_the_functions_take_and_return_what_the_methods_do(name):
    """The call is not seen by mypy, as the functions are found by name."""
    found = {**functions_of(FORMATS[name], "reader"), **functions_of(FORMATS[name], "writer")}
    assert "read" in found and ("lay_out" in found) == FORMATS[name].can_write
    for each, function in found.items():
        method = inspect.signature(getattr(Format, each))
        _, *expected = (str(parameter) for parameter in method.parameters.values())
        signature = inspect.signature(function)
        allowed = [expected, [text.replace("Mapping[str, Any]", "Args") for text in expected]]  # Args is Megatron's name of that type
        assert [str(parameter) for parameter in signature.parameters.values()] in allowed
        assert signature.return_annotation == method.return_annotation


def test_no_format_repeats_what_the_files_say():
    """A method that only imports a reader or a writer and calls it is not written."""
    for found in FORMATS.values():
        assert not {"read", "lay_out", "check_values", "read_memory"} & vars(type(found)).keys()


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Makes a package of the given files, and imports its FORMAT."""
    made = []

    def package(name, **files):
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / f"{file}.py").write_text(text)
        made.append(name)
        return import_module(name).FORMAT

    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] in made]:
        del sys.modules[name]


CLASS = """
from reshard.adapter.format import Format
class Made(Format):
    name, summary = "made", "made in a test"
    def detect(self, files):
        return None
{more}
FORMAT = Made()
"""
READ = "def read(files, hints):\n    return 'the index of a reader'\n"
WRITE = "def lay_out(content, target, companions):\n    return 'the layout of a writer'\n"
METHODS = "    def read(self, files, hints):\n        return 'a method'\n    def lay_out(self, *arguments):\n        return 'a method'\n"


def read_by(found):
    return found.read(LocalFiles(HF / "llama"), Hints())


def test_by_files_and_by_methods(packages):
    by_files = packages("made_by_files", __init__=CLASS.format(more=""), read=READ, write=WRITE)
    by_methods = packages("made_by_methods", __init__=CLASS.format(more=METHODS), read="the parser is never asked", write="nor here")
    assert read_by(by_files) == "the index of a reader" and read_by(by_methods) == "a method"
    assert by_files.lay_out(None, None, None) == "the layout of a writer" and by_methods.lay_out(None, None, None) == "a method"
    assert by_files.can_write and by_methods.can_write and not by_files.tells_memory


def test_a_format_without_a_writer_is_only_read(packages):
    found = packages("made_to_read", __init__=CLASS.format(more=""), read=READ)
    assert not found.can_write
    with pytest.raises(UnsupportedError, match="read, not written"):
        found.lay_out(None, None, None)


def test_a_format_without_a_reader_is_named(packages):
    with pytest.raises(UnsupportedError, match=r"made has neither a file read\.py"):
        read_by(packages("made_of_nothing", __init__=CLASS.format(more="")))


def test_two_formats_in_one_folder_name_their_files_and_a_class_takes_those_of_the_format_that_it_extends(packages):
    packages("made_first", __init__=CLASS.format(more=""), read=READ, old="def read(files, hints):\n    return 'the old reader'\n")
    extending = "from made_first import Made\nclass Other(Made):\n    name, reader = 'other', {reader!r}\nFORMAT = Other()\n"
    assert read_by(packages("made_second", __init__=extending.format(reader="read"))) == "the index of a reader"
    assert read_by(packages("made_third", __init__=extending.format(reader="old"))) == "the old reader"
