"""Errors as one paragraph: what is wrong, where, why it matters, what to do; with a stable id and an exit code for programs.

CheckpointError is about the input, RequestError and its subclasses are about what the user asked for, DifferenceFound about two
checkpoints that should be equal. Any other exception that reaches the user is a defect of reshard.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from reshard.secrets import masked, masked_in

# id -> (exit code of the command line, meaning). Ids are stable: programs branch on them. docs/reference/errors.md explains each one.
ERROR_IDS: dict[str, tuple[int, str]] = {
    "difference": (1, "two checkpoints that should be equal are not, or a check has a finding"),
    "skipped": (1, "a tensor or a file would not be carried, and --fail-if-skipped asks that nothing is left"),
    "overflow": (1, "a cast would make finite values infinite, and `allow_overflow=True` was not said"),
    "usage": (2, "an option, an argument or a declaration is wrong"),
    "not-found": (2, "a path does not exist"),
    "ambiguous": (2, "the source can be read in several ways, or lacks a fact that an option gives"),
    "illegal-sizes": (2, "the model cannot be split into these parallel sizes"),
    "source-broken": (3, "a file of the source is damaged or contradicts another one"),
    "source-incomplete": (3, "a file or a part of the source is missing"),
    "source-truncated": (3, "a file of the source ends before its content does"),
    "source-mixed": (3, "the files of the source are from different saves, steps or runs"),
    "wrong-checksum": (3, "bytes of the source do not have the checksum that was stored with them"),
    "source-replicas": (3, "two stored copies of the same elements differ"),
    "wrong-digest": (3, "a file of the source does not have the SHA-256 that was recorded for it"),
    "target-exists": (4, "the target holds files already"),
    "target-in-use": (4, "another run is writing the target, or was interrupted there"),
    "system": (5, "the operating system refuses: permission, a read-only file system, too many open files"),
    "no-space": (5, "the disk is full, or would be"),
    "no-memory": (5, "the operating system gives no more memory"),
    "unsupported": (6, "reshard does not support this model, format, element type or platform"),
    "not-proven": (70, "the proof of a plan failed: a defect of reshard"),
    "defect": (70, "an unexpected exception: a defect of reshard"),
    "interrupted": (130, "the run was interrupted; 143 if by SIGTERM"),
}


_LONGEST = 5000
"""Characters of a part of a message. A path has up to 4,096."""


class ReshardError(Exception):
    """One paragraph for the user, built from its four parts.

    what: what is wrong. where: the tensor, box, rank or file. why: why it matters. do: what the user can do about it. id: one of ERROR_IDS
    that is more precise than that of the class.
    """

    id = "usage"
    """One of ERROR_IDS, for programs."""

    def __init__(
        self, what: str, *, where: str | None = None, why: str | None = None, do: str | None = None, id: str | None = None
    ) -> None:
        self.what, self.where, self.why, self.do = masked(what), where and masked(where), why and masked(why), do and masked(do)
        super().__init__(self.what)
        if id is not None:
            self.id = id

    @property
    def exit_code(self) -> int:
        """The exit code of the command line."""
        return ERROR_IDS[self.id][0]

    def to_json(self) -> dict[str, Any]:
        """The error as plain values with stable keys."""
        parts = {"what": self.what, "where": self.where, "why": self.why, "do": self.do}
        return {"id": self.id, "exit_code": self.exit_code, **masked_in(parts)}

    def _render_traceback_(self) -> list[str]:
        """What IPython prints in place of a traceback: the caller's own line and the sentence; every line for a defect of reshard."""
        import traceback

        frames = traceback.extract_tb(self.__traceback__)
        package = os.path.dirname(__file__)
        inside = next((i for i, frame in enumerate(frames) if frame.filename.startswith(package)), len(frames))
        callers = [frame for frame in frames[:inside] if not frame.filename.startswith(os.path.dirname(os.__file__))]
        shown = frames if self.exit_code == 70 else callers[-1:]
        about = f"docs/reference/errors.md#{self.id} explains it"
        return [*traceback.format_list(shown), f"{type(self).__name__}: {self} [{self.id}]", about]

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return printable(" ".join(_sentence(_shortened(masked(part))) for part in (head, self.why, self.do) if part))


@contextmanager
def blaming(checkpoint: str) -> Iterator[None]:
    """A context in which an error names the checkpoint, one of several, behind the place that it names."""
    try:
        yield
    except ReshardError as error:
        if checkpoint not in str(error):
            error.where = f"{error.where} in {checkpoint}" if error.where else checkpoint
        raise


