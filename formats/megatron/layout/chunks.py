"""The tensors of one rank's chunk of the model: names, arrays and order as in the chunk's state dict, layers numbered from 0."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from reshard.errors import RequestError
from reshard.geometry.dtypes import DType
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.value import value

from .names import CORE_ATTENTION, LayerSpec
from .stages import Chunk, ParallelSizes, Rank
from .tensors import BUFFERS, EMBEDDING, HEAD, MegatronModel, MegatronTensor, Tensors, is_decayed


@value(eq=False, repr=False)
class ChunkTensor:
    """A tensor of a rank's chunk."""

    name: str
    """Its key in the state dict."""
    array: Mosaic
    """The array of the model that it holds."""
    shape: tuple[int, ...]
    """The shape under which the array's memory is stored."""
    chunk: int
    """The number of its chunk in the stage."""
    is_expert: bool = False
    """Whether it belongs to routed experts."""
    is_shared: bool = False
    """Whether it is an embedding or head that other stages hold, too."""
    dtype: DType | None = None
    """The element type in which it is stored; None if it is not known."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_parameter(self) -> bool:
        """Whether an optimizer updates it."""
        return not self.name.endswith(BUFFERS)

    @property
    def is_decayed(self) -> bool:
        """Whether weight decay applies to it."""
        return is_decayed(self.name, self.array.shape)

    @property
    def is_own_master(self) -> bool:
        """Whether it is its own full-precision copy."""
        return self.dtype is not None and self.dtype.itemsize >= 4

    def __repr__(self) -> str:
        names = self.array.names
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"<{self.name} {list(self.shape)}: {names[0] if names else 'padding'}{more}>"


Entry = tuple[str, ChunkTensor | None]
"""A key of a chunk's state dict with its tensor; None for the unused state of an FP8 recipe, which is stored as None."""


def shared_tables(model: MegatronModel, sizes: ParallelSizes) -> tuple[str, ...]:
    """The names of the embedding and head that several stages hold, because the head or multi-token prediction uses the embedding, too
    (language_module.py, setup_embeddings_and_output_layer)."""
    if sizes.pp == 1:
        return ()
    return (EMBEDDING,) if model.mtp_layers else (EMBEDDING, HEAD) if model.model.is_tied else ()


