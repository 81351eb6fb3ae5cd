"""Checkpoint: an opened checkpoint, which weights can be read from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

from reshard.adapter import registry
from reshard.adapter.format import Hints
from reshard.adapter.model_files import ModelFiles
from reshard.canonical.optimizer_state import is_state_key, master_key
from reshard.canonical.renaming import with_adapter_names
from reshard.canonical.tensor_classes import StoredModel, one_model, stored_models
from reshard.errors import RequestError
from reshard.geometry.sections import whole
from reshard.geometry.value import Drawn, value
from reshard.index.coverage import check_index
from reshard.index.fold import Fold, fold
from reshard.index.index import Index, Tensor
from reshard.opening.keywords import PathLike, PlanOptions, checked_keywords
from reshard.plans.manifest import DIGESTS, Manifest, read_digests
from reshard.storage.files import Files

if TYPE_CHECKING:
    from reshard.canonical.content import Content, Selection
    from reshard.engine.views import LazyTensor, View
    from reshard.index.provenance import AppliedDelta
    from reshard.models.architecture import Architecture
    from reshard.models.model import Model


VerbOf = Callable[[str], Callable[..., Any]]
"""Gives a verb by its name."""


@value(slots=False, eq=False)
class Checkpoint(Drawn):
    """An opened checkpoint: its index, and the files that weights are read from when asked for."""

    path: str
    """The directory or file as the caller gave it."""
    files: Files
    """The files that it is read from."""
    index: Index
    """Which box of which tensor lies in which bytes of which file."""
    model_files: ModelFiles
    """The model's config and tokenizer files."""
    detected: str
    """Why it was taken for this format."""
    architecture: Architecture | None = None
    """The architecture that the caller named; None: the one that the config names."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The keywords of `open` that it was opened with."""
    deltas: tuple[AppliedDelta, ...] = ()
    """The deltas that change its tensors when they are read (opening/deltas.py)."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """By name, what the last delta says of the tensors that it makes; empty if another program wrote it."""
    manifest: Manifest | None = None
    """What reshard recorded when it wrote the files; None if another program wrote them."""

    @property
    def format(self) -> str:
        """The format's name."""
        return self.index.format

    @cached_property
    def model(self) -> Model | None:
        """The model, if there is a config and its architecture is declared."""
        stored = {tensor.name: tensor.shape for tensor in self.index.tensors if tensor.kind in ("weight", "master")}
        return Hints(self.model_files.config, architecture=self.architecture, stored=stored).model

    @cached_property
    def config_problem(self) -> str | None:
        """Why the sizes of a declared model do not follow from its config, such as a key that is missing; None if they do."""
        try:
            _ = self.model and self.model.weights
        except RequestError as error:
            return error.what
        return None

    @property
    def sized_model(self) -> Model | None:
        """The model, if its sizes follow from the config."""
        return None if self.config_problem else self.model

    @cached_property
    def models(self) -> tuple[StoredModel, ...]:
        """The models that it holds, the main one first; `root` of a selection chooses one."""
        return stored_models(self.index)

    def of_model(self, selection: Selection, *, model: Model | None = None) -> Index:
        """The index of the chosen model; where the checkpoint holds no other, this is `index`.

        Raises: RequestError if the checkpoint holds several models and none is chosen, or no model of that root.
        """
        return one_model(self.index, selection.root, model or self.model, keep_all=selection.keep_unknown)

    def named(self, selection: Selection | None = None, *, model: Model | None = None) -> Index:
        """The index of the chosen model under canonical names, whatever its library calls and fuses."""
        from reshard.canonical.content import Selection
        from reshard.canonical.name_variants import with_canonical_names

        selection = selection or Selection()
        index = with_adapter_names(self.of_model(selection, model=model))
        index = with_canonical_names(index, model or self.model, selection.strip_prefix)
        if index is not self.index:
            check_index(index)
        return index

    def content(
        self,
        selection: Selection | None = None,
        *,
        model: Model | None = None,
        index: Index | None = None,
        adapter: Callable[[Tensor], bool] | None = None,
    ) -> Content:
        """The weights under the model's canonical names, or under those of `index`.

        adapter: tells the tensors of the LoRA adapter, which are taken in place of the model's.
        """
        from reshard.canonical.content import Selection, content_of

        if self.index.facts.delta is not None:
            from reshard.opening.chains import delta_alone

            raise delta_alone(self.path, self.index.facts.delta)
        named = index or self.named(selection, model=model)
        content = content_of(named, model or self.model, selection or Selection(), adapter)
        return replace(
            content,
            read_scalar=lambda key: _scalar(content.tensors[key], self.files),
            recorded=lambda: _recorded_digests(self, named, content),
            deltas=self.deltas,
        )

    def tensors(self, selection: Selection | str | None = None) -> View:
        """The tensors under their canonical names, read when asked for: every weight, those whose names match a glob such as "*.q_proj*",
        or those that a selection chooses."""
        from reshard.canonical.content import check_selected
        from reshard.engine.views import View

        if isinstance(selection, str):
            return self._everything.matching(selection)
        content = self.content(selection)
        check_selected(content)
        # A weight without a separate master is its own master: it is one tensor, with one name.
        own = {name: tensor for name, tensor in content.tensors.items() if name not in content.duplicate_masters}
        return View({name: whole(name, tensor.dtype, tensor.shape) for name, tensor in own.items()}, own, self.files)

    @checked_keywords
    def view(self, *, to: str, rank: int = 0, pp_rank: int = 0, ep_rank: int = 0, dp_rank: int = 0, **options: Unpack[PlanOptions]) -> View:
        """What one rank of a target holds, under the names that its engine uses. Takes the keywords of `plan`.

        rank: the tensor-parallel rank. Only this rank is laid out and proven, and only its own bytes of the weights are ever read.

        Raises: RequestError if the target has no such rank.
        """
        view: View = _verb("view")(self, to, {"tp": rank, "pp": pp_rank, "ep": ep_rank, "dp": dp_rank}, options)
        return view

    def to(self, format: str, *, path: PathLike, **options: Any) -> Any:
        """Convert it into the directory or URL `path`: `reshard.convert(self, path, to=format, **options)`, and its Result."""
        return _verb("convert")(self, path, to=format, **options)

    @cached_property
    def tree(self) -> Fold:
        """The tensors as a tree of names in the model's order. Layers and experts that are alike share one branch."""
        return self.tree_of(self.index.tensors)

    def tree_of(self, tensors: Iterable[Tensor]) -> Fold:
        """The tree of these tensors alone."""
        return fold(tensors, self.sized_model.weights if self.sized_model else ())

    @cached_property
    def _everything(self) -> View:
        """Every tensor that has a canonical name: weights, and optimizer state and run state where they can be named."""
        from reshard.canonical.content import Selection

        try:
            return self.tensors(Selection(optimizer=True, masters=True, keep_unknown=True))
        except RequestError:  # several models and none chosen, or optimizer state of unknown parameters
            return self.tensors()

    def __getitem__(self, name: str) -> LazyTensor:
        """A tensor by its canonical name, read when asked for. Raises KeyError with the nearest names."""
        return self._everything[name]

    def __contains__(self, name: object) -> bool:
        return name in self._everything

    def __iter__(self) -> Iterator[str]:
        """The canonical names of the tensors."""
        return iter(self._everything)

    def keys(self) -> KeysView[str]:
        """The canonical names of the tensors, as those of a dict."""
        return self._everything.keys()

    def __len__(self) -> int:
        return len(self._everything)

    def __bool__(self) -> bool:
        """An opened checkpoint is true, even without tensors."""
        return True

    def to_pandas(self) -> Any:
        """A pandas DataFrame with one row per tensor. pandas must be installed."""
        return self._everything.to_pandas()

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, {self.format}, {len(self.index.tensors)} tensors)"


