"""Merging a LoRA adapter, described but not computed: each adapted weight gets its updates attached, and the values are computed when the
weight is read (engine/origins/merged.py).

    matrix             W [out, in]       + scale * (B x A), whatever the form in which the adapter stores the two (adapters/reading.py)
    bias               b [out]           + scale * lora_B.bias
    DoRA               each row of W + scale * (B x A) is scaled to the length that the magnitude vector gives
    modules_to_save    W is replaced; by a table of another number of tokens, too, and then the model has that many
    classifiers        the adapter's head takes the place of the base's (adapters/heads.py)
    trained tokens     single rows of W are replaced

Source: peft 0.21.2, lora/layer.py (Linear, Embedding, ParamWrapper), lora/variants.py and trainable_tokens/layer.py; compared with its own
merge in tests/peft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from reshard.canonical.adapters.base import AdaptedBase, is_quantized
from reshard.canonical.adapters.heads import with_own_head
from reshard.canonical.adapters.reading import read_adapter
from reshard.canonical.adapters.updates import Adapter, item, part
from reshard.canonical.content import Content, Drop
from reshard.canonical.lora import LoraSettings
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.geometry.boxes import Box
from reshard.geometry.mosaics import Mosaic, Tile
from reshard.geometry.value import mutable
from reshard.index.origin import LowRankProduct, Merged, Tensor
from reshard.index.provenance import MergedAdapter
from reshard.models.model import Model


def with_adapter_merged(content: Content, path: str, settings: LoraSettings, tensors: Mapping[str, Tensor], weight: float = 1.0) -> Content:
    """The content with the updates of an adapter attached to its weights, and with the weights that the adapter replaces.

    path: the adapter's directory. tensors: its tensors by their names in the file of PEFT. weight: the factor of its updates.

    Raises: UnsupportedError for an adapter whose update is not the product of its factors; CheckpointError if the adapter and the base do
    not fit together; RequestError for quantized weights that are not dequantized.
    """
    content, tensors = with_own_head(content, settings, tensors)
    base = AdaptedBase(content.model, content, path, settings.config.get("base_model_name_or_path"))
    adapter = read_adapter(base, settings, tensors)
    if weight != 1 and (whole := [*adapter.replaced, *adapter.trained_rows]):
        raise RequestError(
            f"`adapter_weight={weight:g}`: the adapter holds whole weights, which it replaces",
            where=f"{whole[0]} in {path}",
            why="A weight is a factor of updates, and these are no updates",
            do="Give this adapter the weight 1",
        )
    return with_updates(content, base, adapter, MergedAdapter(path, settings.config, 0, weight, content.merged))


def with_updates(content: Content, base: AdaptedBase, adapter: Adapter, merged: MergedAdapter) -> Content:
    """The same for an adapter that is read. merged: the record of it, without the number of weights.

    Raises: CheckpointError or RequestError, as `with_adapter_merged`.
    """
    merge = _Merge(content, base)
    for name, (array, tensor) in adapter.replaced.items():
        merge.replace(name, array, tensor)
    for update in adapter.updates:
        for tile, product in update.products(merged.weight):
            merge.add(tile, product)
    for array, tensor, rows in adapter.trained_rows.values():
        merge.replace_rows(array, tensor, rows)
    return merge.content(adapter, replace(merged, weights=len(merge.tensors)))


@mutable
class _Merge:
    """A merge that is being described."""

    before: Content
    """The content without the adapter."""
    base: AdaptedBase
    """What the adapter changes."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The tensors of the base that change."""
    drops: list[Drop] = field(default_factory=list)
    """The tensors that are not needed."""

    def content(self, adapter: Adapter, merged: MergedAdapter) -> Content:
        """The content after the merge. Raises CheckpointError if the tables of tokens have different numbers of tokens then."""
        tensors = {**self.before.tensors, **self.tensors}
        drops = (*self.before.drops, *adapter.drops, *self.drops)
        model = self.before.model
        if model is not None:
            model = _resized(model, self.base, {name: tensor for name, tensor in tensors.items() if name in model.weights})
        return replace(self.before, tensors=tensors, drops=drops, merged=merged, model=model)

    def replace(self, name: str, array: Mosaic, tensor: Tensor) -> None:
        """Put a whole tensor of the adapter in the place of the base's."""
        for tile in array.tiles:
            old, axes = self.before.tensors[tile.name], [axis for axis in tile.axes if axis is not None]
            of_expert = axes in ([1, 2], [2, 1]) and len(tensor.shape) == 3
            is_whole = tile.box.sizes == old.shape and len(axes) == len(tile.axes) == len(tensor.shape) - of_expert
            if not is_whole and not (len(array.tiles) == 1 and self.base.is_resized(array, tensor.shape)):
                raise UnsupportedError(
                    "the adapter replaces a part of a weight",
                    where=tensor.name,
                    why="Such a replacement is not implemented",
                    do="Merge it with PEFT (merge_and_unload), then convert the result",
                )
            self.drops += [
                Drop.of(leaf, "replaced by the weight of the adapter (modules_to_save, or a trained bias)")
                for leaf in ((old,) if not old.is_computed else old.leaves)
            ]
            own = tensor
            if len(array.tiles) > 1 or axes != list(range(len(tensor.shape))):
                matrix = item(tensor, tile.at[0]) if of_expert else tensor
                own_axes = tuple((size, axis - of_expert, 1) for size, axis in zip(tile.box.sizes, axes, strict=True))
                own = part(matrix, tile.at[of_expert:], own_axes)
                own = replace(own, origin=Merged(own, ()))  # a part of the tensor, such as gate of one expert
            self.tensors[tile.name] = replace(own, name=tile.name, kind="weight")

    def replace_rows(self, array: Mosaic, tensor: Tensor, numbers: tuple[int, ...]) -> None:
        """Put single rows of the adapter in the place of the base's."""
        width = array.shape[1]
        for place, number in enumerate(numbers):
            row = part(tensor, (place, 0), ((1, 0, 1), (width, 1, 1)))
            for tile in array.cut(0, number, number + 1).tiles:
                self.add(tile, LowRankProduct(tile.box, None, row, 1.0, replaces=True))

    def add(self, tile: Tile, product: LowRankProduct) -> None:
        """Attach a product to the tensor of a tile."""
        tensor = self.tensors.get(tile.name) or self.before.tensors[tile.name]
        if not tensor.values_dtype.floating or tensor.values_dtype.itemsize == 1:
            raise is_quantized(tile.name, str(tensor.dtype))
        if product.magnitude is not None and (len(tensor.shape) != 2 or product.box.sizes[1] != tensor.shape[1]):
            raise self.base.misfit(product.columns, "DoRA needs whole rows of the base weight, which is stored in another order")
        before = tensor.origin if isinstance(tensor.origin, Merged) else Merged(tensor, ())
        self.tensors[tile.name] = replace(tensor, origin=Merged(before.base, (*before.products, product)))


