"""The formats of this installation, found through the entry-point group `reshard.formats`; and which one a checkpoint is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from reshard.adapter.format import Format
from reshard.errors import RequestError, UnsupportedError

if TYPE_CHECKING:
    from reshard.adapter.option import Option
    from reshard.adapter.serving_format import ServingFormat
    from reshard.storage.files import Files

GROUP = "reshard.formats"


@cache
def formats() -> dict[str, Format]:
    """Every installed format by name, sorted. A third party's package adds its own by the same group.

    Raises: RequestError if there are none, or if an entry point cannot be loaded or is not a Format.
    """
    found: dict[str, Format] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            loaded = point.load()
        except Exception as error:
            raise RequestError(
                f"the entry point {point.name} of the group {GROUP} cannot be loaded: {error}",
                where=point.value,
                do=f"Update or remove the package that brings it{_name_of_package(point)}",
            ) from error
        if not isinstance(loaded, Format):
            raise RequestError(
                f"the entry point {point.name} of the group {GROUP} is not a Format but an object of the class {type(loaded).__name__}",
                where=point.value,
                why="A format is an object of a subclass of reshard.adapter.format.Format",
                do=f"Update or remove the package that brings it{_name_of_package(point)}",
            )
        found[point.name] = loaded
    if not found:
        raise RequestError("no format is installed", why=f"The entry-point group {GROUP} is empty", do="Install reshard with pip")
    return found


def _name_of_package(point: EntryPoint) -> str:
    return f", {point.dist.name}" if point.dist else ""


def named(name: str) -> Format:
    """The format of that name. Raises RequestError, listing those that are installed."""
    try:
        return formats()[name]
    except KeyError:
        raise RequestError(f"no format is called {name!r}", do=f"Installed are {', '.join(formats())}") from None


def target(name: str) -> Format:
    """The format of that name. Raises RequestError, listing the formats that can be written, if it cannot."""
    found = named(name)
    if not found.can_write:
        writable = (name for name, each in formats().items() if each.can_write)
        raise UnsupportedError(f"the format {name} is read, not written", do=f"Formats that are written: {', '.join(writable)}")
    return found


def serving_formats() -> dict[str, ServingFormat]:
    """The formats that a serving engine loads rank by rank, by name."""
    from reshard.adapter.serving_format import ServingFormat

    return {name: found for name, found in formats().items() if isinstance(found, ServingFormat)}


def options() -> dict[Option, tuple[str, ...]]:
    """Every option of every format, with the names of the formats that understand it.

    Raises: RequestError if two formats declare one name with different meanings.
    """
    by_name: dict[str, Option] = {}
    users: dict[Option, tuple[str, ...]] = {}
    for name, option in _declared_options():
        if by_name.setdefault(option.name, option) != option:
            raise RequestError(
                f"two formats declare the option {option.flag} with different meanings: {name} and {users[by_name[option.name]][0]}",
                do="Rename the option in the package that was installed last",
            )
        users[option] = (*users.get(option, ()), name)
    return users


def _declared_options() -> Iterator[tuple[str, Option]]:
    for name, found in formats().items():
        for option in found.options:
            yield name, option


def detect(files: Files) -> tuple[Format, str]:
    """The one format that claims these files, and its reason.

    Raises: RequestError if none does, or several do.
    """
    claims = [(found, reason) for found in formats().values() if (reason := found.detect(files))]
    refined = {name for found, _ in claims for name in found.refines}
    claims = [(found, reason) for found, reason in claims if found.name not in refined]
    if len(claims) == 1:
        return claims[0]
    if claims:
        raise RequestError(
            "this could be " + " or ".join(f"{found.name} ({reason})" for found, reason in claims),
            where=files.root,
            do="Say which with --format, or give the directory of one of them",
            id="ambiguous",
        )
    listing = files.list()
    raise RequestError(
        f"no known format lies here; the {len(listing)} entries start with {', '.join(listing[:5])}"
        if listing
        else "the directory is empty",
        where=files.root,
        do="`reshard formats` tells what is looked for. Give the directory that holds the checkpoint's files",
        id="not-found",
    )
