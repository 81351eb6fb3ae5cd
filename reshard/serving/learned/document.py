"""A layout file: a LearnedLayout as a JSON document (docs/reference/schemas/layout.json)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from reshard.errors import RequestError
from reshard.geometry.documents import document
from reshard.geometry.dtypes import DType, from_safetensors
from reshard.geometry.functions import FUNCTIONS
from reshard.geometry.quantities import number_runs
from reshard.serving.learned.layout import (
    LearnedLayout,
    LearnedSizes,
    NamedTemplate,
    Ranges,
    TemplateAxis,
    TemplatePart,
    TemplateRun,
    TensorTemplate,
)
from reshard.serving.learned.numbers import Number, Rule
from reshard.storage.json_input import parsed

SCHEMA_VERSION = 1
LAYOUT_FILE = "reshard.layout.json"
"""The name under which a conversion puts the layout beside the files that follow it."""


def text_of(layout: LearnedLayout) -> str:
    """The layout as a document, with one line for each template and each row."""
    lines = []
    for key, value in _document(layout).items():
        if value and key in ("templates", "sources", "stages"):
            rows = ",\n  ".join(map(_stage_text if key == "stages" else _compact, value))
            lines.append(f"{json.dumps(key)}: [\n  {rows}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {_compact(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def _compact(value: object) -> str:
    return json.dumps(value, default=_rule_json)


def _stage_text(stage: Mapping[str, Any]) -> str:
    head = _compact({key: value for key, value in stage.items() if key != "tensors"})
    rows = ",\n   ".join(_compact(row) for row in stage["tensors"])
    return f'{head[:-1]}, "tensors": [\n   {rows}\n  ]}}'


def _document(layout: LearnedLayout) -> dict[str, Any]:
    templates: dict[TensorTemplate, int] = {}
    stages = []
    for (pp, has_ep, pp_rank), tensors in layout.stages.items():
        rows = []
        for tensor in tensors:
            row = [tensor.name, _ranges_text(tensor.ranges), templates.setdefault(tensor.template, len(templates))]
            rows.append(row if tensor.ranks is None else [*row, tensor.ranks])
        stages.append({"pp": pp, "pp_rank": pp_rank, "ep": has_ep, "tensors": rows})
    sources = [[source.name, _ranges_text(source.ranges), source.template.dtype.name, source.template.shape] for source in layout.sources]
    parts = {"sources": sources, "templates": list(map(_template_json, templates)), "stages": stages}
    content = {**document(layout, schema_version=SCHEMA_VERSION), **parts}
    return {**content, "digest": _digest(json.loads(_compact(content)))}


def _digest(document: Mapping[str, Any]) -> str:
    """The digest of a document without its own. It tells damage, and is no signature: whoever changes a layout can make a new one."""
    text = json.dumps({key: value for key, value in document.items() if key != "digest"}, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _ranges_text(ranges: Ranges) -> list[str]:
    return [",".join(number_runs(values)) for values in ranges]


def _template_json(template: TensorTemplate) -> dict[str, Any]:
    entry: dict[str, Any] = {"dtype": str(template.dtype), "shape": template.shape, "parts": list(map(_part_json, template.parts))}
    entry |= {key: getattr(template, key) for key in ("fill", "problem", "kernel")}
    return {key: value for key, value in entry.items() if value not in (None, "", [])}


def _part_json(part: TemplatePart) -> dict[str, Any]:
    entry: dict[str, Any] = {"from": part.source, "start": part.start, "at": part.at, "axes": part.axes}
    return {**entry, "run": part.run} if part.run else entry


def _rule_json(rule: Rule) -> Any:
    return dict(rule.numbers) if rule.word == "listed" else [rule.word, *rule.numbers]


# ---- reading


def layout_of(text: str, where: str) -> LearnedLayout:
    """The layout in a document. where: the file, for messages.

    Raises: RequestError if the document is no layout file, or of a version that this reshard does not know.
    """
    try:
        document = parsed(text)
        version = document["schema_version"]
    except (ValueError, TypeError, LookupError):
        raise _damaged(where, "it is not a JSON document with a schema_version") from None
    if version != SCHEMA_VERSION:
        raise RequestError(
            f"the layout file has version {version}, this reshard reads version {SCHEMA_VERSION}",
            where=where,
            do="Learn it again with `reshard learn`, or use the reshard that wrote it",
        )
    if "digest" in document and document["digest"] != _digest(document):
        raise _damaged(where, "its digest is not that of its content: it was changed since it was written")
    try:
        return _layout(document)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise _damaged(where, f"{type(error).__name__}: {str(error)[:100]}") from error


def _damaged(where: str, reason: str) -> RequestError:
    return RequestError("this is not a layout file as `reshard learn` writes it", where=where, why=reason, do="Learn it again")


def _layout(document: Mapping[str, Any]) -> LearnedLayout:
    sources = tuple(
        NamedTemplate(_text(name), _ranges(ranges), TensorTemplate(from_safetensors(dtype, where=name), tuple(map(_count, shape))))
        for name, ranges, dtype, shape in document["sources"]
    )
    templates = [_template(template) for template in document["templates"]]
    stages = {
        (_count(stage["pp"]), bool(stage["ep"]), _count(stage["pp_rank"])): tuple(_row(row, templates) for row in stage["tensors"])
        for stage in document["stages"]
    }
    sizes = tuple(
        LearnedSizes(tuple(map(_count, size["tp"])), _count(size["pp"]), bool(size["ep"]), size["withheld"]) for size in document["sizes"]
    )
    if any((size.pp, size.has_ep, pp_rank) not in stages for size in sizes for pp_rank in range(min(size.pp, len(stages) + 1))):
        raise ValueError("a stage is missing")
    for rows in (sources, *stages.values()):
        if sum(math.prod(map(len, row.ranges)) for row in rows) > _MOST:
            raise ValueError(f"more than {_MOST:,} names")
    return LearnedLayout(
        engine=_text(document["engine"]),
        engine_version=_text(document["engine_version"]),
        platform=_text(document["platform"]),
        model_class=_text(document["model_class"]),
        dtype=from_safetensors(document["dtype"], where="dtype"),
        config={_text(key): _text(value) for key, value in document["config"].items()},
        counts={_text(key): _count(value) for key, value in document["counts"].items()},
        sizes=sizes,
        sources=sources,
        stages=stages,
        softened=tuple(map(_text, document["softened"])),
        unread=tuple(map(_text, document.get("unread", ()))),
        twice=tuple(map(_text, document.get("twice", ()))),
        has_digest="digest" in document,
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 48:
        raise TypeError(f"{value!r} is not a whole number")
    return value


# No model has more tensors.
_MOST = 1 << 20


def _ranges(texts: list[str]) -> Ranges:
    ranges = []
    for text in texts:
        values: list[int] = []
        for run in text.split(","):
            first, _, last = run.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            if not numbers or (values and numbers[0] <= values[-1]) or len(values) + len(numbers) > _MOST:
                raise ValueError(f"{run[:40]} is no run of numbers after those before it, or too long")
            values.extend(numbers)
        ranges.append(tuple(values))
    return tuple(ranges)


def _row(row: list[Any], templates: list[TensorTemplate]) -> NamedTemplate:
    name, ranges, number, *rest = row
    ranks = {int(tp): tuple(map(_count, ranks)) for tp, ranks in rest[0].items()} if rest else None
    return NamedTemplate(_text(name), _ranges(ranges), templates[_count(number)], ranks)


def _template(document: Mapping[str, Any]) -> TensorTemplate:
    fill, shape, parts = document.get("fill"), _numbers(document["shape"]), tuple(_part(part) for part in document.get("parts", ()))
    for part in parts:
        along = [axis.axis for axis in part.axes] + ([part.run.axis] if part.run else [])
        if len(part.at) != len(shape) or any(axis >= len(shape) for axis in along) or _beyond(part):
            raise ValueError(f"a box of {part.source} has other axes than its tensor")
    return TensorTemplate(
        dtype=_dtype(document["dtype"]),
        shape=shape,
        parts=parts,
        fill=None if fill is None else float(fill),
        problem=_text(document.get("problem", "")),
        kernel=_text(document.get("kernel", "")),
    )


def _dtype(text: str) -> DType:
    """F32, or F32 of -exp."""
    name, _, function = _text(text).partition(" of ")
    if function and function not in FUNCTIONS:
        raise ValueError(f"{function!r} is no known function")
    return from_safetensors(name, where="a template").of(function)


def _part(document: Mapping[str, Any]) -> TemplatePart:
    axes = tuple(
        TemplateAxis(_number(size), _count(axis), _number(step), _count(source_axis), _number(source_step))
        for size, axis, step, source_axis, source_step in document["axes"]
    )
    run = None
    if "run" in document:
        first, count, axis, step = document["run"]
        run = TemplateRun(_number(first), _number(count), _count(axis), _number(step))
    return TemplatePart(_text(document["from"]), _numbers(document["start"]), _numbers(document["at"]), axes, run)


def _beyond(part: TemplatePart) -> bool:
    return any(axis.source_axis >= len(part.start) for axis in part.axes)


def _numbers(values: list[Any]) -> tuple[Number, ...]:
    return tuple(map(_number, values))


def _number(value: Any) -> Number:
    match value:
        case int():
            return _count(value)
        case ["share", _] | ["share", _, _] | ["start", _, _] | ["start", _, _, _] | ["rest", _, _] | ["first", _]:
            return Rule(value[0], tuple(map(_count, value[1:])))
        case ["sum", ["share", *_], ["share", *_]]:
            return Rule("sum", tuple(map(_number, value[1:])))
        case dict():
            return Rule("listed", tuple(sorted((int(tp), tuple(map(_count, numbers))) for tp, numbers in value.items())))
    raise ValueError(f"{value!r} is no number")
