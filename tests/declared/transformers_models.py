"""Names and shapes of small models of transformers on the meta device: as `save_pretrained` writes them, without memory for weights.

    python tests/declared/transformers_models.py < {MODEL_TYPE: CLASS, ...}      (JSON)

Of every type several models: a small one by the recipe of tests/serving/tiny_models.py, one more for each true-or-false setting that
changes names or shapes, reversed, one with all of these reversed, one with settings of other classes, and one with the sizes that the
config class takes where a config says nothing, of three layers. Prints a JSON line for each: the type, the case, the config as it is
saved, the tensors; or the error.

Environment: tests/declared/requirements.txt.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "serving"))

from tiny_models import config_of  # noqa: E402

Shapes = dict[str, list[int]]
# The keys under which a config gives the number of layers.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Settings of many classes, which others ignore.
STRAY = (
    *("attention_bias", "attn_bias", "mlp_bias", "use_bias", "use_qkv_bias", "qkv_bias", "bias", "qk_layernorm", "use_qk_norm", "qk_norm"),
    *("moe_gated", "parallel_attn", "alibi"),
)
# Settings that are no property of a model's weights, or that make transformers fail.
NOT_REVERSED = ("return_dict", "output_hidden_states", "output_attentions", "use_cache", "is_encoder_decoder", "add_cross_attention")


def stand_in_for_scipy() -> None:
    """Let Inkling's class plan its tower, for which it asks SciPy: the columns, in their order, that cost the least for its rows."""

    def cheapest_columns(costs: Any) -> tuple[range, tuple[int, ...]]:
        rows = range(costs.shape[0])
        return rows, min(combinations(range(costs.shape[1]), len(rows)), key=lambda columns: costs[rows, columns].sum())

    if find_spec("scipy") is None:
        sys.modules["scipy"] = module_from_spec(ModuleSpec("scipy", None))
        sys.modules["scipy.optimize"] = SimpleNamespace(linear_sum_assignment=cheapest_columns)


def shapes_of(config: Any, class_name: str | None) -> Shapes:
    """The tensors that `save_pretrained` writes for a model of this config, by name: in the order of the model's parameters if they are all
    parameters, and after an empty name otherwise."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        if class_name and hasattr(transformers, class_name):
            model = getattr(transformers, class_name)(config)
        elif type(config) in transformers.AutoModelForImageTextToText._model_mapping:
            model = transformers.AutoModelForImageTextToText.from_config(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {name for name, _ in model.named_parameters()}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    shapes = {name: list(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}
    parameters = [name for name, _ in model.named_parameters()]
    return {name: shapes[name] for name in parameters} if set(parameters) == set(shapes) else {"": [], **shapes}


def saved(config: Any) -> dict[str, Any]:
    """The config as `save_pretrained` writes it."""
    return dict(json.loads(json.dumps(config.to_diff_dict(), default=str)))


def reversed_settings(config: Any) -> Iterator[tuple[Any, str]]:
    """Every part of a config, and each of its true-or-false settings."""
    inner = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    for part in (config, *(each for each in inner if each is not None)):
        for key, value in part.to_dict().items():
            if isinstance(value, bool) and not key.startswith("_") and key not in NOT_REVERSED:
                yield part, key


def cases(model_type: str, class_name: str | None) -> Iterator[tuple[str, dict[str, Any], Shapes]]:
    """(what, the config as it is saved, the tensors) of each model of a type."""
    config = config_of(model_type)
    plain = shapes_of(config, class_name)
    yield "small", saved(config), plain
    changing = []
    for number, (_, key) in enumerate(list(reversed_settings(config))):
        if (case := with_reversed(model_type, class_name, [number])) and case[1] != plain:
            changing.append(number)
            yield f"{key} reversed", *case
    if len(changing) > 1 and (case := with_reversed(model_type, class_name, changing)):
        yield "all of these reversed", *case
    yield "settings of other classes", *with_stray(model_type, class_name)
    try:
        yield "defaults", *of_defaults(model_type, class_name)
    except Exception as raised:  # transformers cannot make a model of its own defaults
        print(f"{model_type}, defaults: {raised!r}"[:300], file=sys.stderr)


def with_reversed(model_type: str, class_name: str | None, numbers: list[int]) -> tuple[dict[str, Any], Shapes] | None:
    """The small model with some of its true-or-false settings reversed; None if transformers does not make it."""
    config = config_of(model_type)
    settings = list(reversed_settings(config))
    try:
        for part, key in (settings[number] for number in numbers):
            setattr(part, key, not getattr(part, key))
        return saved(config), shapes_of(config, class_name)
    except Exception:
        return None


def with_stray(model_type: str, class_name: str | None) -> tuple[dict[str, Any], Shapes]:
    """The small model whose config has settings that its class does not know."""
    config = config_of(model_type)
    text = config.get_text_config()
    for key in STRAY:
        if not hasattr(text, key):
            setattr(text, key, True)
    return saved(config), shapes_of(config, class_name)


def of_defaults(model_type: str, class_name: str | None) -> tuple[dict[str, Any], Shapes]:
    """The model of a config that says nothing but its types and its number of layers, 3."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    whole = kind()
    parts = {name: getattr(whole, name, None) for name in getattr(kind, "sub_configs", {})}
    config: dict[str, Any] = {name: {"model_type": part.model_type} for name, part in parts.items() if part is not None}
    text = parts.get("text_config")
    if key := next((key for key in LAYERS if hasattr(text or whole, key)), None):
        config.get("text_config", config)[key] = 3
    return {"model_type": model_type, **config}, shapes_of(kind(**json.loads(json.dumps(config))), class_name)


def main() -> None:
    stand_in_for_scipy()
    for model_type, class_name in json.load(sys.stdin).items():
        try:
            for what, config, shapes in cases(model_type, class_name):
                print(json.dumps({"type": model_type, "case": what, "config": config, "shapes": shapes}), flush=True)
        except Exception as raised:
            if os.environ.get("DEBUG"):
                import traceback

                traceback.print_exc()
            error = f"{type(raised).__name__}: {' '.join(str(raised).split())[:200]}"
            print(json.dumps({"type": model_type, "case": "", "error": error}), flush=True)


if __name__ == "__main__":
    main()
