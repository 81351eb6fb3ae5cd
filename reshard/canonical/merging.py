"""Merging a LoRA adapter, described but not computed: each adapted weight gets its updates attached, and the values are computed when the
weight is read (engine/origins/merged.py).

    Linear             W [out, in]       + scale * (B x A)
    Conv1D, embedding  W [in, out]       + scale * (B x A) transposed
    experts            W [E, rows, cols] + scale * (B_e x A_e), with A [r*E, cols] read as (E, r, cols) and B [rows, r*E] as (rows, r, E);
                                           of classes with is_transposed (gpt-oss; not Llama 4) the transpose, with A [r*E, rows]
    bias               b [out]           + scale * lora_B.bias
    DoRA               each row of W + scale * (B x A) is scaled to the length that the magnitude vector gives

Source: peft 0.21.2, lora/layer.py (Linear, Embedding, ParamWrapper) and lora/variants.py; compared with its own merge in tests/peft.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import field, replace

from reshard.canonical.content import Content, Drop
from reshard.canonical.lora import LoraSettings
from reshard.canonical.name_variants import Names
from reshard.canonical.renaming import PREFIX, adapter_name
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.geometry.boxes import Box
from reshard.geometry.mosaics import Mosaic, Tile
from reshard.geometry.quantities import grouped
from reshard.geometry.value import mutable, value
from reshard.index.origin import LowRankProduct, Merged, Tensor
from reshard.index.provenance import MergedAdapter

_BASE_LAYER = ".base_layer"
# Their experts are [in, out], and their class in transformers 5.23 has no is_transposed: PEFT takes them as [out, in].
_WITHOUT_MARK = ("llama4", "llama4_text")
_OF_LINEAR = frozenset({"lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector"})
_OF_EMBEDDING = frozenset({"lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"})


def with_adapter_merged(content: Content, path: str, settings: LoraSettings, tensors: Mapping[str, Tensor]) -> Content:
    """The content with the updates of an adapter attached to its weights, and with the weights that the adapter replaces.

    path: the adapter's directory. tensors: its tensors by their names in the file of PEFT.

    Raises: UnsupportedError for an adapter whose update is not the product of its factors; CheckpointError if the adapter and the base do
    not fit together; RequestError for quantized weights that are not dequantized.
    """
    settings.check_mergeable()
    merge = _Merge(content, path, settings, Names(content.model) if content.model else None)
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        factor = adapter_name(name)
        if factor is not None:
            modules.setdefault(factor.module, {})[factor.parameter] = tensor
        else:
            merge.replace(name.removeprefix(PREFIX), tensor)
    # Adapters of several parameters of one module are nested: `experts`, `experts.base_layer`.
    for module, nested in grouped(modules, lambda name: re.sub(r"(\.base_layer)+$", "", name)).items():
        of_module = [modules[name] for name in nested]
        if parameters := merge.target_parameters(module):
            merge.add_parameters(module, parameters, of_module)
        else:
            for factors in of_module:
                merge.add_module(module, factors)
    return merge.content()


@mutable
class _Merge:
    """A merge that is being described."""

    base: Content
    """The content of the base model."""
    path: str
    """The directory of the adapter."""
    settings: LoraSettings
    """Its settings."""
    names: Names | None
    """The names of the base model; None if its architecture is not declared."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The tensors of the base that change."""
    drops: list[Drop] = field(default_factory=list)
    """The tensors that are not needed."""

    def content(self) -> Content:
        """The content after the merge."""
        merged = MergedAdapter(self.path, self.settings.config, len(self.tensors))
        tensors = {**self.base.tensors, **self.tensors}
        return replace(self.base, tensors=tensors, drops=(*self.base.drops, *self.drops), merged=merged)

    def replace(self, name: str, tensor: Tensor) -> None:
        """Put a whole tensor of the adapter in the place of the base's: of modules_to_save, or a trained bias."""
        array = self._array(name.replace(_BASE_LAYER + ".", "."), tensor)
        if array.shape != tensor.shape:
            raise self._misshapen(tensor, tensor.shape, array, f"its shape is {list(tensor.shape)}, the base has {list(array.shape)}")
        if f"{_BASE_LAYER}." in name and name.endswith(".weight"):
            self.drops.append(Drop.of(tensor, "a copy of a base weight, which is taken from the base", "adapter"))
            return
        tile = array.tiles[0]
        if len(array.tiles) > 1 or tile.axes != tuple(range(len(array.shape))) or tile.box.sizes != self.base.tensors[tile.name].shape:
            raise UnsupportedError(
                "the adapter replaces a weight that the base stores fused with others, or stacked",
                where=tensor.name,
                why="Such a replacement is not implemented",
                do="Merge it with PEFT (merge_and_unload), then convert the result",
            )
        old = self.base.tensors[tile.name]
        self.drops.append(Drop.of(old, "replaced by the weight of the adapter (modules_to_save, or a trained bias)"))
        self.tensors[tile.name] = replace(tensor, name=tile.name, kind="weight")

    def add_module(self, module: str, factors: Mapping[str, Tensor]) -> None:
        """Add the update of a module."""
        is_embedding = "lora_embedding_A" in factors
        a, b = (
            factors.get(part) for part in (("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A.weight", "lora_B.weight"))
        )
        first = next(iter(factors.values()))
        if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in factors.items())
            raise self._misfit(first, f"the adapter needs two matrices [r, in] and [out, r] here, and has {shapes}")
        array = self._array(f"{module}.weight", a)
        pair = _Factors(a, b, rank=a.shape[0], scale=self.settings.scale(module, a.shape[0]))
        shape = (b.shape[0], a.shape[1])
        is_in_out = self._is_in_out(array)
        if is_in_out is None:  # PEFT sets fan_in_fan_out by the class of the module, which is not known here
            is_in_out = array.shape != shape if shape[0] != shape[1] else bool(self.settings.config.get("fan_in_fan_out"))
        flipped = is_embedding or is_in_out
        if array.shape != (shape[::-1] if flipped else shape):
            what = f"its update has the shape {list(shape)}, the base weight {list(array.shape)}"
            raise self._misshapen(a, shape[::-1] if is_embedding else shape, array, what)
        magnitude = factors.get("lora_magnitude_vector")
        self._check_all_used(factors, magnitude)
        if magnitude is not None and (flipped or magnitude.shape != (b.shape[0],)):
            raise UnsupportedError(
                "DoRA on an embedding, or on a weight that is stored transposed, is not merged",
                where=magnitude.name,
                why="Its lengths are those of columns, and weights are read row by row",
                do="Merge it with PEFT (merge_and_unload), then convert the result",
            )
        for tile in array.tiles:
            self._add(tile, pair.update(tile, 0, flipped=flipped, magnitude=magnitude), a)
        if (bias := factors.get("lora_B.bias")) is not None:
            for tile in self._array(f"{module}.bias", bias).tiles:
                start, stop = tile.span(0)
                row = _part(bias, (start,), ((1, 0, 1), (stop - start, 0, 1)))
                self._add(tile, LowRankProduct(tile.box, None, row, pair.scale), bias)

    def _check_all_used(self, factors: Mapping[str, Tensor], magnitude: Tensor | None) -> None:
        """Raises CheckpointError if the settings contradict the tensors of a module, or one of them has no part in its update."""
        use_dora, first = self.settings.config.get("use_dora"), next(iter(factors.values()))
        if bool(use_dora) != (magnitude is not None) and use_dora is not None:
            there = "is not there" if magnitude is None else "is there"
            raise self._misfit(first, f"adapter_config.json says use_dora {bool(use_dora)}, and lora_magnitude_vector {there}")
        used = _OF_EMBEDDING if "lora_embedding_A" in factors else _OF_LINEAR
        if unused := sorted(factors.keys() - used):
            raise self._misfit(factors[unused[0]], f"{', '.join(unused)} has no part in the update of such a module")

    def target_parameters(self, module: str) -> list[str]:
        """The parameters of a module that `target_parameters` adapts. One without a module, such as down_proj, is of every module that has
        it."""
        targets = [target.rpartition(".") for target in self.settings.target_parameters]
        names = {name for of_module, _, name in targets if not of_module or f".{module}".endswith(f".{of_module}")}
        return sorted(name for name in names if self._find(f"{module}.{name}") is not None)

    def add_parameters(self, module: str, parameters: list[str], nested: list[dict[str, Tensor]]) -> None:
        """Add the updates of the parameters of one module. Their shapes tell which is which."""
        arrays = {name: self._array(f"{module}.{name}", next(iter(nested[0].values()))) for name in parameters}
        pairs = []
        for factors in nested:
            a, b = factors.get("lora_A.weight"), factors.get("lora_B.weight")
            if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2:
                raise self._misfit(next(iter(factors.values())), "the adapter needs the matrices lora_A.weight and lora_B.weight here")
            if len(factors) > 2:
                raise self._misfit(
                    a, f"parameters have no {', '.join(sorted(factors.keys() - {'lora_A.weight', 'lora_B.weight'}))} in PEFT"
                )
            pairs.append((a, b))
        # Whether the updates are the transposes of B x A is seen at the shapes, unless all are square.
        ways = [way for way in (False, True) if all(len(_fitting(arrays, a, b, flipped=way)) == 1 for a, b in pairs)]
        flipped = self._is_flipped(pairs[0][0], arrays) if len(ways) == 2 else ways == [True]
        for a, b in pairs:
            fitting = _fitting(arrays, a, b, flipped=flipped)
            if len(fitting) != 1:
                found = f"{[b.shape[0], a.shape[1]]} for each expert, which fits {', '.join(fitting) or 'none'} of {', '.join(arrays)}"
                raise self._misfit(a, f"its update has the shape {found}")
            self._add_parameter(f"{module}.{fitting[0]}", arrays.pop(fitting[0]), a, b, flipped=flipped)

    def _add_parameter(self, name: str, array: Mosaic, a: Tensor, b: Tensor, *, flipped: bool) -> None:
        """Add the update of one parameter, a matrix or those of all experts."""
        of_experts = len(array.shape) == 3
        experts = array.shape[0] if of_experts else 1
        rank = a.shape[0] // experts
        pair = _Factors(a, b, rank, self.settings.scale(name, rank), experts)
        for tile in array.tiles:
            for number in range(*(tile.span(0) if of_experts else (0, 1))):
                of_expert = tile.cut(0, number, number + 1) if of_experts else tile
                assert of_expert is not None
                self._add(of_expert, pair.update(of_expert, number, flipped=flipped and of_experts), a)

    def _is_flipped(self, a: Tensor, arrays: Mapping[str, Mosaic]) -> bool:
        """Whether PEFT adds the transposes of B x A to experts whose matrices are square.

        Raises: RequestError, with both readings, if the adapter does not tell the release, or the base its class, and it matters.
        """
        experts = next((array for array in arrays.values() if len(array.shape) == 3 and array.shape[0] > 1), None)
        if experts is None:
            return False  # a matrix, or the only expert, which PEFT takes as one
        is_in_out, model, releases = self._is_in_out(experts), self.base.model, self.settings.peft_releases
        has_mark = is_in_out and not (model and model.architecture.model_type in _WITHOUT_MARK)
        readings = {_meets_axis_1(release, has_mark) for release in releases}
        if readings in ({True}, {False}):
            return True in readings
        raise RequestError(
            f"its factors fit experts {list(experts.shape)} in two ways: lora_A meets their axis 1, or their axis 2",
            where=f"{a.name} in {self.path}",
            why="PEFT before 0.19 takes axis 1, and since 0.19.1 axis 2 unless the class has is_transposed; "
            + (
                "the model is not known"
                if None in readings
                else f"peft_version in adapter_config.json is {self.settings.config.get('peft_version')}"
            ),
            do='Put the release that trained it into adapter_config.json, such as "peft_version": "0.17.1", and give the base with its '
            "config.json; or merge it with the PEFT that trained it",
            id="ambiguous",
        )

    def _is_in_out(self, array: Mosaic) -> bool | None:
        """Whether an array of the base is [..., in, out], as a Conv1D, by the declaration of its weight; None if that is not declared."""
        weight = self.base.model.weights.get(array.names[0]) if self.base.model else None
        return None if weight is None else weight.declared.transposed and not _is_turned(array.tiles[0])

    def _array(self, name: str, tensor: Tensor) -> Mosaic:
        """The canonical tensors that the base has under a name. Raises CheckpointError if it has none."""
        array = self._find(name)
        if array is None or not array.tiles or any(part not in self.base.tensors for part in array.names):
            quantization = self.base.model.quantization if self.base.model else None
            form = quantization.form_of(name) if quantization else None
            if form is not None and form.names(name).keys() <= self.base.tensors.keys():
                raise _is_quantized(name, form.name)
            why = "The adapter was trained on another model, or the base ties this weight to another one"
            if self.base.selection.is_partial:
                why = "`include=` or `exclude=` leaves it out"
            raise CheckpointError(
                f"the base has no weight {name}, which the adapter changes",
                where=tensor.name,
                why=why,
                do=f"Give the base that the adapter was trained on{self._trained_on()}",
            )
        return array

    def _find(self, name: str) -> Mosaic | None:
        """The canonical tensors that the model has under a name; None if it has none."""
        array = self.names.array(name) if self.names else None
        if array is None and name in self.base.tensors:
            array = Mosaic.of(name, Box.whole(self.base.tensors[name].shape))
        return array

    def _trained_on(self) -> str:
        base = self.settings.config.get("base_model_name_or_path")
        return f"; its adapter_config.json names {base}" if base else ""

    def _misshapen(self, tensor: Tensor, shape: tuple[int, ...], array: Mosaic, what: str) -> CheckpointError:
        """The error for a tensor that is for a weight of another shape: of another vocabulary, or what is said."""
        weight = self.base.model.weights.get(array.names[0]) if self.base.model else None
        if weight is None or weight.role not in ("embedding", "head") or shape[1:] != array.shape[1:]:
            return self._misfit(tensor, what)
        return CheckpointError(
            f"the adapter was trained with a vocabulary of {shape[0]}, the base has one of {array.shape[0]}",
            where=f"{tensor.name} in {self.path}",
            why="The training changed the number of tokens, so the embedding and the head of the base have another shape",
            do=f"Resize the base as the training did (resize_token_embeddings({shape[0]}) and save_pretrained of transformers), then merge",
        )

    def _misfit(self, tensor: Tensor, what: str) -> CheckpointError:
        return CheckpointError(
            what,
            where=f"{tensor.name} in {self.path}",
            why="The adapter was trained on another model, or its file is damaged",
            do=f"Give the base that the adapter was trained on{self._trained_on()}",
        )

    def _add(self, tile: Tile, product: LowRankProduct, factor: Tensor) -> None:
        tensor = self.tensors.get(tile.name) or self.base.tensors[tile.name]
        if not tensor.values_dtype.floating or tensor.values_dtype.itemsize == 1:
            raise _is_quantized(tile.name, str(tensor.dtype))
        if product.magnitude is not None and (len(tensor.shape) != 2 or product.box.sizes[1] != tensor.shape[1]):
            raise self._misfit(factor, "DoRA needs whole rows of the base weight, which is stored in another order")
        before = tensor.origin if isinstance(tensor.origin, Merged) else Merged(tensor, ())
        self.tensors[tile.name] = replace(tensor, origin=Merged(before.base, (*before.products, product)))


