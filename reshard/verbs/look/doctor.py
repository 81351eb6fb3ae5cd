"""The verb `doctor`: is a checkpoint healthy? One table of checks: of its files, its structure and, if asked, its values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, Unpack

from reshard.adapter import registry
from reshard.adapter.format import Format
from reshard.adapter.model_files import ModelFiles
from reshard.adapter.serving_format import ServingFormat
from reshard.canonical.tied_head import with_replica
from reshard.engine.checks.one_save import check_copied_files, check_steps
from reshard.engine.compare import wrong_constants
from reshard.engine.events import details, event
from reshard.engine.pool import Effort
from reshard.errors import CheckpointError, RequestError, ReshardError, UnsupportedError
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.health import distributions, elements, files, movement, quantized, structure, values
from reshard.health.findings import SEVERITIES, Finding, Report, found, of_error, sorted_findings
from reshard.health.model_files import missing_beside_weights
from reshard.index.index import Index, RunFacts, Tensor
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import EffortOptions, OpenOptions, PathLike, checked_keywords, take
from reshard.opening.open import look, open
from reshard.opening.pipelines import Pipeline, PipelinePart, pipeline_at
from reshard.opening.steps import classify
from reshard.plans.manifest import usable_manifest
from reshard.storage.files import Files
from reshard.storage.tar import open_tree
from reshard.storage.trees import chain_of
from reshard.verbs.verify import verify_written


class DoctorOptions(OpenOptions, EffortOptions, total=False):
    """Keywords of `doctor`."""


@value(slots=False, eq=False)
class Patient:
    """A checkpoint that is checked, and what several checks need of it."""

    checkpoint: Checkpoint
    """The checkpoint with the names that are stored; one without format and tensors if it could not be opened."""
    index: Index
    """Its index under canonical names."""
    problems: tuple[Finding, ...]
    """What went wrong while it was opened."""
    since: PathLike
    """An earlier save of the same run; empty if none was given."""
    effort: Effort
    """How much of the machine its checks may use."""
    read: Effort
    """The same, which also counts the bytes of tensors that are read."""
    deep: bool
    """Whether its files and values are read."""

    @property
    def files(self) -> Files:
        """Its files."""
        return self.checkpoint.files

    @property
    def format(self) -> Format:
        """Its format, if it could be opened."""
        return registry.named(self.checkpoint.format)

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The model's config."""
        return self.checkpoint.model_files.config

    @cached_property
    def used(self) -> set[str]:
        """The files in which its tensors lie."""
        return {file.path for file in self.checkpoint.index.files}

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The files to check: those beside the used ones, or all."""
        return files.paths_of(self.files, self.used)

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The weights by name; a weight that is stored only as a master is among them."""
        return {**self.index.by_kind("master"), **self.index.by_kind("weight")}

    @cached_property
    def incomplete(self) -> set[str | None]:
        """The names of the tensors of which a part is in no file."""
        return {finding.tensor for finding in structure.incomplete_tensors(self.index)}

    @cached_property
    def damaged(self) -> list[Finding]:
        """The files whose structure is damaged."""
        return list(files.damaged_files(self.files, self.paths, self.used))

    @cached_property
    def tied_head(self) -> tuple[Tensor, Tensor] | None:
        """The head and the embedding, if both are stored and the config ties them."""
        model, weights = self.checkpoint.model, self.index.by_kind("weight")
        if model is None or not model.is_tied:
            return None
        head, table = (weights.get(name) for name in model.architecture.tied)
        return (head, table) if head and table and (head.dtype, head.shape) == (table.dtype, table.shape) else None

    @cached_property
    def measured(self) -> list[values.Measured]:
        """All complete tensors, read once, a tied head with its embedding; with digests, if reshard wrote the checkpoint."""
        head, table = self.tied_head or (None, None)
        read = (tensor for tensor in self.index.tensors if not tensor.dtype.is_unread)
        complete = [tensor for tensor in read if tensor.name not in self.incomplete]
        tensors = [with_replica(tensor, table) if table and tensor is head else tensor for tensor in complete]
        with_digests = usable_manifest(self.files) is not None
        return values.measure(tensors, self.files, self.read, with_digests=with_digests)


def _problems(patient: Patient) -> Iterator[Finding]:
    """What went wrong while it was opened, without what a damaged file explains."""
    explained = {finding.detail for finding in patient.damaged}
    return (finding for finding in patient.problems if finding.detail not in explained)


def _wrong_checksums(patient: Patient) -> Iterator[Finding]:
    return files.wrong_checksums(patient.files, patient.paths, patient.effort.threads(1, buffers=1), patient.effort.report)


