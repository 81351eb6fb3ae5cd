"""The verb `serve_check`: will an engine take this folder? Nothing of the engine is needed, and no GPU.

What `doctor` checks of the files comes first. Then the folder is planned anew from its own weights and config, for the sizes and the
version at which it will be served: what the plan lays out for each rank is what the engine's loader asks for, by name, shape and element
type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Unpack

from reshard.adapter import registry
from reshard.adapter.format import Hints
from reshard.adapter.model_files import FileNames
from reshard.adapter.serving_format import ServingFormat
from reshard.adapter.serving_format.release import Release
from reshard.containers import safetensors
from reshard.errors import CheckpointError, RequestError, ReshardError
from reshard.geometry.meshes import Parallel
from reshard.geometry.quantities import grouped
from reshard.health.findings import Finding, Report, found, sorted_findings
from reshard.health.release import config_of_release, names_of_release
from reshard.models.config_values import component_class
from reshard.models.lookup import unknown_architecture
from reshard.models.quantization import unknown_quantization
from reshard.models.stored_forms import not_read
from reshard.opening.chains import delta_alone
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import OpenOptions, PathLike, checked_keywords
from reshard.opening.open import open
from reshard.opening.pipelines import Pipeline, pipeline_at
from reshard.plans.layout import Layout, Target
from reshard.requests.unchanged import damage_of
from reshard.serving.learned.document import LAYOUT_FILE
from reshard.serving.legality import check_degrees
from reshard.verbs.look.doctor import doctor
from reshard.verbs.plan import plan

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
    known. Of the folder of a diffusers pipeline: whether diffusers finds its weights, and what is known of the servers of such pipelines.
    """
    report = doctor(source, **options)
    findings, pipeline = list(report.findings), pipeline_at(source, options)
    if pipeline:
        findings += _of_pipeline(pipeline)
    elif report.healthy:
        findings += _of_engine(open(source, **options), engine, {"tp": tp, "pp": pp, "ep": ep}, engine_version)
    return Report(report.path, report.format, False, report.tensors, report.files, report.nbytes, sorted_findings(findings))


def _of_pipeline(pipeline: Pipeline) -> Iterator[Finding]:
    """Whether diffusers finds the weights of each component that it loads, and what serves the pipeline."""
    from reshard.health.pipelines import served_by

    for component in pipeline.components:
        if component.opened and (of_diffusers := component_class(component.opened.model_files.config)):
            for finding in _of_component(component.opened, of_diffusers):
                yield replace(finding, file=f"{component.name}/{finding.file or ''}")
    yield from served_by(pipeline)


def _of_engine(checkpoint: Checkpoint, engine: str | None, asked: Mapping[str, int | None], version: str | None) -> Iterator[Finding]:
    format, config = registry.named(checkpoint.format), checkpoint.model_files.config
    if checkpoint.index.facts.delta is not None:
        raise delta_alone(checkpoint.path, checkpoint.index.facts.delta)
    if format.holds_adapters:
        settings = checkpoint.model_files.adapter_config or {}
        for kind, text, do in format.about_serving(checkpoint.index, settings, engine, config):
            yield found(kind, text, do=do)
        return
    stored = {name: int(size) for name, size in checkpoint.index.facts.parallel.items() if name in asked}
    sizes = {axis: asked[axis] or stored.get(axis) for axis in asked}
    given: dict[str, Any] = {axis: size for axis, size in sizes.items() if size}
    if config is None:
        return  # doctor has said so, or the format needs none
    if component := component_class(config):
        yield from _of_component(checkpoint, component)
        return
    if not isinstance(format, ServingFormat):
        yield from _of_files(checkpoint)
        yield from _of_whole_model(checkpoint, config, engine, given, version)
        return
    if engine not in (None, format.name):
        yield found("other-engine", f"the files are laid out for {format.name}, and {engine} will load them")
        return
    yield from _of_config(checkpoint, config, format, version)
    yield from _of_sizes(stored, asked)
    yield from _of_files(checkpoint)
    given = {axis: size for axis, size in stored.items() if size > 1}
    options = format.options_of_stages(checkpoint.index.facts.layers_of_stages)
    if checkpoint.model and (untold := format.not_told(checkpoint.model, Target(format.name, Parallel(**given), options=options))):
        yield found("not-told", untold)
    given |= options
    if checkpoint.files.size(LAYOUT_FILE) is not None:
        given = {"layout": f"{checkpoint.path}/{LAYOUT_FILE}"}
    laid_out = _planned(checkpoint, format.name, given | ({"engine_version": version} if version else {}))
    yield from _of_ranks(checkpoint, format, laid_out) if isinstance(laid_out, Layout) else (laid_out,)
    if checkpoint.model and (refusal := format.not_loaded(checkpoint.model)):
        yield found("not-served", refusal[0], do=refusal[1])


