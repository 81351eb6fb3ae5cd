"""EngineRules: how a serving engine stores one model, as data per role. What the engine's class of the model does differently from the
engine's other classes are its ModelQuirks, from the model's declaration (models/quirks.py).

    served_model.py    whether the engine serves the model as its config describes it
    legality.py        the parallel sizes at which the engine serves the model
    weights.py         the weights that the engine has a slot for, and their element types
    ranks.py           the tensors in one rank's state dict
    capacity.py        the bytes that ranks hold, and the tokens that fit beside them
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import field, replace
from functools import lru_cache

from reshard.geometry.dtypes import DType
from reshard.geometry.value import value
from reshard.models.model import Model, Part
from reshard.models.quirks import ModelQuirks
from reshard.models.roles import Split
from reshard.models.splits import SplitRules


@value
class Fusion:
    """Several roles that an engine stores as one tensor, joined along the output features.

    For roles of experts, the experts that a rank holds are also stacked, even for a single role. The tensor is then named
    `component`_weight in the module of the experts.
    """

    roles: tuple[str, ...]
    """The roles, in the order in which they follow each other."""

    component: str
    """The name that replaces the last component of the first role's module: qkv_proj in place of q_proj."""


@value
class ExtraTensor:
    """A constant that an engine expects in the state dict and that the model does not have, such as an attention scale of 1."""

    role: str
    """There is one beside every weight of this role."""

    name: str
    """Its name relative to the parent of that weight's module: attn.k_scale beside o_proj."""

    value: float
    """The value of all its elements, rounded to its element type."""

    dtype: DType | None
    """Its element type; None for the model's."""

    shape: tuple[int, ...] = ()
    """Its shape."""


def normalizer(model: Model) -> ExtraTensor:
    """The factor of gemma's embeddings, the square root of the hidden size, which its classes keep as a tensor."""
    return ExtraTensor("embedding", "normalizer", model.dimensions["hidden"] ** 0.5, None)


@value
class EngineRules:
    """How a serving engine stores the weights of one model, the same for every rank."""

    engine: str
    """The engine's name, for messages."""

    fusions: tuple[Fusion, ...]
    """Roles that are stored as one tensor."""

    layers_per_stage: Callable[[int, int], tuple[int, ...]]
    """(number of layers, pp) -> number of layers on each pipeline stage."""

    quirks: ModelQuirks = field(default_factory=ModelQuirks)
    """What the engine's class of this model does differently."""

    extra_tensors: tuple[ExtraTensor, ...] = ()
    """Constants that the engine expects beside the weights."""

    vocabulary_multiple: int | None = None
    """The rows of vocabulary tables are padded to a multiple of this; None: of tp."""

    pads_vocabulary_for_tp: bool = False
    """Whether the rows are padded to a multiple of vocabulary_multiple * tp where tp does not divide the padded rows."""

    keep_fused: frozenset[str] = frozenset()
    """Roles of fused weights that the engine keeps as the model stores them, such as attention.qkv."""

    module_names: Mapping[str, str] = field(default_factory=dict)
    """Module names by the role of the tensor's first part, where the engine does not use Hugging Face's names. {layer} is the number within
    the stage."""

    renames: tuple[tuple[str, str], ...] = ()
    """(pattern, replacement) pairs that are applied to every Hugging Face name, in order."""

    renames_in: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    """Set of layers -> (pattern, replacement) pairs that are applied to the names of these layers before `renames`."""

    splits: Mapping[str, Split] = field(default_factory=dict)
    """Splits by role, where ranks share a weight in another way than usual."""

    dtypes: Mapping[str, DType | None] = field(default_factory=dict)
    """Element types that the engine prescribes, by role ("scale" for every scale), whatever the source has. A value of None prescribes the
    element type that the model computes in."""

    scales_kept_once: frozenset[str] = frozenset()
    """Kinds of scales that are stored once for the fused weights of an expert. The scales of these weights must be equal."""

    zero_expert_biases: bool = False
    """Whether stacked experts of a quantized model have biases, [experts, out], which are zero."""

    no_expert_parallel: str | None = None
    """Why the experts of this model cannot be distributed over ranks; None if they can."""

    equal_experts: bool = False
    """Whether every expert-parallel rank must have the same number of experts."""

    refuses_quantized: str | None = None
    """Why the engine's files cannot hold quantized weights; None if they can."""

    def split_rules(self, model: Model, tp: int) -> SplitRules:
        """The padding with which `tp` ranks split the model."""
        steps = self.quirks.quantized_steps
        is_quantized = bool(steps) and any(weight.form for weight in model.weights.values() if weight.role in steps)
        rules = SplitRules(self.vocabulary_multiple or tp, steps if is_quantized else {})
        if self.pads_vocabulary_for_tp and rules.padded_vocabulary(model.dimensions.get("vocab", 0)) % tp:
            return replace(rules, vocabulary_multiple=rules.vocabulary_multiple * tp)
        return rules

    def with_split(self, part: Part) -> Part:
        """The part with the split that this engine uses for its role."""
        split = self.quirks.splits.get(part.role, self.splits.get(part.role))
        return replace(part, split=split) if split else part

    def module_name(self, role: str) -> str | None:
        """The engine's name for the module of a role; None if the engine uses Hugging Face's name."""
        return self.quirks.module_names.get(role, self.module_names.get(role))

    def renamed(self, name: str, sets: Collection[str] = ()) -> str:
        """The engine's name for a Hugging Face name. sets: those that its layer is in."""
        for of, renames in self.renames_in.items():
            name = _renamed(name, renames) if of in sets else name
        return _renamed(name, self.renames)


@lru_cache(maxsize=1 << 16)
def _renamed(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    """A name after (pattern, replacement) pairs. The ranks of a run have the same names."""
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name