@value
class RankView:
    """A chunk as one rank sees it. Iterating raises RequestError if a tensor does not divide by the ranks."""

    model: MegatronModel
    """The model."""
    chunk: Chunk
    """The chunk."""
    sizes: ParallelSizes
    """The sizes of the run."""
    rank: Rank
    """The rank."""
    spec: LayerSpec
    """The classes of its layers."""

    def parameters(self) -> list[ChunkTensor]:
        """The parameters, in the order of the state dict."""
        return [tensor for _, tensor in self.entries() if tensor and tensor.is_parameter]

    def entries(self) -> Iterator[Entry]:
        """All entries, in the order of the state dict."""
        model, chunk = self.model, self.chunk
        for name, tensor in model.outside_layers.items():
            # The word embeddings are also in the last chunk if the model has multi-token prediction.
            is_here = chunk.is_first or (name == EMBEDDING and chunk.is_last and model.mtp_layers)
            if is_here and name.startswith("embedding."):
                yield self._entry(name, tensor)
        for number, layer in enumerate(chunk.layers):
            yield from self._layer(f"decoder.layers.{number}.", layer)
        # With multi-token prediction the final norm follows the last decoder layer, in whatever chunk that is (transformer_block.py).
        if model.layers - 1 in chunk.layers if model.mtp_layers else chunk.is_last:
            outside = model.outside_layers.items()
            yield from self._module("", {model.stored_name(name): tensor for name, tensor in outside if name.startswith("decoder.")})
        if chunk.is_last:
            for mtp_layer in range(model.mtp_layers):  # two norms and a projection, a transformer layer, a final norm
                prefix, module = f"mtp.layers.{mtp_layer}.", model.mtp_module(mtp_layer)
                final = {name: tensor for name, tensor in module.items() if name.startswith("final_layernorm.")}
                yield from self._module(prefix, {name: tensor for name, tensor in module.items() if name not in final})
                yield from self._layer(prefix + "transformer_layer.", model.layers + mtp_layer)
                yield from self._module(prefix, final)
            for name, tensor in model.outside_layers.items():
                if name.startswith("output_layer.") and not (model.model.is_tied and chunk.is_first):
                    yield self._entry(name, tensor)
            yield "output_layer._extra_state", None

    def _layer(self, prefix: str, layer: int) -> Iterator[Entry]:
        """A transformer layer: attention, norms and MLP or router, then the routed experts, then the shared expert."""
        tensors = self.spec.tensors(self.model.layer(layer))
        shared_expert = {name: tensor for name, tensor in tensors.items() if name.startswith("mlp.shared_experts.")}
        rest = {name: tensor for name, tensor in tensors.items() if name not in shared_expert}
        if self.spec.extra_state:
            yield f"{prefix}{CORE_ATTENTION}._extra_state", None
        yield from self._module(prefix, _fused_norms_first(self.spec.stored_names(rest)))
        if self.model.is_sparse(layer):
            yield from self._experts(f"{prefix}mlp.experts.", layer)
        yield from self._module(prefix, shared_expert)

    def _experts(self, prefix: str, layer: int) -> Iterator[Entry]:
        """The routed experts of the rank."""
        experts = self.sizes.experts_of(self.rank.ep_rank, self.model.experts)
        match self.spec.experts:
            case "sequential":
                for number, expert in enumerate(experts):
                    yield from self._module(f"{prefix}local_experts.{number}.", self.model.expert(layer, expert), is_expert=True)
            case "grouped":
                for name in ("weight1", "weight2"):
                    yield self._entry(prefix + name, self.model.grouped_experts(layer, experts, name), is_expert=True)
            case "te-grouped":
                for module in ("linear_fc1", "linear_fc2"):
                    for parameter, (number, expert) in product(("weight", "bias"), enumerate(experts)):
                        if tensor := self.model.expert(layer, expert).get(f"{module}.{parameter}"):
                            yield self._entry(f"{prefix}{module}.{parameter}{number}", tensor, is_expert=True)
                    yield f"{prefix}{module}._extra_state", None

    def _module(self, prefix: str, tensors: Tensors, *, is_expert: bool = False) -> Iterator[Entry]:
        """The entries of a module's tensors; the FP8 state of a linear layer follows its tensors."""
        names = list(tensors)
        for i, name in enumerate(names):
            yield self._entry(prefix + name, tensors[name], is_expert=is_expert)
            layer = name.rpartition(".")[0]
            if self.spec.has_fp8_state(layer) and layer not in [later.rpartition(".")[0] for later in names[i + 1 :]]:
                yield f"{prefix}{layer}._extra_state", None

    def _entry(self, name: str, tensor: MegatronTensor, *, is_expert: bool = False) -> Entry:
        tp, tp_rank = (self.sizes.etp, self.rank.etp_rank) if is_expert else (self.sizes.tp, self.rank.tp_rank)
        try:
            array = tensor.shard(tp, tp_rank)
        except ValueError as error:
            raise cannot_split(name, tp, error) from None
        is_shared = name in shared_tables(self.model, self.sizes)
        return name, ChunkTensor(name, array, _stored_shape(name, array), self.chunk.number, is_expert, is_shared)


def _stored_shape(name: str, array: Mosaic) -> tuple[int, ...]:
    """The shape under which an array is stored. GroupedMLP stores its [experts, in, out] as [in, experts * out] and [experts * in, out]."""
    if name.endswith(".experts.weight1"):
        return (array.shape[1], array.shape[0] * array.shape[2])
    return (array.shape[0] * array.shape[1], array.shape[2]) if name.endswith(".experts.weight2") else array.shape


def _fused_norms_first(tensors: Tensors) -> Tensors:
    """The tensors of a layer in the order of its state dict: a norm that is fused into a linear layer precedes that layer's weight."""
    norms = {name: tensor for name, tensor in tensors.items() if ".layer_norm_" in name}
    ordered: dict[str, MegatronTensor] = {}
    for name, tensor in tensors.items():
        if name not in norms:
            module = name.rpartition(".")[0]
            ordered |= {norm: norms[norm] for norm in norms if norm.startswith(module + ".layer_norm_") and norm not in ordered}
            ordered[name] = tensor
    return ordered


def cannot_split(name: str, tp: int, error: ValueError) -> RequestError:
    """The error for a tensor-parallel size that does not divide a tensor."""
    return RequestError(
        f"{tp} tensor-parallel ranks cannot share it: {error}",
        where=name,
        do="Choose a tensor-parallel size that divides it (`tp=`, or `etp=` for experts)",
    )
