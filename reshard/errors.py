"""What goes wrong, as one paragraph: what, where, why, what to do.

CheckpointError is about the input, RequestError about what was asked, DifferenceFound about two checkpoints
that should be equal. Anything else that escapes is a defect of reshard.
"""

from __future__ import annotations

from collections.abc import Sequence


class ReshardError(Exception):
    """One paragraph for the user: what is wrong, where, why it matters, what to do about it."""

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, do: str | None = None) -> None:
        super().__init__(what)
        self.what, self.where, self.why, self.do = what, where, why, do

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return printable(" ".join(_sentence(part) for part in (head, self.why, self.do) if part))


class CheckpointError(ReshardError):
    """The files do not hold what a whole checkpoint of their format holds."""


class RequestError(ReshardError):
    """What was asked for cannot be done with this model, these degrees or these options."""


class DifferenceFound(ReshardError):
    """Two checkpoints that should be equal are not."""

    exit_code = 1


def check_word(option: str, word: str, known: Sequence[str]) -> None:
    """Raises RequestError, naming those that are known, if a word is none of them."""
    if word not in known:
        raise RequestError(f"{option} {word}: there is no such thing", do=f"Known are {', '.join(known)}")


def printable(text: str) -> str:
    """The text with control characters spelled out: names come from files, and must not act on a terminal."""
    return "".join(char if char.isprintable() or char == " " else ascii(char)[1:-1] for char in text)


def _sentence(text: str) -> str:
    text = text.strip()
    first = text.split(" ", 1)[0]
    # Names (of tensors, files, vLLM) keep their spelling.
    text = text[:1].upper() + text[1:] if first.isalpha() and first.islower() else text
    return text if text.endswith((".", "!", "?")) else text + "."