def _resized(model: Model, base: AdaptedBase, tensors: Mapping[str, Tensor]) -> Model:
    """The model with the number of tokens that its tables have after the merge.

    Raises: CheckpointError if they have different ones, as when the training added tokens and the adapter holds the embedding alone.
    """
    tables = {name: tensors[name] for name, weight in model.weights.items() if weight.role in ("embedding", "head") and name in tensors}
    changed = [tensor for name, tensor in tables.items() if tensor.shape != model.weights[name].shape]
    if not changed:
        return model
    if rest := [name for name, tensor in tables.items() if tensor.shape[0] != changed[0].shape[0]]:
        array = Mosaic.of(changed[0].name, Box.whole(model.weights[changed[0].name].shape))
        raise base.misshapen(changed[0], changed[0].shape, array, f"{rest[0]} has another number of tokens")
    config = with_vocabulary(dict(model.config), changed[0].shape[0])
    resized = Model(model.architecture, config)
    if any(resized.weights[name].shape != tensor.shape for name, tensor in tables.items()):
        raise CheckpointError(f"{changed[0].name} has the shape {list(changed[0].shape)}, which no vocab_size gives", where=base.path)
    return resized


def with_vocabulary(config: dict[str, object], size: int) -> dict[str, object]:
    """A config with another number of tokens, wherever it says it."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config = {**config, "text_config": {**inner, "vocab_size": size}}
    return {**config, "vocab_size": size} if "vocab_size" in config or not isinstance(inner, dict) else config
