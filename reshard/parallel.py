"""Parallel: how many ranks share the tensors, the layers and the experts; and which layers a pipeline stage holds."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.errors import RequestError


@dataclass(frozen=True, slots=True)
class Parallel:
    """Tensor-, pipeline- and expert-parallel sizes of a target."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep"):
            if getattr(self, name) < 1:
                raise RequestError(f"--{name} {getattr(self, name)}: a parallel size is 1 or more")

    def __str__(self) -> str:
        return " ".join(f"{name.upper()} {size}" for name in ("tp", "pp", "ep") if (size := getattr(self, name)) > 1) or "one rank"


ONE_RANK = Parallel()


def stage_layers(counts: tuple[int, ...], pp_rank: int) -> range:
    """The layers of one pipeline stage, when stage i holds counts[i] consecutive ones."""
    start = sum(counts[:pp_rank])
    return range(start, start + counts[pp_rank])
