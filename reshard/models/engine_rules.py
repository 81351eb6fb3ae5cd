"""EngineRules: how a serving engine stores a model, as data.

An engine's own file gives what holds for all its models (formats/vllm/rules.py). A declaration gives, under `engines`, what the engine's
class of that model does differently:

    engines:
      vllm: {every_stage: [final_norm, head], names: {mlp.gate: {"0.24": mlp.experts.gate}}}

Both are EngineRules. The rules for one model in one version are the engine's, with those of the declaration put in:
`rules.with_quirks(quirks).at(version)`. declared/engines.py reads the section; the rooms of serving/ read the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from reshard.errors import RequestError
from reshard.geometry.dtypes import DType
from reshard.geometry.value import value
from reshard.models.roles import Split

# The numbers of a version: (0, 32).
Version = tuple[int, ...]


def version_numbers(version: str, newest: str) -> Version:
    """The numbers at the start of a version: 0.32.1rc1 is (0, 32, 1).

    Raises: RequestError, with `newest` as the example, for a text that is not a version.
    """
    if not re.fullmatch(r"v?\d+(\.\d+)*([a-z+.-].*)?", version):
        raise RequestError(f"`engine_version={version}`: a version such as {newest} is expected")
    return tuple(int(word) for word in re.match(r"v?([\d.]+)", version)[1].strip(".").split("."))  # type: ignore[index]


class Rename(NamedTuple):
    """A change to Hugging Face names, in the versions that have it."""

    pattern: str
    """A regular expression."""
    replacement: str
    """What stands in its place."""
    since: Version = ()
    """The first version with the change."""
    until: Version | None = None
    """The first version without it; None: all later ones have it."""
    layers: str = ""
    """The set of layers whose names change; empty: all names."""


def renames_of(words: str, by_version: Mapping[Version, str], layers: str = "") -> Iterator[Rename]:
    """The changes for words with dots between them, such as "mlp.gate", that may stand anywhere in a name. by_version: first version ->
    the words that stand in their place from then on. layers: the set of layers whose names change; empty: all names."""
    pattern = rf"(?<![^.]){re.escape(words)}(?![^.])"
    for (since, new), (until, _) in pairwise([*sorted(by_version.items()), (None, "")]):
        if new != words:
            yield Rename(pattern, new, since or (), until, layers)


@value
class Fusion:
    """Several roles that an engine stores as one tensor, joined along the output features.

    The experts of a rank are always one tensor, also those of a single role. The tensor is then named `component`_weight in the module of
    the experts.
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
    value: float = 0.0
    """The value of all its elements, rounded to its element type."""
    dtype: DType | None = None
    """Its element type; None for the model's."""
    shape: tuple[int | str, ...] = ()
    """Its shape; a text is an expression of dimensions, and of rank_kv_heads: how many KV heads a rank holds."""
    square_root_of: str = ""
    """A dimension whose square root is the value, as for the factor of gemma's embeddings; empty: `value` is."""
    since: Version = ()
    """The first version that stores it."""
    until: Version | None = None
    """The first version that no longer stores it; None: every version does."""


@value
class LeftOut:
    """Weights that an engine's class leaves out because its answers do not depend on them, such as the last blocks of a tower."""

    names: str
    """A glob for their names as they are declared, with {layer} and other words in braces."""
    why: str
    """Why the class leaves them out."""
    behind: str | None = None
    """Of blocks that a dimension counts, only those behind the one whose output the class takes: the config's key for its number. 1 is the
    first block, -1 the last one and -2 the one before. None: all are left out."""


# What a condition of `refuses` can name beside keys of the config and dimensions: sizes, which are tp and ep, or pp with the number of a
# stage and of its layers with experts, or the number of ranks that share a packed expert; `always`; whether the model is quantized, whether
# its routers are, and the name of the first router; the numbers of layers with and without experts, and the first one without.
SIZES = ("tp", "ep", "pp", "stage", "sparse_layers_of_stage", "packed_ranks")
WORDS = (*SIZES, "always", "quantized", "quantized_router", "router", "sparse_layers", "dense_layers", "first_dense_layer")


