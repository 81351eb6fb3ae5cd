"""For each stored tensor of a rank, the array of the model that it holds."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from reshard.containers.torch_zip import AnyTensor
from reshard.errors import CheckpointError, IncompleteError
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.value import value

from ..layout.adapters import factor_of
from ..layout.names import ParsedName, parse_name
from ..layout.parallel_sizes import ParallelSizes
from ..layout.stages import first_layers
from ..layout.tensors import BUFFERS, EMBEDDING, HEAD, MegatronModel, is_decayed
from .ranks import LegacySave, MegatronRank
from .tensor_boxes import Shape, check_shape, named_tensor, shared_expert, stored_shard

# The two weights of GroupedMLP. Each holds all experts of a rank.
_GROUPED_EXPERTS = {"mlp.experts.weight1": "weight1", "mlp.experts.weight2": "weight2"}


@value(eq=False, repr=False)
class ChunkTensor:
    """A stored tensor of a rank's chunk."""

    name: str
    """Its name in the file."""
    parsed: ParsedName
    """The parts of its name."""
    chunk: int
    """The number of its chunk in the stage."""
    array: Mosaic
    """The array of the model that it holds."""
    stored: AnyTensor
    """Where its elements lie."""
    is_shared: bool
    """Whether it is an embedding or head that other stages hold, too."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The stored shape."""
        return self.stored.shape

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_parameter(self) -> bool:
        """Whether an optimizer updates it."""
        return self.parsed.name not in BUFFERS

    @property
    def is_expert(self) -> bool:
        return self.parsed.is_expert

    @property
    def is_embedding_or_head(self) -> bool:
        return self.parsed.layer is None and self.parsed.name in (EMBEDDING, HEAD)

    @property
    def is_decayed(self) -> bool:
        """Whether weight decay applies to it."""
        return is_decayed(self.name, self.shape)

    def __repr__(self) -> str:
        names = self.array.names
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"<{self.name} {list(self.shape)}: {names[0] if names else 'padding'}{more}>"