def _is_quantized(weight: str, form: str) -> RequestError:
    return RequestError(
        f"`merge_adapter=`: it is quantized ({form})",
        where=weight,
        why="An update is added to values, and quantizing the sum again would need new scales",
        do="Add `dequantize=True`, or give the base that is not quantized",
    )


@value
class _Factors:
    """The two factors of a module, or of one of its parameters for all experts."""

    a: Tensor
    """[r * experts, in]"""
    b: Tensor
    """[out, r * experts]"""
    rank: int
    """r."""
    scale: float
    """The factor of the product."""
    experts: int = 1
    """The number of experts; 1 for a matrix."""

    def update(self, tile: Tile, expert: int, *, flipped: bool, magnitude: Tensor | None = None) -> LowRankProduct:
        """The update of a tile of the array that is B x A, or with `flipped` its transpose; axes before the last two have one element."""
        row_axis, column_axis = len(tile.at) - 2, len(tile.at) - 1
        rows, columns = tile.span(row_axis), tile.span(column_axis)
        if _is_turned(tile):
            rows, columns, flipped = columns, rows, not flipped
        of_rows, of_columns = (self._of_a, self._of_b) if flipped else (self._of_b, self._of_a)
        lengths = None
        if magnitude is not None and not flipped:
            lengths = _part(magnitude, (rows[0],), ((rows[1] - rows[0], 0, 1),))
        return LowRankProduct(
            tile.box, of_rows(expert, *rows, as_rows=True), of_columns(expert, *columns, as_rows=False), self.scale, lengths
        )

    def _of_a(self, expert: int, start: int, stop: int, *, as_rows: bool) -> Tensor:
        """Some columns of A for an expert: as [r, columns], or transposed as the factor of rows."""
        axes = (self.rank, 0, 1), (stop - start, 1, 1)
        return _part(self.a, (expert * self.rank, start), axes[::-1] if as_rows else axes)

    def _of_b(self, expert: int, start: int, stop: int, *, as_rows: bool) -> Tensor:
        """Some rows of B for an expert: as [rows, r], or transposed as the factor of columns."""
        axes = (stop - start, 0, 1), (self.rank, 1, self.experts)
        return _part(self.b, (start, expert), axes if as_rows else axes[::-1])


