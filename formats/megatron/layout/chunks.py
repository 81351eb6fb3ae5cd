"""The chunks of a pipeline, and the entries of one rank's chunk: names, arrays and order as in the chunk's state dict.

A stage has one chunk of the model, or several with a virtual pipeline. Chunk 0 of every stage comes first in the model, then chunk 1 of
every stage, and so on. Within a chunk the layers are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard.errors import RequestError
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.value import value

from .layer_spec import CORE_ATTENTION, LayerSpec
from .parallel_sizes import ParallelSizes, StageRank
from .tensors import BUFFERS, EMBEDDING, MegatronModel, MegatronTensor, Tensors


@value
class Chunk:
    """A chunk of a stage."""

    stage: int
    """The stage that holds it."""
    number: int
    """Its number in the stage."""
    layers: range
    """Its layers, as the model numbers them."""
    is_first: bool
    """Whether it is the first chunk of the model."""
    is_last: bool
    """Whether it is the last chunk of the model."""


def split_into_chunks(layers_per_chunk: Sequence[int], pp: int) -> list[Chunk]:
    """All chunks of `pp` stages, in the order of the model, from the number of layers of each."""
    chunks, start = [], 0
    for i, layers in enumerate(layers_per_chunk):
        is_last = i == len(layers_per_chunk) - 1
        chunks.append(Chunk(i % pp, i // pp, range(start, start + layers), i == 0, is_last))
        start += layers
    return chunks


@value(eq=False)
class ChunkEntry:
    """An entry of the state dict of a rank's chunk."""

    name: str
    """Its key."""
    array: Mosaic | None = None
    """The array that it holds; None for the unused state of an FP8 recipe, which is stored as None."""
    is_expert: bool = False
    """Whether it belongs to routed experts."""
    is_shared: bool = False
    """Whether it is an embedding or head that other stages hold, too."""
    stored_shape: tuple[int, ...] | None = None
    """The shape under which the array's memory is stored, if it is not the array's own."""

    @property
    def is_parameter(self) -> bool:
        """Whether an optimizer updates it."""
        return self.array is not None and not any(self.name.endswith(buffer) for buffer in BUFFERS)


def chunk_entries(model: MegatronModel, chunk: Chunk, sizes: ParallelSizes, rank: StageRank, spec: LayerSpec) -> Iterator[ChunkEntry]:
    """The entries of a rank's chunk, in the order of its state dict.

    Raises: RequestError if a tensor does not divide by the ranks.
    """
    return _RankView(model, sizes, rank, spec).entries(chunk)


