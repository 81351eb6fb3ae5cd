"""What legacy and distributed checkpoints share on the way to an index: the model that the settings describe, and its weights' pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.adapter.format import Hints
from reshard.adapter.index_builder import Collector
from reshard.containers.distributed_tensors import LocalTensor
from reshard.containers.torch_zip import AnyTensor
from reshard.errors import CheckpointError
from reshard.geometry.mosaics import Mosaic
from reshard.index.index import Kind, Tensor
from reshard.models.lookup import find_model, known_model_types
from reshard.models.model import Model
from reshard.storage.files import Files

from ..layout.arguments import Args, NotUnderstoodError, check_supported, config_of
from ..layout.tensors import UNTRAINED, MegatronModel
from .tensor_boxes import Shape, locals_of

# What only the user knows, and how to say it.
VOCABULARY = "the true size of the vocabulary (--vocab-size N, or --model DIR with the model's config): rows up to {rows} are padding"
_MOST_LAYERS = 100_000


@dataclass(slots=True)
class Building:
    """The tensors that have been found so far, of a model whose layout is known. asks: what has to be said before a conversion."""

    model: MegatronModel
    config: Mapping[str, Any]
    asks: tuple[str, ...]
    collector: Collector = field(default_factory=Collector)
    shapes: dict[str, Shape] = field(init=False)

    def __post_init__(self) -> None:
        self.shapes = {name: weight.shape for name, weight in self.model.model.weights.items()}

    def add(self, role: Kind, array: Mosaic, stored: AnyTensor, path: str, rank: int) -> None:
        """A stored tensor that is this array."""
        for name, local in self.locals_of(array, stored):
            self.collector.add(role, name, local, path, rank)

    def locals_of(self, array: Mosaic, stored: AnyTensor) -> Iterator[tuple[str, LocalTensor]]:
        """The parts of canonical tensors that a stored one holds, by name."""
        return locals_of(array, stored, self.shapes)

    def tensors(self, files: Files) -> tuple[Tensor, ...]:
        """What was found. Raises CheckpointError if the model has a weight that was not, or one lost its part of the optimizer."""
        found = tuple(self.collector.tensors(files))
        check_complete(self.model.model, found, files.root, with_optimizer=True)
        return found


def check_complete(model: Model, found: Sequence[Tensor], where: str, *, with_optimizer: bool) -> None:
    """Raises CheckpointError if a weight of the model is in no file; with_optimizer: or if it has no optimizer state where others have."""
    weights = {tensor.name for tensor in found if tensor.kind == "weight"}
    moments = {tensor.name for tensor in found if tensor.kind == "moment1" and with_optimizer}
    for name, weight in model.weights.items():
        lost = "it" if name not in weights else "its part of the optimizer's state"
        is_kept = weight.optional or (name in weights and (not moments or name in moments or weight.role in UNTRAINED))
        if not is_kept:
            raise CheckpointError(
                f"{lost} is in no file",
                where=name,
                why=f"The run's model has it; a rank's files are missing in {where}, or were lost",
                do="Copy all ranks' files from where the checkpoint was written",
            )


def begin(args: Args, hints: Hints, vocabulary_rows: int | None, where: str, *, qkv: str = "groups") -> Building:
    """The model, from --model's config or else from the settings.

    vocabulary_rows: of the stored table, padding included; None if no table was found.
    Raises: NotUnderstoodError if the settings describe no model that is declared.
    """
    check_supported(args, where)
    if isinstance(layers := args.get("num_layers"), int) and layers > _MOST_LAYERS:
        raise CheckpointError(f"the run's settings claim {layers:,} layers", where=where, do="Get the checkpoint from a source you trust")
    rows = vocabulary_rows or args.get("padded_vocab_size")
    said = hints.vocabulary or (hints.config or {}).get("vocab_size")
    asks: tuple[str, ...] = ()
    if said is None and isinstance(rows, int):
        said, asks = rows, (VOCABULARY.format(rows=rows),)
    config = {**hints.config, "vocab_size": said} if hints.config else _derived(args, said, where)
    # Layers for multi-token prediction are the run's matter: configs of DeepSeek-V3 count one that most runs do not train.
    extra = {"num_nextn_predict_layers": args["mtp_num_layers"] or 0} if "mtp_num_layers" in args else {}
    model = find_model({**config, **extra} if "num_nextn_predict_layers" in config else config, hints.architecture)
    if model is None:
        raise NotUnderstoodError(
            f"the architecture {config.get('model_type')!r} is not declared",
            why="Megatron's files hold each rank's slices of fused weights, which only the model's head counts explain",
            do=f"Declared are {', '.join(known_model_types())}; give the config of one of them with --model DIR, or a declaration with "
            "--architecture FILE",
        )
    if rows is not None and isinstance(said, int) and rows < said:
        raise CheckpointError(
            f"the stored table has {rows} rows, and the vocabulary is said to have {said}",
            where=where,
            do="Give the true size with --vocab-size, or the right config with --model",
        )
    return Building(MegatronModel(model, rows or said or 1, qkv), config, asks)


def _derived(args: Args, vocabulary: Any, where: str) -> dict[str, Any]:
    try:
        return config_of(args, vocabulary)
    except (KeyError, TypeError, ValueError) as error:
        raise NotUnderstoodError(
            f"the run's settings do not describe a model: {type(error).__name__} {error}",
            where=where,
            why="args, which Megatron-LM stores beside the weights, says how heads are grouped; without it slices cannot be put together",
            do="Give the model's Hugging Face config with --model DIR",
        ) from None


def asked_for(error: NotUnderstoodError) -> tuple[str, ...]:
    """What has to be said before anything is made of a checkpoint whose tensors are shown as they are stored."""
    return (f"how the model's weights lie in it: {error}",)


def check_model(model: Model, args: Args, where: str) -> None:
    """Raises CheckpointError if the settings name another number of layers than the config."""
    layers = args.get("num_layers")
    if isinstance(layers, int) and layers != model.dimensions["layers"]:
        raise CheckpointError(
            f"the run had {layers} layers, the config says {model.dimensions['layers']}",
            where=where,
            do="Give the config that this model was trained with by --model DIR",
        )
