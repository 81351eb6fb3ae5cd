"""Growth costs something: room_sizes.yaml says how many code lines each room has, and each growth of a room has a row that says why.

    python tests/house/test_room_sizes.py    # writes the rooms that became smaller; prints those that need a row

Code lines are lines with code: no blank line, no comment, no docstring.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("room_sizes.yaml")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
HEAD = """\
# Code lines of each room, compared with the tree by test_room_sizes.py. A room that grows gets a row under `growth` in the same commit:
# its lines are added to those under `rooms`. `python tests/house/test_room_sizes.py` writes the rooms that became smaller.
"""


def code_lines(text: str) -> int:
    """The number of lines with code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for item in node.body if isinstance(getattr(node, "body", None), list) else ():
            if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str):
                docstrings.update(range(item.lineno, item.end_lineno + 1))
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            used.update(range(token.start[0], token.end[0] + 1))
    return len(used - docstrings)


@cache
def sizes(root: Path) -> Counter[str]:
    """The code lines of each room: a folder of the package, or the files that lie directly in one of its four top folders."""
    rooms: Counter[str] = Counter()
    for top in ("reshard", "formats", "cli", "plugins"):
        for path in sorted((root / top).rglob("*.py")):
            parts = path.relative_to(root).parts
            rooms["/".join(parts[:2]) if len(parts) > 2 else top] += code_lines(path.read_text())
    return rooms


def allowed(table: dict) -> Counter[str]:
    """The code lines that the table gives each room: where it began, and its rows of growth."""
    rooms = Counter(table["rooms"])
    for row in table["growth"]:
        assert row["lines"] > 0 and len(row["why"]) > 10
        rooms[row["room"]] += row["lines"]
    return rooms


def differences(actual: Counter[str], table: dict) -> list[str]:
    """What the table and the tree say differently, a line for each room."""
    given = allowed(table)
    return [
        f"{room} has {actual[room]:,} code lines, the table gives it {given[room]:,}: "
        + ("remove lines, or add a row under `growth` that says why" if actual[room] > given[room] else "write the table again")
        for room in sorted({*actual, *given})
        if actual[room] != given[room]
    ]


def test_a_room_grows_only_with_a_row_that_says_why():
    assert not differences(sizes(ROOT), yaml.safe_load(TABLE.read_text()))


def test_one_line_more_in_a_room_is_seen():
    table = yaml.safe_load(TABLE.read_text())
    larger = Counter(sizes(ROOT))
    larger["reshard/engine"] += 1
    (line,) = differences(larger, table)
    assert line.startswith("reshard/engine has") and "says why" in line
    table["growth"].append({"room": "reshard/engine", "lines": 1, "why": "this test adds a line"})
    assert not differences(larger, table)
    table["growth"][-1]["why"] = ""
    with pytest.raises(AssertionError):
        differences(larger, table)


def test_code_lines_are_lines_with_code():
    text = '"""What it is."""\n\n# why\nx = (\n    1,\n)\n\n\ndef f():\n    """Text\n    of two lines."""\n    return """\n"""\n'
    assert code_lines(text) == 6


def main() -> int:
    table = yaml.safe_load(TABLE.read_text())
    actual, given = sizes(ROOT), allowed(table)
    for room, lines in given.items():  # a smaller room cannot grow back: its rows of growth are paid first by where it began
        if (less := lines - actual[room]) > 0:
            table["rooms"][room] = table["rooms"].get(room, 0) - less
    table["rooms"] = {room: lines for room, lines in sorted(table["rooms"].items()) if lines or actual[room]}
    TABLE.write_text(HEAD + yaml.safe_dump(table, sort_keys=False, width=140))
    grown = differences(actual, table)
    print(*grown, f"{sum(actual.values()):,} code lines in all", sep="\n")
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
