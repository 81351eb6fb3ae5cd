"""The formats of this installation: reshard's own, and those that packages offer in the entry-point group `reshard.formats`; and the format
of a checkpoint.

A format's module is imported when the format is named, or when its signature fits a checkpoint. Signatures are tables, format -> globs:
formats/signatures.py, and those that packages offer in the entry-point group `reshard.signatures`. A format without one is always asked.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import cache
from glob import iglob
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from reshard.adapter.format import Format, Option
from reshard.errors import RequestError, ReshardError, choices, some
from reshard.storage.files import Files

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from reshard.adapter.serving_format import ServingFormat


GROUP, SIGNATURES = "reshard.formats", "reshard.signatures"
LISTED_BY = "`reshard formats` lists all"


def names() -> list[str]:
    """The name of every installed format, sorted."""
    return sorted({*_own().SIGNATURES, *others(GROUP)})


def formats() -> dict[str, Format]:
    """Every installed format by name, sorted.

    Raises: RequestError if an entry point cannot be loaded or is not a Format.
    """
    return {name: _loaded(name) for name in names()}


def writable() -> list[str]:
    """The names of the formats that are written, sorted."""
    return [name for name, format in formats().items() if format.can_write]


def usual_engine() -> str:
    """The format of the serving engine that is meant where none is named."""
    return str(_own().USUAL_ENGINE)


def _own() -> ModuleType:
    """The tables of reshard's own formats. A format of another package that has the name of one of them is not used."""
    return import_module("reshard.formats.signatures")


@cache
def others(group: str) -> dict[str, EntryPoint]:
    """What other packages offer in a group, by name.

    importlib.metadata tells. Its import, with email, csv, zipfile and tempfile, takes a tenth of the time of a short command, so it is
    asked only if another package has entry points for reshard.
    """
    if not _may_have_others():
        return {}
    from importlib.metadata import entry_points

    return {point.name: point for point in sorted(entry_points(group=group), key=lambda point: point.name)}


@cache
def _may_have_others() -> bool:
    """Whether a package other than reshard has entry points for it, or may lie in a zip file, or where an import hook finds it."""
    if any(finder is not PathFinder and "find_distributions" in dir(finder) for finder in sys.meta_path):
        return True
    for folder in sys.path:
        for path in iglob("*-info/entry_points.txt", root_dir=folder or "."):
            with suppress(OSError):
                if not path.startswith("reshard-") and "[reshard." in Path(folder, path).read_text(errors="replace"):
                    return True
    return any(map(os.path.isfile, sys.path))


def _loaded(name: str) -> Format:
    own = _own()
    if name in own.SIGNATURES:
        module = own.SHARED_FOLDERS.get(name, name.replace("-", "_"))
        loaded = import_module(f"reshard.formats.{module}").FORMAT
    else:
        loaded = _object(others(GROUP)[name])
    if not isinstance(loaded, Format):
        raise _wrong(
            others(GROUP)[name],
            f"the entry point {name} of the group {GROUP} is not a Format but an object of the class {type(loaded).__name__}",
            why="A format is an object of a subclass of reshard.adapter.format.Format",
        )
    return loaded


def _object(point: EntryPoint) -> object:
    try:
        return point.load()
    except Exception as error:
        raise _wrong(point, f"the entry point {point.name} of the group {point.group} cannot be loaded: {error}") from error


def _wrong(point: EntryPoint, what: str, why: str | None = None) -> RequestError:
    package = f", {point.dist.name}" if point.dist else ""
    return RequestError(what, where=point.value, why=why, do=f"Update or remove the package that brings it{package}")


def named(name: str) -> Format:
    """The format of that name, or of that other name. Raises RequestError, listing the installed formats, if there is none."""
    if name in _own().SIGNATURES or name in others(GROUP):
        return _loaded(name)
    format = next((format for format in formats().values() if name.lower() in format.other_names), None)
    if format is None:
        raise _unknown(name, names())
    return format


def target(name: str) -> Format:
    """The format of that name. Raises RequestError, naming formats that can be written, if it cannot."""
    try:
        format = named(name)
    except RequestError:
        format = None
    if format is not None and format.can_write:
        return format
    if format is None:
        raise _unknown(name, writable())
    raise RequestError(
        f"`to={name}`: the format {format.name} is read, not written", do=f"Formats that are written: {some(writable())}; {LISTED_BY}"
    )


def _unknown(name: str, known: Collection[str]) -> RequestError:
    from reshard.adapter.foreign_files import target_refusal

    every = [*known, *(other for format_name in known for other in _loaded(format_name).other_names)]
    unknown = RequestError(f"unknown format {name!r}", do=f"{choices(name, known, nearest_of=every)}; {LISTED_BY}")
    return target_refusal(name) or unknown


def serving_formats() -> dict[str, ServingFormat]:
    """The formats that a serving engine loads rank by rank, by name."""
    from reshard.adapter.serving_format import ServingFormat

    return {name: format for name, format in formats().items() if isinstance(format, ServingFormat)}


def options() -> dict[Option, tuple[str, ...]]:
    """Every option of every format, with the names of the formats that understand it.

    Raises: RequestError if two formats declare one name with different meanings.
    """
    by_name: dict[str, Option] = {}
    users: dict[Option, tuple[str, ...]] = {}
    for name, option in ((name, option) for name, format in formats().items() for option in format.options):
        if by_name.setdefault(option.name, option) != option:
            raise RequestError(
                f"two formats declare the option {option.keyword} with different meanings: {name} and {users[by_name[option.name]][0]}",
                do="Rename the option in the package that was installed last",
            )
        users[option] = (*users.get(option, ()), name)
    return users


