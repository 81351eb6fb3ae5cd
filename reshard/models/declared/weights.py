"""The weights of a user's declaration: names with numbers in them, roles, shapes that follow from roles, own splits, fused sections."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from reshard.models.architecture import Dimension, Weight
from reshard.models.declared.node import Node, expression
from reshard.models.roles import SPLITS, Column, Heads, Replicate, Row, Split, Vocabulary

# What a weight of a role is, as [out, in], or [out] where it is a vector: the shape of one whose declaration says none. A checkpoint's own
# shapes are compared with it, so that a model that differs is refused and not misread.
SHAPES: dict[str, tuple[str, ...]] = {
    "embedding": ("vocab", "hidden"),
    "position_embedding": ("positions", "hidden"),
    "head": ("vocab", "hidden"),
    "final_norm": ("hidden",),
    "attention.norm": ("hidden",),
    "attention.post_norm": ("hidden",),
    "attention.q": ("heads * head_dim", "hidden"),
    "attention.k": ("kv_heads * head_dim", "hidden"),
    "attention.v": ("kv_heads * head_dim", "hidden"),
    "attention.o": ("hidden", "heads * head_dim"),
    "attention.q_norm": ("head_dim",),
    "attention.k_norm": ("head_dim",),
    "mla.q": ("heads * qk_dim", "hidden"),
    "mla.q_a": ("q_rank", "hidden"),
    "mla.q_a_norm": ("q_rank",),
    "mla.q_b": ("heads * qk_dim", "q_rank"),
    "mla.kv_a": ("kv_rank + rope_dim", "hidden"),
    "mla.kv_a_norm": ("kv_rank",),
    "mla.kv_b": ("heads * kv_b_dim", "kv_rank"),
    "mlp.norm": ("hidden",),
    "mlp.post_norm": ("hidden",),
    "mlp.gate": ("intermediate", "hidden"),
    "mlp.up": ("intermediate", "hidden"),
    "mlp.down": ("hidden", "intermediate"),
    "router": ("experts", "hidden"),
    "router.correction": ("experts",),
    "expert.gate": ("expert_intermediate", "hidden"),
    "expert.up": ("expert_intermediate", "hidden"),
    "expert.down": ("hidden", "expert_intermediate"),
    "shared_expert.gate": ("shared_intermediate", "hidden"),
    "shared_expert.up": ("shared_intermediate", "hidden"),
    "shared_expert.down": ("hidden", "shared_intermediate"),
    "shared_expert.score": ("1", "hidden"),
}
# Roles that stand for several, which `holds` names.
_FUSED = {("attention.q", "attention.k", "attention.v"): "attention.qkv", ("mlp.gate", "mlp.up"): "mlp.gate_up"}
# What a declaration says of weights; scales follow from a config that says how they are quantised.
ROLES = tuple(role for role in SPLITS if role not in _FUSED.values() and not role.endswith("_scale"))
_SPLITS: dict[str, Split] = {"column": Column(), "row": Row(), "vocabulary": Vocabulary(), "replicate": Replicate()}
# A number in a name, or what stands for one.
NUMBER = r"\{layer\}|\{expert\}|\d+"
_WEIGHT_KEYS = ("role", "shape", "split", "holds", "by", "transposed", "when", "layers")


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a declaration with these dimensions."""

    dimensions: Mapping[str, Dimension]

    def weight(self, said: str, at: Node) -> Weight:
        """One weight. at: its role, or a mapping."""
        name = pattern_of(said, at)
        keys = {"role": at} if isinstance(at.value, str) else at.mapping(_WEIGHT_KEYS)
        transposed = keys["transposed"].flag() if "transposed" in keys else False
        roles = self._holds(keys["holds"]) if "holds" in keys else self._role(at, keys)
        own = [role for role in roles if role not in SPLITS]
        split = self._split(at, keys, own, list(roles))
        fused = "holds" in keys
        role = (_FUSED.get(tuple(roles)) or "+".join(roles)) if fused else next(iter(roles))
        return Weight(
            name,
            role,
            self._shape(at, keys, name, roles, transposed=transposed),
            keys["when"].word(r"(not )?[\w.-]+", "a key of the config, or `not` and one,") if "when" in keys else None,
            keys["layers"].one_of(("dense", "sparse", "extra")) if "layers" in keys else None,  # type: ignore[arg-type]
            roles if fused else {},
            self._by(keys) if "by" in keys else None,
            transposed,
            split,
        )

    def _role(self, at: Node, keys: Mapping[str, Node]) -> dict[str, str]:
        if "role" not in keys:
            raise at.wrong("it says neither its role nor what it holds", do=f"Write `role:` and one of {', '.join(ROLES)}")
        role = keys["role"].word(r"[\w.-]+", "a role")
        if role in _FUSED.values():
            raise keys["role"].wrong(f"{role} is several roles in one", do="Write `holds:` and the list of them, in their order")
        return {role: SHAPES.get(role, ("",))[0]}

    def _holds(self, at: Node) -> dict[str, str]:
        """The roles that are fused, each with its rows."""
        if isinstance(at.value, dict):
            return {role: expression(inner, self.dimensions) for role, inner in at.mapping().items()}
        found: dict[str, str] = {}
        for item in at.items():
            role = item.word(r"[\w.-]+", "a role")
            if role in found:
                raise item.wrong(f"{role} is held twice")
            if role not in SHAPES:
                raise item.wrong(
                    f"how many rows a {role} has is not known", do=f"Write `holds: {{{role}: ROWS, ...}}` with an expression for each"
                )
            found[role] = expression(item.inner("rows", SHAPES[role][0]), self.dimensions)
        if len(found) < 2:
            raise at.wrong("a weight that holds one role is that role", do="Write `role:` in place of `holds:`")
        return found

    def _by(self, keys: Mapping[str, Node]) -> str:
        if "holds" not in keys:
            raise keys["by"].wrong("it says by what the roles of `holds:` alternate, which is not there")
        word = keys["by"].word()
        if not word.isidentifier():
            raise keys["by"].wrong(f"{word!r} stands here, a dimension is expected")
        return expression(keys["by"], self.dimensions)

    def _split(self, at: Node, keys: Mapping[str, Node], own: list[str], roles: list[str]) -> Split | None:
        """The split of own roles. Raises RequestError if it is not said for them, or said for others."""
        for role in roles:
            split = SPLITS.get(role)
            if isinstance(split, Heads) and split.count not in self.dimensions:
                raise at.wrong(
                    f"a weight of the role {role} is split by {split.count}, and no dimension is called so",
                    do=f"Add `{split.count}:` under `dimensions`",
                )
        if "role" in keys and "holds" in keys:
            raise keys["role"].wrong("a weight that holds several roles has none of its own", do="Leave out `role:`")
        if "split" not in keys:
            if own:
                raise at.wrong(
                    f"no role is called {own[0]!r}",
                    do=f"Roles are {', '.join(ROLES)}. For one of your own add `split:` with {', '.join(_SPLITS)}, or {{heads: DIMENSION}}",
                )
            return None
        if len(own) < len(roles):
            known = next(role for role in roles if role in SPLITS)
            raise keys["split"].wrong(
                f"the role {known} says how it is split", do="Leave out `split:`, or give the weight a role of your own"
            )
        return self._own_split(keys["split"])

    def _own_split(self, at: Node) -> Split:
        if not isinstance(at.value, dict):
            return _SPLITS[at.one_of(tuple(_SPLITS))]
        said = at.mapping(("heads", "copies"))
        if "heads" not in said:
            raise at.wrong(
                "it does not say by which dimension", do="Write {heads: DIMENSION}, with `copies: true` where ranks may share one"
            )
        count = said["heads"].word(r"[a-z_][a-z0-9_]*", "a dimension")
        expression(said["heads"], self.dimensions)
        return Heads(count, said["copies"].flag() if "copies" in said else False)

    def _shape(self, at: Node, keys: Mapping[str, Node], name: str, roles: Mapping[str, str], *, transposed: bool) -> tuple[str, ...]:
        if "shape" in keys:
            items = keys["shape"].items()
            if not 1 <= len(items) <= 4:
                raise keys["shape"].wrong(f"a list of {len(items)} axes stands here, 1 to 4 are expected")
            shape = tuple(expression(item, self.dimensions, optional=True) for item in items)
            if "holds" in keys and transposed and len(shape) != 2:
                raise keys["shape"].wrong("a transposed weight that holds several roles has 2 axes")
            return shape
        kind, first = name.rpartition(".")[2], next(iter(roles))
        if kind not in ("weight", "bias") or any(role not in SHAPES for role in roles):
            raise at.wrong("its shape is not said, and does not follow from its role and name", do="Add `shape:` and a list of its axes")
        rest = () if kind == "bias" else SHAPES[first][1:]
        if different := next((role for role in roles if SHAPES[role][1:] != SHAPES[first][1:]), None):
            raise at.wrong(f"its shape is not said, and {first} and {different} have different input features", do="Add `shape:`")
        shape = (" + ".join(roles.values()), *rest)
        shape = shape[::-1] if transposed else shape
        why = f"A {first} is [{', '.join(shape)}] unless `shape:` says otherwise"
        return tuple(expression(at.inner("shape", axis), self.dimensions, what=why, optional=True) for axis in shape)


