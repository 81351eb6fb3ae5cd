"""LoRA adapters as Megatron Bridge (and NeMo, which was not run) and ms-swift store them, beside the linear layers that they adapt.

    <linear>.adapter.linear_in.weight             [r, in]   A, cut as <linear>.weight in row-parallel layers, along axis 0 in others
    <linear>.adapter.linear_out.weight            [out, r]  B, cut along axis 0, its rows in the order of those of <linear>.weight
    <linear>.adapter.adapter_q.linear_in.weight   A of one projection (CanonicalLoRA); so are adapter_k, adapter_v, adapter_gate, adapter_up

    <linear>.lora_A.default.weight, <linear>.lora_B.default.weight      of ms-swift: A is replicated where the weight is not row-parallel

One A serves all projections of a fused layer. PEFT has an A for each of them, with the same values. A factor is described as the tensor
that it adapts, so that its canonical tensors and its shards follow from those of the weight.

    mlp.experts.experts.linear_fc1.adapter.linear_in.weight      [experts, r, in], or [r, in]: one for all experts (0.3.1); the factors of
                                                                 grouped experts, whose keys are those of experts one by one

A distributed save of ms-swift joins the rows of B as the ranks have them: gate and up of rank 0, gate and up of rank 1, ...

Source: megatron/bridge/peft (utils.py, ParallelLinearAdapter, GroupedExpertLinearAdapter; canonical_lora.py) of Megatron Bridge 0.3.1 and
of main in Aug 2026; mcore_bridge/tuners/lora.py (LoraParallelLinear) of mcore-bridge 1.6.5 and swift/megatron/utils/megatron_lm_utils.py of
ms-swift 4 in Aug 2026; measured on fixtures/megatron_lora.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property

from reshard.canonical.renaming import PREFIX, adapter_name
from reshard.errors import UnsupportedError
from reshard.geometry.boxes import Box
from reshard.geometry.mosaics import Mosaic, Tile, joined
from reshard.geometry.value import value

from .tensors import MegatronModel, MegatronTensor, Tensors

# Of the layers that were compared.
_LINEAR = r"((?:.+\.)?linear_(?:qkv|proj|fc1|fc2))"
_NAME = re.compile(_LINEAR + r"\.adapter(?:\.adapter_(q|k|v|gate|up))?\.linear_(in|out)\.weight")
_NAME_OF_SWIFT = re.compile(_LINEAR + r"\.lora_(A|B)\.default\.weight")
# The projections that the adapters of CanonicalLoRA belong to, in the order of the fused weight.
_PROJECTIONS = (("q", "k", "v"), ("gate", "up"))


@value
class Factor:
    """One of the two matrices of an adapter, by its name in Megatron."""

    name: str
    """Its name, such as "self_attention.linear_qkv.adapter.adapter_q.linear_in.weight"."""
    weight: str
    """The name of the weight that it adapts."""
    projection: str
    """The projection that it adapts, such as "q"; empty: all that the weight holds."""
    is_output: bool
    """Whether it is B."""
    is_of_swift: bool = False
    """Whether ms-swift saved it."""

    @property
    def input(self) -> str:
        """The name of A, for B."""
        return self.name.replace(".linear_out.", ".linear_in.").replace(".lora_B.", ".lora_A.")


def factor_of(name: str) -> Factor | None:
    """What the name of a tensor says if it is a factor of an adapter; None for others. The name is relative to its layer or expert."""
    if match := _NAME_OF_SWIFT.fullmatch(name):
        return Factor(name, f"{match[1]}.weight", "", match[2] == "B", is_of_swift=True)
    match = _NAME.fullmatch(name)
    return Factor(name, f"{match[1]}.weight", match[2] or "", match[3] == "out") if match else None


def with_factors(tensors: Tensors, ranks: Mapping[str, int]) -> Tensors:
    """The tensors of a layer or expert, and the factors of the adapters beside them. ranks: r by the name of B.

    Raises: UnsupportedError for an adapter of a weight that PEFT cannot adapt by the module's name.
    """
    result = dict(tensors)
    for output, rank in ranks.items():
        pair = factor_of(output)
        for name in (pair.input, output) if pair is not None and pair.weight in tensors else ():
            factor = factor_of(name)
            assert factor is not None, "A is named as B is"
            result[name] = _factor_tensor(factor, tensors[factor.weight], rank)
    return result


class AdaptedModel(MegatronModel):
    """A model whose layers have LoRA adapters beside their weights."""

    def __init__(self, base: MegatronModel, ranks: Mapping[str, int]) -> None:
        super().__init__(base.model, base.padded_vocab, base.qkv_order)
        self.ranks = ranks
        """r of each adapter by the name of its B, relative to the layer or expert."""

    def layer(self, layer: int) -> Tensors:
        """The tensors of a layer without its routed experts, and the factors of its adapters."""
        return with_factors(super().layer(layer), self.ranks)

    def expert(self, layer: int, expert: int) -> Tensors:
        """The tensors of a routed expert, and the factors of its adapters."""
        return with_factors(super().expert(layer, expert), self.ranks)

    def name_in(self, name: str, layer: int | None, expert: int | None) -> str:
        """The name that a canonical tensor of a layer or expert, or of its adapter, has in another one. expert: None for the same."""
        adapter = adapter_name(name)
        if adapter is None:
            return super().name_in(name, layer, expert)
        weight = super().name_in(f"{adapter.module}.weight", layer, expert)
        return f"{PREFIX}{weight.removesuffix('.weight')}.{adapter.parameter}"

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shape of each canonical tensor and of each factor of the adapters."""
        shapes = dict(super().shapes)
        for layer in range(self.layers + self.mtp_layers):
            experts = range(self.experts) if self.is_sparse(layer) else range(0)
            for tensors in (self.layer(layer), *(self.expert(layer, expert) for expert in experts)):
                # A factor holds its canonical tensors whole, so each ends where its last tile ends.
                for tile in (tile for name in tensors if factor_of(name) for tile in tensors[name].whole.tiles):
                    shapes[tile.name] = tuple(map(max, tile.box.stops, shapes.get(tile.name, tile.box.stops)))
        return shapes


