"""docs/reference/errors.md explains every id of an error, with its exit code; and the command line uses both."""

from __future__ import annotations

import re

from helpers.doc_pages import FIXTURES, ROOT
from helpers.reshard_command import reshard

from reshard.errors import ERROR_IDS, ReshardError


def test_the_page_explains_every_id_with_its_exit_code():
    text = (ROOT / "docs" / "reference" / "errors.md").read_text()
    explained = re.findall(r"^## (\S+)\n\nExit code (\d+)", text, re.MULTILINE)
    assert [(name, int(code)) for name, code in explained] == [(name, code) for name, (code, _) in ERROR_IDS.items()]


def test_troubleshooting_has_an_example_of_every_id():
    """Commands that compare print a result, and no error with an id."""
    text = (ROOT / "docs" / "recipes" / "troubleshooting.md").read_text()
    assert [name for name in ERROR_IDS if f"[{name}]" not in text] == ["difference"] and "$ reshard verify spoiled\ndifferent: " in text


def test_every_exit_code_is_on_its_page_and_in_help():
    text = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    listed = {int(code) for cell in re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE) for code in cell.split(",")}
    assert listed == {0, 143, *(code for code, _ in ERROR_IDS.values())}
    shown = " ".join(reshard("--help").out.split()).partition("Exit codes: ")[2]
    assert {int(code) for code in re.findall(r"(?:^|[;,] |SIGTERM )(\d+) ", shown)} | {143} == listed


def test_every_class_of_errors_has_a_known_id():
    classes = [ReshardError]
    for each in classes:
        classes += each.__subclasses__()
    assert len(classes) > 5 and all(each.id in ERROR_IDS for each in classes)


def test_an_error_ends_with_its_id_and_is_json_too(tmp_path):
    cases = {
        "usage": ("inspect", "--nonsense"),
        "not-found": ("inspect", tmp_path / "absent"),
        "target-exists": ("convert", FIXTURES / "hf" / "llama", FIXTURES / "hf" / "qwen3", "--to", "hf"),
    }
    for name, arguments in cases.items():
        result = reshard(*arguments, "--json")
        assert result.code == ERROR_IDS[name][0] and result.err.endswith(f" [{name}]\n")
        assert result.document["error"].keys() == {"id", "exit_code", "what", "where", "why", "do"}
        assert (result.document["error"]["id"], result.document["error"]["exit_code"]) == (name, result.code)
        assert reshard(*arguments).out == ""
