"""Meshes: how a training run arranges its ranks along named dimensions, and what each dimension does to a tensor.

The rules are those of DTensor: a mesh dimension of size k cuts an axis of n elements into chunks of ceil(n / k), so the last ranks may
hold fewer elements or none. Source: torch/distributed/tensor/placement_types.py; measured on 1- to 3-D meshes, even and uneven.

Parallel has the parallel sizes of a target, from which the layers of each pipeline stage follow.
"""

from __future__ import annotations

import math
from functools import lru_cache

from reshard.errors import CheckpointError, RequestError
from reshard.geometry.boxes import Box
from reshard.geometry.value import value


def is_size(value: object, *, least: int = 1) -> bool:
    """Whether a value that another program tells can be a parallel size; with least=0, the number of a rank."""
    return type(value) is int and least <= value < 1 << 16


@value
class Parallel:
    """The parallel sizes of a target, each 1 or more."""

    tp: int = 1
    """Tensor-parallel size."""
    pp: int = 1
    """Pipeline-parallel size."""
    ep: int = 1
    """Expert-parallel size."""
    dp: int = 1
    """Data-parallel size: the number of ranks over which every tensor is sharded (FSDP, ZeRO-3)."""

    def __post_init__(self) -> None:
        for name in _NAMES:
            if getattr(self, name) < 1:
                raise RequestError(f"`{name}={getattr(self, name)}`: a parallel size must be 1 or more", id="illegal-sizes")

    def __str__(self) -> str:
        return " ".join(f"{name.upper()} {size}" for name in _NAMES if (size := getattr(self, name)) > 1) or "one rank"

    @property
    def in_file_names(self) -> str:
        """The sizes as a part of a file's name, such as "tp8pp2"; "tp1" for one rank."""
        return "".join(f"{name}{size}" for name in _NAMES if (size := getattr(self, name)) > 1) or "tp1"

    def allow(self, *names: str, what: str) -> None:
        """Raises RequestError if a size that is not in `names` is above 1. what: the target, for the message."""
        for name in _NAMES:
            if name not in names and getattr(self, name) > 1:
                raise RequestError(f"`{name}={getattr(self, name)}` does not apply to {what}", do=f"Leave out `{name}=`")


_NAMES = ("tp", "pp", "ep", "dp")
ONE_RANK = Parallel()


def stage_layers(counts: tuple[int, ...], pp_rank: int) -> range:
    """The layers of one pipeline stage, if stage i holds counts[i] consecutive layers."""
    start = sum(counts[:pp_rank])
    return range(start, start + counts[pp_rank])


@value
class Mesh:
    """The dimensions of a device mesh."""

    names: tuple[str, ...]
    """The name of each dimension: "dp", "tp", ...; "dim0", "dim1", ... if the run gave none."""
    sizes: tuple[int, ...]
    """The number of ranks along each dimension."""

    @property
    def ranks(self) -> int:
        """The number of ranks on the mesh."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in zip(self.names, self.sizes, strict=True))


@value
class Replicated:
    """Every rank along the mesh dimension holds the same elements."""

    def __str__(self) -> str:
        return "Replicate"

    @property
    def meaning(self) -> str:
        """The placement as an English phrase."""
        return "every rank holds a copy"


@value
class Sharded:
    """The ranks along the mesh dimension hold consecutive chunks of one axis of the tensor."""

    axis: int
    """The axis of the tensor."""

    def __str__(self) -> str:
        return f"Shard({self.axis})"

    @property
    def meaning(self) -> str:
        """The placement as an English phrase."""
        return f"axis {self.axis} is cut into runs"


@value
class StridedSharded:
    """Like Sharded, but the mesh dimensions to the right cut the axis first.

    Example: FSDP2 over tensor parallelism on the mesh (dp, tp). The rows are cut over the tp ranks, then each chunk over the dp ranks.
    """

    axis: int
    """The axis of the tensor."""
    split_factor: int
    """The number of chunks into which the mesh dimensions to the right cut the axis."""

    def __str__(self) -> str:
        return f"_StridedShard({self.axis}, split_factor={self.split_factor})"

    @property
    def meaning(self) -> str:
        """The placement as an English phrase."""
        return f"the dimensions to the right cut axis {self.axis} into {self.split_factor} runs, and each run is cut again"


Placement = Replicated | Sharded | StridedSharded


@value
class Distribution:
    """How a tensor is distributed on a mesh."""

    mesh: Mesh
    """The mesh."""
    placements: tuple[Placement, ...]
    """The placement along each mesh dimension."""
    order: tuple[int, ...]
    """The mesh dimensions that cut the tensor, in the order in which they cut it."""

    def box(self, shape: tuple[int, ...], coordinates: tuple[int, ...]) -> Box:
        """The box of a tensor of that shape that the rank at those mesh coordinates holds; it may be empty."""
        return _box(self, shape, coordinates)

    def __str__(self) -> str:
        return ", ".join(f"{name}: {placement}" for name, placement in zip(self.mesh.names, self.placements, strict=True))


def distribution(mesh: Mesh, placements: tuple[Placement, ...], cuts: tuple[int, ...] | None = None, *, where: str = "") -> Distribution:
    """The distribution of those placements: Sharded dimensions cut from left to right, then StridedSharded ones from right to left.

    cuts: the Sharded dimensions in another order; ignored if it does not list exactly these.

    Raises: CheckpointError if the mesh has another number of dimensions, or if a split_factor differs from the number of chunks into which
    the dimensions to the right cut the axis. The elements of one rank would then not be one box; no trainer saves such a tensor.
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
                    why=f"A rank of the mesh ({mesh}) then holds elements that are not one box",
                    do="Save the tensor with placements that FSDP2 makes",
                )
    return Distribution(mesh, placements, order)


@lru_cache(maxsize=1 << 16)
def _box(distribution: Distribution, shape: tuple[int, ...], coordinates: tuple[int, ...]) -> Box:
    offsets, sizes = [0] * len(shape), list(shape)
    for i in distribution.order:
        placement = distribution.placements[i]
        assert not isinstance(placement, Replicated)
        start, size = chunk(sizes[placement.axis], distribution.mesh.sizes[i], coordinates[i])
        offsets[placement.axis] += start
        sizes[placement.axis] = size
    return Box(tuple(offsets), tuple(sizes))


def chunk(length: int, parts: int, number: int) -> tuple[int, int]:
    """Start and length of chunk `number` when `length` elements are cut into `parts` chunks of ceil(length / parts).

    The last chunks may be shorter or empty, as in DTensor (torch.chunk leaves out empty ones).
    """
    most = -(-length // parts)
    start = min(length, most * number)
    return start, min(length, start + most) - start