def _config_shapes(patient: Patient) -> Iterator[Finding]:
    try:
        model = patient.checkpoint.model
    except RequestError as error:
        yield of_error(error)
        model = None
    if model is not None and patient.format is not None and patient.format.holds_adapters:
        return  # the config is that of the base
    yield from structure.config_shapes(patient.weights, model, patient.config, patient.checkpoint.index.facts.left_out)


def _missing_scales(patient: Patient) -> Iterator[Finding]:
    return structure.missing_scales(patient.weights, patient.config, of_engine=isinstance(patient.format, ServingFormat))


def _unequal_scales(patient: Patient) -> Iterator[Finding]:
    with contextlib.suppress(CheckpointError, RequestError):
        yield from quantized.unequal_global_scales(patient.checkpoint.content(), patient.config, patient.files)


def _quantized_weights(patient: Patient) -> Iterator[Finding]:
    if len(patient.measured) == len(patient.index.tensors):  # otherwise a part of a tensor is missing
        with contextlib.suppress(RequestError):
            yield from quantized.quantized_weights(patient.checkpoint.content(), patient.config, patient.files)


def _wrong_padding(patient: Patient) -> Iterator[Finding]:
    for difference in wrong_constants(patient.files, patient.index.constants):
        yield found("wrong-padding", difference.detail, tensor=difference.name)


def _changed(patient: Patient) -> Iterator[Finding]:
    """What is not as reshard wrote it. Only what was not measured as it is stored is read again, such as a head with its embedding."""
    if usable_manifest(patient.files) is None:
        return
    digests = {measured.tensor.shards: measured.digests for measured in patient.measured if measured.is_complete and measured.fault is None}
    for difference in verify_written(patient.checkpoint, patient.read, known=lambda tensor: digests.get(tensor.shards)).differences:
        name, is_file = difference.name, patient.files.size(difference.name) is not None
        yield found("changed", difference.detail, tensor=None if is_file else name, file=name if is_file else None)


def _movement(patient: Patient) -> Iterator[Finding]:
    before = open(patient.since, **{**patient.checkpoint.options, "format": None})
    pairs, findings = movement.pairs_of(patient.index, before.named())
    pairs = [pair for pair in pairs if pair.now.name not in patient.incomplete]
    yield from findings
    yield from movement.compare_pairs(pairs, (patient.files, before.files), patient.read)
    yield from movement.still_tensors(pairs, {tensor.name for tensor in patient.index.tensors if tensor.kind == "moment1"})


CHECKS: tuple[tuple[str, Callable[[Patient], Iterator[Finding]]], ...] = (
    ("", _problems),
    ("", lambda patient: iter(patient.damaged)),
    ("opened", lambda patient: files.unused_files(patient.format, patient.used, patient.files, patient.paths)),
    ("opened", _config_shapes),
    ("opened", lambda patient: missing_beside_weights(patient.format, patient.checkpoint.model_files)),
    ("opened", lambda patient: structure.missing_layers(patient.weights)),
    ("opened", lambda patient: structure.mixed_dtypes(patient.weights)),
    ("opened", _missing_scales),
    ("opened", _unequal_scales),
    ("opened", lambda patient: structure.uneven_steps(patient.index, patient.files)),
    ("opened", lambda patient: structure.optimizer_state(patient.index)),
    ("", lambda patient: files.integrity(patient.files, patient.paths, deep=patient.deep)),
    ("deep", _wrong_checksums),
    ("deep", lambda patient: files.wrong_digests(patient.files, patient.paths, patient.effort)),
    ("opened deep", lambda patient: values.faults(patient.measured, patient.tied_head[0].name if patient.tied_head else None)),
    ("opened deep", lambda patient: elements.bad_numbers(patient.measured)),
    ("opened deep", lambda patient: elements.lifeless_tensors(patient.measured)),
    ("opened deep", lambda patient: elements.dead_experts(patient.measured)),
    ("opened deep", _quantized_weights),
    ("opened deep", lambda patient: distributions.norm_outliers(patient.measured)),
    ("opened deep", lambda patient: distributions.fresh_matrices(patient.measured, patient.config)),
    ("opened deep", _wrong_padding),
    ("opened deep", _changed),
    ("opened since", _movement),
)
"""What a check needs (a checkpoint that could be opened, `deep`, `since`), and what finds. Findings of one severity keep this order."""


