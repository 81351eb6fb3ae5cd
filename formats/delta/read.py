"""The frames of a delta, and what it says about itself."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import IndexBuilder
from reshard.adapter.model_files import read_json
from reshard.containers import safetensors
from reshard.errors import CheckpointError, IncompleteError, MissingFile, UnsupportedError, choices
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.extents import Extent, Piece
from reshard.geometry.quantities import plural
from reshard.index.deltas import INDEX, RECORD_KEY, DeltaFacts
from reshard.index.index import Index, RunFacts, Tensor
from reshard.index.name_parts import layer_of
from reshard.index.shards import Shards
from reshard.plans.digests import CURRENT, is_digest, record_digest
from reshard.storage.files import Files, inside

_LIMIT = 1 << 28
_CHECKSUMS = ("blake3", "xxh3-128", "adler32")
_BASE = "the weights of its base: give both, as BASE+DELTA"


def read(files: Files, hints: Hints) -> Index:
    """The index of a delta: its tensors are the frames.

    Raises: CheckpointError if files and index contradict each other; UnsupportedError for another encoding, compression or checksum.
    """
    document = read_json(files, INDEX, limit=_LIMIT)
    metadata, weight_map = document.get("metadata"), document.get("weight_map")
    if not isinstance(metadata, dict) or not isinstance(weight_map, dict) or not all(isinstance(path, str) for path in weight_map.values()):
        raise CheckpointError("it has no metadata, or no weight_map from names to files", where=INDEX, do="Get the index again")
    builder, checksums = IndexBuilder("delta", files), dict[str, str]()
    paths = sorted(dict.fromkeys(inside(path, where=INDEX) for path in weight_map.values()))
    for path in paths:
        for frame, checksum in _frames(files, path, {name for name, file in weight_map.items() if file == path}):
            builder.add_tensor(frame)
            checksums[frame.name] = checksum
    facts = _facts(metadata, checksums)
    builder.add_files(paths)
    # The index is listed, so that a conversion notices a change of it.
    builder.add_files([INDEX])
    builder.add_notes(_notes(facts, builder.tensors()))
    return builder.build(RunFacts(producer="reshard" if facts.base else None, step=facts.step, unanswered=(_BASE,), delta=facts))


def _frames(files: Files, path: str, names: Collection[str]) -> Iterator[tuple[Tensor, str]]:
    """The frames in a file, each with the checksum of the tensor's new bytes. names: those that the index places in it."""
    if files.size(path) is None:
        raise MissingFile(
            f"the index {INDEX} names {path}, which is not there",
            where=files.root,
            why=f"{plural(len(names), 'changed tensor')} would be missing",
            do="Copy that file from where the delta came from",
        )
    header = safetensors.read_header(files, path)
    if different := sorted(set(header.names) ^ set(names)):
        where = "the index places it there, and the file lacks it" if different[0] in names else "the index does not place it there"
        raise IncompleteError(
            f"{path}: {where}",
            where=different[0],
            why="The index and the file are from different deltas, or one of them is damaged",
            do="Copy both from where the delta came from",
        )
    for entry in header.entries:
        checksum = header.metadata.get(entry.name)
        if entry.dtype.name != "U8" or len(entry.shape) != 1 or checksum is None:
            what = "no checksum is given for it" if checksum is None else f"a frame is U8 [n], this is {entry.dtype} {list(entry.shape)}"
            raise CheckpointError(what, where=f"{entry.name} in {path}", do="Get the delta again")
        piece = Piece(Box.whole(entry.shape), Extent(path, entry.byte_offset, row_major(entry.shape), entry.dtype))
        yield Tensor(entry.name, entry.dtype, entry.shape, "state", Shards.of([piece])), checksum


