"""TransferReport: what one update sends, in sums: for programs as a document, for people as lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from reshard.geometry.documents import document
from reshard.geometry.quantities import nbytes_text, plural
from reshard.geometry.sections import Columns
from reshard.geometry.value import value

_SHOWN_WAYS = 8


@value(eq=False)
class TransferReport:
    """What one update sends, in sums."""

    JSON = "source target bytes=nbytes most_out most_in boxes forms ways fallbacks notes"

    source: str
    """What the sources are, in words."""
    target: str
    """What the targets are, in words."""
    flow: Columns
    """[source ranks, replicas, target ranks of a replica]: the bytes from each to each."""
    boxes: int
    """How many boxes travel."""
    forms: int
    """How many forms they have."""
    tensors_of: Callable[[int, int], int]
    """How many tensors of a target rank of a replica a source rank sends parts of."""
    fallbacks: tuple[str, ...]
    """The tensors that are sent whole to the engine's own loader."""
    notes: tuple[str, ...]
    """Sentences for a reader of the plan."""

    @property
    def nbytes(self) -> int:
        """The bytes that travel."""
        return int(self.flow.sum())

    @property
    def bytes_out(self) -> Columns:
        """[source ranks]: the bytes that each sends."""
        return self._sums(1, 2)

    @property
    def bytes_in(self) -> Columns:
        """[target ranks]: the bytes that each receives, of all replicas."""
        return self._sums(0).reshape(-1)

    @property
    def traffic(self) -> Columns:
        """[source ranks, target ranks of a replica]: the bytes from each to each, to all replicas together."""
        return self._sums(1)

    def _sums(self, *axes: int) -> Columns:
        sums: Columns = self.flow.sum(axis=axes)
        return sums

    @property
    def ways(self) -> list[tuple[int, int, int]]:
        """(source rank, target rank of a replica, bytes) where bytes travel."""
        traffic = self.traffic
        return [(a, b, int(traffic[a, b])) for a, b in np.argwhere(traffic).tolist()]

    def to_json(self) -> dict[str, Any]:
        """The sums as plain values, and the bytes from each source rank to each target rank."""
        sources, replicas, ranks = self.flow.shape
        return document(
            self,
            source={"what": self.source, "ranks": sources},
            target={"what": self.target, "ranks": ranks, "replicas": replicas},
            most_out=int(self.bytes_out.max(initial=0)),
            most_in=int(self.bytes_in.max(initial=0)),
            ways=[{"source": a, "target": b, "bytes": nbytes} for a, b, nbytes in self.ways],
        )

    def __str__(self) -> str:
        """What the plan does, in lines for a person: its sums, and the largest ways."""
        bytes_out, bytes_in, replicas = self.bytes_out, self.bytes_in, self.flow.shape[1]
        out, into = int(bytes_out.argmax()), int(bytes_in.argmax())
        lines = [
            f"{self.source} -> {self.target}" + (f", {replicas} replicas" if replicas > 1 else ""),
            f"  bytes     {nbytes_text(self.nbytes)} ({self.nbytes:,}) in {plural(self.boxes, 'box', 'boxes')}",
            f"  most out  {nbytes_text(int(bytes_out[out]))}, from source rank {out}",
            f"  most in   {nbytes_text(int(bytes_in[into]))}, into target rank {into}",
        ]
        ways = sorted(self.ways, key=lambda way: (-way[2], way))
        for source, target, nbytes in ways[:_SHOWN_WAYS]:
            tensors = plural(self.tensors_of(source, target), "tensor")
            lines.append(f"  way       {source} -> {target}: {nbytes_text(nbytes)}, {tensors}")
        lines += [f"  ways      {len(ways) - _SHOWN_WAYS} more, with fewer bytes"] if len(ways) > _SHOWN_WAYS else []
        lines += [f"  whole     {name}: sent whole to the engine's own loader" for name in self.fallbacks]
        return "\n".join([*lines, *(f"  note      {note}" for note in self.notes)])
