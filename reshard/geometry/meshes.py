"""Meshes: how a training run lays its ranks out along named dimensions, and what each dimension does to a tensor.

The rules are DTensor's: a dimension of size k cuts an axis of n elements into runs of ceil(n / k), so that the last ranks
may hold less or nothing. Source: torch/distributed/tensor/placement_types.py; measured on 1- to 3-D meshes, even and uneven.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box


@dataclass(frozen=True, slots=True)
class Mesh:
    """The dimensions of a mesh: their names ("dp", "tp", ...; "dim0" where the run gave none) and sizes."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in zip(self.names, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank along the dimension holds the same."""

    def __str__(self) -> str:
        return "Replicate"

    @property
    def meaning(self) -> str:
        return "every rank holds a copy"


@dataclass(frozen=True, slots=True)
class Sharded:
    """The ranks along the dimension hold consecutive runs of one axis of the tensor."""

    axis: int

    def __str__(self) -> str:
        return f"Shard({self.axis})"

    @property
    def meaning(self) -> str:
        return f"axis {self.axis} is cut into runs"


@dataclass(frozen=True, slots=True)
class StridedSharded:
    """As Sharded, but the dimensions to the right have cut the axis before: `split_factor` says into how many runs.

    FSDP2 over tensor parallelism: rows go to the tp ranks first, and each run of rows is then shared among the dp ranks.
    """

    axis: int
    split_factor: int

    def __str__(self) -> str:
        return f"_StridedShard({self.axis}, split_factor={self.split_factor})"

    @property
    def meaning(self) -> str:
        return f"each of the {self.split_factor} runs into which the dimensions to the right cut axis {self.axis} is cut again"


Placement = Replicated | Sharded | StridedSharded


@dataclass(frozen=True, slots=True)
class Distribution:
    """How a tensor lies on a mesh: a placement per dimension. `order`: the dimensions in the order in which they cut."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    order: tuple[int, ...]

    def box(self, shape: tuple[int, ...], coordinates: tuple[int, ...]) -> Box:
        """What the rank at those coordinates holds of a tensor of that shape; it may be empty."""
        return _box(self, shape, coordinates)

    def __str__(self) -> str:
        return ", ".join(f"{name}: {placement}" for name, placement in zip(self.mesh.names, self.placements, strict=True))


def distribution(mesh: Mesh, placements: tuple[Placement, ...], cuts: tuple[int, ...] | None = None, *, where: str = "") -> Distribution:
    """The distribution in which plain shards cut from left to right and strided ones after them from right to left.

    cuts: the order of the plain shards, where it is another one.
    Raises: CheckpointError if a strided shard's factor is not what the dimensions before it have cut its axis into: then
    a rank's elements are several runs, which no trainer saves.
    """
    if len(placements) != len(mesh.sizes):
        raise CheckpointError(f"{len(placements)} placements on a mesh of {len(mesh.sizes)} dimensions ({mesh})", where=where)
    plain = [i for i, placement in enumerate(placements) if isinstance(placement, Sharded)]
    if cuts is not None and sorted(cuts) == plain:
        plain = list(cuts)
    strided = [i for i, placement in reversed(list(enumerate(placements))) if isinstance(placement, StridedSharded)]
    order = (*plain, *strided)
    for place, i in enumerate(order):
        placement = placements[i]
        if isinstance(placement, StridedSharded):
            before = math.prod(mesh.sizes[j] for j in order[:place] if getattr(placements[j], "axis", None) == placement.axis and j > i)
            if before != placement.split_factor:
                raise CheckpointError(
                    f"{placement} on the mesh dimension {mesh.names[i]}, "
                    f"but the dimensions to its right cut axis {placement.axis} into {before}",
                    where=where,
                    why=f"Which elements a rank holds of it ({mesh}) is then not one box",
                    do="Save the tensor with placements that FSDP2 makes",
                )
    return Distribution(mesh, placements, order)


@lru_cache(maxsize=1 << 16)
def _box(of: Distribution, shape: tuple[int, ...], coordinates: tuple[int, ...]) -> Box:
    offsets, sizes = [0] * len(shape), list(shape)
    for i in of.order:
        placement = of.placements[i]
        assert not isinstance(placement, Replicated)
        start, size = chunk(sizes[placement.axis], of.mesh.sizes[i], coordinates[i])
        offsets[placement.axis] += start
        sizes[placement.axis] = size
    return Box(tuple(offsets), tuple(sizes))


def chunk(length: int, parts: int, number: int) -> tuple[int, int]:
    """Start and length of run `number` of `parts`: all but the last ones are ceil(length / parts) long (torch.chunk)."""
    most = -(-length // parts)
    start = min(length, most * number)
    return start, min(length, start + most) - start
