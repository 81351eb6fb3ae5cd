"""AdapterUpdates: a trainer's ranks send the LoRA adapter of their model alone.

    boxes of each rank, and their bytes -> rank 0 -> a checkpoint in its memory -> push_adapter

Only the adapter's tensors are gathered, some megabytes; the base stays where it is. Of boxes that several ranks hold, one sends its own.
Rank 0 alone has the adapter whole, and talks to the server. The other ranks copy the tensors of one message at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import reshard
from reshard.canonical.renaming import adapter_name, unwrapped
from reshard.errors import RequestError, SystemRefusal, UnsupportedError
from reshard.geometry.boxes import Box
from reshard.geometry.extents import span_elements
from reshard.live.leading import UpdateReport
from reshard.live.memory.describe import arrays_of, describe, local_tensors
from reshard.live.memory.description import RankDescription
from reshard.live.memory.index import checkpoint_of, path_of
from reshard.live.trainers import Trainers
from reshard.live.wire.transport import reason
from reshard.opening.checkpoint import Checkpoint
from reshard.storage.files import VirtualFiles

if TYPE_CHECKING:
    import torch

_MESSAGE = 1 << 24
"""The bytes after which a rank ends a message to rank 0."""


class AdapterUpdates:
    """The rank of a trainer that this process is, which sends an adapter."""

    def __init__(self, model: Any, server: Any, trainers: Trainers, options: Mapping[str, Any]) -> None:
        """server: the address of a server of vLLM or SGLang. options: `name`, `shared_dir` and `keep` of `push_adapter`.

        Raises: RequestError, on every rank, if the model has no adapter whose update follows from its factors and settings alone.
        """
        if not isinstance(server, str):
            raise RequestError("`adapter=True` sends to the address of one server", do="Give it as `engine=`, or make a Sender for each")
        self._model, self._server, self._trainers, self._options = model, server, trainers, options
        self._described()

    def update(self) -> UpdateReport:
        """Send what the adapter's tensors hold now, as a new version.

        Raises: on rank 0 as `push_adapter`, on the others SystemRefusal with the same message; the server goes on with what it had.
        """
        description = self._described()
        arrays = arrays_of(self._model)
        descriptions = self._trainers.gather(description)
        messages: list[tuple[int, list[str]]] = self._trainers.share(_messages(descriptions))
        held: list[dict[str, bytes]] = [{} for _ in descriptions]
        for rank, names in messages:
            own = {name: _bytes_of(arrays[name]) for name in names} if rank == self._trainers.rank else None
            passed = self._trainers.passed(rank, own)
            if descriptions:
                held[rank].update(passed)
        said: tuple[UpdateReport | None, str] = None, ""
        error: Exception | None = None
        if descriptions:
            try:
                pushed = reshard.push_adapter(_checkpoint(descriptions, held), self._server, **self._options)
                said = UpdateReport(pushed.nbytes, pushed.seconds, 0.0, pushed.seconds, pushed.adapter), ""
            except Exception as caught:
                said, error = (None, reason(caught)), caught
        report, why = self._trainers.share(said)
        if error is not None:
            raise error
        if report is None:
            raise SystemRefusal(f"rank 0 could not send the adapter: {why}", where=self._server)
        done: UpdateReport = report
        return done

    def _described(self) -> RankDescription:
        """What this rank holds of the adapter."""
        whole = describe(self._model, rank=self._trainers.rank)
        if whole.framework != "torch":
            raise UnsupportedError(
                f"`adapter=True` does not know adapters of {whole.framework}",
                do="Save the adapter, and send it with `reshard.push_adapter`",
            )
        if whole.adapter is None or whole.adapter.get("bias", "none") != "none":
            what = "has no single LoRA adapter of PEFT" if whole.adapter is None else "trains biases of the base"
            raise RequestError(
                f"`adapter=True`: the model {what}",
                why="The settings come from peft_config, and the tensors are told from the base's by their names",
                do="Give a model of get_peft_model with one adapter, and with bias='none'",
            )
        if any(hasattr(tensor, "ds_tensor") for _, tensor in local_tensors(self._model)):
            raise UnsupportedError(
                "`adapter=True` does not know parameters that ZeRO-3 has divided",
                do="Save the step, and send its adapter with `reshard.push_adapter(STEP, SERVER)`, which reads ZeRO-3's checkpoints",
            )
        boxes = tuple(box for box in whole.boxes if adapter_name(unwrapped(box.key).removeprefix("module.")) is not None)
        return replace(whole, boxes=boxes)


def _messages(descriptions: list[RankDescription]) -> list[tuple[int, list[str]]]:
    """The messages to rank 0, as (rank, names of its tensors): of each box of the adapter one rank sends its own."""
    messages: list[tuple[int, list[str]]] = []
    seen: set[tuple[str, Box]] = set()
    for description in descriptions:
        room = 0
        for box in description.boxes:
            if (box.key, box.box) in seen:
                continue
            seen.add((box.key, box.box))
            if room <= 0:
                messages.append((description.rank, []))
                room = _MESSAGE
            messages[-1][1].append(box.held.name)
            room -= box.box.volume * box.held.dtype.itemsize
    return messages


def _checkpoint(descriptions: list[RankDescription], held: list[dict[str, bytes]]) -> Checkpoint:
    """The adapter of all ranks as a checkpoint in this process's memory. held: the bytes of the tensors that each rank has sent."""
    sent = [
        replace(description, boxes=tuple(box for box in description.boxes if box.held.name in of_rank))
        for description, of_rank in zip(descriptions, held, strict=True)
    ]
    checkpoint = checkpoint_of(sent)
    files = VirtualFiles("the trainer's adapter")
    for description, of_rank in zip(sent, held, strict=True):
        files.add(path_of(description.rank), description.nbytes, [(description.addresses[name], data) for name, data in of_rank.items()])
    return replace(checkpoint, files=files, model_files=replace(checkpoint.model_files, files=files))


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes from the first element of a tensor to the end of its last one."""
    import torch

    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    span = 0 if 0 in shape else span_elements(shape, strides)
    flat = tensor.as_strided((span,), (1,)).contiguous().cpu()
    return bytes(flat.view(torch.uint8).numpy().data)
