"""Placements for Mooncake: which box of which tensor each rank of the source and of the target holds.

Mooncake plans from two placements itself. A placement has participants with coordinates, tensors, and per participant fragments: boxes of
a tensor in its canonical coordinates, each contiguous in the participant's memory. Each tensor says what an axis of participants does:

    split         the participants' boxes partition the tensor along one dimension, and each has a part
    replicated    each participant holds the whole tensor
    ownership     some participants hold the whole tensor, the others nothing

The identities are digests of the contents. Read and run with the wheel mooncake-transfer-engine 0.3.13.post1 (mooncake/reshard/weight:
serde.py, validation.py, topology.py, placement.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reshard.errors import UnsupportedError
from reshard.geometry.boxes import Box, row_major
from reshard.geometry.extents import Piece
from reshard.index.index import Tensor
from reshard.plans.plan import Plan

Ranks = Mapping[str, tuple[int, int]]
"""Path of a file -> tensor-parallel rank and pipeline stage of the participant whose memory it is."""
_Held = Mapping[tuple[int, int], Sequence[Box]]


def mooncake_placements(plan: Plan, *, resource: str, revision: str = "0") -> tuple[str, str]:
    """The placements of a plan's source and target, as JSON texts.

    plan: of a conversion whose source's files are memories of ranks (`checkpoint_of(descriptions)`) or files of one rank each. Source rank
    i is tensor-parallel rank i of the placement. resource, revision: what both sides call the weights and their version.

    Raises: UnsupportedError, naming the tensor, for what a placement cannot say: elements that are cast or computed, strides, flat shards,
    a rank without a part, key-value heads that several ranks hold beside other parts.
    """
    for route in plan.routes:
        _check_copied(route.source, route.target)
    sources = {file.path: (rank, 0) for rank, file in enumerate(plan.source.files)}
    targets = {file.path: (file.ranks.get("tp", 0), file.ranks.get("pp", 0)) for file in plan.layout.files}
    named = {"resource_id": resource, "revision": revision, "weight_generation": 0}
    return (
        _document((route.source for route in plan.routes), sources, {**named, "placement_set_id": "source"}),
        _document((route.target for route in plan.routes), targets, {**named, "placement_set_id": "target"}),
    )


def _check_copied(source: Tensor, target: Tensor) -> None:
    if source.is_computed or source.dtype != target.dtype:
        raise _unsaid(target.name, f"its elements are cast or computed ({source.dtype} -> {target.dtype})")
    if not target.shape:
        raise _unsaid(target.name, "it is one number, without an axis")


def _document(tensors: Iterable[Tensor], ranks: Ranks, named: Mapping[str, Any]) -> str:
    participants = {_participant(rank): _coordinates(rank) for rank in sorted(set(ranks.values()), key=_participant)}
    sizes = {
        "tp_size": 1 + max(tp for tp, _ in ranks.values()),
        "pp_size": 1 + max(pp for _, pp in ranks.values()),
        "ep_size": 1,
        "dp_size": 1,
    }
    people = [{"participant_id": name, "rank": rank} for name, rank in participants.items()]
    topology: dict[str, Any] = {**sizes, "participants": people}
    topology["topology_id"] = _digest({"schema": "weight-parallel-topology", **topology})
    described: list[dict[str, Any]] = []
    fragments: dict[str, list[dict[str, Any]]] = {name: [] for name in participants}
    for tensor in sorted(tensors, key=lambda each: each.name):
        held = _held(tensor, ranks)
        axes = _axes(tensor, held, sorted(set(ranks.values())))
        described.append(_described(tensor, axes))
        for rank, boxes in held.items():
            fragments[_participant(rank)] += [_fragment(tensor, rank, box) for box in boxes]
    parts: list[dict[str, Any]] = [
        {"participant_id": name, "rank": rank, "fragments": sorted(fragments[name], key=lambda each: str(each["placement_fragment_id"]))}
        for name, rank in participants.items()
    ]
    contents = {**named, "topology": topology, "tensors": described, "parts": parts}
    identity = _digest({"schema": "complete-weight-placement", **contents})
    return json.dumps({**contents, "resource_kind": "model_weight", "placement_id": identity}, sort_keys=True, separators=(",", ":"))


def _held(tensor: Tensor, ranks: Ranks) -> _Held:
    """By participant, its boxes. Raises UnsupportedError for a box that does not lie contiguous in memory."""
    found: dict[tuple[int, int], dict[Box, None]] = {}
    for piece in tensor.pieces():
        if piece.box.volume:
            if not _is_contiguous(piece):
                raise _unsaid(tensor.name, f"rank {ranks[piece.extent.path][0]} holds a part of it with strides")
            found.setdefault(ranks[piece.extent.path], {})[piece.box] = None
    return {rank: tuple(boxes) for rank, boxes in found.items()}


def _is_contiguous(piece: Piece) -> bool:
    whole = zip(piece.box.sizes, piece.extent.strides, row_major(piece.box.sizes), strict=True)
    return all(size == 1 or stride == expected for size, stride, expected in whole)


def _axes(tensor: Tensor, held: _Held, ranks: Sequence[tuple[int, int]]) -> dict[str, dict[str, Any]]:
    """What each axis of participants does with a tensor."""
    axes: dict[str, dict[str, Any]] = {}
    if any(stage for _, stage in ranks):
        axes["pp"] = {"semantics": "ownership", "kind": "pp"}
    if any(tp for tp, _ in ranks):
        stages = {stage for _, stage in held}
        told = [_split(tensor, held, stage, [tp for tp, own in ranks if own == stage]) for stage in sorted(stages)]
        if any(each != told[0] for each in told):
            raise _unsaid(tensor.name, "the pipeline stages that hold it hold it in different ways")
        axes["tp"] = told[0]
    return axes


def _split(tensor: Tensor, held: _Held, stage: int, ranks: Sequence[int]) -> dict[str, Any]:
    """What the tensor-parallel ranks of a stage do with a tensor. Raises UnsupportedError if it is none of the three."""
    boxes = {tp: held[tp, stage] for tp in ranks if (tp, stage) in held}
    if all(each == (Box.whole(tensor.shape),) for each in boxes.values()):
        return {"semantics": "replicated" if len(boxes) == len(ranks) else "ownership", "kind": "tp"}
    if len(boxes) < len(ranks):
        missing = next(tp for tp in ranks if tp not in boxes)
        raise _unsaid(tensor.name, f"rank {missing} has no part of it, and others have parts")
    for axis, size in enumerate(tensor.shape):
        spans = sorted((box.offsets[axis], box.stops[axis], tp) for tp, each in boxes.items() for box in each)
        merged: list[list[int]] = []
        for start, stop, tp in spans:
            if merged and merged[-1][2] == tp and start <= merged[-1][1]:
                merged[-1][1] = max(stop, merged[-1][1])
            else:
                merged.append([start, stop, tp])
        ends = [0, *(stop for _, stop, _ in merged)]
        if len(merged) > 1 and ends[-1] == size and all(start == end for (start, *_), end in zip(merged, ends, strict=False)):
            return {"semantics": "split", "kind": "tp", "dim": axis}
    raise _unsaid(tensor.name, "its parts do not follow each other along one dimension, or several ranks hold the same part")


def _described(tensor: Tensor, axes: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "tensor_id": tensor.name,
        "global_shape": list(tensor.shape),
        "dtype": tensor.dtype.torch,
        "itemsize": tensor.dtype.itemsize,
        "shard_dims": [axis["dim"] for axis in axes.values() if "dim" in axis],
        "layout_fingerprint": "row-major",
        "parallel_axes": [*axes.values()],
        "layer_id": None,
        "expert_id": None,
    }


def _fragment(tensor: Tensor, rank: tuple[int, int], box: Box) -> dict[str, Any]:
    return {
        "placement_fragment_id": f"{_participant(rank)}/{tensor.name}/{','.join(map(str, box.offsets))}",
        "tensor_id": tensor.name,
        "global_offset": list(box.offsets),
        "local_shape": list(box.sizes),
        "nbytes": box.volume * tensor.dtype.itemsize,
        "rank": _coordinates(rank),
        "aliases": [],
    }


def _participant(rank: tuple[int, int]) -> str:
    return f"tp{rank[0]}-pp{rank[1]}"


def _coordinates(rank: tuple[int, int]) -> dict[str, int]:
    return {"dp": 0, "tp": rank[0], "pp": rank[1], "ep": 0}


def _digest(content: Mapping[str, Any]) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(content, sort_keys=True, separators=(',', ':')).encode()).hexdigest()}"


def _unsaid(name: str, what: str) -> UnsupportedError:
    return UnsupportedError(what, where=name, why="A placement of Mooncake cannot say it", do="Send it by `reshard.live.Sender`")
