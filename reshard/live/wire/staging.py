"""Staged: the memory in which an engine rank collects an update, one flat buffer with a place for each tensor of the load form.

It is kept between the updates of a sender, and takes as many bytes as the rank's weights have, in the memory of the host by default. Until
`finish` nothing else is written, so an update that fails leaves the live weights as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from reshard.errors import RequestError
from reshard.live.plan.schedule import HeldTensor

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""Each tensor starts at a multiple of so many bytes."""


def places(targets: Sequence[HeldTensor]) -> tuple[dict[str, int], int]:
    """The byte offset of each tensor, by name, in the order of `targets`; and the bytes of all, with the gaps between them."""
    offsets, end = {}, 0
    for target in targets:
        offsets[target.name] = end
        end = -(-(end + target.nbytes) // ALIGNMENT) * ALIGNMENT
    return offsets, end


class Staged(Mapping[str, "torch.Tensor"]):
    """Name -> contiguous tensor of the load form, a view of the buffer."""

    def __init__(self, targets: Sequence[HeldTensor], fills: Mapping[str, float], device: str = "cpu") -> None:
        """fills: the value of tensors that are one constant, by name. Everything else is zero before the first update."""
        import torch

        self.targets = tuple(targets)
        """The tensors, in their order."""
        self.offsets, nbytes = places(targets)
        self.buffer: torch.Tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        """All tensors, as bytes."""
        self._tensors = {}
        for target in targets:
            start = self.offsets[target.name]
            words = self.buffer[start : start + target.nbytes].view(getattr(torch, target.dtype.torch))
            self._tensors[target.name] = words.view(target.shape)
        if len(self._tensors) < len(targets):
            raise RequestError("the plan names a tensor of an engine rank twice", why="One of them would be lost")
        for name, constant in fills.items():
            self._tensors[name].fill_(constant)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