def _meets_axis_1(release: tuple[int, int, int], has_mark: bool | None) -> bool | None:
    """Whether A [r*E, n] meets axis 1 of experts in a release of PEFT; None if that depends on the class, which is not known.

    has_mark: whether the class has is_transposed. Source: ParamWrapper.update_layer of peft 0.17.1, 0.18.1, 0.19.0, 0.19.1 and 0.21.2.
    """
    if release < (0, 19) or has_mark is None:
        return True if release < (0, 19) else None
    return has_mark if release >= (0, 19, 1) else not has_mark


def _is_turned(tile: Tile) -> bool:
    """Whether the canonical tensor holds the transpose of the array, in its last two axes."""
    row_axis, column_axis = len(tile.at) - 2, len(tile.at) - 1
    return tile.axes[-1] == row_axis or (len(tile.axes) > 1 and tile.axes[-2] == column_axis)


def _fitting(arrays: Mapping[str, Mosaic], a: Tensor, b: Tensor, *, flipped: bool) -> list[str]:
    """The parameters whose shapes the factors have, or with `flipped` their transposes; experts have axes before the last two."""
    fitting = []
    for name, array in arrays.items():
        if len(array.shape) in (2, 3) and 0 not in array.shape:
            *experts, rows, columns = array.shape
            out, into = (columns, rows) if flipped and experts else (rows, columns)
            if (b.shape[0], a.shape[1]) == (out, into) and a.shape[0] == b.shape[1] and a.shape[0] % math.prod(experts) == 0:
                fitting.append(name)
    return fitting


def _part(tensor: Tensor, at: tuple[int, ...], axes: tuple[tuple[int, int, int], ...]) -> Tensor:
    """A strided part of a stored tensor, as a tensor of the same name. at, axes: as for `Shards.strided`."""
    return replace(tensor, shape=tuple(size for size, _, _ in axes), shards=tensor.shards.strided(at, axes))
