"""The formats of this installation, found through the entry-point group `reshard.formats`; and which one a checkpoint is."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from reshard.adapter.protocol import Reader, Writer
from reshard.errors import RequestError
from reshard.storage.files import Files

GROUP = "reshard.formats"


@cache
def formats() -> dict[str, Reader]:
    """Every installed format by name, sorted. A third party's package adds its own by the same group."""
    found: dict[str, Reader] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        found[point.name] = point.load()
    if not found:
        raise RequestError("no format is installed", why=f"The entry-point group {GROUP} is empty", do="Install reshard with pip")
    return found


def reader(name: str) -> Reader:
    """The format of that name. Raises RequestError, naming those that are installed."""
    try:
        return formats()[name]
    except KeyError:
        raise RequestError(f"no format is called {name!r}", do=f"Installed are {', '.join(formats())}") from None


def writer(name: str) -> Writer:
    """The format of that name, if it can be written."""
    found = reader(name)
    if not can_write(found):
        raise RequestError(
            f"the format {name} is read, not written", do=f"Targets are {', '.join(n for n, f in formats().items() if can_write(f))}"
        )
    return found  # type: ignore[return-value]


def can_write(found: Reader) -> bool:
    return hasattr(found, "lay_out")


def detect(files: Files) -> tuple[Reader, str]:
    """The one format that claims these files, and its reason.

    Raises: RequestError if none does, or several do.
    """
    claims = [(found, reason) for found in formats().values() if (reason := found.detect(files))]
    refined = {name for found, _ in claims for name in getattr(found, "refines", ())}
    claims = [(found, reason) for found, reason in claims if found.name not in refined]
    if len(claims) == 1:
        return claims[0]
    if claims:
        raise RequestError(
            "this could be " + " or ".join(f"{found.name} ({reason})" for found, reason in claims),
            where=files.root,
            do="Say which with --format, or give the directory of one of them",
        )
    listing = files.list()
    raise RequestError(
        f"no known format lies here; the {len(listing)} entries start with {', '.join(listing[:5])}"
        if listing
        else "the directory is empty",
        where=files.root,
        do="`reshard formats` tells what is looked for. Give the directory that holds the checkpoint's files",
    )