@checked_keywords
def doctor(path: PathLike, *, deep: bool = False, since: PathLike | None = None, **options: Unpack[DoctorOptions]) -> Report:
    """What is wrong with a checkpoint, or looks wrong. A checkpoint that cannot be opened is a finding too.

    deep: also read all tensors once, and the checksums of zip files. since: an earlier save of the same run, to find what never moved;
    this reads the weights of both.

    Of the folder of a diffusers pipeline, every component is checked, and whether model_index.json agrees with the folders.

    Raises: RequestError if there is no checkpoint at the path, or an option does not apply.
    """
    given: dict[str, Any] = dict(options)
    if pipeline := pipeline_at(path, given):
        return _of_pipeline(pipeline, deep=deep, since=since, given=given)
    effort, nbytes = replace(Effort.of(take(given, EffortOptions)), verify_source=False), 0  # `deep` compares all digests

    def count(more: int) -> None:
        nonlocal nbytes
        nbytes += more
        effort.report(more)

    patient = Patient(*_opened(path, given), since or "", effort, replace(effort, progress=count), deep)
    format = patient.checkpoint.format or None
    has = {word for word, applies in (("opened", format), ("deep", deep), ("since", since is not None)) if applies}
    findings = [finding for needs, find in CHECKS if has.issuperset(needs.split()) for finding in find(patient)]
    tensors, paths = len(patient.index.tensors), {*patient.paths, *patient.used}
    report = Report(str(path), format, deep, tensors, len(paths), nbytes, sorted_findings(findings))
    _log_checked(report)
    return report


def _of_pipeline(pipeline: Pipeline, *, deep: bool, since: PathLike | None, given: Mapping[str, Any]) -> Report:
    """What is wrong with the components of a pipeline. The file of a finding begins with the component's folder."""
    from reshard.health.pipelines import unlike_index

    findings, reports = [*unlike_index(pipeline)], list[Report]()
    for component in pipeline.components:
        if component.format:
            before = None if since is None else f"{os.fspath(since).rstrip('/')}/{component.name}"
            reports.append(report := doctor(component.path, deep=deep, since=before, **given))
            findings += (_of_component(component, finding) for finding in report.findings)
    formats = ", ".join(sorted({report.format for report in reports if report.format})) or None
    sizes = (sum(report.tensors for report in reports), sum(report.files for report in reports), sum(report.nbytes for report in reports))
    return Report(pipeline.path, formats, deep, *sizes, sorted_findings(findings))


def _of_component(component: PipelinePart, finding: Finding) -> Finding:
    file = (finding.file or "").removeprefix(component.path).lstrip("/")
    do = "The library that loads it compares them" if finding.id == "config-not-checked" else finding.do
    return replace(finding, file=f"{component.name}/{file}", do=do)


def _log_checked(report: Report) -> None:
    event(
        "checked",
        f"checked {report.path}: {report.counts_text()}; {plural(report.tensors, 'tensor')}, {plural(report.files, 'file')}",
        path=report.path,
        format=report.format,
        deep=report.deep,
        tensors=report.tensors,
        files=report.files,
        bytes=report.nbytes,
        **{severity: report.count(severity) for severity in SEVERITIES},
    )
    details("finding", lambda: ((f"{finding.severity} {finding.id}: {finding.detail}", asdict(finding)) for finding in report.findings))


def _opened(path: PathLike, options: Mapping[str, Any]) -> tuple[Checkpoint, Index, tuple[Finding, ...]]:
    """The checkpoint, as far as it can be opened, its index under canonical names, and what keeps it from being opened."""
    if len(chain_of(path)) > 1:
        raise UnsupportedError(
            "a base with deltas is no checkpoint of its own whose files could be checked",
            where=os.fspath(path),
            do="Check its base; `reshard verify` compares every tensor with what the last delta says, and `reshard stats` finds NaN",
        )
    try:
        checkpoint = look(path, options)
    except CheckpointError as error:
        try:
            tree, empty = open_tree(path), Index("", (), (), RunFacts())
        except CheckpointError:
            raise error from None  # an archive that cannot be listed
        return Checkpoint(str(path), tree, empty, ModelFiles(tree, "", None), ""), empty, (of_error(error),)
    tree, index, format = checkpoint.files, checkpoint.index, registry.named(checkpoint.format)
    broken = list(structure.incomplete_tensors(index))
    problems = [*broken, *structure.unread_arrays(index)]
    names = {finding.tensor for finding in broken}
    complete = tuple(tensor for tensor in index.tensors if tensor.name not in names and not tensor.dtype.is_unread)
    whole = replace(index, tensors=complete) if len(complete) < len(index.tensors) else index
    checks = (lambda: check_steps(tree, whole), lambda: check_copied_files(tree, whole), lambda: format.check_values(tree, whole))
    for check in checks:
        try:
            corrected = check()
        except CheckpointError as error:
            # What belongs to an incomplete tensor was left out, so what seems wrong with the others may follow from it.
            problems += [] if broken else [of_error(error)]
        else:
            checkpoint = replace(checkpoint, index=(None if broken else corrected) or checkpoint.index)
    checkpoint = classify(checkpoint)
    named = checkpoint.index
    if not broken:
        try:
            named = checkpoint.named()
        except ReshardError as error:
            problems.append(of_error(error))
    return checkpoint, named, tuple(problems)
