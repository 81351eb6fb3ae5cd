"""Globs over tensor names: --include, --exclude, --keep-dtype. A glob that matches no name is a mistake, and never ignored."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from reshard.errors import RequestError, choices, nearest
from reshard.geometry.quantities import plural

_MOST_NAMES = 3
_WORD = r"[A-Za-z0-9]+"
_LAYER = re.compile(r"\.\d+\.")


def as_globs(given: str | Iterable[str]) -> tuple[str, ...]:
    """One glob or several as a tuple. Raises RequestError for anything else."""
    globs = (given,) if isinstance(given, str) else tuple(given)
    for glob in globs:
        if not isinstance(glob, str):
            raise RequestError(f"{glob!r}: a glob is a text such as '*norm*'")
    return globs


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether one of the globs matches a name."""
    return any(fnmatchcase(name, glob) for glob in globs)


def any_layer(name: str) -> str:
    """A glob for the tensors of that name in all layers."""
    return _LAYER.sub(".*.", name, count=1)


def check_globs(option: str, globs: Iterable[str], names: Collection[str]) -> None:
    """Raises RequestError, with the nearest names, if one of the globs matches no name."""
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            near = _near(glob, names)
            raise RequestError(
                f"{option} '{glob}' matches none of {plural(len(names), 'tensor name')}",
                do=f"Did you mean '{near}', which matches {plural(sum(matches(name, (near,)) for name in names), 'name')}?"
                if near
                else choices(glob, names, most=_MOST_NAMES),
            )


def _near(glob: str, names: Collection[str]) -> str | None:
    """A glob that matches, in place of one that does not: with its misspelled words corrected, or for a part of the name."""
    known = {word for name in names for word in re.findall(_WORD, name)}
    corrected = re.sub(_WORD, lambda match: match[0] if match[0] in known else nearest(match[0], known) or match[0], glob)
    for pattern in (corrected, f"*{glob}*", f"*{corrected}*"):
        if pattern.strip("*") and any(fnmatchcase(name, pattern) for name in names):
            return pattern
    return None
