"""Tensor classes: which tensors of a checkpoint are weights of the model, and what the others are.

    weight   a weight of the model
    buffer   a tensor that the model computes or counts, such as running_mean, position_ids, num_batches_tracked
    adapter  a part of a LoRA adapter, which is stored beside the base weights
    other    a tensor of another model in the same checkpoint: an EMA, a critic, a teacher
    state    state of the run: RNG, loss scaler, histories, counters, FP8 recipes (_extra_state, amax_history)

A format says which tensors are optimizer state, and which keys stand beside the model in the saved state dict (`RunFacts.roots`).
Everything else is decided here, for all formats, and only by what is certain:

- A name that the declared architecture has is a weight. A tensor with moments or a master is a weight. Without moments nothing follows:
  frozen towers, the bases of adapters and checkpoints without an optimizer have none.
- A key beside the model never holds the model's weights. A matrix under it, or a tensor called weight or bias, makes it another model.
- Without such keys, only the words below count, and only as the first part of a name. A run's word does not count if something under it
  looks like a weight: a model may have a part called `scheduler`.
- Floating-point tensors are weights. Integers with two axes are weights that were packed by a quantizer, and the tables of draft models
  are weights; other integers are buffers.

- Names of the model after a root that the declared architecture does not have, such as teacher.model.layers.0..., are those of another
  model, if the model's own names are there as well.

A weight that a declared architecture lacks is *unknown*; content.py finds it, because it depends on the selection.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.canonical.optimizer_state import ROOTS as OPTIMIZER_ROOTS
from reshard.canonical.optimizer_state import is_state_key, owner
from reshard.canonical.renaming import renamed, without_wrappers
from reshard.errors import RequestError
from reshard.geometry.quantities import grouped
from reshard.geometry.value import value
from reshard.index.index import Index, Kind, Tensor, element_count

if TYPE_CHECKING:
    from reshard.models.model import Model

# Keys under which trainers keep the model's state dict. Where several occur, the first of this list holds the main model.
MODEL_ROOTS = ("model", "module", "state_dict", "model_state_dict", "net", "network", "app", "ema")
# What `--root` calls the main model, whose names have no root.
_MAIN = "model"
# Keys under which trainers keep a moving average of the weights.
_EMA_ROOTS = frozenset({"ema", "model_ema", "ema_model", "ema_state_dict", "model_ema_state_dict", "state_dict_ema", "ema_params"})
# Keys of the models of one run, none of which is the main one. They count if every weight is under one of them.
_MODEL_NAMES = frozenset(
    {"actor", "critic", "actor_model", "critic_model", "reference", "reference_model", "ref", "ref_model", "reward", "reward_model",
     "policy", "policy_model", "value_model", "teacher", "student", "teacher_model", "student_model"}
)  # fmt: skip
# Keys under which trainers keep state that is neither the model's nor the optimizer's: torchtitan, accelerate, Lightning, verl, DeepSpeed.
RUN_ROOTS = frozenset(
    {"train_state", "trainer_state", "train_progress", "trainer", "training_state", "extra", "extra_state", "lr_scheduler", "scheduler",
     "lr_schedulers", "schedulers", "opt_param_scheduler", "dataloader", "train_dataloader", "data_loader", "data_sampler", "sampler",
     "batch_sampler", "data_state", "data_iterator", "rng", "rng_state", "rng_states", "random", "random_state", "random_states",
     "cuda_rng_state", "cuda_rng_states", "torch_rng_state", "numpy_rng_state", "scaler", "grad_scaler", "loss_scaler", "loss_history",
     "global_step", "global_steps", "step", "epoch", "current_epoch", "iteration", "num_tokens", "consumed_samples"}
)  # fmt: skip
# Parts of names: of LoRA (PEFT, torchtune), of FP8 recipes (Transformer Engine), and last parts of buffers.
_ADAPTERS = frozenset(
    {"lora_A", "lora_B", "lora_a", "lora_b", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "trainable_tokens_delta",
     "lora_bias", "modules_to_save"}
)  # fmt: skip
_RECIPES = frozenset({"_extra_state", "amax_history", "amax_history_fwd", "amax_history_bwd"})
# Rotary frequencies and their tables (transformers before 4.39 and remote code), masks of GPT-2's relatives, the scalar of their masks.
_BUFFERS = frozenset(
    {"running_mean", "running_var", "num_batches_tracked", "inv_freq", "original_inv_freq", "position_ids", "cos_cached", "sin_cached",
     "masked_bias"}
)  # fmt: skip
# Modules that observe values for a quantizer: torch.ao, NVIDIA ModelOpt.
_OBSERVERS = frozenset(
    {"activation_post_process", "weight_fake_quant", "weight_quantizer", "input_quantizer", "output_quantizer", "q_bmm_quantizer",
     "k_bmm_quantizer", "v_bmm_quantizer", "p_bmm_quantizer"}
)  # fmt: skip
_MARKS = _ADAPTERS | _RECIPES | _BUFFERS | _OBSERVERS
_RNG = re.compile(r"(?:^|[._])(?:rng|random|generator)(?:$|[._])")
_WEIGHT_LIKE = re.compile(r"(?:^|\.)(?:weight|bias)$")
_OF_TRAINED = ("master", "moment1", "moment2")
# Element types into which quantizers pack weights.
_PACKED = ("U8", "I8", "I32")
# Integer tables of a draft model (models/lookup.py): which token of the model each token of its smaller vocabulary is.
_DRAFT_TABLES = frozenset({"d2t", "t2d", "token_map", "draft_id_to_target_id"})


@value
class StoredModel:
    """One of the models in a checkpoint."""

    JSON = "root main=is_main tensors parameters bytes=nbytes"

    root: str
    """The first part of its tensors' names, which `--root` takes; "model" for the main model, whose names have no such part."""
    is_main: bool
    """Whether it is meant where no root is given."""
    tensors: int
    """The number of its tensors, without optimizer state."""
    parameters: int
    """The number of its parameters."""
    nbytes: int
    """The bytes of its tensors, stored once."""


