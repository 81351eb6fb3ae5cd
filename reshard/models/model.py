"""Model: an architecture together with one config. It lists the weights by name, and the parts of weights by role.

Architecture + config -> sizes      the settings and dimensions that a model has without its weights (sizes.py)
                      -> weights    one ModelWeight per tensor of the model, quantization scales included (weights.py)
                      -> parts()    one Part per role of each weight: a fused qkv is three parts (parts.py)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from operator import attrgetter

from reshard.errors import RequestError
from reshard.geometry.boxes import Box
from reshard.geometry.mosaics import Mosaic
from reshard.geometry.quantities import grouped
from reshard.geometry.value import value
from reshard.models.architecture import COUNTED
from reshard.models.config_values import stated_class, whole_number
from reshard.models.engine_rules import EngineRules
from reshard.models.parts import Part, parts_of
from reshard.models.sizes import Sizes
from reshard.models.weights import ModelWeight, WeightList, numbered


@value(eq=False)
class LayerKind:
    """Layers whose weights are alike but for the number of the layer."""

    layers: tuple[int, ...]
    """The indices of the layers, in order."""
    weights: tuple[ModelWeight, ...]
    """The weights of the first of them, in the model's order."""


# The keys of configs for the experts that each token is sent to.
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "num_experts_per_token", "top_k_experts")


