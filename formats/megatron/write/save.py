"""A Megatron save that is being laid out: what both formats need of the model, the optimizer, the settings and the target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from reshard.adapter.format import EXPERTS_OF_MODELS, check_experts
from reshard.adapter.torch_writer import TorchFile
from reshard.canonical.content import Content, check_against_model
from reshard.canonical.optimizer_state import STEP, counts_of_groups, parameter_and_kind, plain_settings
from reshard.containers.pickle_writer import Call, Instance
from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.dtypes import DType, from_torch
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.quantities import plural
from reshard.geometry.sections import step_count
from reshard.geometry.value import value
from reshard.models.model import Model
from reshard.plans.layout import Sidecar, Target

from ..layout.arguments import sparse_layers
from ..layout.chunks import ChunkTensor, Entry, RankView
from ..layout.hybrid import gpt_settings
from ..layout.names import LayerSpec
from ..layout.save_folders import TRACKER
from ..layout.settings import model_settings, namespace, rank_settings
from ..layout.stages import Args, Chunk, ParallelSizes, Rank, chunks_of_target
from ..layout.tensors import BUFFER_ROLES, MTP_COPIES, MegatronModel, computation_of, is_hybrid
from .check_model import check_sizes, check_spec, megatron_compatible_model

F32 = from_torch("float32", where="")
_VOCABULARY_MULTIPLE = 128
_SCHEDULER: dict[str, Any] = {
    "max_lr": 0.0, "lr_warmup_steps": 0, "num_steps": 0, "lr_decay_style": "constant", "lr_decay_steps": 1, "min_lr": 0.0,
    "start_wd": 0.0, "end_wd": 0.0, "wd_incr_style": "constant", "wd_incr_steps": 1,
}  # fmt: skip
# Settings that torch's Adam and Transformer Engine's look for in a param group. They stand in for what the source's groups lack;
# Megatron's scheduler sets the learning rates again.
_ADAM: dict[str, Any] = {
    "lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False, "foreach": None,
    "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True, "bias_correction": True,
}  # fmt: skip


@value(slots=False, eq=False)
class OptimizerContent:
    """The optimizer's part of the source's content."""

    content: Content
    """The source's content."""

    @cached_property
    def keys(self) -> Mapping[str, Mapping[str, str]]:
        """Weight -> {torch's name for a kind of state: key of that state among the content's tensors}."""
        keys: dict[str, dict[str, str]] = {}
        for key in self.content.states:
            weight, kind = parameter_and_kind(key)
            keys.setdefault(weight, {})[kind] = key
        return keys

    @property
    def has_muon(self) -> bool:
        """Whether some weights have Muon's state and some Adam's."""
        return {"momentum_buffer", "exp_avg"} <= {kind for kinds in self.keys.values() for kind in kinds}

    @property
    def step_keys(self) -> tuple[str, ...]:
        """The keys of the step counts that the source keeps per weight; empty if it keeps one step count for all weights."""
        return tuple(kinds[STEP] for kinds in self.keys.values() if STEP in kinds)

    @cached_property
    def step(self) -> int:
        """The number of steps that the optimizer has made. Raises RequestError if weights have made different numbers of steps."""
        counts = {int(self.content.read_scalar(key)) for key in self.step_keys}
        counts |= {*counts_of_groups(self.content.param_groups()).values()}
        if len(counts) > 1:
            raise RequestError(
                f"parameters have made different numbers of steps: {', '.join(map(str, sorted(counts)))}",
                why="Megatron's optimizers have one step count for all parameters",
                do="Leave out `optimizer=True`",
            )
        return counts.pop() if counts else self.content.facts.step or 0

    def kinds(self, array: Mosaic) -> tuple[str, ...]:
        """The kinds of elementwise state, without masters, of a parameter with this array.

        Raises: RequestError if a weight in the array has no state, or other state than the weights that are fused with it.
        """
        # A rank's shard of the embedding can be padding only; it has the kinds of any other weight.
        names = array.names or (next(iter(self.keys)),)
        if missing := [name for name in names if name not in self.keys]:
            raise RequestError(
                "the optimizer has no state of it",
                where=missing[0],
                why="Megatron's optimizers have state of every parameter",
                do="Leave out `optimizer=True`, or give a checkpoint in which all weights were trained",
            )
        kinds = tuple(sorted(self._elementwise_kinds(names[0])))
        if differing := [name for name in names if tuple(sorted(self._elementwise_kinds(name))) != kinds]:
            raise RequestError(f"the optimizer has other state of it than of {names[0]}, with which it is fused", where=differing[0])
        return kinds

    def _elementwise_kinds(self, name: str) -> Iterator[str]:
        for kind, key in self.keys[name].items():
            if kind != "master_param" and self.content.tensors[key].shape == self.content.tensors[name].shape:
                yield kind

    def state_array(self, array: Mosaic, kind: str) -> Mosaic:
        """The array with each weight replaced by its state of that kind."""
        return array.renamed(lambda name: self.keys[name][kind])

    def step_tensor(self, file: TorchFile, names: Sequence[str]) -> Call:
        """Add the step count of these weights to the file: that of the first weight with a step count, or else `step`."""
        keys = self._step_keys_of(names)
        if not keys:
            return file.tensor(step_count(STEP, self.step))
        return file.whole(keys[0], self.content.tensors[keys[0]])

    def aliases(self, parameters: Iterable[ChunkTensor], steps_shared_by: Iterable[Sequence[str]]) -> dict[str, str]:
        """The masters and step counts that the plain optimizer does not store -> the stored tensor with the same values: a weight that is
        its own master; the step count that `step_tensor` stores for several weights."""
        own = (name for parameter in parameters if parameter.is_own_master for name in parameter.array.names)
        aliases = {self.keys[name]["master_param"]: name for name in own if name in self.keys}
        for names in steps_shared_by:
            if keys := self._step_keys_of(names):
                aliases |= dict.fromkeys(keys[1:], keys[0])
        return aliases

    def _step_keys_of(self, names: Sequence[str]) -> list[str]:
        return [self.keys[name][STEP] for name in dict.fromkeys(names) if STEP in self.keys.get(name, {})]

    def param_groups(self, parameters: Sequence[ChunkTensor], *, is_expert: bool) -> list[tuple[dict[str, Any], list[ChunkTensor]]]:
        """(settings, parameters) of an optimizer's groups with and without weight decay. Dense weights have both, even if one is empty.

        The settings are those of the source's group of the first weight that is in one.
        Raises: RequestError if some weights have Muon's state and some Adam's.
        """
        if self.has_muon:
            raise RequestError(
                "`optimizer=True`: the optimizer keeps Muon's momentum of some weights and Adam's moments of others",
                why="reshard does not write Megatron's chain of two such optimizers, and in one the settings of the groups would be lost",
                do="Leave out `optimizer=True`, or choose dcp, fsdp, deepspeed or universal, which keep both",
            )
        groups = self.content.param_groups()
        parsed_groups: list[tuple[dict[str, Any], list[ChunkTensor]]] = []
        for is_decayed in (True, False):
            members = [parameter for parameter in parameters if parameter.is_decayed is is_decayed]
            names = (name for member in members for name in member.array.names)
            group = next((group for name in names for group in groups if name in group.names), groups[0] if groups else None)
            flags = {"wd_mult": 1.0 if is_decayed else 0.0, "lr_mult": 1.0, "is_expert_parallel": is_expert, "is_decoupled_lr": False}
            source = plain_settings(group.settings) if group else {}
            settings = {**_ADAM, "default_config": True, **flags, **source, "is_expert_parallel": is_expert, STEP: self.step}
            if members or is_decayed or not is_expert:
                parsed_groups.append((settings, members))
        return parsed_groups


