"""StagedRank: where the bytes of the files of one rank lie in the staging of that rank of a running engine.

    model-rank-0-part-0.safetensors    header | tensor A | tensor B | ...
    staging of rank 0                           tensor A | gap | tensor B | gap | ...       (staging.places)

A plan that writes files for an engine is also the plan of an update: only the places differ. Tensors that the engine computes itself, such
as scales of the KV cache, are in the files and not in the staging.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence

from reshard.geometry.boxes import row_major
from reshard.geometry.value import value
from reshard.index.index import Constant
from reshard.live.plan.schedule import HeldTensor
from reshard.live.wire.staging import places
from reshard.plans.layout import PlacedTensor, TargetFile
from reshard.plans.plan import Plan


@value(eq=False)
class FilePlaces:
    """Where the tensors of one file lie in the staging. n tensors, in the order of the file."""

    starts: list[int]
    """[n]: the byte of the file at which the tensor starts."""
    places: list[int]
    """[n]: the byte of the staging at which it starts; -1: it has no place there."""

    def at(self, byte_offset: int) -> int:
        """The byte of the staging that a byte of the file goes to; -1: nowhere."""
        i = bisect_right(self.starts, byte_offset) - 1
        return -1 if self.places[i] < 0 else self.places[i] + byte_offset - self.starts[i]


@value(eq=False)
class StagedRank:
    """What the files of a rank bring to its staging."""

    position: tuple[int, int]
    """The rank's pipeline stage, and its number within the stage."""
    targets: tuple[HeldTensor, ...]
    """The tensors of the staging, in its order."""
    files: dict[str, FilePlaces]
    """Path of a file -> where its tensors go."""
    constants: tuple[Constant, ...] = ()
    """Bytes that the format prescribes and that are not zero; the staging is zero before anything comes."""
    nbytes: int = 0
    """The bytes that come."""


def staged_ranks(plan: Plan, computed: Collection[str] = ()) -> tuple[StagedRank, ...]:
    """The ranks of a plan to an engine's format. computed: the names of tensors that the engine computes itself. A tensor for which the
    source has values stays, whatever its name."""
    files: dict[tuple[int, int], list[TargetFile]] = {}
    for file in plan.layout.files:
        files.setdefault((file.ranks.get("pp", 0), file.ranks.get("tp", 0)), []).append(file)
    constants = [constant for constant in plan.target_index.constants if constant.expected.strip(b"\0")]
    return tuple(_staged(position, files[position], constants, computed) for position in sorted(files))


def _staged(position: tuple[int, int], files: Sequence[TargetFile], constants: Iterable[Constant], computed: Collection[str]) -> StagedRank:
    stored = [item for file in files for item in file.tensors]
    left = {item.tensor.name for item in stored if item.tensor.name in computed and item.tensor.filled == math.prod(item.tensor.shape)}
    kept = [item for item in stored if item.tensor.name not in left]
    targets = tuple(HeldTensor(held.name, held.dtype, held.shape, row_major(held.shape)) for held in (item.tensor for item in kept))
    offsets, _ = places(targets)
    paths = {file.path: _places_of(file, offsets) for file in files}
    own = tuple(constant for constant in constants if constant.path in paths and constant.name not in left)
    nbytes = sum(item.tensor.nbytes - item.tensor.filled * item.tensor.dtype.itemsize for item in kept)
    return StagedRank(position, targets, paths, own, nbytes + sum(constant.nbytes for constant in own))


def _places_of(file: TargetFile, offsets: dict[str, int]) -> FilePlaces:
    items: list[PlacedTensor] = sorted(file.tensors, key=lambda item: item.byte_offset)
    return FilePlaces([item.byte_offset for item in items], [offsets.get(item.tensor.name, -1) for item in items])
