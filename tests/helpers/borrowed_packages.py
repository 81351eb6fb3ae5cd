"""Packages that several environments of this tree have in the same version: unpacked and compiled once, and linked by the others."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def requirements_of(file: Path) -> list[Requirement]:
    """The lines of a file of requirements, those of the files that it names included."""
    found: list[Requirement] = []
    for line in file.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r "):
            found += requirements_of(file.parent / text.removeprefix("-r ").strip())
        elif text:
            found.append(Requirement(text))
    return found


def borrow(target: Path, wanted: Iterable[Requirement], whole: Iterable[str], lenders: Iterable[Path]) -> set[str]:
    """Link packages into an environment: those that are wanted in one version, as another environment has them.

    target, lenders: the folders of environments, of the same Python. whole: names of packages of which the requirements are linked, too,
    where a lender has what fits. pip installs the rest, and replaces what does not fit. A file of a package is never written to: pip and
    Python put a new one in its place, so an environment does not change another.

    Returns: the names of the linked packages.
    """
    lent: dict[str, list[tuple[Path, Distribution]]] = {}
    for lender in lenders:
        for package in distributions(path=[str(_packages(lender))]):
            lent.setdefault(canonicalize_name(package.name), []).append((lender, package))
    named = {canonicalize_name(one.name): one for one in wanted}
    pinned = [name for name, one in named.items() if any(part.operator == "==" for part in one.specifier)]
    left = [(named[name], name in whole) for name in pinned]
    linked = set[str]()
    while left:
        one, is_whole = left.pop()
        name = canonicalize_name(one.name)
        fitting = [pair for pair in lent.get(name, ()) if _fits(pair[1], one) and _fits(pair[1], named.get(name, one))]
        if name in linked or not fitting:
            continue
        lender, package = fitting[0]
        _link(package, lender, target)
        linked.add(name)
        if is_whole:
            needed = map(Requirement, package.requires or ())
            left += ((each, True) for each in needed if each.marker is None or each.marker.evaluate({"extra": ""}))
    return linked


def _fits(package: Distribution, requirement: Requirement) -> bool:
    return requirement.specifier.contains(package.version, prereleases=True)


def _packages(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages"))


def _link(package: Distribution, lender: Path, target: Path) -> None:
    for file in _files(package):
        place = target / file.relative_to(lender)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            continue
        if file.parent == lender / "bin":  # its first line names the Python
            place.write_bytes(file.read_bytes().replace(os.fsencode(lender), os.fsencode(target), 1))
            place.chmod(0o755)
        else:
            os.link(file, place)


def _files(package: Distribution) -> Iterator[Path]:
    """The files of a package, and what Python has compiled of them."""
    for name in package.files or ():
        file = Path(os.path.normpath(name.locate()))
        compiled = [Path(cache_from_source(str(file)))] if file.suffix == ".py" else []
        yield from (each for each in (file, *compiled) if each.exists())
