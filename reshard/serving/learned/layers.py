"""Layers fold: tensors whose names and templates differ only in numbers become one entry."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from reshard.geometry.quantities import grouped
from reshard.serving.learned.layout import NamedTemplate, Ranges, TensorTemplate

# A number in a name: a part of the name that consists of digits.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
Numbers = tuple[int, ...]
"""The numbers in a name."""
Ranks = Mapping[int, tuple[int, ...]] | None
"""Tensor-parallel size -> ranks; None: all ranks at all sizes."""


def folded_layers(by_name: Mapping[str, Sequence[tuple[Ranks, TensorTemplate]]]) -> Iterator[NamedTemplate]:
    """One entry for the tensors whose names and templates differ only in numbers. found: name -> the templates of its ranks."""
    groups: dict[tuple[str, object, TensorTemplate], dict[Numbers, tuple[Ranks, TensorTemplate]]] = {}
    for name, variants in by_name.items():
        pattern, numbers = _pattern(name)
        for ranks, template in variants:
            key = (pattern, None if ranks is None else tuple(sorted(ranks.items())), _without_numbers(template))
            groups.setdefault(key, {})[numbers] = ranks, template
    for (pattern, _, _), members in groups.items():
        templates = {numbers: template for numbers, (_, template) in members.items()}
        references = _references(templates)
        for same in _consistent(templates, references):
            template = _with_references(templates[same[0]], same[0], references)
            for ranges in products(same):
                yield NamedTemplate(pattern, ranges, template, members[same[0]][0])


def products(rows: Iterable[Numbers]) -> Iterator[Ranges]:
    """The rows of numbers as products of ranges: together they are exactly the rows."""
    rows = sorted(rows)
    if not rows or not rows[0]:
        yield from (() for _ in rows[:1])
        return
    whole = tuple(tuple(sorted({row[position] for row in rows})) for position in range(len(rows[0])))
    if sum(1 for _ in product(*whole)) == len(rows):
        yield whole
        return
    by_rest = grouped(rows, lambda row: row[1:])
    by_firsts = grouped(by_rest, lambda rest: tuple(row[0] for row in by_rest[rest]))
    for same, rests in by_firsts.items():
        yield from ((same, *ranges) for ranges in products(rests))


def _pattern(name: str) -> tuple[str, Numbers]:
    """A name with {0}, {1}, ... in place of its numbers, and the numbers."""
    numbers = tuple(int(match[0]) for match in _NUMBER.finditer(name))
    position = iter(range(len(numbers)))
    return _NUMBER.sub(lambda _: f"{{{next(position)}}}", name), numbers


def _without_numbers(template: TensorTemplate) -> TensorTemplate:
    """The template with {} in place of every number in the names of its sources."""
    return replace(template, parts=tuple(replace(part, source=_NUMBER.sub("{}", part.source)) for part in template.parts))


def _source_numbers(template: TensorTemplate) -> Numbers:
    """The numbers in the names of a template's sources, in order."""
    return tuple(int(match[0]) for part in template.parts for match in _NUMBER.finditer(part.source))


def _references(templates: Mapping[Numbers, TensorTemplate]) -> list[int | None]:
    """For each number in the sources' names, the number in the tensor's name that it equals most often; None if it equals none."""
    rows = [(numbers, _source_numbers(template)) for numbers, template in templates.items()]
    references: list[int | None] = []
    for position in range(len(rows[0][1])):
        hits = {own: sum(numbers[own] == sources[position] for numbers, sources in rows) for own in range(len(rows[0][0]))}
        best = max(hits, key=lambda own: hits[own], default=None)
        references.append(best if best is not None and hits[best] else None)
    return references


def _consistent(templates: Mapping[Numbers, TensorTemplate], references: Sequence[int | None]) -> list[list[Numbers]]:
    """The members in groups that have the same references, and the same numbers in all other places."""
    groups: dict[tuple[object, ...], list[Numbers]] = {}
    for numbers, template in templates.items():
        kept = (
            source if reference is None or numbers[reference] != source else f"{{{reference}}}"
            for source, reference in zip(_source_numbers(template), references, strict=True)
        )
        groups.setdefault(tuple(kept), []).append(numbers)
    return list(groups.values())


def _with_references(template: TensorTemplate, numbers: Numbers, references: Sequence[int | None]) -> TensorTemplate:
    """The template with references such as {0} in the names of its sources. numbers: those in its tensor's name."""
    remaining = iter(references)

    def named(match: re.Match[str]) -> str:
        reference = next(remaining)
        return match[0] if reference is None or numbers[reference] != int(match[0]) else f"{{{reference}}}"

    return replace(template, parts=tuple(replace(part, source=_NUMBER.sub(named, part.source)) for part in template.parts))
