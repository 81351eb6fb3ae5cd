"""The verb `doctor`: is a checkpoint healthy? Its files, its structure and, if asked, its values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Unpack

from reshard.adapter.format import Format
from reshard.adapter.serving_format import ServingFormat
from reshard.canonical.tied_head import with_replica
from reshard.engine.compare import wrong_constants
from reshard.engine.events import details, event
from reshard.engine.one_save import check_copied_files, check_steps
from reshard.engine.pool import workers_within
from reshard.errors import CheckpointError, RequestError, ReshardError
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.health import distributions, elements, experts, files, movement, optimizer, quantized, structure, values
from reshard.health.findings import SEVERITIES, Finding, Report, found, of_error, sorted_findings
from reshard.health.model_files import missing_beside_weights
from reshard.health.values import Measured
from reshard.index.index import Index, Tensor
from reshard.models.quantization import quantization_of
from reshard.plans.manifest import usable_manifest
from reshard.requests.checkpoint import Checkpoint, classified_checkpoint, open, unchecked
from reshard.requests.request import Effort, EffortOptions, OpenOptions, PathLike, Progress, checked_keywords
from reshard.storage.files import Files
from reshard.storage.tar import open_tree
from reshard.verbs.verify import verify_written


class DoctorOptions(OpenOptions, EffortOptions, total=False):
    """Keywords of `doctor`."""


@value
class _Patient:
    """A checkpoint that is checked, as far as it could be opened."""

    files: Files
    """Its files."""
    format: Format | None = None
    """Its format; None if it could not be opened."""
    checkpoint: Checkpoint | None = None
    """The opened checkpoint; None if it could not be opened."""
    index: Index | None = None
    """Its index under canonical names; None if it could not be opened."""


@checked_keywords
def doctor(path: PathLike, *, deep: bool = False, since: PathLike | None = None, **options: Unpack[DoctorOptions]) -> Report:
    """What is wrong with a checkpoint, or looks wrong. A checkpoint that cannot be opened is a finding too.

    deep: also read all tensors once, and the checksums of zip files. since: an earlier save of the same run, to find what never moved;
    this reads the weights of both.

    Raises: RequestError if there is no checkpoint at the path, or an option does not apply.
    """
    effort = Effort(options.get("workers"), options.get("memory"), options.get("progress"))
    read = _Counter(effort.progress)
    opening = {name: options[name] for name in OpenOptions.__annotations__ if name in options}  # type: ignore[literal-required]
    findings: list[Finding] = []
    patient = _opened(path, opening, findings)
    paths = files.paths_of(patient.files, patient.checkpoint.index if patient.checkpoint else None)
    known = {file.path for file in patient.checkpoint.index.files} if patient.checkpoint else set()
    damaged = list(files.damaged_files(patient.files, paths, known))
    # The first damaged file may be what kept the checkpoint from being opened.
    findings = [finding for finding in findings if finding.detail not in {each.detail for each in damaged}] + damaged
    if patient.format and patient.checkpoint:
        findings += files.unused_files(patient.format, patient.checkpoint.index, patient.files, paths)
    if patient.index:
        findings += _structure(patient, patient.index)
    if deep:
        workers = workers_within(effort.memory, effort.workers, 1, buffers=1)
        findings += files.wrong_checksums(patient.files, paths, workers, effort.report)
        measured = _measured(patient, patient.index, effort, read) if patient.index else []
        if patient.index:
            findings += _values(patient, patient.index, measured)
        if patient.checkpoint:
            findings += _changes(patient.checkpoint, measured, replace(effort, progress=read))
    if since is not None and patient.index:
        findings += _movement(patient, patient.index, since, opening, effort, read)
    report = Report(
        path=str(path),
        format=patient.format.name if patient.format else None,
        deep=deep,
        tensors=len(patient.index.tensors) if patient.index else 0,
        files=len({*paths, *known}),
        nbytes=read.nbytes,
        findings=sorted_findings(findings),
    )
    _log_checked(report)
    return report


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
    details("finding", lambda: ((f"{each.severity} {each.id}: {each.detail}", asdict(each)) for each in report.findings))


class _Counter:
    """Counts the bytes that were read, and passes them on."""

    def __init__(self, progress: Progress | None) -> None:
        self.nbytes, self._progress = 0, progress

    def __call__(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if self._progress:
            self._progress(nbytes)


def _opened(path: PathLike, options: Mapping[str, Any], findings: list[Finding]) -> _Patient:
    """The checkpoint, as far as it can be opened. What keeps it from that is added to the findings."""
    try:
        format, checkpoint = unchecked(path, options)
    except CheckpointError as error:
        findings.append(of_error(error))
        try:
            return _Patient(open_tree(path))
        except CheckpointError:
            raise error from None  # an archive that cannot be listed
    tree, index = checkpoint.files, checkpoint.index
    broken = list(structure.incomplete_tensors(index))
    findings += broken
    names = {finding.tensor for finding in broken}
    whole = replace(index, tensors=tuple(tensor for tensor in index.tensors if tensor.name not in names)) if broken else index
    checks = (lambda: check_steps(tree, whole), lambda: check_copied_files(tree, whole), lambda: format.check_values(tree, whole))
    for check in checks:
        try:
            corrected = check()
        except CheckpointError as error:
            # What belongs to an incomplete tensor was left out, so what seems wrong with the others may follow from it.
            findings += [] if broken else [of_error(error)]
        else:
            checkpoint = replace(checkpoint, index=(None if broken else corrected) or checkpoint.index)
    checkpoint = classified_checkpoint(checkpoint)
    try:
        named = checkpoint.named() if not broken else checkpoint.index
    except ReshardError as error:
        findings.append(of_error(error))
        named = checkpoint.index
    return _Patient(tree, format, checkpoint, named)


def _structure(patient: _Patient, index: Index) -> Iterator[Finding]:
    """The checks that need the index alone."""
    assert patient.checkpoint
    weights = _weights(index)
    try:
        model = patient.checkpoint.model
    except RequestError as error:
        yield of_error(error)
        model = None
    yield from structure.config_shapes(weights, model, patient.checkpoint.model_files.config)
    if patient.format:
        yield from missing_beside_weights(patient.format, patient.checkpoint.model_files)
    yield from structure.missing_layers(weights)
    yield from structure.mixed_dtypes(weights)
    yield from structure.missing_scales(weights, patient.checkpoint.model_files.config, of_engine=isinstance(patient.format, ServingFormat))
    yield from structure.uneven_steps(index, patient.files)
    yield from optimizer.optimizer_state(index)


def _measured(patient: _Patient, index: Index, effort: Effort, advance: Callable[[int], None]) -> list[Measured]:
    """All tensors, read once; with digests, if reshard wrote the checkpoint. A tensor of which a part is missing is not read."""
    assert patient.checkpoint
    head = _tied_head(patient.checkpoint, index)
    incomplete = {finding.tensor for finding in structure.incomplete_tensors(index)}
    tensors = [_with_embedding(tensor, head) for tensor in index.tensors if tensor.name not in incomplete]
    with_digests = usable_manifest(patient.files) is not None
    return values.measure(tensors, patient.files, advance, with_digests=with_digests, workers=effort.workers, memory=effort.memory)


def _values(patient: _Patient, index: Index, measured: Sequence[Measured]) -> Iterator[Finding]:
    """The checks of the values of all tensors."""
    assert patient.checkpoint
    head = _tied_head(patient.checkpoint, index)
    yield from values.faults(measured, head[0].name if head else None)
    yield from elements.bad_numbers(measured)
    yield from elements.lifeless_tensors(measured)
    yield from experts.dead_experts(measured)
    if len(measured) == len(index.tensors):  # otherwise a part of a tensor is missing
        yield from _quantized(patient)
    yield from distributions.norm_outliers(measured)
    yield from distributions.fresh_matrices(measured, patient.checkpoint.model_files.config)
    for difference in wrong_constants(patient.files, index.constants):
        yield found("wrong-padding", difference.detail, tensor=difference.name)


def _quantized(patient: _Patient) -> Iterator[Finding]:
    """The checks of quantized weights."""
    assert patient.checkpoint
    config = patient.checkpoint.model_files.config
    if quantization_of(config or {}) is None:
        return
    with contextlib.suppress(RequestError):
        yield from quantized.quantized_weights(patient.checkpoint.content(), config, patient.files)


def _changes(checkpoint: Checkpoint, measured: Sequence[Measured], effort: Effort) -> Iterator[Finding]:
    """What is not as reshard wrote it, if it wrote the checkpoint.

    Only tensors that were not measured as they are stored are read again, such as a tied head, which was read with its embedding.
    """
    if usable_manifest(checkpoint.files) is None:
        return
    digests = {each.tensor.shards: each.digests for each in measured if each.is_complete and each.fault is None}
    for difference in verify_written(checkpoint, effort, known=lambda tensor: digests.get(tensor.shards)).differences:
        name, is_file = difference.name, checkpoint.files.size(difference.name) is not None
        yield found("changed", difference.detail, tensor=None if is_file else name, file=name if is_file else None)


def _movement(
    patient: _Patient, index: Index, since: PathLike, opening: Mapping[str, Any], effort: Effort, advance: Callable[[int], None]
) -> Iterator[Finding]:
    """The checks that compare the weights with an earlier save."""
    before = open(since, **{**opening, "format": None})
    incomplete = {finding.tensor for finding in structure.incomplete_tensors(index)}
    pairs, findings = movement.pairs_of(index, before.named())
    pairs = [pair for pair in pairs if pair.now.name not in incomplete]
    yield from findings
    yield from movement.compare_pairs(pairs, (patient.files, before.files), advance, workers=effort.workers, memory=effort.memory)
    yield from movement.still_tensors(pairs, {tensor.name for tensor in index.tensors if tensor.kind == "moment1"})


def _weights(index: Index) -> dict[str, Tensor]:
    """The weights of an index by name; a weight that is stored only as a master is among them."""
    return {**index.by_kind("master"), **index.by_kind("weight")}


def _tied_head(checkpoint: Checkpoint, index: Index) -> tuple[Tensor, Tensor] | None:
    """The head and the embedding, if both are stored and the config ties them."""
    model, weights = checkpoint.model, index.by_kind("weight")
    if model is None or not model.is_tied:
        return None
    head, table = (weights.get(name) for name in model.architecture.tied)
    return (head, table) if head and table and (head.dtype, head.shape) == (table.dtype, table.shape) else None


def _with_embedding(tensor: Tensor, head: tuple[Tensor, Tensor] | None) -> Tensor:
    """A tied head, with the embedding as its replica; any other tensor as it is."""
    return with_replica(tensor, head[1]) if head and tensor is head[0] else tensor