def detect(files: Files) -> tuple[Format, str]:
    """The one format that claims these files, and what `Format.detect` says about them.

    Raises: RequestError if none does, or several do; CheckpointError if they are what a download has left.
    """
    claims = _claims(files)
    if len(claims) == 1:
        return claims[0]
    if claims:
        raise RequestError(
            "checkpoints of several formats lie here: " + ", ".join(f"{format.name} ({reason})" for format, reason in claims),
            where=files.root,
            do="Choose one: " + " or ".join(f"`reshard inspect {files.root} --format {format.name}`" for format, _ in claims),
        )
    from reshard.adapter.foreign_files import refusal

    raise _one_of_many(files) or refusal(files, lambda globs: _fitting_path(_paths(files), globs)) or _nothing_known(files)


def _nothing_known(files: Files) -> RequestError:
    """The error for a folder in which no format and no foreign file is found, or for such a file."""
    if files.is_file:
        do = "Give a file of weights, or the directory that holds the checkpoint's files. `reshard formats` tells what is looked for"
        return RequestError("this file is in no known format", where=files.root, do=do, id="not-found")
    from reshard.adapter.model_files import CONFIG

    listing, do = files.list(), "`reshard formats` tells what is looked for. Give the directory that holds the checkpoint's files"
    what = f"no known format lies here; {_some(listing)}" if listing else "the directory is empty"
    if CONFIG in listing:
        what = (
            f"no weights lie here, only a model's {CONFIG}"
            if len(listing) == 1
            else f"no weights lie here beside {CONFIG}; {_some(listing)}"
        )
        do = "`reshard inspect`, `reshard degrees` and `reshard estimate` take it as it is. For anything else, copy the weights here"
    return RequestError(what, where=files.root, do=do, id="not-found")


def is_claimed(files: Files) -> bool:
    """Whether a format claims these files; also if several do."""
    return bool(_claims(files))


def claims(name: str, files: Files) -> bool:
    """Whether the format of that name claims these files. Raises RequestError if there is no such format."""
    format = named(name)
    return any(claiming is format for claiming, _ in _claims(files))


def _claims(files: Files) -> list[tuple[Format, str]]:
    """The formats that claim these files, each with its reason. A format yields to one that consists of its checkpoints."""
    asked = [named(name) for name in _fitting(files)]
    asked = [format for format in asked if format.one_file_suffices or not files.is_file]
    claims = [(format, reason) for format in asked if (reason := format.detect(files))]
    refined = {name for format, _ in claims for name in format.refines}
    return [(format, reason) for format, reason in claims if format.name not in refined]


def _fitting(files: Files) -> Iterator[str]:
    """The formats whose signature fits these files, and those that have none."""
    signatures, paths = _signatures(), _paths(files)
    here = "../" + files.root.rstrip("/").rpartition("/")[2] + "/"
    paths += tuple(here + path for path in files.list())
    text = "\n".join(paths)
    for name in names():
        # Few globs have all of their words anywhere, and only for them a pattern is worth its compilation.
        globs = [glob for glob in signatures.get(name, ()) if all(word in text for word in glob.split("*"))]
        if name not in signatures or (globs and any(map(_pattern(*globs).fullmatch, paths))):
            yield name


def _paths(files: Files) -> tuple[str, ...]:
    """The entries of a folder, and of the folders in it."""
    listing = files.list()
    return (*listing, *(path for folder in listing if folder.endswith("/") for path in files.list(folder)))


def _fitting_path(paths: Iterable[str], globs: tuple[str, ...]) -> str | None:
    """The first path that fits a glob of a signature; None if none does."""
    return next(filter(_pattern(*globs).fullmatch, paths), None)


def _pattern(*globs: str) -> re.Pattern[str]:
    """A pattern of the paths that fit one of these globs."""
    return re.compile("|".join(re.escape(glob).replace(r"\*", "[^/]*") for glob in globs))


@cache
def _signatures() -> dict[str, tuple[str, ...]]:
    """Format -> globs of the paths of which its checkpoints have one."""
    globs: dict[str, tuple[str, ...]] = {**_own().SIGNATURES}
    for point in others(SIGNATURES).values():
        table = _object(point)
        if not isinstance(table, dict) or not all(isinstance(some, tuple | list) for some in table.values()):
            raise _wrong(point, f"the entry point {point.name} of the group {SIGNATURES} is not a dict from formats to tuples of globs")
        globs |= table
    return globs


def _one_of_many(file: Files) -> RequestError | None:
    """The error for one of the files of a checkpoint; it names the directory. None for a directory, and for any other file."""
    folder = file.parent() if file.is_file else None
    try:
        claims = _claims(folder) if folder else []
    except ReshardError:
        claims = []
    names = [format.name for format, _ in claims if _is_of(format.name, file.list())]
    if folder is None or not names:
        return None
    return RequestError(f"one file of a checkpoint ({names[0]}) was given", where=file.root, do=f"Give the directory {folder.root}")


def _is_of(name: str, listing: tuple[str, ...]) -> bool:
    """Whether a file is one of the files by which a format is known, or a config: other files lie beside checkpoints by chance."""
    globs = _signatures().get(name, ("*",))
    return _fitting_path(listing, (*globs, *(glob.rpartition("/")[2] or glob for glob in globs), "*.json")) is not None


def _some(listing: tuple[str, ...]) -> str:
    """The entries of a folder in a few words."""
    if len(listing) == 1:
        return f"its only entry is {listing[0]}"
    return f"its {len(listing)} entries start with {', '.join(listing[:5])}" if len(listing) > 5 else f"it holds {', '.join(listing)}"
