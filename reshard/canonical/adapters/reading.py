"""From the tensors of an adapter, in any form, to the value. Names are those of PEFT's file, below "base_model.model.".

    <module>.lora_A.weight [r, in], .lora_B.weight [out, r]            one matrix; of experts: split (experts.0.gate_proj)
    <experts>.lora_A.weight [E*r, in], .lora_B.weight [out, r*E]       fused (target_parameters): A is (E, r, in), B is (out, r, E)
    <experts>.base_layer.lora_A.weight ...                             the same for another parameter of the module
    <experts>.w1.lora_A.weight [E, r, in], .lora_B.weight [E, out, r]  stacked: w1 is gate, w3 up, w2 down. Where all experts share a
                                                                       factor, its first axis is 1 (Tinker; vLLM's "shared outer" form)

How an update lies on the weight: W [out, in] + scale * (B x A); Conv1D and embeddings hold the transpose. Which parameter the factors of
experts belong to, and which of its axes A meets, is decided by shapes.

Source: peft 0.21.2, lora/layer.py (Linear, Embedding, ParamWrapper) and lora/variants.py; tinker-cookbook 0.6.1, weights/_merge_utils.py;
vllm 0.32, lora/layers/fused_moe.py. Compared with the merges of PEFT and Tinker in tests/peft.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from reshard.canonical.adapters.base import AdaptedBase, Place, by_expert
from reshard.canonical.adapters.updates import Adapter, BiasUpdate, Update, item, part, transposed
from reshard.canonical.content import Drop
from reshard.canonical.lora import LoraSettings
from reshard.canonical.renaming import PREFIX, TRAINED_TOKENS, adapter_name, base_name
from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.boxes import Box
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.quantities import grouped, plural
from reshard.index.origin import Tensor
from reshard.models.model import Model

_BASE_LAYER = ".base_layer"
# Their experts are [in, out], and their class in transformers 5.23 has no is_transposed: PEFT takes them as [out, in].
WITHOUT_MARK = ("llama4", "llama4_text")
_OF_LINEAR = frozenset({"lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector"})
_OF_EMBEDDING = frozenset({"lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"})
STACKED = re.compile(r"(.+\.experts)\.(w1|w2|w3)")
# Projections of stacked factors, for experts with a gate and without one (Nemotron: w3 has no elements).
_GATED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_UNGATED = {"w1": "up_proj", "w2": "down_proj"}


def read_adapter(base: AdaptedBase, settings: LoraSettings, tensors: Mapping[str, Tensor], *, expert_slowest: bool = False) -> Adapter:
    """The adapter whose tensors these are. tensors: by their names in the file of PEFT. expert_slowest: read lora_B of the fused form as
    (out, E, r), as Unsloth did before September 2026, in place of PEFT's (out, r, E).

    Raises: UnsupportedError for an adapter whose update is not the product of its factors; CheckpointError if the adapter and the base do
    not fit together; RequestError if factors can be read in two ways.
    """
    settings.check_mergeable()
    reading = _Reading(base, settings, expert_slowest)
    modules: dict[str, dict[str, Tensor]] = {}
    named = {name: adapter_name(name) for name in tensors}
    reading.replace({name.removeprefix(PREFIX): tensors[name] for name, factor in named.items() if factor is None})
    for name, factor in named.items():
        tensor = tensors[name]
        if factor is None:
            continue
        if factor.parameter == TRAINED_TOKENS:
            reading.add_rows(factor.module.removesuffix(".token_adapter"), name, tensor)
        elif (other := modules.setdefault(factor.module, {}).setdefault(factor.parameter, tensor)) is not tensor:
            raise base.misfit(tensor, f"it is the {factor.parameter} of {factor.module}, as {other.name} is")
    # Adapters of several parameters of one module are nested: `experts`, `experts.base_layer`.
    for module, nested in grouped(modules, lambda name: re.sub(r"(\.base_layer)+$", "", name)).items():
        of_module = [modules[name] for name in nested]
        if parameters := reading.target_parameters(module):
            reading.add_parameters(module, parameters, of_module)
            continue
        for factors in of_module:
            if any(len(tensor.shape) == 3 for tensor in factors.values()):
                reading.add_stacked(module, factors)
            else:
                reading.add_module(base.renamed(module), factors)
    reading.check_one_form()
    return Adapter(tuple(reading.updates), reading.replaced, reading.rows, tuple(reading.drops))


def check_whole(adapter: Adapter, model: Model) -> None:
    """Raises CheckpointError if an adapter of experts lacks one of the experts of the model."""
    experts = [update for update in adapter.updates if isinstance(update, Update) and update.expert is not None]
    for module, updates in grouped(experts, lambda update: re.sub(r"(\.experts)\.\d+\.", r"\1.*.", update.module)).items():
        numbers = {update.expert for update in updates}
        if lacking := [number for number in range(model.dimensions.get("experts", 0)) if number not in numbers]:
            raise CheckpointError(
                f"it changes {plural(len(numbers), 'expert')}, and not expert {lacking[0]}",
                where=module,
                why="An engine takes the adapter of all experts of a layer, or of none",
                do="Save the adapter again, with the files of all ranks",
            )


class _Reading:
    """An adapter that is being read."""

    def __init__(self, base: AdaptedBase, settings: LoraSettings, expert_slowest: bool) -> None:
        self.base, self.settings, self.expert_slowest = base, settings, expert_slowest
        self.updates: list[Update | BiasUpdate] = []
        self.replaced: dict[str, tuple[Mosaic, Tensor]] = {}
        self.rows: dict[str, tuple[Mosaic, Tensor, tuple[int, ...]]] = {}
        self.drops: list[Drop] = []
        self._scales: dict[tuple[str, int], tuple[float, float]] = {}
        self._tables: dict[str, Mosaic] = {}

    def replace(self, whole: Mapping[str, Tensor]) -> None:
        """Read the whole tensors of the adapter, in the place of the base's: of modules_to_save, trained biases, tables of another number
        of tokens. PEFT saves copies of others with them."""
        for name, tensor in whole.items():
            plain = base_name(name.replace(".modules_to_save.", "."))
            if not self.base.has_weights and self.base.find(plain) is None:
                continue  # the head of a classifier, which the config of its base does not tell
            array = self.base.weight(plain, tensor).array
            is_copy = plain != name and not name.endswith(f"{_BASE_LAYER}.bias")
            if array.shape != tensor.shape and not self.base.is_resized(array, tensor.shape):
                what = f"its shape is {list(tensor.shape)}, the base has {list(array.shape)}"
                raise self.base.misshapen(tensor, tensor.shape, array, what)
            if is_copy and (array.shape == tensor.shape or plain in whole or array.names[0] in self._tables):
                self.drops.append(Drop.of(tensor, "a copy of a base weight, which is taken from the base", "adapter"))
            elif self.base.tied_to(plain) in whole:
                self.drops.append(Drop.of(tensor, "a copy of the embedding, to which the head is tied", "adapter"))
            else:
                self.replaced[name] = array, tensor
                if array.shape != tensor.shape:
                    self._tables[array.names[0]] = Mosaic.of(array.names[0], Box.whole(tensor.shape))

    def _weight(self, name: str, tensor: Tensor) -> Place:
        """The weights of the base under a name, with the number of tokens that the adapter brings. Raises CheckpointError if there is
        none."""
        place = self.base.weight(name, tensor)
        return Place(self._tables.get(place.array.names[0], place.array), place.first_row, place.row_step)

    def add_rows(self, module: str, name: str, tensor: Tensor) -> None:
        """Read single trained rows of an embedding. PEFT lists those of a tied head under the name of the embedding, or of the head."""
        array = self._weight(f"{module}.weight", tensor).array
        if any(other.names == array.names for other, _, _ in self.rows.values()):
            self.drops.append(Drop.of(tensor, "the rows of the embedding, to which the head is tied", "adapter"))
            return
        rows = self.settings.trained_rows(module, *(other.removesuffix(".weight") for other in self.base.other_names(array)))
        if tensor.shape != (len(rows), *array.shape[1:]) or not all(0 <= row < array.shape[0] for row in rows):
            what = f"it has the shape {list(tensor.shape)}, for {len(rows)} rows of {list(array.shape)} (trainable_token_indices)"
            raise self.base.misfit(tensor, what)
        self.rows[name] = array, tensor, rows

    def add_module(self, module: str, factors: Mapping[str, Tensor]) -> None:
        """Read the update of a module."""
        is_embedding = "lora_embedding_A" in factors
        a, b = (
            factors.get(part) for part in (("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A.weight", "lora_B.weight"))
        )
        first = next(iter(factors.values()))
        if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in factors.items())
            raise self.base.misfit(first, f"the adapter needs two matrices [r, in] and [out, r] here, and has {shapes}")
        place = self._weight(f"{module}.weight", a)
        array, shape = place.array, (b.shape[0] * place.row_step, a.shape[1])
        is_in_out = self.base.is_in_out(array)
        if is_in_out is None:  # PEFT sets fan_in_fan_out by the class of the module, which is not known here
            is_in_out = array.shape != shape if shape[0] != shape[1] else bool(self.settings.config.get("fan_in_fan_out"))
        flipped = is_embedding or is_in_out
        if array.shape != (shape[::-1] if flipped else shape):
            what = f"its update has the shape {list(shape)}, the base weight {list(array.shape)}"
            raise self.base.misshapen(a, shape[::-1] if is_embedding else shape, array, what)
        magnitude = factors.get("lora_magnitude_vector")
        self._check_all_used(factors, magnitude)
        if magnitude is not None and (flipped or magnitude.shape != (b.shape[0],)):
            raise UnsupportedError(
                "DoRA on an embedding, or on a weight that is stored transposed, is not merged",
                where=magnitude.name,
                why="Its lengths are those of columns, and weights are read row by row",
                do="Merge it with PEFT (merge_and_unload), then convert the result",
            )
        number = re.search(r"\.experts\.(\d+)\.", module)
        self._add(module, Place(array.transposed() if flipped else array, place.first_row, place.row_step), a, b,
                  int(number[1]) if number else None, magnitude)  # fmt: skip
        if (bias := factors.get("lora_B.bias")) is not None:
            scale = self.settings.scale(module, a.shape[0])
            self.updates.append(BiasUpdate(self.base.weight(f"{module}.bias", bias).array, bias, scale))

    def add_stacked(self, module: str, factors: Mapping[str, Tensor]) -> None:
        """Read the updates of one projection of all experts, whose factors have a first axis of experts; of 1 where all share a factor."""
        a, b, named = factors.get("lora_A.weight"), factors.get("lora_B.weight"), STACKED.fullmatch(module)
        first = next(iter(factors.values()))
        if named is None or a is None or b is None or len(factors) > 2 or len(a.shape) != 3 or len(b.shape) != 3:
            shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in factors.items())
            raise self.base.misfit(first, f"the adapter needs lora_A [experts, r, in] and lora_B [experts, out, r] here, and has {shapes}")
        of_module = self.base.renamed(named[1], ".0.down_proj")
        projections = _GATED if self.base.find(f"{of_module}.0.gate_proj.weight") else _UNGATED
        if not a.elements and not b.elements and named[2] not in projections:  # where the experts have no gate, w3 holds nothing
            self.drops += [Drop.of(tensor, "it has no elements", "adapter") for tensor in (a, b)]
            return
        experts = max(a.shape[0], b.shape[0])
        is_whole = self.base.find(f"{of_module}.{experts - 1}.down_proj.weight") and not self.base.find(
            f"{of_module}.{experts}.down_proj.weight"
        )
        if not is_whole or named[2] not in projections or {a.shape[0], b.shape[0]} - {1, experts}:
            raise self.base.misfit(a, f"its factors {list(a.shape)} and {list(b.shape)} are not those of all experts of the base")
        for number in range(experts):
            own_a, own_b = (item(tensor, number if tensor.shape[0] > 1 else 0) for tensor in (a, b))
            self.add_module(f"{of_module}.{number}.{projections[named[2]]}", {"lora_A.weight": own_a, "lora_B.weight": own_b})

    def _check_all_used(self, factors: Mapping[str, Tensor], magnitude: Tensor | None) -> None:
        """Raises CheckpointError if the settings contradict the tensors of a module, or one of them has no part in its update."""
        use_dora, first = self.settings.config.get("use_dora"), next(iter(factors.values()))
        if bool(use_dora) != (magnitude is not None) and use_dora is not None:
            there = "is not there" if magnitude is None else "is there"
            raise self.base.misfit(first, f"adapter_config.json says use_dora {bool(use_dora)}, and lora_magnitude_vector {there}")
        used = _OF_EMBEDDING if "lora_embedding_A" in factors else _OF_LINEAR
        if unused := sorted(factors.keys() - used):
            raise self.base.misfit(factors[unused[0]], f"{', '.join(unused)} has no part in the update of such a module")

    def check_one_form(self) -> None:
        """Raises CheckpointError if a matrix of an expert has two updates, as in a file that holds an adapter in two forms."""
        first: dict[tuple[str, int, int], Update] = {}
        for update in self.updates:
            if isinstance(update, BiasUpdate) or update.expert is None:
                continue
            for tile in update.array.tiles:
                row = tile.box.offsets[-1 if tile.axes[-1] == 0 else -2] + (update.first_row if update.row_step > 1 else 0)
                other = first.setdefault((tile.name, update.expert, row), update)
                if other is not update:
                    raise self.base.misfit(update.a, f"it changes {tile.name}, which {other.a.name} changes too")

    def target_parameters(self, module: str) -> list[str]:
        """The parameters of a module that `target_parameters` adapts. One without a module, such as down_proj, is of every module that has
        it."""
        targets = [target.rpartition(".") for target in self.settings.target_parameters]
        names = {name for of_module, _, name in targets if not of_module or f".{module}".endswith(f".{of_module}")}
        return sorted(name for name in names if self.base.find(f"{module}.{name}") is not None)

    def add_parameters(self, module: str, parameters: list[str], nested: list[dict[str, Tensor]]) -> None:
        """Read the updates of the parameters of one module. Their shapes tell which is which."""
        first = next(iter(nested[0].values()))
        arrays = {name: self.base.weight(f"{module}.{name}", first).array for name in parameters}
        pairs = []
        for factors in nested:
            a, b = factors.get("lora_A.weight"), factors.get("lora_B.weight")
            if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2:
                raise self.base.misfit(next(iter(factors.values())), "the adapter needs the matrices lora_A.weight and lora_B.weight here")
            if len(factors) > 2:
                others = ", ".join(sorted(factors.keys() - {"lora_A.weight", "lora_B.weight"}))
                raise self.base.misfit(a, f"parameters have no {others} in PEFT")
            pairs.append((a, b))
        # Whether the updates are the transposes of B x A is seen at the shapes, unless all are square.
        ways = [way for way in (False, True) if all(len(_fitting(arrays, a, b, flipped=way)) == 1 for a, b in pairs)]
        flipped = self._is_flipped(pairs[0][0], arrays) if len(ways) == 2 else ways == [True]
        for a, b in pairs:
            fitting = _fitting(arrays, a, b, flipped=flipped)
            if len(fitting) != 1:
                shape = f"{[b.shape[0], a.shape[1]]} for each expert, which fits {', '.join(fitting) or 'none'} of {', '.join(arrays)}"
                raise self.base.misfit(a, f"its update has the shape {shape}")
            self._add_parameter(f"{module}.{fitting[0]}", arrays.pop(fitting[0]), a, b, flipped=flipped)

    def _add_parameter(self, name: str, array: Mosaic, a: Tensor, b: Tensor, *, flipped: bool) -> None:
        """Read the updates of one parameter, a matrix or those of all experts."""
        if len(array.shape) == 2:
            self._add(name, Place(array), a, b)
            return
        experts, is_in_out = array.shape[0], self.base.is_in_out(array)
        rank = a.shape[0] // experts
        for number, matrix in enumerate(by_expert(array)):
            own_a = part(a, (number * rank, 0), ((rank, 0, 1), (a.shape[1], 1, 1)))
            first, step = (number * rank, 1) if self.expert_slowest else (number, experts)
            own_b = part(b, (0, first), ((b.shape[0], 0, 1), (rank, 1, step)))
            if flipped:
                matrix = matrix.transposed()
            if bool(is_in_out) != flipped:  # A meets the output features: the product is that of exchanged, transposed factors
                matrix, own_a, own_b = matrix.transposed(), transposed(own_b), transposed(own_a)
            self._add(name, Place(matrix), own_a, own_b, number)

    def _add(self, name: str, place: Place, a: Tensor, b: Tensor, expert: int | None = None, magnitude: Tensor | None = None) -> None:
        key = name, a.shape[0]
        if key not in self._scales:
            scale = self.settings.scale(*key)
            self._scales[key] = self.settings.alpha_of(name), scale
        update = Update(name, place.array, a, b, *self._scales[key], expert, place.first_row, place.row_step, magnitude)
        self.updates.append(update)

    def _is_flipped(self, a: Tensor, arrays: Mapping[str, Mosaic]) -> bool:
        """Whether PEFT adds the transposes of B x A to experts whose matrices are square.

        Raises: RequestError, with both readings, if the adapter does not tell the release, or the base its class, and it matters.
        """
        experts = next((array for array in arrays.values() if len(array.shape) == 3 and array.shape[0] > 1), None)
        if experts is None:
            return False  # a matrix, or the only expert, which PEFT takes as one
        is_in_out, model, releases = self.base.is_in_out(experts), self.base.model, self.settings.peft_releases
        has_mark = is_in_out and not (model and model.architecture.model_type in WITHOUT_MARK)
        readings = {_meets_axis_1(release, has_mark) for release in releases}
        if readings in ({True}, {False}):
            return True in readings
        release = f"peft_version in adapter_config.json is {self.settings.config.get('peft_version')}"
        raise self.base.ambiguous(a, experts, "the model is not known" if None in readings else release)


def _meets_axis_1(release: tuple[int, int, int], has_mark: bool | None) -> bool | None:
    """Whether A [r*E, n] meets axis 1 of experts in a release of PEFT; None if that depends on the class, which is not known.

    has_mark: whether the class has is_transposed. Source: ParamWrapper.update_layer of peft 0.17.1, 0.18.1, 0.19.0, 0.19.1 and 0.21.2.
    """
    if release < (0, 19) or has_mark is None:
        return True if release < (0, 19) else None
    return has_mark if release >= (0, 19, 1) else not has_mark


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