class CheckpointError(ReshardError):
    """The files are not a complete and consistent checkpoint of their format."""

    id = "source-broken"


class IncompleteError(CheckpointError):
    """A file or a part of the checkpoint is missing."""

    id = "source-incomplete"


class MissingFile(IncompleteError):
    """A file of the checkpoint, or of one of its ranks, is not there."""


class TruncatedFile(CheckpointError):
    """A file ends before its content does."""

    id = "source-truncated"


class IncompleteTensor(IncompleteError):
    """A part of a tensor is in no file, or unequal boxes hold it."""


class MixedSaves(CheckpointError):
    """The files are from different saves, steps or runs."""

    id = "source-mixed"


class WrongChecksum(CheckpointError):
    """Bytes of a file do not have the checksum that was stored with them."""

    id = "wrong-checksum"


class ReplicasDiffer(CheckpointError):
    """Two stored copies of the same elements differ."""

    id = "source-replicas"


class UnexpectedContentError(CheckpointError):
    """The metadata has a form that no reader foresaw: it is damaged, or was written by a program that reshard does not know."""


class RequestError(ReshardError):
    """The request cannot be fulfilled with this model, these parallel sizes or these options."""


class UnsupportedError(RequestError):
    """The request is valid, but reshard does not support it for this model, format or platform."""

    id = "unsupported"


class ValuesOverflow(RequestError):
    """A cast makes finite values infinite, and the caller has not allowed it."""

    id = "overflow"


class TargetError(RequestError):
    """The target exists already, or another run is writing it."""

    id = "target-exists"


class TargetInUse(TargetError):
    """Another run is writing the target now."""

    id = "target-in-use"


class SystemRefusal(RequestError):
    """The operating system refuses: no space, no permission, a read-only file system, too many open files."""

    id = "system"


class LostObject(SystemRefusal):
    """A file that was just written is not in the store: the store has lost it, or another process has removed it."""


class DifferenceFound(ReshardError):
    """Two checkpoints that should be equal are not."""

    id = "difference"


def check_word(option: str, word: str, known: Sequence[str]) -> None:
    """Raises RequestError, with the list of known words, if `word` is not one of them."""
    if word not in known:
        raise RequestError(f"{option} {word}: unknown value", do=choices(word, known))


MOST_NAMES = 5
"""The most names of one kind that a message lists."""


def choices(word: str, known: Collection[str], *, most: int = MOST_NAMES, nearest_of: Collection[str] | None = None) -> str:
    """What to use instead of an unknown word: the nearest known word, if one is near, and the known words; of many, `most`.

    nearest_of: the words among which the nearest is looked for, if they are more than the listed ones.
    """
    near = nearest(word, nearest_of or known)
    return (f"Did you mean {near}? " if near else "") + f"Known: {some(known, most=most)}"


def some(words: Collection[str], *, most: int = MOST_NAMES) -> str:
    """The words, or the first `most` of them and how many more there are."""
    return ", ".join(list(words)[:most]) + (f" and {len(words) - most:,} more" if len(words) > most else "")


def nearest(word: str, known: Collection[str]) -> str | None:
    """The known word that begins with `word`, or else is most like it, without regard to case; None if none is like it."""
    from difflib import get_close_matches

    by_lower = {name.lower(): name for name in known}
    continued = [lower for lower in by_lower if len(word) > 2 and lower.startswith(word.lower())]
    close = sorted(continued, key=len) or get_close_matches(word.lower(), by_lower, n=1, cutoff=0.7)
    return by_lower[close[0]] if close else None


def printable(text: str) -> str:
    """The text as a terminal may show it: `visible`, and with credentials masked."""
    return visible(masked(text))


def visible(text: str) -> str:
    """The text with control characters escaped, as names come from files and must not control a terminal."""
    return "".join(char if char.isprintable() or char == " " else ascii(char)[1:-1] for char in text)


def _shortened(text: str) -> str:
    """The text without its middle if it is longer than any path: names come from files and must not fill a terminal."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def _sentence(text: str) -> str:
    text = text.strip()
    first = text.split(" ", 1)[0]
    # A lower-case English word gets a capital letter. Names of tensors, files and programs keep their spelling.
    text = text[:1].upper() + text[1:] if first.isalpha() and first.islower() else text
    return text if text.endswith((".", "!", "?")) else text + "."