def _facts(metadata: Mapping[str, Any], checksums: Mapping[str, str]) -> DeltaFacts:
    """What the metadata of the index says."""
    for key, known in (("delta_encoding", ("xor", "overwrite")), ("compression_format", ("zstd",)), ("checksum_format", _CHECKSUMS)):
        if metadata.get(key) not in known:
            given = str(metadata.get(key))[:80]
            raise UnsupportedError(f"its {key} is {given!r}", where=INDEX, do=choices(given, known))
    for key in ("version", "base_version"):
        if not isinstance(metadata.get(key), str) or not re.fullmatch(r"\d{1,18}", metadata[key]):
            given = str(metadata.get(key))[:80]
            raise CheckpointError(f"its {key} is {given!r}, digits are expected", where=INDEX, do="Get the delta again")
    if int(metadata["version"]) == int(metadata["base_version"]):
        raise CheckpointError(f"its version {metadata['version']} is that of its base", where=INDEX, do="Get the delta again")
    own = {key: metadata.get(f"reshard_{key}") for key in ("base", "base_fingerprint", "result", "result_fingerprint")}
    is_ours = all(isinstance(text, str) for text in own.values())
    digests, tensors = metadata.get("reshard_digests"), metadata.get("reshard_tensors")
    if is_ours and (not isinstance(digests, dict) or tensors != len(checksums) or not checksums.keys() <= digests.keys()):
        raise IncompleteError(
            f"its index names {plural(len(checksums), 'changed tensor')}, {tensors} were written",
            where=INDEX,
            why="An entry was removed, or the index is damaged",
            do="Copy the delta again from where it was written",
        )
    if is_ours and not _is_as_recorded(metadata, checksums):
        raise CheckpointError(
            "what the delta says of itself has changed since it was written: a fingerprint, a digest, or the checksum of a tensor",
            where=INDEX,
            why="What it makes could be compared with only a part of what was recorded",
            do="Copy the delta again from where it was written",
        )
    counts, step = metadata.get("reshard_elements"), metadata.get("reshard_step")
    return DeltaFacts(
        metadata["version"],
        metadata["base_version"],
        metadata["delta_encoding"],
        metadata["checksum_format"],
        checksums,
        **own if is_ours else {},
        digests={str(name): str(digest) for name, digest in digests.items()} if is_ours and isinstance(digests, dict) else {},
        step=step if type(step) is int else None,
        counts=(counts[0], counts[1]) if isinstance(counts, list) and list(map(type, counts)) == [int, int] else None,
    )


def _is_as_recorded(metadata: Mapping[str, Any], checksums: Mapping[str, str]) -> bool:
    """Whether what a delta of ours says of itself agrees: its record, which deltas before 0.3 lack, and the fingerprint of its digests."""
    others = {key: each for key, each in metadata.items() if key != RECORD_KEY}
    if metadata.get(RECORD_KEY) not in (None, record_digest(others, checksums)):
        return False
    digests = metadata["reshard_digests"]
    raw = {name: bytes.fromhex(text.removeprefix(CURRENT.prefix)) for name, text in digests.items() if is_digest(text)}
    return bool(CURRENT.checkpoint(raw).root == metadata["reshard_result_fingerprint"])


def _notes(facts: DeltaFacts, frames: Collection[Tensor]) -> Iterator[str]:
    """Sentences on what it is a delta of, which layers it changes, and how much."""
    of = f", {facts.base}, whose fingerprint is {facts.base_fingerprint}" if facts.base else ""
    yield f"a delta: it makes the version {facts.version} of the version {facts.base_version}{of}"
    if facts.result:
        yield f"the result is {facts.result}, whose fingerprint is {facts.result_fingerprint}"
    layers = sorted({layer for frame in frames if (layer := layer_of(frame.name)) is not None})
    others = sum(layer_of(frame.name) is None for frame in frames)
    of_all = f" of {len(facts.digests):,}" if facts.digests else ""
    where = f" in {plural(len(layers), 'layer')} ({_runs(layers)})" if layers else ""
    beside = f", {others} in no layer" if others and layers else ""
    share = ""
    if facts.counts:
        changed, elements = facts.counts
        share = f": {changed:,} of {elements:,} elements ({changed / max(1, elements):.2%})"
    nbytes = sum(frame.nbytes for frame in frames)
    yield f"it changes {len(frames):,}{of_all} tensors{where}{beside}{share}; its frames ({facts.encoding}, zstd) have {nbytes:,} bytes"


def _runs(layers: list[int]) -> str:
    """Numbers in order as runs: 0-3, 7."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    stops = [layer for layer in layers if layer + 1 not in layers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, stops, strict=True))
