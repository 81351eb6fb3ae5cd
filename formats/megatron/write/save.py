"""What is written of a model, whatever the kind of checkpoint: its sizes, its chunks, its settings, and what the optimizer keeps of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from reshard.adapter.torch_writer import TorchFile
from reshard.canonical.content import Content, check_against_model
from reshard.canonical.optimizer_state import is_plain, parameter_and_kind
from reshard.containers.pickle_writer import Instance
from reshard.errors import RequestError
from reshard.geometry.dtypes import DType, from_torch
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.stored import count
from reshard.index.index import ParamGroup
from reshard.models.lookup import built_in_model_types, known_model_types
from reshard.models.model import Model
from reshard.plans.target import Target

from ..layout.arguments import sparse_layers
from ..layout.chunks import Chunk, Entry, LayerSpec, RankPlace, Sizes, chunks_of, entries, layer_counts
from ..layout.settings import namespace, settings_of
from ..layout.tensors import ROLES, UNTRAINED, MegatronModel

F32 = from_torch("float32", where="")
_MULTIPLE = 128
_STEP = "step"
# What torch's Adam and Transformer Engine's look for in a param group, where the source's groups do not say it; Megatron's scheduler
# sets the rates anew.
_ADAM: dict[str, Any] = {
    "lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False, "foreach": None,
    "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True, "bias_correction": True,
}  # fmt: skip
_SCHEDULER: dict[str, Any] = {
    "max_lr": 0.0, "lr_warmup_steps": 0, "num_steps": 0, "lr_decay_style": "constant", "lr_decay_steps": 1, "min_lr": 0.0,
    "start_wd": 0.0, "end_wd": 0.0, "wd_incr_style": "constant", "wd_incr_steps": 1,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Writing:
    """A checkpoint that is being laid out. rows: of the table, padding included; dtype: of the model's parameters."""

    content: Content
    target: Target
    model: MegatronModel
    sizes: Sizes
    chunks: tuple[Chunk, ...]
    spelling: LayerSpec
    rows: int
    dtype: DType

    @property
    def source_args(self) -> Mapping[str, Any]:
        """The args of the run that the source is from, if it was Megatron's."""
        found = self.content.facts.state.get("args")
        return found if isinstance(found, Mapping) else {}

    @cached_property
    def has_optimizer(self) -> bool:
        return bool(self.content.states)

    @property
    def has_masters(self) -> bool:
        return self.has_optimizer and self.dtype.itemsize < 4

    @cached_property
    def is_distributed(self) -> bool:
        """Whether the optimizer is the distributed one: as asked, or as the source's was."""
        asked = self.target.options.get("distributed_optimizer")
        if asked is not None:
            return bool(asked)
        # The distributed one keeps one count of steps, in its settings.
        known = self.source_args.get("use_distributed_optimizer")
        return bool(known) if known is not None else self.has_optimizer and not any(_STEP in kinds for kinds in self.states.values())

    @property
    def step(self) -> int:
        return self.content.facts.step or 0

    @cached_property
    def states(self) -> Mapping[str, Mapping[str, str]]:
        """parameter -> kind -> key, of what the optimizer keeps."""
        found: dict[str, dict[str, str]] = {}
        for key in self.content.states:
            parameter, kind = parameter_and_kind(key)
            found.setdefault(parameter, {})[kind] = key
        return found

    @cached_property
    def optimizer_step(self) -> int:
        """How many steps the optimizer has made, which is one number for all parameters.

        Raises: RequestError if parameters disagree.
        """
        keys = [kinds[_STEP] for kinds in self.states.values() if _STEP in kinds]
        counts = {int(self.content.read_scalar(key)) for key in keys}
        counts |= {
            int(group.settings[_STEP])
            for group in self.content.param_groups()
            if is_plain(group.settings.get(_STEP)) and _STEP in group.settings
        }
        if len(counts) > 1:
            raise RequestError(
                f"parameters have made different numbers of steps: {', '.join(map(str, sorted(counts)))}",
                why="Megatron's optimizers count them once",
                do="Leave out --optimizer",
            )
        return counts.pop() if counts else self.step

    @cached_property
    def has_steps(self) -> bool:
        """Whether every parameter's state counts its steps, as torch's Adam wants it. Transformer Engine's counts them in the param groups
        alone, and refuses to load others (transformer_engine/pytorch/optimizers/fused_adam.py); so do runs that have used it."""
        is_counted = any(_STEP in kinds for kinds in self.states.values())
        is_fused = any("bias_correction" in group.settings for group in self.content.param_groups())
        return not self.is_distributed and not self.spelling.te and (is_counted or not is_fused)

    @property
    def told(self) -> tuple[str, ...]:
        """The counts of steps that only the param groups tell."""
        return () if self.has_steps else tuple(kinds[_STEP] for kinds in self.states.values() if _STEP in kinds)

    @cached_property
    def is_stacked(self) -> bool:
        """Whether the layers of a distributed checkpoint are stacked: not if the run says that they may differ (transformer_block.py)."""
        frequency = self.settings.get("moe_layer_freq", 1)
        return type(frequency) is int and frequency == 1

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What describes the model; the layers with experts as the source's run said them, if that comes to the same."""
        found = settings_of(self.model.model)
        if "moe_layer_freq" in found and "moe_layer_freq" in self.source_args and "num_layers" in self.source_args:
            own = [layer in self.model.model.sparse_layers for layer in range(self.model.layers)]
            if sparse_layers(self.source_args) == own:
                found["moe_layer_freq"] = self.source_args["moe_layer_freq"]
        return found

    def step_tensor(self, file: TorchFile, names: Sequence[str], copies: dict[str, str]) -> Any:
        """The count of steps of parameters that share one, as a tensor of the file; the others' are copies of the first one's."""
        keys = [self.states[name][_STEP] for name in dict.fromkeys(names) if _STEP in self.states.get(name, {})]
        if not keys:
            return self.count(file)
        copies.update(dict.fromkeys(keys[1:], keys[0]))
        return file.whole(keys[0], self.content.tensors[keys[0]])

    def count(self, file: TorchFile) -> Any:
        """How many steps the optimizer has made, as a tensor of the file."""
        return file.tensor(count(_STEP, self.optimizer_step))

    def entries(self, chunk: Chunk, rank: RankPlace) -> list[Entry]:
        return list(entries(self.model, chunk, self.sizes, rank, self.spelling))

    def dtype_of(self, array: Mosaic) -> DType:
        """The element type that a tensor is stored with. Raises RequestError if its parts have different ones."""
        names = array.names
        kinds = {self.target.dtype_of(self.content.tensors[name]) for name in names}
        if len(kinds) > 1:
            raise RequestError(
                f"they have different element types: {', '.join(map(str, sorted(map(str, kinds))))}",
                where=", ".join(names),
                why="Megatron stores them as one tensor",
                do="Choose one for all with --dtype",
            )
        return kinds.pop() if kinds else self.dtype

    def kinds(self, array: Mosaic) -> tuple[str, ...]:
        """The kinds of state that have an element for each of the parameter's, its full-precision copy aside.

        Raises: RequestError if a weight has none, or others than what is fused with it.
        """
        # A rank's part of the table may be nothing but padding.
        names = array.names or (next(iter(self.states)),)
        if lost := [name for name in names if name not in self.states]:
            raise RequestError(
                "the optimizer keeps nothing of it",
                where=lost[0],
                why="Megatron's optimizers have state of every parameter",
                do="Leave out --optimizer, or give a checkpoint in which all was trained",
            )
        first = tuple(sorted(self._elementwise(names[0])))
        if differing := [name for name in names if tuple(sorted(self._elementwise(name))) != first]:
            raise RequestError(f"the optimizer keeps other state of it than of {names[0]}, with which it is fused", where=differing[0])
        return first

    def _elementwise(self, name: str) -> Iterator[str]:
        for kind, key in self.states[name].items():
            if kind != "master_param" and self.content.tensors[key].shape == self.content.tensors[name].shape:
                yield kind

    def state_array(self, array: Mosaic, kind: str) -> Mosaic:
        """The same array of what the optimizer keeps."""
        return array.renamed(lambda name: self.states[name][kind])

    def group_settings(self, names: Sequence[str], *, is_decayed: bool, is_expert: bool) -> dict[str, Any]:
        """A param group's settings: those of the source's group that the first of these parameters is in."""
        groups = self.content.param_groups()
        own: ParamGroup | None = next((group for name in names for group in groups if name in group.names), groups[0] if groups else None)
        kept = {key: value for key, value in (own.settings if own else {}).items() if is_plain(value)}
        flags = {"wd_mult": 1.0 if is_decayed else 0.0, "lr_mult": 1.0, "is_expert_parallel": is_expert, "is_decoupled_lr": False}
        return {**_ADAM, "default_config": True, **flags, **kept, "is_expert_parallel": is_expert, _STEP: self.optimizer_step}

    def scheduler(self) -> dict[str, Any]:
        """The state of the learning-rate schedule: the source's, or one that has run for as many steps."""
        known = self.content.facts.state.get("opt_param_scheduler")
        return dict(known) if isinstance(known, Mapping) else {**_SCHEDULER, "num_steps": self.step}

    def args(self, **own: Any) -> Instance:
        """The run's settings."""
        settings = {
            "params_dtype": self.dtype.torch,
            "transformer_impl": "transformer_engine" if self.spelling.te else "local",
            "make_vocab_size_divisible_by": self._multiple,
            "use_distributed_optimizer": self.is_distributed,
            "iteration": self.step,
            "no_save_rng": True,
            "moe_grouped_gemm": self.spelling.experts != "sequential",
            "moe_use_legacy_grouped_gemm": self.spelling.experts == "grouped",
            **own,
        }
        return namespace(self.settings, self.source_args, self.sizes, self.chunks, self.rows, settings)

    @property
    def _multiple(self) -> int:
        return vocabulary_multiple(self.target, self.source_args)

    def notes(self) -> tuple[str, ...]:
        """What who loads it has to know."""
        found = []
        if added := self.rows - self.model.model.dimensions["vocab"]:
            found.append(f"{added} rows of zeros pad the vocabulary to {self.rows}, as Megatron does for --tp {self.sizes.tp}")
        if any(self.target.dtype_of(self.content.tensors[name]) != F32 for name in self._buffers):
            found.append("the routers' score corrections are widened to fp32, as Megatron keeps them")
        if self.has_optimizer:
            found.append("load it with --no-load-rng: random states belong to the ranks of the run that they were saved in")
            if "opt_param_scheduler" not in self.content.facts.state:
                found.append("the source has no schedule of Megatron's: load it with --override-opt-param-scheduler")
        return tuple(found)

    @property
    def _buffers(self) -> list[str]:
        return [part.tensor for part in self.model.model.parts if part.role in UNTRAINED and part.tensor in self.content.tensors]

    @cached_property
    def copies(self) -> dict[str, str]:
        """Canonical tensors that others stand for: the extra layers' copies of the model's ends."""
        model, found = self.model.model, {}
        ends = {part.role: part.tensor for part in model.parts if part.layer is None}
        if model.is_tied:
            ends["head"] = ends["embedding"]
        for part in model.parts:
            if part.role in ("extra.embedding", "extra.head") and part.tensor in self.content.tensors:
                found[part.tensor] = ends[part.role.removeprefix("extra.")]
        return found


