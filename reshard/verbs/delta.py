"""The verbs `delta`, which writes what changed between two checkpoints, and `apply`, which converts a base with its deltas."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Unpack

from reshard.adapter.save_folders import step_of
from reshard.canonical.content import Content, check_selected
from reshard.containers import safetensors
from reshard.engine.checks.reading import Reading
from reshard.engine.checks.recorded_digests import check_digests
from reshard.engine.compare import Comparison, Side, check_recorded, comparable
from reshard.engine.deltas.frames import CHECKSUM, MadeFrame, made_frames
from reshard.engine.events import event
from reshard.engine.pool import Effort
from reshard.engine.recorded import BlockDigests, fingerprint_of
from reshard.engine.walk import block_digests
from reshard.errors import RequestError, TargetError, UnsupportedError, check_word
from reshard.geometry.documents import document
from reshard.geometry.dtypes import from_torch
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.index.deltas import INDEX, OWN_KEY, RECORD_KEY, DeltaEncoding
from reshard.index.index import Tensor, element_count
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import EffortOptions, ModelOptions, PathLike, PlanOptions, checked_keywords, take
from reshard.opening.open import open_both
from reshard.plans.digests import Fingerprint, content_digest, record_digest
from reshard.secrets import masked_in
from reshard.storage.claims import FileDigests, SourceChecks
from reshard.storage.files import Files
from reshard.storage.own_files import WORK_FOLDER
from reshard.storage.staging import Staging
from reshard.storage.system_calls import is_url, local_path, system_errors
from reshard.storage.trees import chain_of
from reshard.verbs.convert import Result, convert
from reshard.verbs.plan import plan

# A file of frames is at most this long, unless one frame is longer.
_LARGEST_FILE = 5_000_000_000
_IS_OF_DELTA = re.compile(rf"{re.escape(INDEX)}|model-\d{{5}}-of-\d{{5}}\.safetensors")


@value
class DeltaResult:
    """What a delta has written."""

    JSON = (
        "path version base_version encoding base_fingerprint=base.root fingerprint=result.root tensors changed_tensors elements "
        "changed_elements bytes=nbytes checkpoint_bytes seconds source_checks source_digests"
    )

    path: str
    """The folder."""
    version: str
    """The version that it makes, six digits."""
    base_version: str
    """The version that it changes."""
    encoding: DeltaEncoding
    """How its frames say what changed."""
    base: Fingerprint
    """The fingerprint of the base."""
    result: Fingerprint
    """The fingerprint of the new checkpoint, which the delta makes of the base."""
    tensors: int
    """The number of tensors of the checkpoint."""
    changed_tensors: int
    """How many of them changed."""
    elements: int
    """The number of their elements."""
    changed_elements: int
    """How many elements changed."""
    nbytes: int
    """The bytes of the delta's files."""
    checkpoint_bytes: int
    """The bytes of the weights of the new checkpoint."""
    seconds: float
    """How long it took."""
    source_checks: SourceChecks = SourceChecks()
    """What of both checkpoints was compared with the checksums that their files hold."""
    source_digests: FileDigests = FileDigests()
    """How many files of both were compared with recorded digests (`verify_source`)."""

    def to_json(self) -> dict[str, Any]:
        """The result as plain values with stable keys."""
        return document(self, seconds=round(self.seconds, 3))

    def __str__(self) -> str:
        share = self.changed_elements / max(1, self.elements)
        return (
            f"{self.path}: version {self.version} of {self.base_version}, {self.changed_tensors:,} of {plural(self.tensors, 'tensor')} "
            f"and {share:.2%} of the elements changed; {self.nbytes:,} bytes for {self.checkpoint_bytes:,}"
        )


class DeltaOptions(ModelOptions, EffortOptions, total=False):
    """Keywords of `delta`."""