def _scalar(tensor: Tensor, files: Files) -> float:
    """The value of a tensor of one element."""
    from reshard.engine.views import LazyTensor

    return float(LazyTensor(whole(tensor.name, tensor.dtype, tensor.shape), {tensor.name: tensor}, files).numpy().item())


def _recorded_digests(checkpoint: Checkpoint, index: Index, content: Content) -> Mapping[str, str]:
    """The digests that reshard recorded when it wrote this checkpoint, by key of `content`. Empty if another program wrote it, if
    reshard.digests is not there, or if `index` has other names than the conversion wrote.

    Raises: CheckpointError if reshard.digests is damaged.
    """
    manifest, files, format = checkpoint.manifest, checkpoint.files, checkpoint.format
    if checkpoint.deltas:
        return {name: checkpoint.digests[name] for name in content.tensors if name in checkpoint.digests}
    if manifest is None or manifest.digests is None or manifest.format != format or files.size(DIGESTS) is None:
        return {}
    if content.selection.strip_prefix or (registry.named(format).keeps_names and index is not checkpoint.index):
        return {}
    recorded = read_digests(files, manifest).tensors
    return {
        name: recorded[name]
        for name, tensor in content.tensors.items()
        # Where a weight and its master were written, the weight's own name is recorded for the weight.
        if name in recorded and not (tensor.kind == "master" and not is_state_key(name) and master_key(name) in recorded)
    }


def verbs_from(verb: VerbOf) -> None:
    """Bind the verbs that methods call. They stand above this room, and `reshard/__init__.py` binds them."""
    global _verb
    _verb = verb


_verb: VerbOf
