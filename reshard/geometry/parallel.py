"""Parallel: the parallel sizes of a target, and the layers of each pipeline stage."""

from __future__ import annotations

from reshard.errors import RequestError
from reshard.geometry.value import value


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
                raise RequestError(f"--{name} {getattr(self, name)}: a parallel size must be 1 or more", id="illegal-sizes")

    def __str__(self) -> str:
        return " ".join(f"{name.upper()} {size}" for name in _NAMES if (size := getattr(self, name)) > 1) or "one rank"

    def allow(self, *names: str, what: str) -> None:
        """Raises RequestError if a size that is not in `names` is above 1. what: the target, for the message."""
        for name in _NAMES:
            if name not in names and getattr(self, name) > 1:
                raise RequestError(f"--{name} {getattr(self, name)} does not apply to {what}", do=f"Leave out --{name}")


_NAMES = ("tp", "pp", "ep", "dp")
ONE_RANK = Parallel()


def stage_layers(counts: tuple[int, ...], pp_rank: int) -> range:
    """The layers of one pipeline stage, if stage i holds counts[i] consecutive layers."""
    start = sum(counts[:pp_rank])
    return range(start, start + counts[pp_rank])