def vocabulary_multiple(target: Target, args: Mapping[str, Any]) -> int:
    said = target.options.get("vocab_multiple") or args.get("make_vocab_size_divisible_by")
    return said if isinstance(said, int) and said > 0 else _MULTIPLE


def begin_writing(content: Content, target: Target, what: str) -> Writing:
    """Raises: RequestError if the model is not known, cannot be Megatron's, or does not divide by the sizes."""
    target.parallel.allow("tp", "pp", "ep", what=what)
    model = _model(content)
    check_against_model(content, partial=False, strict=True)
    options, parallel = target.options, target.parallel
    args = content.facts.state.get("args")
    args = args if isinstance(args, Mapping) else {}
    sizes = Sizes(parallel.tp, parallel.pp, parallel.ep, options.get("vp") or 1, options.get("etp") or parallel.tp)
    _check_sizes(model, sizes)
    unit = vocabulary_multiple(target, args) * sizes.tp
    rows = -(-model.dimensions["vocab"] // unit) * unit
    impl = options.get("transformer_impl") or args.get("transformer_impl") or "transformer_engine"
    counts = layer_counts(model.dimensions["layers"], sizes, options.get("stage_layers"))
    embedding = content.tensors[next(part.tensor for part in model.parts if part.role == "embedding")]
    return Writing(
        content,
        target,
        MegatronModel(model, rows),
        sizes,
        tuple(chunks_of(counts, sizes.pp)),
        LayerSpec.of(args, impl, options.get("experts")),
        rows,
        target.dtype_of(embedding),
    )


def _model(content: Content) -> Model:
    """The model, without extra layers where the source has none."""
    model = content.model
    if model is None:
        raise RequestError(
            "Megatron's layout of fused weights needs the model's architecture, which is not known",
            why=f"Declared are {', '.join(known_model_types())}",
            do="Give the model's Hugging Face config with --model DIR, and a declaration with --architecture FILE if it is none of these",
        )
    if model.architecture.family not in built_in_model_types():
        raise RequestError(
            f"which of Megatron's norms, positions and routers a {model.architecture.model_type} model has is not known",
            why="Its declaration tells of weights; Megatron's settings also tell what is computed with them",
            do="If it computes what a built-in model computes, add `like:` and that model's name to the declaration",
        )
    if model.config.get("use_parallel_residual", model.architecture.family == "gpt_neox"):
        raise RequestError(
            "the config says use_parallel_residual, which Megatron-Core does not compute",
            why="Its layers add attention before the MLP; the weights would load and mean another model",
        )
    _check_biases(model)
    if model.quantization:
        raise RequestError(
            f"the weights are quantised ({model.quantization.method}), Megatron's are not",
            why="Its layers would take the quantised elements for values",
            do="Make values of them with --dequantize",
        )
    if foreign := [part for part in model.parts if part.role not in ROLES]:
        raise RequestError(
            f"Megatron-Core's layers have no such part ({foreign[0].role})",
            where=foreign[0].tensor,
            why=f"How it would keep a {model.architecture.model_type} model is not known, and is not guessed",
        )
    if model.extra_layers and not any(weight.optional and weight.name in content.tensors for weight in model.weights.values()):
        return Model(model.architecture, {**model.config, str(model.architecture.extra_layers): 0})
    return model


_LINEAR = ("attention.o", "mlp.up", "mlp.down", "expert.up", "expert.down", "shared_expert.up", "shared_expert.down")


def _check_biases(model: Model) -> None:
    """Raises RequestError if some linear layers have biases and others have none: add_bias_linear speaks for all of them."""
    roles: dict[str, set[str]] = {}
    for part in model.parts:
        roles.setdefault(part.role, set()).add(part.parameter)
    linear = [role for role in _LINEAR if "weight" in roles.get(role, ())]
    biased = [role for role in linear if "bias" in roles[role]]
    fused = "bias" in roles.get("attention.q", ())
    if (biased and len(biased) < len(linear)) or (biased and "attention.q" in roles and not fused):
        raise RequestError(
            f"{', '.join(biased)} have biases, other linear layers of the model have none",
            why="Megatron-Core gives biases to all linear layers or to none of them (add_bias_linear), and would miss them when loading",
        )


def _check_sizes(model: Model, sizes: Sizes) -> None:
    experts = model.dimensions.get("experts", 0)
    if sizes.ep > 1 and not experts:
        raise RequestError(f"--ep {sizes.ep}: a {model.architecture.model_type} model has no experts", do="Leave out --ep")
    if experts % sizes.ep:
        fitting = [ep for ep in range(1, experts + 1) if experts % ep == 0]
        raise RequestError(
            f"--ep {sizes.ep} does not divide {experts} experts", do=f"Legal expert-parallel sizes are {', '.join(map(str, fitting))}"
        )
    if sizes.tp % sizes.etp:
        raise RequestError(
            f"--etp {sizes.etp} does not divide --tp {sizes.tp}",
            why="Megatron's file names hold the tensor- and the expert-parallel rank, which then would not tell the ranks apart",
        )
    if sizes.vp > 1 and sizes.pp == 1:
        raise RequestError(f"--vp {sizes.vp} needs several stages (--pp)", why="Megatron interleaves chunks of different stages")
    heads, groups = model.dimensions["heads"], model.dimensions["kv_heads"]
    if heads % sizes.tp:
        fitting = [tp for tp in range(1, heads + 1) if heads % tp == 0]
        raise RequestError(
            f"--tp {sizes.tp} does not divide {heads} attention heads", do=f"Legal sizes are among {', '.join(map(str, fitting))}"
        )
    if groups % sizes.tp and sizes.tp % groups:
        raise RequestError(
            f"--tp {sizes.tp} and {groups} query groups: neither divides the other",
            why="Megatron-Core refuses it",
            do="Choose another --tp",
        )
