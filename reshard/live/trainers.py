"""Trainers: the ranks of a trainer, as far as a channel needs them before it is joined."""

from __future__ import annotations

from typing import Any

from reshard.geometry.value import value


@value(eq=False)
class Trainers:
    """The ranks that send. After the channel is joined, they talk through it."""

    rank: int = 0
    """This process's number among them."""
    size: int = 1
    """How many they are."""
    group: Any = None
    """Their process group in torch.distributed; None with a single rank."""

    @staticmethod
    def of(group: Any = None) -> Trainers:
        """The ranks of a process group of torch.distributed; None: of the default group, or this process alone where there is none."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return Trainers()
        return Trainers(dist.get_rank(group), dist.get_world_size(group), group or dist.group.WORLD)

    def share(self, document: Any = None) -> Any:
        """What rank 0 shares, on every rank."""
        if self.size == 1:
            return document
        import torch.distributed as dist

        documents = [document]
        dist.broadcast_object_list(documents, src=dist.get_global_rank(self.group, 0), group=self.group)
        return documents[0]

    def passed(self, source: int, document: Any = None) -> Any:
        """What rank `source` says, on rank 0; None on the others. Called on every rank."""
        if self.rank != 0 and self.rank != source:
            return None
        documents = [document]
        if source:
            import torch.distributed as dist

            if self.rank == 0:
                dist.recv_object_list(documents, src=dist.get_global_rank(self.group, source), group=self.group)
            else:
                dist.send_object_list(documents, dst=dist.get_global_rank(self.group, 0), group=self.group)
        return documents[0] if self.rank == 0 else None

    def gather(self, document: Any) -> list[Any]:
        """What all ranks say, in their order, on rank 0; empty on the others."""
        if self.size == 1:
            return [document]
        import torch.distributed as dist

        documents: list[Any] = [None] * self.size
        dist.gather_object(document, documents if self.rank == 0 else None, dst=dist.get_global_rank(self.group, 0), group=self.group)
        return documents if self.rank == 0 else []
