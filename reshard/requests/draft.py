"""Draft: a conversion that is being planned, as a frozen value that each step makes anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reshard.adapter.model_files import ModelFiles
from reshard.canonical.content import Content, Selection
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.index.index import Index
from reshard.opening.checkpoint import Checkpoint
from reshard.plans.layout import Layout, Target
from reshard.requests.request import ConversionRequest
from reshard.storage.files import Files


@value(eq=False)
class Draft:
    """A conversion that is being planned."""

    source: Checkpoint
    """The opened source."""
    request: ConversionRequest
    """What is asked for."""
    adapters: tuple[Checkpoint, ...]
    """The LoRA adapters to merge, without the source's own."""
    others: tuple[Checkpoint, ...]
    """The checkpoints that the source is combined with."""
    selection: Selection
    """Which tensors are taken."""
    companions: ModelFiles
    """The config, the tokenizer and the adapter's settings that go with the target."""
    index: Index
    """What is read, under the names that the target has."""
    files: Files
    """The files of `index`."""
    content: Content
    """The tensors to be written, and those that are left out; empty until `select`."""
    kept_for: frozenset[str] = frozenset()
    """Names of tensors that are never cast: quantized weights and their scales."""
    notes: tuple[str, ...] = ()
    """Sentences for a reader of the plan."""
    layout: Layout | None = None
    """The files of the target; None until `lay_out`."""

    @staticmethod
    def of(source: Checkpoint, request: ConversionRequest, adapters: Sequence[Checkpoint] = (), others: Sequence[Checkpoint] = ()) -> Draft:
        """The draft before its first step. adapters: the opened ones of `merge_adapter`. others: what the source is combined with."""
        content, files = Content({}, (), source.model), source.model_files
        return Draft(
            source,
            request,
            tuple(adapters),
            tuple(others),
            request.selection,
            files,
            source.index,
            source.files,
            content,
            notes=files.notes,
        )

    @property
    def target(self) -> Target:
        """What the format lays out."""
        return replace(self.request.target, dtype_kept_for=self.kept_for)

    def noting(self, *notes: str) -> Draft:
        """The draft with further notes."""
        return replace(self, notes=(*self.notes, *notes))

    def __repr__(self) -> str:
        made = f"laid out in {plural(len(self.layout.files), 'file')}" if self.layout else "not laid out"
        chosen = f"{plural(len(self.content.tensors), 'tensor')} of {len(self.index.tensors)}"
        return f"Draft({self.source.format} -> {self.request.to.name}, {chosen}, {plural(len(self.notes), 'note')}, {made})"
