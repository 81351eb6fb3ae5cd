"""Parallel: how many ranks share the tensors, the layers and the experts; and which layers a pipeline stage holds."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.errors import RequestError


@dataclass(frozen=True, slots=True)
class Parallel:
    """Tensor-, pipeline- and expert-parallel sizes of a target; dp: how many data-parallel ranks share every tensor."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name in _NAMES:
            if getattr(self, name) < 1:
                raise RequestError(f"--{name} {getattr(self, name)}: a parallel size is 1 or more")

    def __str__(self) -> str:
        return " ".join(f"{name.upper()} {size}" for name in _NAMES if (size := getattr(self, name)) > 1) or "one rank"

    def allow(self, *names: str, what: str) -> None:
        """Raises RequestError for a size above 1 that `what` does not have."""
        for name in _NAMES:
            if name not in names and getattr(self, name) > 1:
                raise RequestError(f"--{name} {getattr(self, name)} does not apply to {what}", do=f"Leave out --{name}")


_NAMES = ("tp", "pp", "ep", "dp")
ONE_RANK = Parallel()


def stage_layers(counts: tuple[int, ...], pp_rank: int) -> range:
    """The layers of one pipeline stage, when stage i holds counts[i] consecutive ones."""
    start = sum(counts[:pp_rank])
    return range(start, start + counts[pp_rank])
