"""The model of a run, from its settings or from the config that the user gives; and whether a save holds all of it, in one state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reshard.adapter.format import Hints
from reshard.canonical.renaming import adapter_name
from reshard.errors import CheckpointError, IncompleteError, MixedSaves, UnsupportedError
from reshard.geometry.value import value
from reshard.index.index import Index, Tensor
from reshard.models.lookup import find_model, known_model_types, model_type_of
from reshard.models.model import Model
from reshard.storage.files import Files

from ..layout.adapters import AdaptedModel, factor_of
from ..layout.arguments import NotUnderstoodError, check_supported, config_from_args
from ..layout.hybrid import PairedModel, gpt_settings
from ..layout.names import LayerSpec
from ..layout.settings import other_setting
from ..layout.stages import Args
from ..layout.tensors import BUFFER_ROLES, MegatronModel, QkvOrder, is_hybrid
from .arrays import Shape

if TYPE_CHECKING:
    from reshard.engine.checks.masters import WrongMaster

_MOST_LAYERS = 100_000


@value(slots=False, eq=False, repr=False)
class RunModel:
    """The model of a run, in a known layout."""

    megatron: MegatronModel
    """Its tensors under Megatron's names."""
    config: Mapping[str, Any]
    """Its Hugging Face config."""
    unanswered: tuple[str, ...] = ()
    """What the user has to tell before a conversion."""

    @property
    def shapes(self) -> dict[str, Shape]:
        """The global shape of each canonical tensor."""
        return self.megatron.shapes

    @property
    def adapters(self) -> Mapping[str, int]:
        """The LoRA adapters beside the weights: r by the name of B, relative to the layer or expert. Empty without any."""
        return self.megatron.ranks if isinstance(self.megatron, AdaptedModel) else {}

    def spec(self, args: Args, transformer_impl: str) -> LayerSpec:
        """The layer classes of the run. transformer_impl: that of a run whose settings do not name it."""
        if isinstance(self.megatron, PairedModel):  # whose specs have Transformer Engine's classes only
            return LayerSpec(te=True, experts="te-grouped")
        return LayerSpec.from_args(args, str(args.get("transformer_impl", transformer_impl)))

    def with_adapters(self, factors: Iterable[tuple[str, Shape]]) -> RunModel:
        """The model with the adapters whose factors are stored, as (name relative to the layer or expert, stored shape).

        Raises: UnsupportedError for an adapter of a HybridModel.
        """
        of_factors = [(factor_of(name), shape) for name, shape in factors]
        ranks = {factor.name: shape[-1] for factor, shape in of_factors if factor is not None and factor.is_output and shape}
        if ranks and isinstance(self.megatron, PairedModel):
            raise UnsupportedError(
                "it has LoRA adapters beside the layers of a HybridModel, which reshard does not read",
                where=next(iter(ranks)),
                do="Merge the adapter with the program that trained it, then convert the result",
            )
        return replace(self, megatron=AdaptedModel(self.megatron, ranks)) if ranks else self

    def as_stored(self, tensor: Tensor) -> Tensor:
        """The tensor, marked if Megatron stores a function of the weight in its place. Moments are the weight's own."""
        function = self.megatron.functions.get(tensor.name, "") if tensor.kind in ("weight", "master") else ""
        return replace(tensor, dtype=tensor.dtype.of(function)) if function else tensor

    def __repr__(self) -> str:
        return f"<{self.config.get('model_type')} model of {self.megatron.layers} layers, {len(self.shapes)} weights>"


def describe_model(args: Args, hints: Hints, stored_vocab: int | None, where: str, *, qkv_order: QkvOrder = "by_group") -> RunModel:
    """The model, from the config that the user gives, or else from the run's settings.

    stored_vocab: rows of the stored embedding, with padding; None if there is no embedding.
    Raises: NotUnderstoodError if its layout is not known; CheckpointError if the config contradicts the settings or the embedding.
    """
    check_supported(args, where)
    if isinstance(layers := args.get("num_layers"), int) and layers > _MOST_LAYERS:
        raise CheckpointError(f"the run's settings claim {layers:,} layers", where=where, do="Get the checkpoint from a source you trust")
    padded_vocab = stored_vocab or args.get("padded_vocab_size")
    true_vocab = hints.vocabulary or (hints.config or {}).get("vocab_size")
    unanswered: tuple[str, ...] = ()
    if true_vocab is None and isinstance(padded_vocab, int):
        true_vocab = padded_vocab
        unanswered = (
            f"the vocabulary size without padding (`vocab_size=N`, or `model=DIR` with the model's config): "
            f"the stored table has {padded_vocab} rows, and the last ones may be padding",
        )
    config = {**hints.config, "vocab_size": true_vocab} if hints.config else _config(args, true_vocab, where)
    model = _model(config, args, hints)
    if other := other_setting(args, model, is_inferred=not hints.config):
        name, change = other
        raise NotUnderstoodError(
            f"the run was trained with {name}={args[name]!r}, unlike a {model.architecture.model_type} model",
            where=where,
            why=f"With it {change}",
            do="Give the config of the model that was trained with `model=DIR`",
        )
    if padded_vocab is not None and isinstance(true_vocab, int) and padded_vocab < true_vocab:
        raise CheckpointError(
            f"the stored table has {padded_vocab} rows, but the given vocabulary size is {true_vocab}",
            where=where,
            do="Give the true size with `vocab_size=`, or the config of this model with `model=`",
        )
    gpt = args if is_hybrid(model) else gpt_settings(args)
    if isinstance(layers := gpt.get("num_layers"), int) and layers != model.dimensions["layers"]:
        raise CheckpointError(
            f"the run had {layers} layers, the config says {model.dimensions['layers']}",
            where=where,
            do="Give the config that this model was trained with by `model=DIR`",
        )
    kind = MegatronModel if gpt is args else PairedModel
    return RunModel(kind(model, padded_vocab or true_vocab or 1, qkv_order), config, unanswered)