@checked_keywords
def delta(
    base: Checkpoint | PathLike,
    new: Checkpoint | PathLike,
    target: PathLike,
    *,
    encoding: DeltaEncoding = "xor",
    cast: bool = False,
    **options: Unpack[DeltaOptions],
) -> DeltaResult:
    """Write what changed from the checkpoint `base` to `new`, of any formats and layouts, into the directory `target`.

    The weights are compared under their canonical names, in the Hugging Face form. The files are in the form of slime and ModelExpress
    (formats/delta), and hold the fingerprints of both checkpoints.

    encoding: "xor" for the differences of all bytes, "overwrite" for the positions of changed bytes and the new bytes. cast: where element
    types differ, cast the values of `new` to the type of `base`, as torch does.

    Raises: RequestError if names, shapes or element types differ; DifferenceFound if reshard wrote one of the two and it has changed since;
    CheckpointError if a file was written meanwhile, or its bytes do not have the checksum that was saved with them; TargetError if
    something lies in the target.
    """
    check_word("`encoding=`", encoding, ("xor", "overwrite"))
    given: dict[str, Any] = dict(options)
    about_model, began = take(given, ModelOptions), time.monotonic()
    effort = Effort.of(given)
    root = _free_place(target)
    if not (isinstance(base, Checkpoint) and isinstance(new, Checkpoint)):
        base, new = _opened(base, new, about_model)
    contents = base.content(), new.content()
    pairs, reading = _pairs(base, new, contents, cast=cast), Reading(checks=effort.source_checksums)
    staging = Staging(root)
    with staging.locked(content_digest(f"delta\0{base.path}\0{new.path}\0{encoding}".encode()), lambda: "a delta is being written"):
        staging.remove(_incomplete_files(root))
        staging.clean()
        digests = check_digests(effort, *((side.files, side.index.tensors) for side in (base, new)))
        made = made_frames(pairs, (base.files, new.files), encoding, effort, staging.work, reading)
        ordered = sorted(made, key=attrgetter("number"))
        frames = [(pairs[frame.number][1].name, frame) for frame in ordered if frame.nbytes]
        prints = tuple(_fingerprint(side, pairs, ordered) for side in enumerate(zip((base, new), contents, strict=True)))
        for number, side in enumerate((base, new)):
            reading.check_unchanged(side.files, side.index, partial(_is_same, number, pairs, ordered, side.files))
        counts = sum(frame.changed for frame in ordered), element_count(old for old, _ in pairs)
        metadata = _metadata(base, new, prints, counts) | {"delta_encoding": encoding, "reshard_tensors": len(frames)}
        nbytes = _write(staging, frames, metadata)
    result = DeltaResult(
        path=os.fspath(target),
        version=metadata["version"],
        base_version=metadata["base_version"],
        encoding=encoding,
        base=prints[0],
        result=prints[1],
        tensors=len(pairs),
        changed_tensors=len(frames),
        elements=counts[1],
        changed_elements=counts[0],
        nbytes=nbytes,
        checkpoint_bytes=sum(old.nbytes for old, _ in pairs),
        seconds=time.monotonic() - began,
        source_checks=reading.checks,
        source_digests=digests,
    )
    event("delta", str(result), **result.to_json())
    return result


@checked_keywords
def apply(
    base: PathLike,
    deltas: PathLike | Sequence[PathLike],
    target: PathLike,
    *,
    to: str,
    overwrite: bool = False,
    **options: Unpack[PlanOptions],
) -> Result:
    """Convert what a chain of deltas makes of the checkpoint `base` to the format `to`, in one pass; the same as converting `BASE+DELTA`.

    Takes the keywords of `plan`. overwrite: replace the checkpoint in `target` once the new one is complete.

    Raises: as `open` and `convert` do; CheckpointError if the result is not what the last delta says: then nothing is written.
    """
    return convert(plan("+".join(chain_of(base, deltas)), to=to, **options), target, overwrite=overwrite)


def _opened(base: Checkpoint | PathLike, new: Checkpoint | PathLike, options: Mapping[str, Any]) -> tuple[Checkpoint, Checkpoint]:
    """Both checkpoints. One that is opened already is opened again, so that its facts count for the other."""
    left, right = (side.path if isinstance(side, Checkpoint) else side for side in (base, new))
    return open_both(left, right, **options)


def _pairs(base: Checkpoint, new: Checkpoint, contents: tuple[Content, Content], *, cast: bool) -> list[tuple[Tensor, Tensor]]:
    """The tensors of both under their canonical names. Raises RequestError if names, shapes or element types differ; UnsupportedError for
    the values of a function, and for a cast from or to types of one byte."""
    comparison = Comparison()
    old_side, new_side = (Side(side.files, side.index, content) for side, content in zip((base, new), contents, strict=True))
    for content in contents:
        check_selected(content)
    pairs = list(comparable(old_side, new_side, comparison, with_cast=cast))
    if comparison.differences:
        first, more = comparison.differences[0], len(comparison.differences) - 1
        raise RequestError(
            first.detail.partition(" (`cast")[0] + (f", and {plural(more, 'other difference')}" if more else ""),
            where=first.name,
            why="A delta is made of two checkpoints with the same names, shapes and element types",
            do="Compare them with `reshard diff --headers`; `cast=True` casts the new values to the types of the base",
        )
    for name, dtypes in ((old.name, (old.dtype, of_new.dtype)) for old, of_new in pairs):
        if function := dtypes[0].function or dtypes[1].function:
            raise UnsupportedError(
                f"one of the two holds {function} of this weight, and a delta has the bytes of the weight",
                where=name,
                do="Give the checkpoints that serving engines' files were made from",
            )
        if dtypes[0] != dtypes[1] and min(dtype.itemsize for dtype in dtypes) == 1:
            raise UnsupportedError(
                f"{dtypes[1]} is not cast to {dtypes[0]}, which needs scales", where=name, do="Convert one of the two first"
            )
    return pairs


def _is_same(number: int, pairs: Sequence[tuple[Tensor, Tensor]], frames: Sequence[MadeFrame], files: Files) -> bool:
    """Whether the checkpoint of that number still has the bytes of which frames were made."""
    digests = block_digests(files, {pair[0].name: pair[number] for pair in pairs if pair[0].dtype == pair[number].dtype})
    return all(digests.get(pairs[frame.number][0].name) in (None, frame.digests[number]) for frame in frames)


