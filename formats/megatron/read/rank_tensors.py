"""For each stored tensor of a rank, the array of the model that it holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from reshard.containers.torch_zip import AnyTensor
from reshard.errors import CheckpointError, IncompleteError
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.value import value

from ..layout.adapters import factor_of
from ..layout.chunks import ChunkTensor, shares_tables
from ..layout.names import ParsedName, parse_name
from ..layout.stages import Chunk, ParallelSizes, chunks_of_files
from ..layout.tensors import EMBEDDING, HEAD, MegatronModel
from .arrays import check_shape, model_layer, model_tensor, no_such_tensor, shared_expert, stored_shard
from .ranks import LegacySave, MegatronRank

# The two weights of GroupedMLP. Each holds all experts of a rank.
_GROUPED_EXPERTS = {"mlp.experts.weight1": "weight1", "mlp.experts.weight2": "weight2"}


def stored_chunks(save: LegacySave, model: MegatronModel) -> tuple[Chunk, ...]:
    """The chunks of all stages, by the layers in the ranks' files.

    Raises: CheckpointError if the layers of the chunks are not those of the model.
    """
    counts: dict[tuple[int, int], int] = {}
    for rank in save.ranks:
        for number, chunk in enumerate(rank.chunks):
            layers = {parsed.layer for parsed in map(parse_name, chunk) if parsed.layer is not None and not parsed.is_mtp}
            if layers and max(layers) + 1 != len(layers):
                raise IncompleteError(
                    f"it holds the layers {sorted(layers)}, and some numbers before the last one are missing",
                    where=rank.path,
                    why="Each chunk numbers its layers from 0",
                    do="Copy the file again",
                )
            if counts.setdefault((number, rank.pp_rank), len(layers)) != len(layers):
                raise CheckpointError(
                    f"it holds {len(layers)} layers, another rank of its stage holds {counts[number, rank.pp_rank]}",
                    where=rank.path,
                    do="Keep the folders of one save only",
                )
    return chunks_of_files(counts, save.sizes, model.layers, save.first.path)


def rank_tensors(
    rank: MegatronRank, model: MegatronModel, sizes: ParallelSizes, chunks: Sequence[Chunk]
) -> list[tuple[ChunkTensor, AnyTensor]]:
    """The tensors of a rank with the arrays that they hold, each with where it is stored. chunks: the result of `stored_chunks`.

    Raises: CheckpointError if the model does not have a stored tensor, or has it with another shape.
    """
    found: list[tuple[ChunkTensor, AnyTensor]] = []
    for chunk in (chunk for chunk in chunks if chunk.stage == rank.pp_rank):
        stored_by_name, located = rank.chunks[chunk.number], _RankChunk(rank, chunk, model, sizes)
        outside_layers = {parsed.name for parsed in map(parse_name, stored_by_name) if parsed.layer is None}
        found.extend((located.tensor(name, stored, outside_layers), stored) for name, stored in stored_by_name.items())
    return found


@value
class _RankChunk:
    """A chunk of one rank, in which it finds arrays."""

    rank: MegatronRank
    chunk: Chunk
    model: MegatronModel
    sizes: ParallelSizes

    def tensor(self, name: str, stored: AnyTensor, outside_layers: Collection[str]) -> ChunkTensor:
        """The tensor of that name. outside_layers: the names in the chunk that belong to no layer."""
        parsed = parse_name(name)
        self._check_stage(parsed, name)
        array = self._array(parsed, stored, f"{name} in {self.rank.path}")
        is_shared = self._is_shared(parsed, outside_layers)
        return ChunkTensor(name, array, stored.shape, self.chunk.number, parsed.is_expert, is_shared, stored.dtype)

    def _check_stage(self, parsed: ParsedName, name: str) -> None:
        """Raises CheckpointError if a tensor outside of layers is in a chunk that has none of its kind."""
        if parsed.layer is not None or self.model.mtp_layers:
            return
        chunk = self.chunk
        if not (chunk.is_first if parsed.name.startswith("embedding.") else chunk.is_last):
            raise CheckpointError(
                f"{name} is in stage {chunk.stage}{f', chunk {chunk.number}' if self.sizes.vp > 1 else ''}",
                where=self.rank.path,
                why="Only the first stage has embeddings, and only the last one a final norm and a head, so folders have changed places",
                do="Copy all rank folders again from where the checkpoint was written",
            )

    def _is_shared(self, parsed: ParsedName, outside_layers: Collection[str]) -> bool:
        """Whether it is an embedding or head that other stages hold, too (language_module.py, setup_embeddings_and_output_layer)."""
        if parsed.layer is not None or not shares_tables(self.model, self.sizes):
            return False
        if self.rank.pp_rank == 0:
            return parsed.name == EMBEDDING and HEAD not in outside_layers
        return parsed.name == (EMBEDDING if self.model.mtp_layers else HEAD)

    def _array(self, parsed: ParsedName, stored: AnyTensor, where: str) -> Mosaic:
        rank, sizes, layer = self.rank, self.sizes, model_layer(self.model, parsed, self.chunk.layers.start)
        if layer is None or not parsed.is_expert:
            return stored_shard(model_tensor(self.model, parsed, layer, None, where), stored.shape, sizes.tp, rank.tp_rank, where)
        experts, etp_rank = sizes.experts_of(rank.ep_rank, self.model.experts), rank.tp_rank % sizes.etp
        if parsed.name in _GROUPED_EXPERTS:
            array = self.model.grouped_experts(layer, experts, _GROUPED_EXPERTS[parsed.name], sizes.etp, etp_rank)
            check_shape(array, stored.shape, where)
            return array
        if parsed.expert is None:
            raise no_such_tensor({}, parsed.name, where)  # in a rank's file, every expert has its number
        if parsed.expert >= len(experts):
            raise CheckpointError(
                f"it is expert {parsed.expert} of its rank, which has {len(experts)}",
                where=where,
                why=f"The model has {self.model.experts} experts on {sizes.ep} ranks",
            )
        tensor = model_tensor(self.model, parsed, layer, experts[parsed.expert], where)
        if factor_of(parsed.name) and sizes.etp > 1:
            raise shared_expert(where)
        return stored_shard(tensor, stored.shape, sizes.etp, etp_rank, where)
