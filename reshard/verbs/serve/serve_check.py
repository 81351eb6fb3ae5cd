"""The verb `serve_check`: will an engine take this folder? Nothing of the engine is needed, and no GPU.

What `doctor` checks of the files comes first. Then the folder is planned anew from its own weights and config, for the sizes and the
version at which it will be served: what the plan lays out for each rank is what the engine's loader asks for, by name, shape and element
type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Unpack

from reshard.adapter import registry
from reshard.adapter.serving_format import ServingFormat
from reshard.containers import safetensors
from reshard.errors import ReshardError
from reshard.geometry.quantities import grouped
from reshard.health.findings import Finding, Report, found, sorted_findings
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import OpenOptions, PathLike, checked_keywords
from reshard.opening.open import open
from reshard.plans.layout import Layout
from reshard.requests.unchanged import damage_of
from reshard.verbs.look.doctor import doctor
from reshard.verbs.plan import plan

_LAYOUT = "reshard.layout.json"
_MOST = 100
"""Findings of one rank that are reported."""


@checked_keywords
def serve_check(
    source: PathLike,
    *,
    engine: str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    engine_version: str | None = None,
    **options: Unpack[OpenOptions],
) -> Report:
    """What stands between a folder and an engine that shall serve it: files, config, tokenizer, names, shapes, sizes.

    Of a LoRA adapter: what the engine would do with it beside the base whose config `model` gives.
    engine: the name of its format; None: the format of the folder, and for a Hugging Face folder the first engine that takes it. tp, pp,
    ep: the sizes at which it will be served; None: those of the folder. engine_version: the engine's version; None: the newest that is
    known.
    """
    report = doctor(source, **options)
    findings = list(report.findings)
    if report.healthy:
        findings += _of_engine(open(source, **options), engine, {"tp": tp, "pp": pp, "ep": ep}, engine_version)
    return Report(report.path, report.format, False, report.tensors, report.files, report.nbytes, sorted_findings(findings))


def _of_engine(checkpoint: Checkpoint, engine: str | None, asked: Mapping[str, int | None], version: str | None) -> Iterator[Finding]:
    format, config = registry.named(checkpoint.format), checkpoint.model_files.config
    if format.holds_adapters:
        settings = checkpoint.model_files.adapter_config or {}
        for kind, text, do in format.about_serving(checkpoint.index, settings, engine, config):
            yield found(kind, text, do=do)
        return
    stored = {name: int(size) for name, size in checkpoint.index.facts.parallel.items() if name in asked}
    is_for_ranks = isinstance(format, ServingFormat)
    serving = [name for name, each in registry.formats().items() if isinstance(each, ServingFormat)]
    names = [engine] if engine else [format.name] if is_for_ranks else serving
    if config is None:
        return  # doctor has said so, or the format needs none
    if not config.get("architectures"):
        yield found("no-class", "config.json names no class: `architectures` is missing or empty", file="config.json")
    if is_for_ranks and names != [format.name]:
        yield found("other-engine", f"the files are laid out for {format.name}, and {names[0]} will load them")
        return
    if is_for_ranks:
        yield from _of_sizes(stored, asked)
    yield from _of_files(checkpoint)
    sizes = {axis: asked[axis] or stored.get(axis) for axis in asked}
    given: dict[str, Any] = {axis: size for axis, size in sizes.items() if size}
    if is_for_ranks:
        given = {axis: size for axis, size in stored.items() if size > 1}
        if checkpoint.files.size(_LAYOUT) is not None:
            given = {"layout": f"{checkpoint.path}/{_LAYOUT}"}
    given |= {"engine_version": version} if version else {}
    plans = [_planned(checkpoint, name, given) for name in names]
    laid_out = next((each for each in plans if isinstance(each, Layout)), None)
    if laid_out is None:
        yield next(each for each in plans if isinstance(each, Finding))
        return
    if isinstance(format, ServingFormat):
        yield from _of_ranks(checkpoint, format, laid_out)


def _planned(checkpoint: Checkpoint, name: str, given: Mapping[str, Any]) -> Layout | Finding:
    """What an engine would be given, or why it takes nothing of this."""
    try:
        return plan(checkpoint, to=name, **given).layout
    except ReshardError as error:
        where = f"{error.where}: " if error.where else ""
        return found("not-served", f"{where}{error.what}", do=error.do or "")


def _of_sizes(stored: Mapping[str, int], asked: Mapping[str, int | None]) -> Iterator[Finding]:
    for axis, size in asked.items():
        if size is not None and size != stored.get(axis, 1):
            yield found("other-sizes", f"the files are for {axis.upper()} {stored.get(axis, 1)}, and {axis.upper()} {size} is asked for")


def _of_files(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Whether the folder is as reshard wrote it, if it did: by lengths and samples."""
    manifest = checkpoint.manifest
    if manifest is not None and (problem := damage_of(checkpoint.files, manifest)):
        yield found("changed", problem)


def _of_ranks(checkpoint: Checkpoint, format: ServingFormat, laid_out: Layout) -> Iterator[Finding]:
    """What the engine asks of each rank's files, against what is in them. A rank may have any number of files."""

    def rank_of(path: str) -> tuple[str | None, ...]:
        match = format.file_pattern.fullmatch(path.rpartition("/")[2])
        return match.groups() if match else (path,)

    asked = _by_rank(
        (rank_of(file.path), item.tensor.name, f"{item.tensor.dtype} {list(item.tensor.shape)}")
        for file in laid_out.files
        for item in file.tensors
    )
    held = _by_rank(
        (rank_of(file.path), entry.name, f"{entry.dtype} {list(entry.shape)}")
        for file in checkpoint.index.files
        for entry in safetensors.read_header(checkpoint.files, file.path).entries
    )
    for number, rank in enumerate(sorted(asked.keys() | held.keys(), key=str)):
        wanted, there = asked.get(rank, {}), held.get(rank, {})
        differing = [name for name in {**wanted, **there} if wanted.get(name) != there.get(name)]
        for name in differing[:_MOST]:
            if name not in there:
                yield found("missing-on-rank", f"the engine asks for it: {wanted[name]}", tensor=name, rank=number)
            elif name not in wanted:
                yield found("unknown-on-rank", f"the engine has no place for it: {there[name]}", tensor=name, rank=number)
            else:
                yield found("unlike-on-rank", f"the engine asks for {wanted[name]}, stored is {there[name]}", tensor=name, rank=number)


def _by_rank(rows: Iterable[tuple[tuple[Any, ...], str, str]]) -> dict[tuple[Any, ...], dict[str, str]]:
    return {rank: {name: what for _, name, what in of_rank} for rank, of_rank in grouped(rows, lambda row: row[0]).items()}
