"""ModelWeight: one tensor of a model. WeightList lists all of them, those of quantized forms included, in the order of the parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from sys import intern

from reshard.errors import RequestError
from reshard.geometry.dtypes import DType, from_safetensors
from reshard.geometry.value import value
from reshard.models.architecture import NUMBER_OF_WEIGHT, USE, Weight
from reshard.models.roles import REPLICATE, ROLES
from reshard.models.sizes import Sizes, evaluate
from reshard.models.stored_forms import Component, StoredForm


@value
class ModelWeight:
    """One tensor of one model."""

    name: str
    """The canonical name, with the numbers of its layer and expert."""
    role: str
    """What it does, such as "attention.q"."""
    shape: tuple[int, ...]
    """The shape, as stored."""
    layer: int | None
    """The index of its layer; None outside of the layers."""
    declared: Weight
    """The declaration that it follows from."""
    pattern: str
    """The name with {layer} and {expert} in place of these numbers."""
    expert: int | None = None
    """The index of its expert; None outside of the experts."""
    optional: bool = False
    """Whether a checkpoint may lack it."""
    form: StoredForm | None = None
    """How it is stored if it is quantized; None: as its elements."""
    component: Component | None = None
    """If it is quantized: which of the tensors of its form this one is. Also for a scale of the KV cache."""
    implied: bytes | None = None
    """Its bytes, if they follow from the shape of the weight beside which it stands."""

    @property
    def is_scale(self) -> bool:
        """Whether it stands beside the elements of a quantized weight: its scales, its zero points."""
        return self.component is not None and self.component.is_scale

    @property
    def is_cache_scale(self) -> bool:
        """Whether it is a scale of cached keys or values."""
        return self.component is not None and self.form is None

    @property
    def component_dtype(self) -> DType | None:
        """The element type in which a component of a quantized weight is stored; None: as other weights."""
        if self.component is None:
            return None
        named = self.form.code_types[0] if self.form and not self.component.is_scale else self.component.element_type
        return from_safetensors(named, where=self.name) if named else None

    @property
    def elements(self) -> int:
        """The number of elements of the weight; 0 for what stands beside them."""
        packing = self.component.packing if self.component else None
        if self.is_scale:
            return 0
        return math.prod(self.shape) // math.prod(packing.words) * packing.count if packing else math.prod(self.shape)


class WeightList:
    """The weights that the sizes of a model give, in the order of its parameters. A tied head is among them."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes

    def __iter__(self) -> Iterator[ModelWeight]:
        present = self._present(self._sizes.dimensions)
        in_layers = {id(self._sizes.dimensions): present}
        layers = self._sizes.dimensions["layers"]
        done = False
        for (counted_by, is_in_layer, _), run in groupby(present, key=lambda item: _block_list(item[0])):
            if counted_by:
                of_block, sets = list(run), self._sizes.sets_among(self._sizes.dimensions[counted_by], {})
                for number in range(self._sizes.dimensions[counted_by]):
                    dimensions = {**self._sizes.dimensions, NUMBER_OF_WEIGHT: number}
                    yield from self._numbered(
                        [
                            (weight, self._shape(weight, dimensions) if weight.grows else shape)
                            for weight, shape in of_block
                            if all(number in sets[name] for name in weight.layers)
                        ],
                        None,
                        {counted_by: number},
                    )
            elif not is_in_layer:
                yield from self._numbered(list(run), None)
            elif not done:
                done = True
                for layer in range(layers + self._sizes.mtp_layers):
                    here = self._sizes.dimensions_in(layer)
                    if id(here) not in in_layers:
                        in_layers[id(here)] = self._present(here)
                    yield from self._in_layer([item for item in in_layers[id(here)] if self._is_in(layer, item[0])], layer)

    def _in_layer(self, weights: list[tuple[Weight, tuple[int, ...]]], layer: int) -> Iterator[ModelWeight]:
        """The tensors of one layer. In a shared block, a list has an item for each use of the block."""
        uses = self._sizes.uses_of_blocks.get(layer)
        if uses is None:
            yield from self._numbered(weights, layer)
            return
        for of_list, run in groupby(weights, key=lambda item: USE in item[0].name and item[0].name.partition(USE)[0]):
            items = list(run)
            for use in uses if of_list else (None,):
                yield from self._numbered(items, layer, {"use": use} if use is not None else None)

    def _is_in(self, layer: int, weight: Weight) -> bool:
        """Whether a layer has a weight."""
        return "{layer}" in weight.name and all(layer in self._sizes.layer_sets[name] for name in weight.layers)

    def _present(self, dimensions: Mapping[str, int]) -> list[tuple[Weight, tuple[int, ...]]]:
        """The weights that exist where these dimensions hold, with their shapes there."""
        missing = self._sizes.architecture.dimensions.keys() - dimensions.keys()
        present = [
            weight
            for weight in self._sizes.declared.weights
            if not missing & {weight.counted_by, *re.findall(r"\w+", " ".join(weight.shape))}
            and not ("experts" in missing and "{expert}" in weight.name)
            and self._sizes.holds(weight.when)
        ]
        return [(weight, self._shape(weight, {NUMBER_OF_WEIGHT: 0, **dimensions})) for weight in present]

    def _shape(self, weight: Weight, dimensions: Mapping[str, int]) -> tuple[int, ...]:
        shape = tuple(evaluate(axis, dimensions) for axis in weight.shape)
        if weight.fuses:
            own = shape[1:] if weight.stacked else shape
            rows = {role: evaluate(expression, dimensions) for role, expression in weight.fuses.items()}
            rounds = dimensions[weight.interleaved_by] if weight.interleaved_by else 1
            out_features = own[-1 if weight.transposed else 0]
            if sum(rows.values()) != out_features or any(count % rounds for count in rows.values()):
                interleaved = f" in {rounds} equal runs each, one per {weight.interleaved_by}" if weight.interleaved_by else ""
                raise RequestError(
                    f"it has {out_features} output features, and the roles fused in it have {' + '.join(map(str, rows.values()))}"
                    + interleaved,
                    where=weight.name,
                    why="So the declaration does not say which role each row has",
                    do="Compare its `shape` and `fuses` with the config",
                )
        return shape

    def _numbered(
        self, weights: list[tuple[Weight, tuple[int, ...]]], layer: int | None, numbers: Mapping[str, int] | None = None
    ) -> Iterator[ModelWeight]:
        """The tensors of one layer (None: outside of the layers), each weight followed by its scales, the experts one after the other.

        numbers: of other words in braces, such as the block of a vision tower.
        """
        optional, head = layer is not None and layer >= self._sizes.dimensions["layers"], self._sizes.architecture.head
        may_lack = ("class_head",) if head and head.beside else ()  # another model of the same files may have none
        for is_expert, run in groupby(weights, key=lambda item: "{expert}" in item[0].name):
            # What the experts share is computed once.
            alike = []
            for weight, shape in run:
                pattern = weight.name.format(layer="{layer}", expert="{expert}", **numbers) if numbers else weight.name
                runs = self._runs(weight)
                forms = [(form, self._components(form, pattern, shape, layer, runs)) for form in self._forms(weight, pattern)]
                alike.append((weight, shape, pattern, _names_in(layer, pattern), forms))
            for expert in range(self._sizes.dimensions["experts"]) if is_expert else (None,):
                for weight, shape, pattern, name_in, forms in alike:
                    name = name_in(expert)
                    form = self._sizes.quantization.form_of(name) if self._sizes.quantization and forms else None
                    if form is None:
                        yield ModelWeight(name, weight.role, shape, layer, weight, pattern, expert, optional or weight.role in may_lack)
                        continue
                    for component, stored, its, its_name, implied in next(components for of_form, components in forms if of_form is form):
                        name = its_name(expert)
                        yield ModelWeight(name, weight.role, stored, layer, weight, its, expert, optional, form, component, implied)
                    if weight.role == "attention.o" and self._sizes.quantization:
                        module = pattern.removesuffix(".weight").rpartition(".")[0]
                        for component in self._sizes.quantization.cache_scales:
                            pattern, role = f"{module}.{component.kind}", f"attention.{component.kind[0]}_scale"
                            name, stored = numbered(pattern, layer, expert), component.single_shape
                            if component.is_vector:  # one for each head
                                role, stored = f"{role}s", (self._sizes.dimensions_in(layer)["kv_heads"], 1, 1)
                            yield ModelWeight(name, role, stored, layer, weight, pattern, expert, True, component=component)

    def _forms(self, weight: Weight, pattern: str) -> list[StoredForm]:
        """The forms in which a weight can be stored, unless the config excludes its module; none: weights of its role are not quantized."""
        if self._sizes.quantization is None:
            return []
        is_linear = any(role in ROLES and ROLES[role].quantized for role in (weight.role, *weight.fuses))
        if not is_linear and not (self._sizes.quantization.everything and len(weight.shape) > 1):
            return []
        return [form for form in self._sizes.quantization.forms if form.fits(pattern) and form.transposed == weight.transposed]

    def _runs(self, weight: Weight) -> int:
        """The number of equal runs of rows of a weight, each with blocks of its own."""
        split = weight.split or (ROLES[weight.role].split if weight.role in ROLES else REPLICATE)
        return self._sizes.dimensions[split.heads] if split.exactly else 1

    @staticmethod
    def _components(
        form: StoredForm, pattern: str, shape: tuple[int, ...], layer: int | None, runs: int
    ) -> list[tuple[Component, tuple[int, ...], str, Callable[[int | None], str], bytes | None]]:
        """The components of a weight in a form: each with its shape, its pattern and its names, and its bytes if they are implied."""
        of_weight = (*shape[:-2], shape[-1], shape[-2]) if form.transposed else shape

        def stored(component: Component) -> tuple[int, ...]:
            if runs == 1:
                return component.shape(of_weight)
            of_run = component.shape((of_weight[0] // runs, *of_weight[1:]))
            return (runs * of_run[0], *of_run[1:]) if of_run else ()  # one scale of the whole weight has no axis

        return [
            (component, stored(component), name, _names_in(layer, name), form.implied(component, of_weight))
            for name, component in form.names(pattern).items()
        ]


def _block_list(weight: Weight) -> tuple[str | None, bool, str]:
    """The dimension that a weight's name counts, whether it is in a layer, and the list of blocks that it belongs to."""
    return weight.counted_by, "{layer}" in weight.name, weight.name.partition("{")[0] if weight.counted_by else ""


def _names_in(layer: int | None, pattern: str) -> Callable[[int | None], str]:
    """A function from an expert to its name in one layer. Equal names are one object, since they are compared a million times."""
    front, number, back = pattern.replace("{layer}", str(layer)).partition("{expert}")
    return (lambda expert: intern(f"{front}{expert}{back}")) if number else (lambda _: intern(front))


def numbered(pattern: str, layer: int | None, expert: int | None = None) -> str:
    """The name that a pattern with {layer} and {expert} stands for."""
    return pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))
