"""The section `frameworks` of a declaration: how training frameworks compute the model.

    frameworks:
      megatron:
        settings: {moe_router_score_function: sigmoid, moe_router_topk_scaling_factor: {key: routed_scaling_factor}}

The keys of a framework are the fields of Computation. A framework that is listed, even as `megatron: {}`, was compared with the model.
"""

from __future__ import annotations

from reshard.geometry.functions import INVERTIBLE
from reshard.models.computation import Computation, ConfigKey, LayersOf
from reshard.models.declared.node import Node
from reshard.models.declared.weights import layer_set

_KEYS = ("settings", "values", "assumes", "lacks", "built_by")


def frameworks_of(node: Node) -> dict[str, Computation]:
    """The computations by the name of the framework's format. Raises RequestError, naming the line, for what is not understood."""
    return {framework: _computation(inner) for framework, inner in node.mapping().items()}


def _computation(node: Node) -> Computation:
    keys = node.mapping(_KEYS)
    return Computation(
        {name: _value(inner) for name, inner in keys["settings"].mapping().items()} if "settings" in keys else {},
        {role: inner.one_of(INVERTIBLE) for role, inner in keys["values"].mapping().items()} if "values" in keys else {},
        tuple((key, _plain(inner)) for key, inner in keys["assumes"].mapping().items()) if "assumes" in keys else (),
        _phrase(keys["lacks"], "what the framework lacks") if "lacks" in keys else None,
        _phrase(keys["built_by"], "a library and its class") if "built_by" in keys else None,
    )


def _value(node: Node) -> object:
    if isinstance(node.value, dict):
        keys = node.mapping(("key", "when", "layers"))
        if ("key" in keys) == ("layers" in keys):
            raise node.unexpected("a value, {key: KEY} with a key of the config, or {layers: SET} with a set of layers")
        when = keys["when"].condition() if "when" in keys else None
        return ConfigKey(keys["key"].config_key(), when) if "key" in keys else LayersOf(layer_set(keys["layers"]))
    return _plain(node)


def _plain(node: Node) -> object:
    if not isinstance(node.value, bool | int | float | str):
        raise node.unexpected("true, false, a number or a word")
    return node.value


def _phrase(node: Node, expected: str) -> str:
    if not isinstance(node.value, str) or not node.value.strip():
        raise node.unexpected(expected)
    return node.value