def _metadata(base: Checkpoint, new: Checkpoint, prints: tuple[Fingerprint, ...], counts: tuple[int, int]) -> dict[str, Any]:
    """What the index says of a delta. Readers of other programs ask for the first five keys."""
    version, base_version = _versions(base, new)
    return {
        "version": version,
        "base_version": base_version,
        "delta_encoding": "",
        "compression_format": "zstd",
        "checksum_format": CHECKSUM,
        OWN_KEY: base.path,
        "reshard_base_fingerprint": prints[0].root,
        "reshard_result": new.path,
        "reshard_result_fingerprint": prints[1].root,
        "reshard_step": new.index.facts.step,
        "reshard_elements": counts,
        "reshard_tensors": 0,
        "reshard_digests": dict(prints[1].tensors),
    }


def _versions(base: Checkpoint, new: Checkpoint) -> tuple[str, str]:
    """The version of the new checkpoint, and that of the base, as six digits: their steps, or else counted from 0."""
    before, after = (side.index.facts.step if side.index.facts.step is not None else step_of(side.path) for side in (base, new))
    if base.deltas:
        before = int(base.deltas[-1].version)
    if before is None or after is None or before == after:
        before = before if base.deltas else 0
        after = (before or 0) + 1
    return f"{after:06d}", f"{before:06d}"


def _fingerprint(
    side: tuple[int, tuple[Checkpoint, Content]], pairs: Sequence[tuple[Tensor, Tensor]], frames: Iterable[MadeFrame]
) -> Fingerprint:
    """The fingerprint of one of the two. Raises DifferenceFound if it is not the recorded one."""
    number, (checkpoint, content) = side
    digests: BlockDigests = {pairs[frame.number][0].name: frame.digests[number] for frame in frames}
    stored = {pair[number].name for pair in pairs if pair[number].dtype == pair[0].dtype}
    check_recorded(Side(checkpoint.files, checkpoint.index, content), {name: kept for name, kept in digests.items() if name in stored})
    return fingerprint_of({old.name: old for old, _ in pairs}, digests)


def _free_place(target: PathLike) -> Path:
    """The directory that is written. Raises UnsupportedError for a URL, TargetError if something lies there."""
    if is_url(target):
        what = "a delta is written into a local directory"
        raise UnsupportedError(what, where=os.fspath(target), do="Write it on this machine, then copy the folder")
    root = local_path(target)
    _incomplete_files(root)
    return root


def _incomplete_files(root: Path) -> list[str]:
    """What an interrupted run has left of a delta in the target. Raises TargetError if anything else lies there."""
    with system_errors("read", root):
        entries = os.listdir(root) if root.exists() else []
        is_interrupted = WORK_FOLDER in entries and not Staging(root).journal.exists()
    others = [entry for entry in entries if entry != WORK_FOLDER]
    if (WORK_FOLDER in entries and not is_interrupted) or (others and not (is_interrupted and all(map(_IS_OF_DELTA.fullmatch, others)))):
        raise TargetError(
            f"the target exists and holds {plural(len(entries), 'entry', 'entries')}",
            where=str(root),
            why="Nothing was written",
            do="Choose another directory, or remove this one",
        )
    return others


def _write(staging: Staging, frames: Sequence[tuple[str, MadeFrame]], metadata: Mapping[str, Any]) -> int:
    """Write the files of a delta; returns their bytes.

    The index gets its name first: until all files that it names have theirs, every reader refuses the folder.
    """
    groups: list[list[tuple[str, MadeFrame]]] = []
    for name, frame in frames:
        if not groups or sum(earlier.nbytes for _, earlier in groups[-1]) + frame.nbytes > _LARGEST_FILE:
            groups.append([])
        groups[-1].append((name, frame))
    paths, dtype = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))], from_torch("uint8", where=INDEX)
    framed = [
        safetensors.frame([(name, dtype, (frame.nbytes,)) for name, frame in group], {name: frame.checksum for name, frame in group})
        for group in groups
    ]
    told, weight_map = masked_in(metadata), {name: path for path, group in zip(paths, groups, strict=True) for name, _ in group}
    told |= {RECORD_KEY: record_digest(told, {name: frame.checksum for name, frame in frames})}
    content = json.dumps({"metadata": told, "weight_map": weight_map}, indent=1).encode() + b"\n"
    staging.prepare({path: file.nbytes for path, file in zip(paths, framed, strict=True)}, resume=False)
    for path, group, file in zip(paths, groups, framed, strict=True):
        staging.write(path, 0, memoryview(file.header))
        for (_, frame), entry in zip(group, file.entries, strict=True):
            at = entry.byte_offset
            for part in frame.content():
                staging.write(path, at, memoryview(part))
                at += len(part)
    staging.sync()
    staging.add(INDEX, content)
    with system_errors("completed", staging.root):
        os.replace(staging.work / INDEX, staging.root / INDEX)
    try:
        staging.commit(paths)
    except BaseException:
        with suppress(OSError):
            (staging.root / INDEX).unlink()
        raise
    return len(content) + sum(file.nbytes for file in framed)
