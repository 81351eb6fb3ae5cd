"""The weights of a declaration: names with numbers in them, roles, shapes that follow from roles, fused weights, splits of new roles."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from reshard.errors import choices
from reshard.geometry.value import value
from reshard.models.architecture import COUNTED, EXPERTS, INDICES, NUMBER_OF_WEIGHT, USE, Dimension, Weight
from reshard.models.declared.node import Node, expression
from reshard.models.roles import (
    ABOUT_ROLES,
    COLUMN,
    DECLARED_ROLES,
    FIRST_RANK,
    REPLICATE,
    ROLES,
    ROLES_IN_USE,
    ROW,
    VOCABULARY,
    Split,
    heads,
)

WEIGHT_KEYS = ("role", "shape", "split", "fuses", "interleaved_by", "transposed", "stacked", "pieces", "padded", "when", "layers")
_FUSED_ROLES = {role.fuses: role.name for role in ROLES.values() if role.fuses}
_SPLITS = {"column": COLUMN, "row": ROW, "vocabulary": VOCABULARY, "replicate": REPLICATE, "first_rank": FIRST_RANK}
# A number in a name, or its placeholder.
NUMBER = r"\{\w+\}|\d+"
_ROLE = r"[\w.-]+"


@value
class WeightReader:
    """Reads the weights of a declaration."""

    dimensions: Mapping[str, Dimension]
    """The dimensions that the declaration has."""

    def weight(self, written: str, node: Node) -> Weight:
        """One weight. written: its name in the file; node: its role, or the mapping of its keys."""
        name = pattern_of(written, node, self.dimensions)
        keys = {"role": node} if isinstance(node.value, str) else node.mapping(WEIGHT_KEYS)
        transposed = keys["transposed"].flag() if "transposed" in keys else False
        rows = self._fused_rows(keys["fuses"]) if "fuses" in keys else self._rows_of_role(node, keys)
        split = self._split(node, keys, list(rows))
        role = _FUSED_ROLES.get(tuple(rows), "+".join(rows))
        return Weight(
            name,
            role,
            self._shape(node, keys, name, rows, transposed=transposed),
            keys["when"].condition() if "when" in keys else None,
            tuple(layer_set(item) for item in keys["layers"].items()) if "layers" in keys else (),
            rows if "fuses" in keys else {},
            self._interleaved_by(keys) if "interleaved_by" in keys else None,
            transposed,
            split,
            _stacked(keys),
            self._pieces(keys["pieces"]) if "pieces" in keys else None,
            keys["padded"].flag() if "padded" in keys else False,
        )

    def _pieces(self, node: Node) -> str:
        """The last words of the names of pieces, with a dimension that counts them in braces."""
        counted = re.findall(COUNTED, node.word(r"[\w.]*\{\w+\}[\w.]*", "words of a name with one dimension in braces"))
        expression(node.inner("", counted[0]), self.dimensions)
        return str(node.value)

    def _rows_of_role(self, node: Node, keys: Mapping[str, Node]) -> dict[str, str]:
        """The role of a weight that is not fused, with its usual output features."""
        if "role" not in keys:
            raise node.error("it has neither `role` nor `fuses`", do=f"Write `role:`. {ABOUT_ROLES}")
        name = keys["role"].word(_ROLE, "a role")
        role = ROLES.get(name)
        if role and role.fuses:
            raise keys["role"].error(
                f"{name} is several roles in one weight", do=f"Write `fuses: [{', '.join(role.fuses)}]`, in their order"
            )
        return {name: role.shape[0] if role and role.shape else ""}

    def _fused_rows(self, node: Node) -> dict[str, str]:
        """The roles that are fused in a weight, with the output features of each."""
        if isinstance(node.value, dict):
            return {role: expression(inner, self.dimensions, optional=True) for role, inner in node.mapping().items()}
        rows: dict[str, str] = {}
        for item in node.items():
            role = item.word(_ROLE, "a role")
            if role in rows:
                raise item.error(f"{role} occurs twice")
            if role not in DECLARED_ROLES:
                raise item.error(
                    f"the number of rows of {role} is not known",
                    do=f"Write `fuses: {{{role}: ROWS, ...}}` with an expression for each role",
                )
            rows[role] = expression(item.inner("rows", ROLES[role].shape[0]), self.dimensions, optional=True)
        if len(rows) < 2:
            raise node.error("a fused weight has at least two roles", do="Write `role:` in place of `fuses:`")
        return rows

    def _interleaved_by(self, keys: Mapping[str, Node]) -> str:
        node = keys["interleaved_by"]
        if "fuses" not in keys:
            raise node.error("only the roles of a fused weight alternate, and this weight has no `fuses`")
        if not node.word().isidentifier():
            raise node.unexpected("a dimension")
        return expression(node, self.dimensions)

    def _split(self, node: Node, keys: Mapping[str, Node], roles: Sequence[str]) -> Split | None:
        """The split of a weight with new roles; None if its roles are known. Raises RequestError if `split` is missing, or not allowed."""
        for role in roles:
            count = ROLES[role].split.heads if role in ROLES else ""
            if count and count not in self.dimensions:
                raise node.error(
                    f"ranks share a weight of the role {role} by {count}, and no dimension is called that",
                    do=f"Add `{count}:` under `dimensions`",
                )
        if "role" in keys and "fuses" in keys:
            raise keys["role"].error("a fused weight has the roles in `fuses`", do="Leave out `role:`")
        new_roles = [role for role in roles if role not in ROLES]
        if "split" not in keys:
            if new_roles:
                raise node.error(
                    f"there is no role {new_roles[0]!r}",
                    do=f"{choices(new_roles[0], DECLARED_ROLES)}; {ROLES_IN_USE}. For a new role add `split:` with {', '.join(_SPLITS)} or "
                    "{heads: DIMENSION}",
                )
            return None
        if len(new_roles) < len(roles):
            with_split = next(role for role in roles if role in ROLES)
            raise keys["split"].error(f"the role {with_split} has a split already", do="Leave out `split:`, or give the weight a new role")
        split = split_of(keys["split"])
        if split.heads:
            expression(keys["split"].mapping()["heads"], self.dimensions)
        return split

    def _shape(self, node: Node, keys: Mapping[str, Node], name: str, rows: Mapping[str, str], *, transposed: bool) -> tuple[str, ...]:
        """The shape that is written, or the usual shape of the roles; a bias has only the output features."""
        dimensions = self.dimensions
        if {*re.findall(COUNTED, name)} - {*INDICES}:
            dimensions = {**dimensions, NUMBER_OF_WEIGHT: Dimension(())}
        if "shape" in keys:
            axes = keys["shape"].items()
            if len(axes) > 5:
                raise keys["shape"].error(f"expected at most 5 axes, found {len(axes)}")
            own = len(axes) - (1 if _stacked(keys) else 0)
            if "fuses" in keys and transposed and own != 2:
                raise keys["shape"].error(f"a fused weight that is transposed has 2 axes, found {own}")
            return tuple(expression(axis, dimensions, optional=True) for axis in axes)
        stacked = _stacked(keys)
        parameter = name.rpartition(".")[2]
        if stacked:  # such as experts.down_proj and experts.down_proj_bias
            parameter = "bias" if parameter.endswith("bias") else "weight"
        if parameter not in ("weight", "bias") or any(role not in DECLARED_ROLES for role in rows):
            raise node.error("it has no `shape`, and none follows from its role and name", do="Add `shape:` and a list of its axes")
        inputs = {role: () if parameter == "bias" else ROLES[role].shape[1:] for role in rows}
        first = next(iter(rows))
        if different := next((role for role in rows if inputs[role] != inputs[first]), None):
            raise node.error(f"it has no `shape`, and {first} and {different} have different input features", do="Add `shape:`")
        shape = (" + ".join(rows.values()), *inputs[first])
        shape = shape[::-1] if transposed else shape
        shape = (stacked, *shape) if stacked else shape
        why = f"The usual shape of {first} is [{', '.join(shape)}]; `shape:` sets another one"
        return tuple(expression(node.inner("shape", axis), self.dimensions, why=why, optional=True) for axis in shape)


def _stacked(keys: Mapping[str, Node]) -> str:
    """The dimension that counts the experts along the first axis; empty if there is no such axis."""
    node = keys.get("stacked")
    if node is None or isinstance(node.value, bool):
        return EXPERTS if node is not None and node.flag() else ""
    return node.word(r"[a-z_][a-z0-9_]*", "true, or the dimension that counts the experts")


def split_of(node: Node) -> Split:
    """A split: a word, or {heads: DIMENSION}."""
    if not isinstance(node.value, dict):
        return _SPLITS[node.one_of(tuple(_SPLITS))]
    keys = node.mapping(("heads", "copies"))
    if "heads" not in keys:
        raise node.error("it does not name the dimension", do="Write {heads: DIMENSION}, with `copies: true` if ranks may share a head")
    count = keys["heads"].word(r"[a-z_][a-z0-9_]*", "a dimension")
    return heads(count, copies=keys["copies"].flag() if "copies" in keys else False)


def layer_set(node: Node) -> str:
    """The name of a set of layers, or `not` and the name."""
    return node.word(r"(not )?[a-z_][a-z0-9_]*", "a set of layers, or `not` and a set of layers")


def pattern_of(written: str, node: Node, dimensions: Collection[str] = ()) -> str:
    """The name with {layer} and {expert}. The first * is the index of the layer, the second that of the expert, each between two dots.

    dimensions: further words that may stand in braces.
    """
    words = written.split(".")
    stars, braces = words.count("*"), re.findall(r"\{[^{}]*\}", written)
    allowed = (*INDICES, *dimensions)
    if strange := next((brace for brace in braces if brace[1:-1] not in allowed or braces.count(brace) > 1), None):
        raise node.error(f"a name cannot contain {strange} here", do="It may contain {layer}, {expert} or a dimension, once each")
    if len(braces) > 1 and set(braces) not in ({"{layer}", "{expert}"}, {"{layer}", USE}):
        raise node.error("a name that counts a dimension cannot contain the number of a layer or an expert")
    rest = re.sub(r"\{\w+\}", "", written)
    if re.search(r"[\s{}?\[\]]", rest) or not rest:
        raise node.error(
            "this is not the name of a weight", do="A name may contain {layer} and {expert}, or * in place of a number between two dots"
        )
    if written.count("*") != stars or stars > 2 or (stars and braces):
        raise node.error(
            "it is not clear which number each * stands for",
            why="The first * is the number of the layer, a second one that of the expert, each alone between two dots",
            do="Write {layer} and {expert}",
        )
    numbers = iter(("{layer}", "{expert}"))
    return ".".join(next(numbers) if word == "*" else word for word in words)


def overlap(one: str, other: str) -> bool:
    """Whether one tensor name can match both patterns."""
    left, right = (re.split(f"({NUMBER})", name) for name in (one, other))
    return len(left) == len(right) and all(
        a == b or (i % 2 == 1 and "{" in a + b) for i, (a, b) in enumerate(zip(left, right, strict=True))
    )