def _factor_tensor(factor: Factor, weight: MegatronTensor, rank: int) -> MegatronTensor:
    names = _names(factor, weight)
    if any(len(tile.box.sizes) != 2 or tile.span(1) != (0, weight.shape[1]) for tile in weight.whole.tiles):
        raise UnsupportedError(
            f"the adapter {factor.name} changes a part of {weight.names[0]}",
            why="The published model keeps the weights of all experts in one tensor, and PEFT's names of modules do not reach a part of it",
            do="Merge the adapter with the program that trained it, then convert the result",
        )
    if not factor.is_output:
        whole = Box.whole((rank, weight.shape[1]))
        tiles = tuple(tile for name in names for tile in Mosaic.of(_canonical(name, "lora_A"), whole).tiles)
        return MegatronTensor((Mosaic(whole.sizes, tiles),), 1 if weight.axis == 1 else None if factor.is_of_swift else 0)
    if factor.projection:
        rows = sum(stop - start for start, stop in (tile.span(0) for tile in weight.whole.tiles if tile.name == names[0]))
        return MegatronTensor((Mosaic.of(_canonical(names[0], "lora_B"), Box.whole((rows, rank))),), 0)
    return MegatronTensor(tuple(_rows_of(block, rank) for block in weight.blocks), 0)


def _names(factor: Factor, weight: MegatronTensor) -> tuple[str, ...]:
    """The canonical weights that a factor adapts."""
    if not factor.projection:
        return weight.names
    for projections in _PROJECTIONS:
        if factor.projection in projections and len(projections) == len(weight.names):
            return (weight.names[projections.index(factor.projection)],)
    raise UnsupportedError(
        f"the adapter {factor.name} changes one projection, and the model has {', '.join(weight.names)} in its place",
        why="In the published model the projections are not weights of their own, so PEFT has no adapter for one of them",
        do="Merge the adapter with the program that trained it, then convert the result",
    )


def _rows_of(block: Mosaic, rank: int) -> Mosaic:
    """B of the rows of a weight: each run of rows of a canonical weight is the same run of its B."""
    tiles = []
    for tile in block.tiles:
        out = tile.axes.index(0)  # a transposed weight, such as Conv1D's [in, out], has its output features along axis 1
        rows = Box((tile.box.offsets[out], 0), (tile.box.sizes[out], rank))
        tiles.append(Tile(_canonical(tile.name, "lora_B"), rows, (tile.at[0], 0), (0, 1)))
    return Mosaic((block.shape[0], rank), tuple(tiles))


def _canonical(weight: str, part: str) -> str:
    return f"{PREFIX}{weight.removesuffix('.weight')}.{part}.weight"


def is_saved_by_halves(factor: Factor, tensor: MegatronTensor) -> bool:
    """Whether a distributed save cuts each rank's rows of a factor in two, as if they were gate and up, and they are not.

    It does so with B of every linear_fc1: of one projection, and of an MLP without a gate (ParallelLinearAdapter.sharded_state_dict).
    """
    return factor.is_output and factor.weight.endswith("linear_fc1.weight") and len(tensor.blocks) == 1


def by_ranks(tensor: MegatronTensor, tp: int) -> Mosaic:
    """The rows as ms-swift's distributed save joins them: those of each tensor-parallel rank in turn."""
    return joined([tensor.shard(tp, tp_rank) for tp_rank in range(tp)])


def by_halves(array: Mosaic, parts: int) -> Mosaic:
    """The rows as such a save has them, in `parts` parts: the first half of every rank's rows, then the second half of every rank's."""
    shards = [array.part(0, parts // 2, tp_rank) for tp_rank in range(parts // 2)]
    return joined([shard.part(0, 2, half) for half in range(2) for shard in shards])