def _config(args: Args, vocabulary: Any, where: str) -> dict[str, Any]:
    try:
        return config_from_args(args, vocabulary)
    except (KeyError, TypeError, ValueError) as error:
        raise NotUnderstoodError(
            f"the run's settings do not describe a model: {type(error).__name__} {error}",
            where=where,
            why="args, which Megatron-LM stores beside the weights, tells how heads are grouped; without it the shards cannot be joined",
            do="Give the model's Hugging Face config with `model=DIR`",
        ) from None


def _model(config: Mapping[str, Any], args: Args, hints: Hints) -> Model:
    # The run tells the number of MTP layers: configs of DeepSeek-V3 count one that most runs do not train.
    if "mtp_num_layers" in args and "num_nextn_predict_layers" in config:
        config = {**config, "num_nextn_predict_layers": args["mtp_num_layers"] or 0}
    model = find_model(config, hints.architecture)
    if model is None:
        named = model_type_of(config)
        raise NotUnderstoodError(
            f"the architecture {named!r} is not declared" if named else "neither the run's settings nor a config say which model this is",
            why="Megatron's files hold each rank's shard of fused weights, which only the model's head counts explain",
            do=f"Add `model=DIR` with the model's Hugging Face config, or `architecture=NAME`: {', '.join(known_model_types())}",
        )
    return model


def completed(index: Index, model: RunModel, where: str, *, with_optimizer: bool) -> Index:
    """The index with the element types that are stored. Raises CheckpointError if a weight of the model is in no file.

    with_optimizer: also if a weight has no optimizer state although other weights have.
    """
    names: dict[str, set[str]] = {"weight": set(), "moment1": set()}
    for tensor in index.tensors:
        if tensor.kind == "state":  # such as Muon's momentum, in place of moments
            names["moment1"].add(tensor.name.rpartition(".")[0])
        names.setdefault(tensor.kind, set()).add(tensor.name)
    of_adapter = {name for name in names["weight"] if adapter_name(name)} if model.adapters else set()
    _check_factors(of_adapter, where)
    moments = names["moment1"] if with_optimizer and not model.adapters else set()  # the base of an adapter is frozen
    is_adapter_alone = model.adapters and of_adapter == names["weight"]
    for name, weight in () if is_adapter_alone else model.megatron.model.weights.items():
        has_weight = name in names["weight"]
        has_state = not moments or name in moments or weight.role in BUFFER_ROLES
        if not weight.optional and not (has_weight and has_state):
            raise IncompleteError(
                f"{'its optimizer state' if has_weight else 'it'} is in no file",
                where=name,
                why=f"The run's model has it; files of a rank are missing in {where}, or were lost",
                do="Copy all ranks' files from where the checkpoint was written",
            )
    return replace(index, tensors=tuple(map(model.as_stored, index.tensors)))


def _check_factors(names: Collection[str], where: str) -> None:
    """Raises IncompleteError if an adapter's A or B is in no file."""
    for name in names:
        other = name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")
        if other not in names:
            raise IncompleteError(
                "it is in no file",
                where=other,
                why=f"{name} is there, and an adapter is the product of both; files of a rank are missing in {where}, or were lost",
                do="Copy all ranks' files from where the checkpoint was written",
            )


def check_masters(files: Files, index: Index) -> Index:
    """The index. Raises CheckpointError if a master does not round to its weight."""
    if wrong := _wrong_master(files, index):
        raise MixedSaves(
            f"its master in {wrong.master_path} is not what the weight was rounded from",
            where=f"{wrong.name} in {wrong.weight_path}",
            why="Either the optimizer's file belongs to another save, or its parameters have another order than in this version",
            do="Copy the files of one save again; or take the weights alone: move the optimizer's file away",
        )
    return index


def without_wrong_masters(files: Files, index: Index) -> Index:
    """The index; without its optimizer state and with a note if a master does not round to its weight.

    Megatron-Core 0.16 to 0.19 write shifted values into a fully reshardable checkpoint if a buffer had several buckets (its issue 504).
    """
    wrong = _wrong_master(files, index)
    if wrong is None:
        return index
    note = (
        f"the optimizer's state is left out: {wrong.name} in {wrong.weight_path}: its master in {wrong.master_path} is not what the weight "
        "was rounded from (Megatron-Core 0.16 to 0.19 shift it if there were several buckets)"
    )
    weights = tuple(tensor for tensor in index.tensors if tensor.kind == "weight")
    return replace(index, tensors=weights, facts=replace(index.facts, notes=(*index.facts.notes, note)), param_groups=tuple)


def _wrong_master(files: Files, index: Index) -> WrongMaster | None:
    """A master that does not round to its weight.

    Where a parameter lies in an optimizer's buffer follows from settings and order alone, so many parameters are compared. A truncated
    master lies at most one representable value from the rounded one.
    """
    from reshard.engine.checks.masters import wrong_master

    return wrong_master(files, index, per_file=2000, tolerance=1)