def _of_whole_model(
    checkpoint: Checkpoint, config: Mapping[str, Any], engine: str | None, given: Mapping[str, Any], version: str | None
) -> Iterator[Finding]:
    """A folder that every engine reads: what the first engine says that surely takes it, or else the first of all; vllm before sglang."""
    of_today = sorted((name for name, format in registry.serving_formats().items() if format.until is None), reverse=True)
    first: list[Finding] | None = None
    for name in [engine] if engine else of_today:
        format = registry.named(name)
        if not isinstance(format, ServingFormat):
            raise RequestError(
                f"`engine={name}`: {format.name} is no serving engine", do=f"Choose one of {', '.join(registry.serving_formats())}"
            )
        findings = [*_of_folder(checkpoint, config, format, given, version)]
        if all(finding.severity != "error" and finding.id != "not-known" for finding in findings):
            yield from findings
            return
        first = findings if first is None else first
    yield from first or ()


def _of_folder(
    checkpoint: Checkpoint, config: Mapping[str, Any], engine: ServingFormat, given: Mapping[str, Any], version: str | None
) -> Iterator[Finding]:
    """What stands between a Hugging Face folder and one engine: what its release rejects, and sizes that its class cannot have."""
    model, format = checkpoint.sized_model, registry.named(checkpoint.format)
    yield from _of_config(checkpoint, config, engine, version)
    if model is None:
        method = unknown_quantization(config)
        reason = not_read(method) if method else unknown_architecture(config).what
        yield found(
            "not-known", f"{checkpoint.config_problem or reason}, so names and shapes were not compared with {engine.engine}'s class"
        )
        return
    release = _release(engine, version)
    if release and format.needs_model_files:
        hints = Hints(config, architecture=checkpoint.architecture)
        yield from names_of_release([tensor.name for tensor in format.read(checkpoint.files, hints).tensors], release, model)
    if model.architecture.head is None and not config.get("classifier_from_token"):
        laid_out = _planned(checkpoint, engine.name, {**given, **({"engine_version": version} if version else {})})
        if isinstance(laid_out, Finding) and "onvert to hf" in laid_out.do:  # it is about files of ranks alone
            yield found("not-known", f"the sizes were not compared with {engine.engine}'s class, as no files of ranks are laid out for it")
        elif isinstance(laid_out, Finding):
            yield laid_out
        return
    parallel = Parallel(**given)
    if about := engine.about_folder(model, parallel):
        yield found("not-known", about, do="Serve it at TP 1, or store the classifier as score.weight")
    try:
        check_degrees(model, engine.rules(model, Target(engine.name, parallel)), parallel)
    except ReshardError as error:
        yield _refused(error)


def _release(engine: ServingFormat, version: str | None) -> Release | None:
    """The release of an engine that is known, if it is the one that is asked about."""
    release = engine.release
    return release if release and release.engine.endswith(version or "") else None


def _of_config(checkpoint: Checkpoint, config: Mapping[str, Any], engine: ServingFormat, version: str | None) -> Iterator[Finding]:
    """What an engine rejects in the config."""
    if release := _release(engine, version):
        yield from config_of_release(config, release, checkpoint.model)
    elif not config.get("architectures"):
        yield found("no-class", "config.json names no class: `architectures` is missing or empty", file="config.json")


def _of_component(checkpoint: Checkpoint, component: str) -> Iterator[Finding]:
    """Whether diffusers finds the weights of a component, by the names of their files (0.42, ModelMixin.from_pretrained)."""
    expected = FileNames.of(checkpoint.model_files.config)
    paths = [file.path for file in checkpoint.index.files]
    named = FileNames.written(paths)
    if named is None or named.stem != expected.stem:
        yield found(
            "not-served",
            f"diffusers loads a {component} from {expected.file(1, 1)} or the files of {expected.index}, and the weights are in {paths[0]}",
            do="Convert to hf, which writes these names",
        )
    yield from _of_files(checkpoint)


def _planned(checkpoint: Checkpoint, name: str, given: Mapping[str, Any]) -> Layout | Finding:
    """What an engine would be given, or why it takes nothing of this."""
    try:
        return plan(checkpoint, to=name, **given).layout
    except ReshardError as error:
        return _refused(error)


def _refused(error: ReshardError) -> Finding:
    """The finding that an error of planning is. A weight that the declaration lacks may have a place in the engine's class."""
    where = f"{error.where}: " if error.where else ""
    is_known = not (isinstance(error, CheckpointError) and error.id == "unsupported")
    return found("not-served" if is_known else "not-known", f"{where}{error.what}", do=error.do or "")


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