def layer_offsets(save: LegacySave, model: MegatronModel) -> dict[tuple[int, int], int]:
    """(stage, chunk) -> the model's number of the chunk's first layer.

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
            if counts.setdefault((rank.pp_rank, number), len(layers)) != len(layers):
                raise CheckpointError(
                    f"it holds {len(layers)} layers, another rank of its stage holds {counts[rank.pp_rank, number]}",
                    where=rank.path,
                    do="Keep the folders of one save only",
                )
    return first_layers(counts, model.layers, save.first.path)


def locate_tensors(
    rank: MegatronRank, model: MegatronModel, sizes: ParallelSizes, offsets: Mapping[tuple[int, int], int]
) -> list[ChunkTensor]:
    """The tensors of a rank with the arrays that they hold. offsets: the result of `layer_offsets`.

    Raises: CheckpointError if the model does not have a stored tensor, or has it with another shape.
    """
    locator = _Locator(rank, model, sizes, offsets)
    return [tensor for number, chunk in enumerate(rank.chunks) for tensor in locator.tensors(number, chunk)]


@value
class _Locator:
    """Finds the arrays of one rank's tensors."""

    rank: MegatronRank
    model: MegatronModel
    sizes: ParallelSizes
    offsets: Mapping[tuple[int, int], int]

    def tensors(self, number: int, chunk: Mapping[str, AnyTensor]) -> Iterator[ChunkTensor]:
        first_layer = self.offsets[self.rank.pp_rank, number]
        outside_layers = {parsed.name for parsed in map(parse_name, chunk) if parsed.layer is None}
        for name, stored in chunk.items():
            parsed = parse_name(name)
            self._check_stage(parsed, name, number)
            array = self._array(parsed, first_layer, stored.shape, f"{name} in {self.rank.path}")
            yield ChunkTensor(name, parsed, number, array, stored, self._is_shared(parsed, outside_layers))

    def _check_stage(self, parsed: ParsedName, name: str, chunk: int) -> None:
        """Raises CheckpointError if a tensor outside of layers is in a chunk that has none of its kind."""
        if parsed.layer is not None or self.model.mtp_layers:
            return
        stage, sizes = self.rank.pp_rank, self.sizes
        is_first, is_last = (stage, chunk) == (0, 0), (stage, chunk) == (sizes.pp - 1, sizes.vp - 1)
        if not (is_first if parsed.name.startswith("embedding.") else is_last):
            raise CheckpointError(
                f"{name} is in stage {stage}{f', chunk {chunk}' if sizes.vp > 1 else ''}",
                where=self.rank.path,
                why="Only the first stage has embeddings, and only the last one a final norm and a head, so folders have changed places",
                do="Copy all rank folders again from where the checkpoint was written",
            )

    def _is_shared(self, parsed: ParsedName, outside_layers: Collection[str]) -> bool:
        """Whether it is an embedding or head that other stages hold, too (language_module.py, setup_embeddings_and_output_layer)."""
        has_shared_embedding = self.sizes.pp > 1 and (self.model.model.is_tied or self.model.mtp_layers > 0)
        if parsed.layer is not None or not has_shared_embedding:
            return False
        if self.rank.pp_rank == 0:
            return parsed.name == EMBEDDING and HEAD not in outside_layers
        return parsed.name == (EMBEDDING if self.model.mtp_layers else HEAD)

    def _array(self, parsed: ParsedName, first_layer: int, stored_shape: Shape, where: str) -> Mosaic:
        if parsed.layer is None:
            tensor = named_tensor(self.model.outside_layers, parsed.name, where)
            return stored_shard(tensor, stored_shape, self.sizes.tp, self.rank.tp_rank, where)
        layer = self.model.layers + parsed.layer if parsed.is_mtp else first_layer + parsed.layer
        if parsed.expert is not None:
            return self._expert_array(parsed.name, layer, parsed.expert, stored_shape, where)
        if parsed.name in _GROUPED_EXPERTS:
            return self._grouped_array(_GROUPED_EXPERTS[parsed.name], layer, stored_shape, where)
        tensors = {**self.model.layer(layer), **(self.model.mtp_module(parsed.layer) if parsed.is_mtp else {})}
        return stored_shard(named_tensor(tensors, parsed.name, where), stored_shape, self.sizes.tp, self.rank.tp_rank, where)

    def _expert_array(self, name: str, layer: int, expert: int, stored_shape: Shape, where: str) -> Mosaic:
        """The array of an expert's tensor; `expert` counts the rank's experts."""
        if expert >= len(self._experts):
            raise CheckpointError(
                f"it is expert {expert} of its rank, which has {len(self._experts)}",
                where=where,
                why=f"The model has {self.model.experts} experts on {self.sizes.ep} ranks",
            )
        tensor = named_tensor(self.model.expert(layer, self._experts[expert]), name, where)
        if factor_of(name) and self.sizes.etp > 1:
            raise shared_expert(where)
        return stored_shard(tensor, stored_shape, self.sizes.etp, self._etp_rank, where)

    def _grouped_array(self, weight: str, layer: int, stored_shape: Shape, where: str) -> Mosaic:
        """The array of a GroupedMLP weight, which holds all experts of the rank."""
        array = self.model.grouped_experts(layer, self._experts, weight, self.sizes.etp, self._etp_rank)
        check_shape(array, stored_shape, where)
        return array

    @property
    def _experts(self) -> range:
        """The experts of the rank."""
        experts_per_rank = self.model.experts // self.sizes.ep
        return range(self.rank.ep_rank * experts_per_rank, (self.rank.ep_rank + 1) * experts_per_rank)

    @property
    def _etp_rank(self) -> int:
        return self.rank.tp_rank % self.sizes.etp
