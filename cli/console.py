"""What a terminal can show: its width and height, words that are wrapped, and colour.

A pipe or a file has no width and no colour: it gets every line as it is. COLUMNS sets a width for both; NO_COLOR and TERM=dumb turn colour
off, FORCE_COLOR and CLICOLOR_FORCE turn it on. A line is wrapped at words, and goes on below its text, not below its label:

      note      the config says that the head is tied, and the checkpoint
                stores it
      next      reshard convert runs/7/step-2000 out --to vllm --tp 8 \\
                --model tiny-llama
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import TextIO

NARROWEST = 60
"""Texts are wrapped at this width where a terminal is narrower."""
# The indentation of a line, its label, and the space up to its text.
_HEAD = re.compile(r"( *)(?:([^\s:]+:?)( {2,}))?")
_COMMAND = re.compile(r"(?:\$ )?reshard ")
# A quoted word of a command stays in one piece, and so does a command in backticks.
_WORDS_OF_COMMAND = re.compile(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+|\S+")
_WORDS = re.compile(r"`[^`]+`[^\s`]*|\S+")

BOLD, DIM, RED, GREEN, YELLOW, CYAN = "1", "2", "31", "32", "33", "36"
# (what a line begins with, the style of the group, whether all that follows has it, too). The first that fits counts.
_STYLES = (
    (re.compile(r"(equal|as written|lossless|healthy)(?=: )"), f"{BOLD};{GREEN}", False),
    (re.compile(r"(different|not lossless|beyond the threshold)(?=: )"), f"{BOLD};{RED}", False),
    (re.compile(r"  (complete) "), GREEN, False),
    (re.compile(r"(error)  "), f"{BOLD};{RED}", False),
    (re.compile(r"(warning)  "), f"{BOLD};{YELLOW}", False),
    (re.compile(r"  (partial|missing|needed|refused) "), YELLOW, False),
    (re.compile(r"  (?:next +)(?=reshard )(.)"), CYAN, True),
    (re.compile(r"  ((?:note|assumed|skip|other) ) *"), DIM, True),
    (re.compile(r"(reshard: warning:)"), f"{BOLD};{YELLOW}", False),
    (re.compile(r"(reshard:)"), f"{BOLD};{RED}", False),
    (re.compile(r"([^\s:]+(?::[^\s:]+)*)(?=: )"), BOLD, False),
)
_STYLES_OF_CELLS = {"complete": GREEN, "incomplete": YELLOW, "error": RED, "warning": YELLOW, "replica": DIM}


def width_of(stream: TextIO) -> int | None:
    """The characters of a line; None if nothing limits them, as in a file."""
    if os.environ.get("COLUMNS", "").isdecimal() or stream.isatty():
        import shutil

        return max(shutil.get_terminal_size().columns, NARROWEST)
    return None


def height() -> int | None:
    """The lines of the terminal; None if standard output is none."""
    if not sys.stdout.isatty():
        return None
    import shutil

    return shutil.get_terminal_size().lines


def has_colour(stream: TextIO) -> bool:
    """Whether a stream shows colour: a terminal, or any where FORCE_COLOR or CLICOLOR_FORCE asks for it, as logs of CI do."""
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def painted(text: str, style: str) -> str:
    """A text in a style: the numbers of an ANSI escape sequence."""
    return f"\x1b[{style}m{text}\x1b[0m" if text.strip() else text


def painted_cell(text: str) -> str:
    """A cell of a table in the colour of the state that it names."""
    style = _STYLES_OF_CELLS.get(text.strip())
    return painted(text, style) if style else text


def shown_on(stream: TextIO, line: str) -> str:
    """A line as a stream shows it: wrapped, and in colour."""
    width = width_of(stream)
    lines = [line] if width is None or len(line) <= width else list(wrapped(line, width))
    return "\n".join(_coloured(lines) if has_colour(stream) else lines)


def wrapped(line: str, width: int) -> Iterator[str]:
    """The lines of a text, none longer than `width` unless a word is. A command that goes on in the next line ends in a backslash."""
    head = _HEAD.match(line)
    assert head is not None
    start = len(head[0])
    indent = start if head[2] and start <= width // 2 else len(head[1]) + 2
    is_command = _COMMAND.match(line, start) is not None
    room, words = width - (2 if is_command else 0), _words(line[start:], width - indent, is_command=is_command)
    current, is_empty = line[:start], True
    for word in words:
        if not is_empty and len(current) + 1 + len(word) > room:
            yield current + (" \\" if is_command else "")
            current, is_empty = " " * indent, True
        current += word if is_empty else f" {word}"
        is_empty = False
    yield current


def _words(text: str, room: int, *, is_command: bool) -> Iterator[str]:
    if is_command:
        yield from _WORDS_OF_COMMAND.findall(text)
        return
    for word in _WORDS.findall(text):
        if word.startswith("`") and len(word) > room:
            # A command that is longer than a line: a backslash at the end of each piece keeps it one command.
            *pieces, last = wrapped(word[1:], max(room, NARROWEST // 2))
            yield from [("`" if not i else "") + piece.strip() for i, piece in enumerate(pieces)]
            yield last.strip()
        else:
            yield word


def _coloured(lines: list[str]) -> list[str]:
    """The lines of one text, painted by what it begins with."""
    for pattern, style, to_the_end in _STYLES:
        if match := pattern.match(lines[0]):
            start, stop = match.span(1)
            if not to_the_end:
                return [lines[0][:start] + painted(lines[0][start:stop], style) + lines[0][stop:], *lines[1:]]
            first = lines[0][:start] + painted(lines[0][start:], style)
            return [first, *(" " * (len(line) - len(line.lstrip())) + painted(line.lstrip(), style) for line in lines[1:])]
    return lines