@value(slots=False, eq=False)
class Model(Sizes):
    """The sizes that a config gives for an architecture, and the weights that follow from them."""

    @property
    def is_tied(self) -> bool:
        """Whether the head of a language model and the embedding are one tensor."""
        head = self.architecture.head
        return bool(self.setting("tie_word_embeddings")) and (head is None or head.beside)

    @property
    def experts_per_token(self) -> int | None:
        """The number of routed experts that each token is sent to; None if the config does not say it, or not one for all."""
        key, stated = next(((key, value) for key in _EXPERTS_PER_TOKEN if (value := self.setting(key))), ("", None))
        if isinstance(stated, list):  # one for each layer, as in Hunyuan's configs
            stated = stated[0] if all(number == stated[0] for number in stated) else None
        return whole_number({key: stated}, key)

    @property
    def class_name(self) -> str | None:
        """The class by which engines choose their own: the first of the config's `architectures`, or the one inside if it is a wrapper's;
        else the one of the declaration."""
        named, declared = stated_class(self.config), self.architecture.class_name
        if self.architecture.head or named in (None, declared):
            return self.architecture.head.class_name if self.architecture.head else declared
        from reshard.models.declared.heads import plain_class

        return plain_class(str(named), declared)

    @property
    def noun(self) -> str:
        """What messages call it: by its class if that has another head than a language model, else by its type."""
        head = self.architecture.head
        return f"{head.what} ({head.class_name})" if head else f"a {self.architecture.model_type} model"

    def __repr__(self) -> str:
        return f"Model({self.class_name or self.architecture.model_type}, {', '.join(f'{of} {n}' for of, n in self.dimensions.items())})"

    def quirks_of(self, engine: str) -> EngineRules | None:
        """What an engine's class for this model does differently, to be put into the engine's rules; None if no class of that engine was
        compared."""
        quirks = self.architecture.engines.get(engine)
        of_class = quirks.of_class.items() if quirks else ()
        return next((rules for name, rules in of_class if name == self.class_name or self.holds(name)), quirks)

    @cached_property
    def weights(self) -> dict[str, ModelWeight]:
        """The weights by canonical name, in the order of the model's parameters. A tied head is not among them."""
        by_name: dict[str, ModelWeight] = {}
        for weight in WeightList(self):
            if by_name.setdefault(weight.name, weight) is not weight:
                raise RequestError(
                    f"it is declared twice, as {by_name[weight.name].role} and as {weight.role}",
                    where=weight.name,
                    why="The layers of the two have this one in common",
                    do="Compare the sets of layers in the declaration with the config",
                )
        if self.is_tied:
            by_name.pop(self.architecture.tied[0], None)
        return by_name

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Further names that a checkpoint may have for a weight -> the name of the weight: that of a tied head, and those of a shared block
        in the other layers that use it."""
        head, embedding = self.architecture.tied
        of_blocks = {
            numbered(weight.pattern, layer, weight.expert): weight.name
            for weight in (self.weights.values() if self.uses_of_blocks else ())
            if weight.declared.in_shared_block
            for layer in self.uses_of_blocks[weight.layer or 0].values()
            if layer not in self.uses_of_blocks
        }
        return {**({head: embedding} if self.is_tied else {}), **of_blocks}

    @cached_property
    def pieces(self) -> dict[str, Mosaic]:
        """The runs of rows of weights that published files hold in pieces, by the names that they have there, in order."""
        by_name: dict[str, Mosaic] = {}
        for weight in self.weights.values() if any(declared.pieces for declared in self.declared.weights) else ():
            ending = weight.declared.pieces
            if ending is None or weight.is_scale:
                continue
            module, rows = weight.name.rpartition(".")[0], weight.shape[0]
            length = -(-rows // self.dimensions[re.findall(COUNTED, ending)[0]])
            for number, start in enumerate(range(0, rows, length)):
                box = Box.whole(weight.shape).narrow(0, start, min(start + length, rows))
                by_name[f"{module}.{re.sub(COUNTED, str(number), ending)}"] = Mosaic.of(weight.name, box)
        return by_name

    def as_published(self, whole: Collection[str] = ()) -> dict[str, ModelWeight]:
        """The weights by the names that published files have for them: pieces in place of weights that these files hold in pieces, unless
        they are in `whole`."""
        pieces: dict[str, dict[str, ModelWeight]] = {}
        for name, array in self.pieces.items():
            weight = self.weights[array.names[0]]
            pieces.setdefault(weight.name, {})[name] = replace(weight, name=name, shape=array.shape)
        inner = (pieces.get(name, {name: weight}) if name not in whole else {name: weight} for name, weight in self.weights.items())
        return {name: weight for of_weight in inner for name, weight in of_weight.items()}

    def parts(self, *, keep_fused: frozenset[str] = frozenset()) -> tuple[Part, ...]:
        """The parts of all weights. keep_fused: roles of fused weights, such as "attention.qkv", that stay one part."""
        return self.parts_of(self.weights.values(), keep_fused=keep_fused) if keep_fused else self._separate_parts

    def parts_of(self, weights: Iterable[ModelWeight], *, keep_fused: frozenset[str] = frozenset()) -> tuple[Part, ...]:
        """The parts of some weights of the model. keep_fused: as for `parts`."""
        return tuple(
            part for weight in weights for part in parts_of(weight, self.dimensions_in(weight.layer), keep_fused=weight.role in keep_fused)
        )

    @cached_property
    def _separate_parts(self) -> tuple[Part, ...]:
        return self.parts_of(self.weights.values())

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The layers in groups whose weights are alike, layers for multi-token prediction included."""
        rows = grouped((weight for weight in self.weights.values() if weight.layer is not None), attrgetter("layer"))

        def form(layer: int) -> tuple[object, ...]:
            weights = ((w.pattern, w.role, w.expert, w.shape, w.declared.split, w.form, w.component) for w in rows[layer])
            return id(self.dimensions_in(layer)), *weights

        return tuple(LayerKind(tuple(layers), tuple(rows[layers[0]])) for layers in grouped(rows, form).values())

    @cached_property
    def weights_outside_layers(self) -> tuple[ModelWeight, ...]:
        """The weights that are in no numbered layer, such as the embedding."""
        return tuple(weight for weight in self.weights.values() if weight.layer is None)

    def reason_to_drop(self, name: str) -> str | None:
        """Why a tensor of that name is left out on purpose; None if it is not. Weights of the model never are."""
        return self._reason(name, self.architecture.dropped)

    def reason_not_served(self, name: str) -> str | None:
        """Why serving engines leave out a tensor that a checkpoint may contain besides the weights; None for other names."""
        return self._reason(name, self.architecture.carried)

    def _reason(self, name: str, reasons: Mapping[str, str]) -> str | None:
        """The reason for a tensor that is no weight of the model. The layer that {mtp} stands for in a pattern comes after the last one."""
        for pattern, reason in reasons.items() if name not in self.weights else ():
            if match := re.fullmatch(pattern, name):
                layer = match.groupdict().get("mtp")
                if layer is None or int(layer) >= self.dimensions["layers"]:
                    return reason
        return None

    def is_in_layer(self, name: str) -> bool:
        """Whether a name lies in one of the numbered layers that the architecture declares."""
        fronts = {weight.name.partition("{layer}")[0] for weight in self.architecture.weights if "{layer}" in weight.name}
        return any(name.startswith(front) and name.removeprefix(front)[:1].isdecimal() for front in fronts)
