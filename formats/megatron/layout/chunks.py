"""What a rank's chunk of the model holds: its layers, and its tensors by the names and in the order that Megatron gives them there."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from reshard.errors import RequestError
from reshard.geometry.mosaics import Mosaic

from .tensors import BUFFERS, TABLE, MegatronModel, MegatronTensor, Tensors


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes of a run. vp: chunks per stage; etp: tensor-parallel size of the experts."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    vp: int = 1
    etp: int = 1

    @property
    def per_stage(self) -> int:
        """How many ranks a stage has at least."""
        return math.lcm(self.tp, self.etp * self.ep)

    def ranks(self) -> Iterator[RankPlace]:
        """Those ranks of a stage that write files of their own (core/parallel_state.py): one of each tensor- and expert-parallel rank."""
        seen: set[tuple[str, int, int]] = set()
        for rank in range(self.per_stage):
            tp, ep, etp = rank % self.tp, rank // self.etp % self.ep, rank % self.etp
            if ("file", tp, ep) not in seen:
                yield RankPlace(tp, ep, etp, rank, ("dense", tp, 0) not in seen, ("experts", ep, etp) not in seen)
                seen |= {("file", tp, ep), ("dense", tp, 0), ("experts", ep, etp)}


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's tensor-parallel rank, its expert-parallel rank, that among the ranks that share experts, and its number in the stage.
    has_dense, has_experts: whether it is the first that has its part of what is dense, of the experts."""

    tp: int
    ep: int
    etp: int
    number: int = 0
    has_dense: bool = True
    has_experts: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunk `number` of a stage, with these of the model's layers; whether it is the first, the last of all."""

    stage: int
    number: int
    layers: range
    is_first: bool
    is_last: bool