@value
class _RankView:
    """A model as one rank sees it."""

    model: MegatronModel
    sizes: ParallelSizes
    rank: StageRank
    spec: LayerSpec

    def entries(self, chunk: Chunk) -> Iterator[ChunkEntry]:
        yield from self._embeddings(chunk)
        for number, layer in enumerate(chunk.layers):
            yield from self._layer(f"decoder.layers.{number}.", layer)
        # With multi-token prediction the final norm follows the last decoder layer, in whatever chunk that is (transformer_block.py).
        if self.model.layers - 1 in chunk.layers if self.model.mtp_layers else chunk.is_last:
            outside = self.model.outside_layers.items()
            final = {self.model.stored_name(name): tensor for name, tensor in outside if name.startswith("decoder.")}
            yield from self._module("", final)
        if chunk.is_last:
            for mtp_layer in range(self.model.mtp_layers):
                yield from self._mtp_layer(f"mtp.layers.{mtp_layer}.", mtp_layer)
            yield from self._head(chunk)

    @property
    def _shares_tables(self) -> bool:
        """Whether several stages hold the embedding, because the head or multi-token prediction uses it, too."""
        return self.sizes.pp > 1 and (self.model.model.is_tied or self.model.mtp_layers > 0)

    def _embeddings(self, chunk: Chunk) -> Iterator[ChunkEntry]:
        """All embeddings in the first chunk; the word embeddings also in the last one if the model has multi-token prediction."""
        if not chunk.is_first and not (chunk.is_last and self.model.mtp_layers):
            return
        is_shared = self._shares_tables and not (chunk.is_first and chunk.is_last)
        for name, tensor in self.model.outside_layers.items():
            if name.startswith("embedding.") and (chunk.is_first or name == EMBEDDING):
                yield self._dense(name, tensor, is_shared=is_shared and name == EMBEDDING)

    def _head(self, chunk: Chunk) -> Iterator[ChunkEntry]:
        is_tied = self.model.model.is_tied
        if not (is_tied and chunk.is_first):
            for name, tensor in self.model.outside_layers.items():
                if name.startswith("output_layer."):
                    yield self._dense(name, tensor, is_shared=self._shares_tables and is_tied and not self.model.mtp_layers)
        yield ChunkEntry("output_layer._extra_state")

    def _layer(self, prefix: str, layer: int) -> Iterator[ChunkEntry]:
        """A transformer layer: attention, norms and MLP or router, then the routed experts, then the shared expert."""
        tensors, is_sparse = self.spec.tensors(self.model.layer(layer)), self.model.is_sparse(layer)
        shared_expert = {name: tensor for name, tensor in tensors.items() if name.startswith("mlp.shared_experts.")}
        rest = {name: tensor for name, tensor in tensors.items() if name not in shared_expert}
        if self.spec.extra_state:
            yield ChunkEntry(f"{prefix}{CORE_ATTENTION}._extra_state")
        yield from self._module(prefix, _fused_norms_first(self.spec.stored_names(rest)))
        if is_sparse:
            yield from self._experts(f"{prefix}mlp.experts.", layer)
        yield from self._module(prefix, shared_expert)

    def _mtp_layer(self, prefix: str, mtp_layer: int) -> Iterator[ChunkEntry]:
        """A layer for multi-token prediction: two norms and a projection, a transformer layer, a final norm."""
        tensors = self.model.mtp_module(mtp_layer)
        before = {name: tensor for name, tensor in tensors.items() if not name.startswith("final_layernorm.")}
        yield from self._module(prefix, before)
        yield from self._layer(prefix + "transformer_layer.", self.model.layers + mtp_layer)
        yield from self._module(prefix, {name: tensor for name, tensor in tensors.items() if name not in before})

    def _experts(self, prefix: str, layer: int) -> Iterator[ChunkEntry]:
        """The routed experts of the rank."""
        experts_per_rank = self.model.experts // self.sizes.ep
        experts = range(self.rank.ep_rank * experts_per_rank, (self.rank.ep_rank + 1) * experts_per_rank)
        match self.spec.experts:
            case "sequential":
                return self._sequential_experts(prefix, layer, experts)
            case "grouped":
                return self._grouped_experts(prefix, layer, experts)
            case "te-grouped":
                return self._te_grouped_experts(prefix, layer, experts)

    def _sequential_experts(self, prefix: str, layer: int, experts: range) -> Iterator[ChunkEntry]:
        for number, expert in enumerate(experts):
            yield from self._module(f"{prefix}local_experts.{number}.", self.model.expert(layer, expert), is_expert=True)

    def _grouped_experts(self, prefix: str, layer: int, experts: range) -> Iterator[ChunkEntry]:
        """The array [experts, hidden, 2 * intermediate], stored as [hidden, experts * 2 * intermediate], and the array
        [experts, intermediate, hidden], stored as [experts * intermediate, hidden]."""
        for name in ("weight1", "weight2"):
            array = self.model.grouped_experts(layer, experts, name, self.sizes.etp, self.rank.etp_rank)
            count, rows, columns = array.shape
            stored_shape = (rows, count * columns) if name == "weight1" else (count * rows, columns)
            yield ChunkEntry(prefix + name, array, is_expert=True, stored_shape=stored_shape)

    def _te_grouped_experts(self, prefix: str, layer: int, experts: range) -> Iterator[ChunkEntry]:
        for module in ("linear_fc1", "linear_fc2"):
            for parameter in ("weight", "bias"):
                for number, expert in enumerate(experts):
                    if tensor := self.model.expert(layer, expert).get(f"{module}.{parameter}"):
                        yield self._expert(f"{prefix}{module}.{parameter}{number}", tensor)
            yield ChunkEntry(f"{prefix}{module}._extra_state")

    def _module(self, prefix: str, tensors: Tensors, *, is_expert: bool = False) -> Iterator[ChunkEntry]:
        """The entries of a module's tensors; the FP8 state of a linear layer follows its tensors."""
        entry, names = self._expert if is_expert else self._dense, list(tensors)
        for i, name in enumerate(names):
            yield entry(prefix + name, tensors[name])
            layer = name.rpartition(".")[0]
            if self.spec.has_fp8_state(layer) and layer not in [later.rpartition(".")[0] for later in names[i + 1 :]]:
                yield ChunkEntry(f"{prefix}{layer}._extra_state", is_expert=is_expert)

    def _dense(self, name: str, tensor: MegatronTensor, *, is_shared: bool = False) -> ChunkEntry:
        return ChunkEntry(name, _shard(name, tensor, self.sizes.tp, self.rank.tp_rank), is_shared=is_shared)

    def _expert(self, name: str, tensor: MegatronTensor) -> ChunkEntry:
        return ChunkEntry(name, _shard(name, tensor, self.sizes.etp, self.rank.etp_rank), is_expert=True)


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


def _shard(name: str, tensor: MegatronTensor, tp: int, tp_rank: int) -> Mosaic:
    try:
        return tensor.shard(tp, tp_rank)
    except ValueError as error:
        raise cannot_split(name, tp, error) from None


def cannot_split(name: str, tp: int, error: ValueError) -> RequestError:
    """The error for a tensor-parallel size that does not divide a tensor."""
    return RequestError(
        f"{tp} tensor-parallel ranks cannot share it: {error}",
        where=name,
        do="Choose a tensor-parallel size that divides it (--tp, or --etp for experts)",
    )