def root_of(name: str) -> str:
    """The first part of a name."""
    return name.partition(".")[0]


def classified(index: Index, model: Model | None) -> Index:
    """The index in which every tensor that a format takes for a weight has its class as its kind. `index` itself if all are weights."""
    weights = [tensor for tensor in index.tensors if tensor.kind == "weight"]
    trained = frozenset(tensor.name for tensor in index.tensors if tensor.kind != "weight" and tensor.kind in _OF_TRAINED)
    by_root = grouped(weights, lambda tensor: root_of(tensor.name))
    kinds = {root: _kind_under_root(root, by_root, index.facts.roots, trained) for root in by_root}
    kinds |= dict.fromkeys(_copies(by_root, model, trained) if model else (), "other")
    guessed = ((tensor, kinds[root] or _kind_of_tensor(tensor, trained)) for root, of_root in by_root.items() for tensor in of_root)
    doubtful = [(tensor, kind) for tensor, kind in guessed if kind != "weight"]
    if not doubtful:
        return index
    from reshard.canonical.name_variants import Names

    names = Names(model) if model else None
    changed = {id(tensor): kind for tensor, kind in doubtful if not names or names.array(tensor.name) is None}
    return replace(index, tensors=tuple(replace(t, kind=changed[id(t)]) if id(t) in changed else t for t in index.tensors))


def _kind_under_root(root: str, by_root: Mapping[str, list[Tensor]], beside: Iterable[str], trained: frozenset[str]) -> Kind | None:
    """The class of all tensors whose names begin with this root; None if it is decided for each.

    by_root: the weights of each root. beside: the keys beside the model. trained: the names of the tensors with moments.
    """
    tensors = by_root[root]
    like_weights = (stored for stored in tensors if len(stored.shape) > 1 or (stored.shape and _WEIGHT_LIKE.search(stored.name)))
    has_weights = any(tensor.name in trained for tensor in tensors) or any(map(_is_number, like_weights))
    if root in beside:
        return "other" if has_weights and root not in RUN_ROOTS and root not in OPTIMIZER_ROOTS else "state"
    if root in RUN_ROOTS and not has_weights:
        return "state"
    if root in _EMA_ROOTS and by_root.keys() - _EMA_ROOTS - RUN_ROOTS and not any(tensor.name in trained for tensor in tensors):
        return "other"
    models = by_root.keys() - _EMA_ROOTS - RUN_ROOTS
    return "other" if len(models) > 1 and models <= _MODEL_NAMES and root in models else None


def _copies(by_root: Mapping[str, list[Tensor]], model: Model, trained: frozenset[str]) -> Iterator[str]:
    """The roots of further copies of the model: roots that the model lacks, before names in its layers, without moments."""
    own = {root_of(weight.name) for weight in model.declared.weights} | {*map(root_of, model.architecture.tied)}
    for root in by_root.keys() - own if by_root.keys() & own else ():
        stored = [tensor.name for tensor in by_root[root]]
        inner = (name.removeprefix(f"{root}.") for name in stored)
        if trained.isdisjoint(stored) and any(name in model.weights and model.is_in_layer(name) for name in inner):
            yield root


def _is_number(tensor: Tensor) -> bool:
    return tensor.dtype.floating or tensor.dtype.name in ("C64", "C128")