def pattern_of(said: str, at: Node) -> str:
    """The name with {layer} and {expert}. The first * is the layer's number, the second the expert's; each is a whole word between dots."""
    words = said.split(".")
    stars, braces = words.count("*"), re.findall(r"\{[^{}]*\}", said)
    if strange := next((brace for brace in braces if brace not in ("{layer}", "{expert}") or braces.count(brace) > 1), None):
        raise at.wrong(f"{strange} stands in the name", do="{layer} and {expert} may, once each")
    rest = said.replace("{layer}", "").replace("{expert}", "")
    if re.search(r"[\s{}?\[\]]", rest) or not rest:
        raise at.wrong("this is no name of a weight", do="A name may hold {layer} and {expert}, or * in place of a number")
    if said.count("*") != stars or stars > 2 or (stars and braces):
        raise at.wrong(
            "it is not clear which number each * stands for",
            why="The first * is the layer's, a second one the expert's, each alone between two dots",
            do="Write {layer} and {expert}",
        )
    numbers = iter(("{layer}", "{expert}"))
    return ".".join(next(numbers) if word == "*" else word for word in words)


def overlap(one: str, other: str) -> bool:
    """Whether two patterns have a name in common."""
    left, right = (re.split(f"({NUMBER})", name) for name in (one, other))
    return len(left) == len(right) and all(
        a == b or (i % 2 == 1 and "{" in a + b) for i, (a, b) in enumerate(zip(left, right, strict=True))
    )