@value(slots=False, eq=False, repr=False)
class MegatronSave:
    """A save that is being laid out."""

    content: Content
    """What is written."""
    target: Target
    """What the user asks for."""
    model: MegatronModel
    """The model under Megatron's names."""
    sizes: ParallelSizes
    """The target's parallel sizes."""
    chunks: tuple[Chunk, ...]
    """The chunks of all stages, in the order of the model."""
    spec: LayerSpec
    """The layer classes of the run that will load it."""
    source_args: Args
    """The settings of the run that wrote the source; empty if it was not Megatron's."""
    dtype: DType
    """The element type of the parameters."""

    @property
    def step(self) -> int:
        """The iteration of the save."""
        return self.content.facts.step or 0

    @property
    def name(self) -> str:
        """The name of the save's folder. Weights alone are a "release", with which Megatron starts a new run."""
        return f"iter_{self.step:07d}" if self.has_optimizer else "release"

    @property
    def tracker(self) -> Sidecar:
        """The file that names the save."""
        return Sidecar(TRACKER, (str(self.step) if self.has_optimizer else "release").encode())

    # ---- the optimizer ----

    @cached_property
    def optimizer(self) -> OptimizerContent:
        """What the source's optimizer keeps."""
        return OptimizerContent(self.content)

    @cached_property
    def has_optimizer(self) -> bool:
        """Whether optimizer state is written."""
        return bool(self.content.states)

    @property
    def has_masters(self) -> bool:
        """Whether masters are written beside the weights."""
        return self.has_optimizer and self.dtype.itemsize < 4

    @cached_property
    def is_distributed_optimizer(self) -> bool:
        """Whether the optimizer is the distributed one: as the user asks, or as in the source."""
        requested = self.target.options.get("distributed_optimizer")
        if requested is not None:
            return bool(requested)
        in_source = self.source_args.get("use_distributed_optimizer")
        if in_source is not None:
            return bool(in_source)
        # The distributed optimizer has no step counts of single parameters.
        return self.has_optimizer and not self.optimizer.step_keys

    @cached_property
    def has_step_tensors(self) -> bool:
        """Whether the state of every parameter has a step count, as torch's Adam wants it.

        Transformer Engine's FusedAdam keeps its step count in the param groups only, and refuses to load step counts of parameters
        (transformer_engine/pytorch/optimizers/fused_adam.py). So they are left out for runs that use it.
        """
        is_fused_adam = any("bias_correction" in group.settings for group in self.content.param_groups())
        uses_torch_adam = bool(self.optimizer.step_keys) or not is_fused_adam
        return not self.is_distributed_optimizer and not self.spec.te and uses_torch_adam

    def by_optimizer(self, parameters: Sequence[ChunkTensor]) -> list[list[ChunkTensor]]:
        """The parameters of each of the chained optimizers: with expert parallelism, experts have an optimizer of their own."""
        if self.sizes.ep == 1:
            return [list(parameters)]
        return [[parameter for parameter in parameters if parameter.is_expert is is_expert] for is_expert in (False, True)]

    @property
    def inlined_scalars(self) -> tuple[str, ...]:
        """The step counts of the content that are written only as a setting of the param groups."""
        return () if self.has_step_tensors else self.optimizer.step_keys

    # ---- settings ----

    @cached_property
    def model_settings(self) -> dict[str, Any]:
        """The settings that describe the model. moe_layer_freq is the source's value if it selects the same layers."""
        settings, source = model_settings(self.model.model), self.source_args
        if "moe_layer_freq" not in settings or not {"moe_layer_freq", "num_layers"} <= source.keys():
            return settings
        if sparse_layers(source) == [self.model.is_sparse(layer) for layer in range(self.model.layers)]:
            settings["moe_layer_freq"] = source["moe_layer_freq"]
        return settings

    @property
    def stacks_layers(self) -> bool:
        """Whether a distributed save stacks the layers: not if the settings say that layers may differ (transformer_block.py)."""
        settings = self.model_settings
        frequencies = settings.get("moe_layer_freq", 1), settings.get("linear_attention_freq", 1)
        return not is_hybrid(self.model.model) and all(type(frequency) is int and frequency == 1 for frequency in frequencies)

    def args(self, **format_settings: Any) -> Instance:
        """The settings of the run, as Megatron stores them. format_settings: settings of one format, which override all others."""
        mtp_layers = self.model_settings.get("mtp_num_layers") or 0
        return namespace(
            {
                **self.source_args,
                **self.model_settings,
                **rank_settings(self.sizes, self.chunks, self.model.padded_vocab, mtp_layers),
                "params_dtype": self.dtype.torch,
                "transformer_impl": "transformer_engine" if self.spec.te else "local",
                "make_vocab_size_divisible_by": _vocabulary_multiple(self.target, self.source_args),
                "use_distributed_optimizer": self.is_distributed_optimizer,
                "iteration": self.step,
                "no_save_rng": True,
                "moe_grouped_gemm": self.spec.experts != "sequential",
                "moe_use_legacy_grouped_gemm": self.spec.experts == "grouped",
                **format_settings,
            }
        )

    def root(self, **format_settings: Any) -> dict[str, Any]:
        """What the state of a run begins with. format_settings: settings of one format."""
        return {
            "args": self.args(**format_settings),
            "checkpoint_version": 3.0,
            "iteration": self.step,
            "num_floating_point_operations_so_far": 0,
        }

    def scheduler(self) -> dict[str, Any]:
        """The state of the learning-rate schedule: the source's, or a new one after the same number of steps."""
        state = self.content.facts.state.get("opt_param_scheduler")
        return dict(state) if isinstance(state, Mapping) else {**_SCHEDULER, "num_steps": self.step}

    # ---- tensors ----

    def chunks_of(self, rank: Rank) -> list[Chunk]:
        """The chunks of a rank's stage."""
        return [chunk for chunk in self.chunks if chunk.stage == rank.pp_rank]

    def entries(self, chunk: Chunk, rank: Rank) -> list[Entry]:
        """The entries of a rank's chunk, with the element types in which they are stored."""
        entries = RankView(self.model, chunk, self.sizes, rank, self.spec).entries()
        return [
            (name, tensor and replace(tensor, dtype=self.dtype_of(tensor.array) if tensor.is_parameter else F32))
            for name, tensor in entries
        ]

    def dtype_of(self, array: Mosaic) -> DType:
        """The element type of a stored tensor. Raises RequestError if its parts have different ones."""
        functions = self.model.functions
        dtypes = {self.target.dtype_of(self.content.tensors[name]).of(functions.get(name, "")) for name in array.names}
        if len(dtypes) > 1:
            raise RequestError(
                f"they have different element types: {', '.join(sorted(map(str, dtypes)))}",
                where=", ".join(array.names),
                why="Megatron stores them as one tensor",
                do="Choose one element type for all with `dtype=`",
            )
        return dtypes.pop() if dtypes else self.dtype

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Tensor of an MTP layer -> the tensor of the model with the same values, which is stored once for both."""
        model = self.model.model
        tensors = {part.role: part.tensor for part in model.parts() if part.layer is None}
        if model.is_tied:
            tensors["head"] = tensors["embedding"]
        copies = [part for part in model.parts() if part.role in MTP_COPIES and part.tensor in self.content.tensors]
        return {part.tensor: tensors[MTP_COPIES[part.role]] for part in copies}

    def notes(self) -> tuple[str, ...]:
        """What someone who loads the save has to know."""
        notes = []
        padded_vocab = self.model.padded_vocab
        if padding := padded_vocab - self.model.model.dimensions["vocab"]:
            notes.append(f"{padding} rows of zeros pad the vocabulary to {padded_vocab}, as Megatron does for `tp={self.sizes.tp}`")
        buffers = [part.tensor for part in self.model.model.parts() if part.role in BUFFER_ROLES and part.tensor in self.content.tensors]
        if any(self.target.dtype_of(self.content.tensors[name]) != F32 for name in buffers):
            notes.append("the score corrections of the routers are widened to fp32, as Megatron stores them")
        if functions := set(self.model.functions.values()):
            notes.append(
                f"of {plural(len(self.model.functions), 'weight')} such as {next(iter(self.model.functions))} Megatron stores "
                f"{' and '.join(sorted(functions))}, rounded to the element type"
            )
        if self.aliases:
            copies = ", ".join(f"{copy} (of {stored})" for copy, stored in self.aliases.items())
            notes.append(f"copies are compared and stored once, and a conversion back to hf does not write them again: {copies}")
        if library := computation_of(self.model.model).built_by:
            notes.append(f"the model is built by {library}: Megatron-LM's own arguments do not describe it")
        if not self.has_optimizer:
            notes.append("weights alone are a `release`: Megatron starts a new run from them, at iteration 0")
        elif self.content.facts.step is None:
            notes.append("the source does not tell its iteration, so the save is of iteration 0")
        if self.has_optimizer:
            notes.append("load it with --no-load-rng: random states belong to the ranks of the run that saved them")
            if "opt_param_scheduler" not in self.content.facts.state:
                notes.append("the source has no state of Megatron's schedule: load it with --override-opt-param-scheduler")
        return tuple(notes)

    def __repr__(self) -> str:
        return f"<save {self.name}: {self.model.layers} layers in {len(self.chunks)} chunks, {self.sizes}>"


def begin_save(content: Content, target: Target) -> MegatronSave:
    """The save of `content` that `target` asks for.

    Raises: RequestError if the model is not known, Megatron cannot hold it, or it does not divide by the parallel sizes.
    """
    target.parallel.allow("tp", "pp", "ep", what="a Megatron checkpoint")
    model = megatron_compatible_model(content)
    check_against_model(content, partial=False, strict=True)
    if content.states and computation_of(model).values:
        raise UnsupportedError(
            f"the optimizer state of a {model.architecture.model_type} model is not written",
            why="Its masters are of weights, some of which Megatron stores in another form",
            do="Leave out `optimizer=True`",
        )
    options, parallel, args = target.options, target.parallel, content.facts.state.get("args")
    args = gpt_settings(args) if isinstance(args, Mapping) else {}
    _refuse_unused(options, content, model)
    sizes = ParallelSizes(parallel.tp, parallel.pp, parallel.ep, options.get("vp") or 1, options.get("etp") or parallel.tp)
    check_sizes(model, sizes)
    multiple = _vocabulary_multiple(target, args) * sizes.tp
    padded_vocab = -(-model.dimensions["vocab"] // multiple) * multiple
    transformer_impl = options.get("transformer_impl") or args.get("transformer_impl") or "transformer_engine"
    chunks = chunks_of_target(model.dimensions["layers"], sizes, options.get("stage_layers"))
    embedding = content.tensors[next(part.tensor for part in model.parts() if part.role == "embedding")]
    check_experts(options, "megatron", EXPERTS_OF_MODELS)
    spec = LayerSpec.from_args(args, transformer_impl, options.get("experts"))
    if is_hybrid(model) and not args and not options.get("experts"):
        spec = replace(spec, experts="te-grouped")  # MambaModel's spec has no other experts
    spec = replace(spec, extra_state=bool(options.get("extra_state")))
    check_spec(model, spec)
    return MegatronSave(content, target, MegatronModel(model, padded_vocab), sizes, chunks, spec, args, target.dtype_of(embedding))


def _vocabulary_multiple(target: Target, args: Args) -> int:
    """The multiple per tensor-parallel rank to which the vocabulary is padded (--make-vocab-size-divisible-by)."""
    multiple = target.options.get("vocab_multiple") or args.get("make_vocab_size_divisible_by")
    return multiple if isinstance(multiple, int) and multiple > 0 else _VOCABULARY_MULTIPLE


def _refuse_unused(options: Mapping[str, Any], content: Content, model: Model) -> None:
    """Raises RequestError for an option that changes nothing in the files."""
    if "distributed_optimizer" in options and not content.states:
        flag = "`distributed_optimizer=True`" if options["distributed_optimizer"] else "`plain_optimizer=True`"
        raise RequestError(f"{flag} without `optimizer=True`: no optimizer state is written", do="Add `optimizer=True`, or leave it out")
    if options.get("extra_state") and options.get("transformer_impl") == "local":
        raise RequestError(
            "`extra_state=True`: Megatron's local layers have no such states",
            do="Leave it out, or choose `transformer_impl=transformer_engine`",
        )
    for name in ("experts", "etp"):
        if name in options and "experts" not in model.dimensions:
            raise RequestError(f"`{name}=`: a {model.architecture.model_type} model has no experts", do="Leave it out")
