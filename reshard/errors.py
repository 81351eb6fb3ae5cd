"""Errors as one paragraph: what is wrong, where, why it matters, what to do.

CheckpointError is about the input, RequestError and its subclasses are about what the user asked for, DifferenceFound is about two
checkpoints that should be equal. Any other exception that reaches the user is a defect of reshard.
"""

from __future__ import annotations

from collections.abc import Sequence


class ReshardError(Exception):
    """One paragraph for the user, built from its four parts.

    what: what is wrong. where: the tensor, box, rank or file. why: why it matters. do: what the user can do about it.
    """

    exit_code = 2
    """The exit code of the command line."""

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, do: str | None = None) -> None:
        super().__init__(what)
        self.what, self.where, self.why, self.do = what, where, why, do

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return printable(" ".join(_sentence(part) for part in (head, self.why, self.do) if part))


class CheckpointError(ReshardError):
    """The files are not a complete and consistent checkpoint of their format."""


class UnexpectedContentError(CheckpointError):
    """The metadata has a form that no reader foresaw: it is damaged, or was written by a program that reshard does not know."""


class RequestError(ReshardError):
    """The request cannot be fulfilled with this model, these parallel sizes or these options."""


class UnsupportedError(RequestError):
    """The request is valid, but reshard does not support it for this model, format or platform."""


class TargetError(RequestError):
    """The target exists already, or another run is writing it."""


class SystemRefusal(RequestError):
    """The operating system refuses: no space, no permission, a read-only file system, too many open files."""


class DifferenceFound(ReshardError):
    """Two checkpoints that should be equal are not."""

    exit_code = 1


def check_word(option: str, word: str, known: Sequence[str]) -> None:
    """Raises RequestError, with the list of known words, if `word` is not one of them."""
    if word not in known:
        raise RequestError(f"{option} {word}: unknown value", do=f"Use one of {', '.join(known)}")


def printable(text: str) -> str:
    """The text with control characters escaped: names come from files and must not control a terminal."""
    return "".join(char if char.isprintable() or char == " " else ascii(char)[1:-1] for char in text)


def _sentence(text: str) -> str:
    text = text.strip()
    first = text.split(" ", 1)[0]
    # A lower-case English word gets a capital letter. Names of tensors, files and programs keep their spelling.
    text = text[:1].upper() + text[1:] if first.isalpha() and first.islower() else text
    return text if text.endswith((".", "!", "?")) else text + "."