def words_of(condition: str) -> set[str]:
    """The dimensions and the WORDS in a condition or an expression, among others."""
    return {*re.findall(r"[a-z]\w*", condition)}


Versioned = TypeVar("Versioned", Rename, ExtraTensor)


def all_on_each_stage(layers: int, pp: int) -> tuple[int, ...]:
    """The layers of an engine whose files have one stage."""
    return (layers,)


@value
class EngineRules:
    """How a serving engine stores the weights of one model, the same for every rank; or what a declaration says about that."""

    engine: str = ""
    """The engine's name, for messages; empty in a declaration."""
    fusions: tuple[Fusion, ...] = ()
    """Roles that are stored as one tensor. The last one counts for a role."""
    layers_per_stage: Callable[[int, int], tuple[int, ...]] = all_on_each_stage
    """(number of layers, pp) -> number of layers on each pipeline stage."""
    of_class: Mapping[str, EngineRules] = field(default_factory=dict)
    """The rules of further classes that serve the model, by the name under which the config's `architectures` name them, or by a condition
    on the config."""
    since: Version = ()
    """The first version of the engine whose class was compared; (): the oldest version that the engine's own file knows."""

    # Names.
    names: tuple[Rename, ...] = ()
    """Changes to the Hugging Face names, applied in order. `at` puts those that are about a set of layers first."""
    module_names: Mapping[str, str] = field(default_factory=dict)
    """Module names by the role of the tensor's first part, where the engine does not use Hugging Face's names. {layer} is the number within
    the stage."""
    layer_lists: Mapping[str, str] = field(default_factory=dict)
    """Set of layers -> the engine's own list of these layers, in which it counts them from 0: model.decoder in place of model.layers."""
    tied_table_stored_as: str = "head"
    """The name under which a stage with embedding and head stores the tied tensor: "head", "embedding" or "both" (two copies). With
    "embedding", a stage that holds only the head uses the embedding's name, too."""

    # Which tensors there are, and where.
    keep_fused: Mapping[str, Version] = field(default_factory=dict)
    """Role of a fused weight, such as attention.qkv, that is kept as the model stores it -> the first version that does so."""
    every_stage: frozenset[str] = frozenset()
    """Roles outside of the layers that every pipeline stage holds; "vision" stands for all roles of the vision tower. Other embeddings are
    on the first stage, the rest on the last."""
    unsupported: frozenset[tuple[str, str]] = frozenset()
    """(role, "weight" or "bias") pairs that the class has no slot for."""
    left_out: tuple[LeftOut, ...] = ()
    """Weights that the class leaves out, although it computes what the model does."""
    zeros: frozenset[tuple[str, str]] = frozenset()
    """(role, "bias") pairs that the model lacks: their rows of the fused bias are zeros."""
    in_place_of: Mapping[str, str] = field(default_factory=dict)
    """Role -> another role, whose weight is stored also in the place of the first one, where a layer has no weight of that role."""
    extra_tensors: tuple[ExtraTensor, ...] = ()
    """Constants that the engine expects beside the weights."""
    zero_expert_biases: bool = False
    """Whether stacked experts of a quantized model have biases, [experts, out], which are zero."""
    unset_input_scales: bool = False
    """Whether stacked experts without quantized activations have input scales all the same, which the engine leaves unset. They are 1."""
    scales_kept_once: frozenset[str] = frozenset()
    """Kinds of scales that are stored once for the fused weights of an expert. The scales of these weights must be equal."""

    # How ranks share them.
    splits: Mapping[str, Split] = field(default_factory=dict)
    """Splits by role, where ranks share a weight in another way than usual."""
    unit_axes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Role -> the axes of one element that the class has in such a tensor and the model has not: [0, 1, 3] makes [n] to [1, 1, n, 1]."""
    without_axes: frozenset[str] = frozenset()
    """Roles whose tensors of one element the class holds without axes."""
    even_rows_first: Mapping[str, str] = field(default_factory=dict)
    """Role -> a dimension, such as "head_dim". In each run of so many rows of such a weight, the class stores the rows 0, 2, 4, ... before
    the rows 1, 3, 5, ...: the pairs that rotary embeddings turn become halves. "all": in all rows that a rank holds."""
    side_by_side: frozenset[str] = frozenset()
    """Roles whose stacked weights [experts, out, in] the class stores as one matrix [out, experts * in]."""
    vocabulary_multiple: Callable[[int, int], int] | None = None
    """(rows of a vocabulary table, tp) -> the rows are padded to a multiple of this; None: of tp."""
    padded_rows: Mapping[str, int] = field(default_factory=dict)
    """Role -> the class makes the rows of such a weight, or of a fused one that begins with it, a multiple of this, and leaves the added
    ones unset or zero; here they are zeros."""
    quantized_steps: Mapping[str, int] = field(default_factory=dict)
    """Role -> rows or input features, of which each rank of a quantized model holds a multiple; the last ranks are filled up with zeros."""

    # Their elements.
    dtypes: Mapping[str, DType | None] = field(default_factory=dict)
    """Element types that the engine prescribes, by role ("scale" for every scale), whatever the source has. A value of None prescribes the
    element type that the model computes in."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Role -> the function, one of functions.FUNCTIONS, whose values the class stores in place of such a weight."""

    # What the class does not serve.
    assumes: Mapping[str, object] = field(default_factory=dict)
    """Config key -> the value that the class works with, whatever the config says; or dimension -> an expression of dimensions. A model
    with another value is refused."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Condition on the config, the dimensions and the WORDS -> why the class refuses models, or parallel sizes, for which it holds. In the
    reason, `{experts}` stands for the number of experts. A second sentence says what the user can do."""

    # Beside the weights.
    config_defaults: tuple[tuple[str, object], ...] = ()
    """Config keys that the class needs, each with the value that is written if the config does not have the key. A dot leads into an inner
    config."""
    notes: tuple[str, ...] = ()
    """Sentences for the person who starts the engine."""

    def with_quirks(self, quirks: EngineRules) -> EngineRules:
        """These rules with those of one model put in; or those of the language model inside a multimodal one with those of the class around
        it. Collections are joined; where the two conflict, `quirks` win."""
        stated = {rule.name: getattr(quirks, rule.name) for rule in fields(quirks)}
        changed = {name: _joined(getattr(self, name), new) for name, new in stated.items() if new != getattr(_NO_RULES, name)}
        return replace(self, **{**changed, "since": max(self.since, quirks.since), "of_class": {}})

    def at(self, version: Version) -> EngineRules:
        """These rules with only what one version of the engine has."""
        return replace(
            self,
            names=tuple(sorted(_of_version(self.names, version), key=lambda rename: not rename.layers)),
            keep_fused={role: since for role, since in self.keep_fused.items() if since <= version},
            extra_tensors=_of_version(self.extra_tensors, version),
        )

    @property
    def changes(self) -> set[Version]:
        """The versions in which something changed."""
        rows: tuple[Rename | ExtraTensor, ...] = (*self.names, *self.extra_tensors)
        return {version for row in rows for version in (row.since, row.until) if version} | {*self.keep_fused.values()}

    def renamed(self, name: str, sets: tuple[str, ...] = ()) -> str:
        """The engine's name for a Hugging Face name. sets: those that its layer is in."""
        return _renamed(name, self.names, sets)


_NO_RULES = EngineRules()


def _joined(inner: Any, outer: Any) -> Any:
    """The values of a field of two rules in one: collections are joined."""
    match outer:
        case Mapping():
            return {**outer, **inner, **outer}  # those of `outer` first: the first refusal that holds counts
        case tuple():
            return (*inner, *outer)
        case frozenset():
            return inner | outer
    return outer


def _of_version(rows: Iterable[Versioned], version: Version) -> tuple[Versioned, ...]:
    """The rows that one version has."""
    return tuple(row for row in rows if row.since <= version and (row.until is None or version < row.until))


@lru_cache(maxsize=1 << 16)
def _renamed(name: str, renames: tuple[Rename, ...], sets: tuple[str, ...]) -> str:
    """A name after the changes. The ranks of a run have the same names."""
    for rename in renames:
        if not rename.layers or rename.layers in sets:
            name = re.sub(rename.pattern, rename.replacement, name)
    return name
