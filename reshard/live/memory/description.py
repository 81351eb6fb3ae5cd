"""RankDescription: what one rank of a run says of its memory. It can be pickled, sent and compared, and needs no torch.

A rank holds a box of each tensor, as an array in its own memory. For the index, the memory of a rank is an address space in which its
arrays follow each other, each where a multiple of 64 bytes begins; addresses of the process are never told.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from reshard.geometry.boxes import Box
from reshard.geometry.extents import span_elements
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.live.plan.schedule import HeldTensor
from reshard.plans.layout import ALIGNMENT


@value
class MemoryBox:
    """A box of a tensor of the run, in the memory of one rank."""

    held: HeldTensor
    """The array that holds it."""
    key: str
    """The name of the run's tensor: for FSDP that of the parameter, for Megatron-Core that of its sharded state dict."""
    shape: tuple[int, ...]
    """The shape of the run's tensor."""
    box: Box
    """The box, in its coordinates."""
    strides: tuple[int, ...]
    """The distance between neighbours along each axis of the run's tensor, in elements of the array."""
    start: int = 0
    """Where the box starts, in elements from the start of the array."""
    is_replica: bool = False
    """Whether the run itself calls it a copy of what another rank holds."""


@value(slots=False, eq=False)
class RankDescription:
    """What one rank holds."""

    rank: int
    """Its number in the run, from 0."""
    boxes: tuple[MemoryBox, ...]
    """The boxes, those of one array one after the other."""
    framework: str = "torch"
    """What its keys follow: "torch", the names of parameters; or another framework, such as "megatron-core"."""
    settings: Mapping[str, Any] | None = None
    """The settings of the run, as a checkpoint of the framework has them; None: there are none."""
    config: Mapping[str, Any] | None = None
    """The model's Hugging Face config, if the model has one."""
    adapter: Mapping[str, Any] | None = None
    """The settings of its LoRA adapter, under the names of PEFT's adapter_config.json; None if PEFT has made none."""

    @cached_property
    def addresses(self) -> dict[str, int]:
        """Where each array starts in the rank's address space, in bytes."""
        addresses: dict[str, int] = {}
        end = 0
        for box in self.boxes:
            if box.held.name not in addresses:
                addresses[box.held.name] = end
                end += -(-_span(box.held) // ALIGNMENT) * ALIGNMENT
        return addresses

    @cached_property
    def tensors(self) -> tuple[HeldTensor, ...]:
        """The arrays, in the order of their addresses."""
        return tuple({box.held.name: box.held for box in self.boxes}.values())

    @cached_property
    def nbytes(self) -> int:
        """The length of the address space."""
        return max((self.addresses[tensor.name] + _span(tensor) for tensor in self.tensors), default=0)

    def __repr__(self) -> str:
        return f"RankDescription(rank {self.rank}, {plural(len(self.tensors), 'tensor')}, {plural(self.nbytes, 'byte')})"


def _span(held: HeldTensor) -> int:
    """The bytes from the first element of an array to the end of its last one."""
    return 0 if 0 in held.shape else span_elements(held.shape, held.strides) * held.dtype.itemsize