def chunks_of(counts: Sequence[int], pp: int) -> list[Chunk]:
    """All chunks; `counts` are their layers in the order of the model: chunk 0 of every stage, then chunk 1 of every stage."""
    found, start = [], 0
    for i, count in enumerate(counts):
        found.append(Chunk(i % pp, i // pp, range(start, start + count), i == 0, i == len(counts) - 1))
        start += count
    return found


def layer_counts(layers: int, sizes: Sizes, asked: Sequence[int] | None) -> tuple[int, ...]:
    """The layers of every chunk: as asked, or equal.

    Raises: RequestError if they do not divide, or what was asked does not come to the model's.
    """
    chunks = sizes.pp * sizes.vp
    if asked is None:
        if layers % chunks:
            fitting = [pp for pp in range(1, layers + 1) if layers % (pp * sizes.vp) == 0]
            raise RequestError(
                f"{layers} layers do not divide by {chunks} chunks ({sizes.pp} stages{f' of {sizes.vp} chunks' if sizes.vp > 1 else ''})",
                do=f"Legal pipeline-parallel sizes are {', '.join(map(str, fitting))}; or say how many layers each has: --stage-layers",
            )
        return (layers // chunks,) * chunks
    if len(asked) != chunks or sum(asked) != layers:
        raise RequestError(
            f"--stage-layers {','.join(map(str, asked))}: {len(asked)} chunks with {sum(asked)} layers",
            why=f"The model has {layers} layers, and there are {chunks} chunks"
            + (", chunk 0 of every stage before chunk 1 of any" if sizes.vp > 1 else ""),
            do=f"Give {chunks} numbers that come to {layers}",
        )
    return tuple(asked)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A tensor of a chunk, or, where there is no array, an entry that is None: state of an FP8 recipe that is not used.

    is_shared: other stages have the same table. shape: under which the array's memory is stored, if not its own.
    """

    name: str
    array: Mosaic | None = None
    is_expert: bool = False
    is_shared: bool = False
    shape: tuple[int, ...] | None = None

    @property
    def is_parameter(self) -> bool:
        return self.array is not None and not any(self.name.endswith(buffer) for buffer in BUFFERS)


_DOWN = re.compile(r"self_attention\.linear_(q|kv)_down_proj\.")
Experts = Literal["sequential", "grouped", "te-grouped"]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Which classes the run builds its layers of.

    te: Transformer Engine's, which take a norm into the linear layer after it. experts: whether each is an MLP ("sequential"), those of a
    rank are two tensors ("grouped"), or two layers with a weight for each ("te-grouped").
    """

    te: bool = False
    experts: Experts = "sequential"

    @classmethod
    def of(cls, args: Mapping[str, Any], impl: str, experts: Experts | None = None) -> LayerSpec:
        """That of a run with these settings and transformer_impl; experts: if they are to be others than the settings say."""
        te = impl == "transformer_engine"
        if not args.get("moe_grouped_gemm"):
            return cls(te, experts or "sequential")
        return cls(te, experts or ("grouped" if impl == "local" or args.get("moe_use_legacy_grouped_gemm") else "te-grouped"))

    def tensors(self, layer: Tensors) -> Tensors:
        """A layer's tensors, of which Transformer Engine's ranks all hold the projections into latent spaces whole (parallel_mode
        "duplicated", multi_latent_attention.py)."""
        return {name: replace(tensor, axis=None) if self.te and _DOWN.match(name) else tensor for name, tensor in layer.items()}

    def name(self, name: str, *, sparse: bool, latent: bool) -> str:
        if not self.te:
            return name
        module, _, kind = name.rpartition(".")
        fused = {
            "input_layernorm": None if latent else "self_attention.linear_qkv",
            "pre_mlp_layernorm": None if sparse else "mlp.linear_fc1",
            "self_attention.q_layernorm": "self_attention.linear_q_up_proj" if latent else None,
            "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
        }.get(module)
        return f"{fused}.layer_norm_{kind}" if fused else name


def entries(model: MegatronModel, chunk: Chunk, sizes: Sizes, rank: RankPlace, spelling: LayerSpec) -> Iterator[Entry]:
    """The entries of a rank's chunk, in the order of its state dict.

    Raises: RequestError if the ranks do not divide a tensor.
    """
    tp_rank, ends = rank.tp, model.ends
    is_shared = sizes.pp > 1 and (model.model.is_tied or model.extra_layers > 0)
    has_extra = chunk.is_last and model.extra_layers > 0
    if chunk.is_first or has_extra:
        shared = is_shared and not (chunk.is_first and chunk.is_last)
        for name, tensor in ends.items():
            if name.startswith("embedding.") and (chunk.is_first or name == TABLE):
                yield Entry(name, _cut(name, tensor, sizes.tp, tp_rank), is_shared=shared and name == TABLE)
    for number, layer in enumerate(chunk.layers):
        yield from _layer(model, f"decoder.layers.{number}.", layer, sizes, rank, spelling)
    # With layers for multi-token prediction the norm follows the last decoder layer, wherever that is (transformer_block.py).
    if model.layers - 1 in chunk.layers if model.extra_layers else chunk.is_last:
        yield from (_entry(name, ends[name], sizes.tp, tp_rank) for name in ends if name.startswith("decoder."))
    if chunk.is_last:
        for extra in range(model.extra_layers):
            yield from _extra(model, f"mtp.layers.{extra}.", extra, sizes, rank, spelling)
        if not (model.model.is_tied and chunk.is_first):
            for name in ends:
                if name.startswith("output_layer."):
                    shared = is_shared and model.model.is_tied and not model.extra_layers
                    yield Entry(name, _cut(name, ends[name], sizes.tp, tp_rank), is_shared=shared)
        yield Entry("output_layer._extra_state")


def _layer(model: MegatronModel, prefix: str, layer: int, sizes: Sizes, rank: RankPlace, spelling: LayerSpec) -> Iterator[Entry]:
    tensors, sparse = spelling.tensors(model.layer(layer)), model.is_sparse(layer)

    def spelled(some: Tensors) -> Iterator[Entry]:
        renamed = _fused_first({spelling.name(name, sparse=sparse, latent=model.is_latent): tensor for name, tensor in some.items()})
        yield from _with_state({prefix + name: tensor for name, tensor in renamed.items()}, sizes.tp, rank.tp)

    shared = {name: tensor for name, tensor in tensors.items() if name.startswith("mlp.shared_experts.")}
    yield from spelled({name: tensor for name, tensor in tensors.items() if name not in shared})
    if sparse:
        own = model.experts // sizes.ep
        experts = range(rank.ep * own, (rank.ep + 1) * own)
        yield from _EXPERTS[spelling.experts](model, f"{prefix}mlp.experts.", layer, experts, sizes.etp, rank.etp)
    yield from spelled(shared)


def _fused_first(tensors: Tensors) -> Tensors:
    """A norm that is fused into a layer comes where that layer comes, before its weight."""
    fused = {name: tensor for name, tensor in tensors.items() if ".layer_norm_" in name}
    found: dict[str, MegatronTensor] = {}
    for name, tensor in tensors.items():
        if name not in fused:
            module = name.rpartition(".")[0]
            found |= {norm: fused[norm] for norm in fused if norm.startswith(module + ".layer_norm_") and norm not in found}
            found[name] = tensor
    return found


def _sequential(model: MegatronModel, prefix: str, layer: int, experts: range, etp: int, rank: int) -> Iterator[Entry]:
    for number, expert in enumerate(experts):
        named = {f"{prefix}local_experts.{number}.{name}": tensor for name, tensor in model.expert(layer, expert).items()}
        for entry in _with_state(named, etp, rank):
            yield replace(entry, is_expert=True)


def _grouped(model: MegatronModel, prefix: str, layer: int, experts: range, etp: int, rank: int) -> Iterator[Entry]:
    """[experts, hidden, 2 * intermediate] as [hidden, experts * 2 * intermediate], [experts, intermediate, hidden] as [.., hidden]."""
    for which in ("weight1", "weight2"):
        array = model.grouped(layer, experts, which, etp, rank)
        count, rows, columns = array.shape
        shape = (rows, count * columns) if which == "weight1" else (count * rows, columns)
        yield Entry(prefix + which, array, is_expert=True, shape=shape)


def _te_grouped(model: MegatronModel, prefix: str, layer: int, experts: range, etp: int, rank: int) -> Iterator[Entry]:
    for module in ("linear_fc1", "linear_fc2"):
        for kind in ("weight", "bias"):
            for number, expert in enumerate(experts):
                if tensor := model.expert(layer, expert).get(f"{module}.{kind}"):
                    name = f"{prefix}{module}.{kind}{number}"
                    yield Entry(name, _cut(name, tensor, etp, rank), is_expert=True)
        yield Entry(f"{prefix}{module}._extra_state")


_EXPERTS = {"sequential": _sequential, "grouped": _grouped, "te-grouped": _te_grouped}


def _extra(model: MegatronModel, prefix: str, extra: int, sizes: Sizes, rank: RankPlace, spelling: LayerSpec) -> Iterator[Entry]:
    """A layer that predicts a further token: two norms and a projection before it, a norm after it."""
    own = model.extra(extra)
    before = {name: tensor for name, tensor in own.items() if not name.startswith("final_layernorm.")}
    yield from _with_state({prefix + name: tensor for name, tensor in before.items()}, sizes.tp, rank.tp)
    yield from _layer(model, prefix + "transformer_layer.", model.layers + extra, sizes, rank, spelling)
    yield from (_entry(prefix + name, own[name], sizes.tp, rank.tp) for name in own if name not in before)


def _with_state(tensors: Tensors, tp: int, rank: int) -> Iterator[Entry]:
    """The tensors; after those of a linear layer its state."""
    names = list(tensors)
    for i, name in enumerate(names):
        yield _entry(name, tensors[name], tp, rank)
        module = name.rpartition(".")[0]
        is_linear = module.rpartition(".")[2].startswith(("linear_", "eh_proj"))
        if is_linear and not any(other.startswith(module + ".") for other in names[i + 1 :]):
            yield Entry(f"{module}._extra_state")


def _entry(name: str, tensor: MegatronTensor, tp: int, rank: int) -> Entry:
    return Entry(name, _cut(name, tensor, tp, rank))


def _cut(name: str, tensor: MegatronTensor, tp: int, rank: int) -> Mosaic:
    try:
        return tensor.of_rank(tp, rank)
    except ValueError as error:
        raise RequestError(
            f"{tp} tensor-parallel ranks cannot share it: {error}",
            where=name,
            do="Choose a tensor-parallel size that divides it (--tp, or --etp for experts)",
        ) from None
