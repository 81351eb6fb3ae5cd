"""docs/glossary.md: words with several meanings have one on each level, and what stands for it is there."""

import ast
import re
from itertools import groupby

from helpers.doc_pages import ROOT

WORDS = ["block", "held", "part", "plan"]
ROWS = re.findall(r"^\| (\w+) \| `(\w+)` \| `(\w+)` \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)


def defined(room):
    """The names that the files of a room define."""
    for path in (ROOT / "reshard" / room).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield node.name
            elif isinstance(node, ast.Assign):
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def test_each_of_the_words_has_one_meaning_on_a_level():
    levels = [(word, level) for word, level, _ in ROWS]
    assert len(levels) == len(set(levels)) and sorted({word for word, _ in levels}) == WORDS


def test_what_stands_for_a_word_is_defined_on_its_level():
    by_level = sorted((level, name) for _, level, name in ROWS)
    for level, rows in groupby(by_level, key=lambda row: row[0]):
        assert {name for _, name in rows} <= {*defined(level)}, level