def _kind_of_tensor(tensor: Tensor, trained: frozenset[str]) -> Kind:
    """The class of a tensor under the model's root, from its own name and type."""
    name, dtype = tensor.name, tensor.dtype
    parts = name.split(".")
    is_mask = parts[-1] == "bias" and len(tensor.shape) == 4
    if dtype.floating and not is_mask and _MARKS.isdisjoint(parts):
        return "weight"
    if not _ADAPTERS.isdisjoint(parts):
        return "adapter"
    if name in trained:
        return "weight"
    if not _RECIPES.isdisjoint(parts) or (dtype.name == "U8" and len(tensor.shape) == 1 and _RNG.search(name)):
        return "state"
    if is_mask or parts[-1] in _BUFFERS or not _OBSERVERS.isdisjoint(parts):
        return "buffer"
    is_packed = dtype.name in _PACKED and len(tensor.shape) > 1
    return "weight" if _is_number(tensor) or is_packed or parts[-1] in _DRAFT_TABLES else "buffer"


def stored_models(index: Index) -> tuple[StoredModel, ...]:
    """The models of a classified index, the main one first. One entry, or none, if the checkpoint holds a single model."""
    copied = {tensor.name for tensor in index.tensors if tensor.kind in ("weight", "buffer", "other", "adapter")}
    kinds = ("weight", "buffer", "other")
    of_models = (stored for stored in index.tensors if stored.kind in kinds or (stored.kind == "master" and stored.name not in copied))
    tensors = grouped(of_models, lambda tensor: root_of(tensor.name) if tensor.kind == "other" else None)
    return tuple(
        StoredModel(
            root=root or _MAIN,
            is_main=root is None,
            tensors=len(of_model),
            parameters=element_count(t for t in of_model if t.kind != "buffer"),
            nbytes=sum(t.nbytes for t in of_model),
        )
        for root, of_model in sorted(tensors.items(), key=lambda item: item[0] is not None)
    )


def one_model(index: Index, root: str | None, model: Model | None, *, keep_all: bool = False) -> Index:
    """The index with the tensors of one model under their names in that model; all others have the kind "other".

    root: the model; None for the main one. keep_all: without a root, several models without a main one are no error.

    Raises: RequestError, naming the roots, if there is no such model, or no main one.
    """
    if root is None and all(tensor.kind != "other" for tensor in index.tensors):
        return index
    models = stored_models(index)
    roots = ", ".join(stored_model.root for stored_model in models if not stored_model.is_main)
    has_main = any(stored_model.is_main for stored_model in models)
    if root is None:
        if models and not has_main and not keep_all:
            raise RequestError(
                f"the checkpoint holds several models: {roots}",
                why="None of them is the main one",
                do=f"Choose one, such as `root={models[0].root}`. `keep_unknown=True` takes all of them under their full names",
            )
        return index
    chosen = next((stored_model for stored_model in models if stored_model.root == root and not stored_model.is_main), None)
    if chosen is None and has_main and root == _MAIN:
        return index
    if chosen is None:
        raise RequestError(
            f"`root={root}`: the checkpoint holds no such model",
            why=f"It holds the models {', '.join(stored_model.root for stored_model in models)}" if roots else "It holds one model",
            do="`reshard inspect` lists the models" if roots else "Leave out `root=`",
        )
    return _under_root(index, f"{root}.", model)


def _under_root(index: Index, prefix: str, model: Model | None) -> Index:
    """The index of the model whose names start with `prefix`, without that prefix."""
    weights = index.by_kind("weight")

    def of_model(tensor: Tensor) -> Tensor:
        if not tensor.name.startswith(prefix):
            return _of_another_model(tensor, weights)
        return replace(tensor, name=tensor.name.removeprefix(prefix), kind="weight" if tensor.kind == "other" else tensor.kind)

    def new_names(name: str) -> tuple[str, ...]:
        return (name.removeprefix(prefix),) if name.startswith(prefix) else ()

    renamed_index = renamed(index, map(of_model, index.tensors), new_names)
    return classified(without_wrappers(replace(renamed_index, facts=replace(renamed_index.facts, roots=()))), model)


def _of_another_model(tensor: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """A tensor that is not of the chosen model. One of the main model gets a name that tells its model and kind."""
    if tensor.kind == "other" or (tensor.kind == "state" and not is_of_optimizer(tensor, weights)):
        return tensor
    kind = "" if tensor.kind in ("weight", "buffer", "adapter") else f".{tensor.kind}"
    return replace(tensor, name=f"{_MAIN}.{tensor.name}{kind}", kind="other")


def is_of_optimizer(tensor: Tensor, weights: Mapping[str, Tensor]) -> bool:
    """Whether a tensor of kind "state" belongs to an optimizer: to a parameter, or to the optimizer itself."""
    of_optimizer = is_state_key(tensor.name) or root_of(tensor.name) in OPTIMIZER_ROOTS or owner(tensor, weights) is not None
    return tensor.kind == "state" and of_optimizer
