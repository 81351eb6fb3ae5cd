"""Sections: a result described once is shown as lines and as a page, and each shows what is meant for it."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import click
import pytest

from reshard.pages.pages import page_of
from reshard.pages.sections import Facts, Head, Note, OnPage, Rows, Share

replies = import_module("reshard.cli.replies")
COMMANDS = sorted((Path(__file__).resolve().parents[2] / "cli" / "commands").rglob("*.py"))
SECTIONS = (
    Head("step-1000", "checkpoint", "complete", facts=[("size", "3 kB"), ("step", None)]),
    "step-1000: llama",
    Facts([("serves", "vllm at TP 1"), ("note", ["one", "two", ""]), ("mesh", None)]),
    "",
    Rows(("tensor", "share"), [(f"t{number}", Share(number / 4)) for number in range(5)], "Tensors", limit=2, hint="; `limit=0` shows all"),
    Note("warning  odd", ["first", "second", "third"], "warning", limit=2, hint="; more", advice="Look."),
    OnPage(Facts([("only", "on the page")])),
    Facts([("only", "on the terminal")], title=""),
)


@pytest.fixture
def lines(capsys, monkeypatch):
    """What a terminal shows of sections."""

    def shown(sections, **how):
        with click.Context(click.Command("test")):
            replies.show_sections(sections, **how)
        return capsys.readouterr().out.splitlines()

    monkeypatch.delenv("COLUMNS", raising=False)
    return shown


def test_the_lines_of_sections(lines):
    assert lines(SECTIONS) == [
        "step-1000: llama",
        "  serves    vllm at TP 1",
        "  note      one",
        "  note      two",
        "",
        "  tensor  share",
        "  t0",
        "  t1      ███",
        "  and 3 more; --limit 0 shows all",
        "warning  odd",
        "  first",
        "  second",
        "  and 1 more; more",
        "  Look.",
        "  only      on the terminal",
    ]


def test_a_brief_answer_is_its_lines_alone(lines):
    assert lines(SECTIONS, brief=True) == ["step-1000: llama"]


def test_facts_count_the_values_beyond_their_limit(lines):
    assert lines([Facts([("missing", ["a", "b", "c"])], limit=2)]) == ["  missing   a", "  missing   b", "  missing   and 1 more"]


def test_the_page_of_the_same_sections():
    page = page_of(SECTIONS).render()
    assert all(word in page for word in ("<h1>step-1000</h1>", "complete", "vllm at TP 1", "<dd>two</dd>", "t4", "third", "on the page"))
    assert "on the terminal" not in page and page.count('class="bar"') == 5 and ">step<" not in page


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_a_command_draws_no_table_and_prints_no_document_itself(path):
    """It returns a Reply."""
    called = {
        node.func.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"show_table", "show_json", "show_verbatim"}
