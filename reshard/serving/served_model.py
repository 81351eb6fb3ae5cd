"""Whether a serving engine can serve a model, and whether it would serve the model as its config describes it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from reshard.errors import RequestError, UnsupportedError
from reshard.models.drafts import draft_class
from reshard.models.lookup import unknown_architecture
from reshard.models.model import Model
from reshard.models.quantization import unknown_quantization
from reshard.serving.rules import EngineRules


def require_model(model: Model | None, config: Mapping[str, object] | None, engine: str, *, can_learn: bool = False) -> Model:
    """The model, which must not be None. Raises RequestError if it is, with the reason, which follows from the config.

    can_learn: whether `reshard learn` can trace the engine's loader.
    """
    if model is not None:
        return model
    if config is None:
        raise RequestError(
            "there is no config.json in the checkpoint or in its parent directory, so the model is not known",
            why=f"{engine}'s files hold each rank's slices, and their sizes depend on the numbers of heads in the config",
            do="Add --model DIR, the directory with the model's config",
        )
    if method := unknown_quantization(config):
        raise UnsupportedError(
            f"the weights are quantized ({method}) with a method that reshard does not know",
            why="How packed weights and their scales split over ranks is not guessed",
            do=f"Convert to hf, which keeps them unchanged and which {engine} loads as well",
        )
    error = unknown_architecture(config)
    if can_learn and not draft_class(config):
        error.do = f"{error.do}. Or learn the layout from {engine}'s own loader with `reshard learn`, and add --layout FILE"
    raise error


def check_served(model: Model, rules: EngineRules) -> None:
    """Raises RequestError if the engine does not load the model, or would answer differently from the model that the config describes."""
    engine, quirks = rules.engine, rules.quirks
    what = f"{engine}'s class for a {model.architecture.model_type} model"
    for key, value in quirks.assumed_settings:
        if (setting := model.setting(key)) != value:
            raise UnsupportedError(
                f"{what} works as if {key} were {json.dumps(value)}, the config says {json.dumps(setting)}",
                why="It would refuse the weights, or serve wrong or unset ones",
                do="Serve it with another engine",
            )
    if quirks.not_loadable:
        raise UnsupportedError(
            f"{engine} does not load a {model.architecture.model_type} model from such files: {quirks.not_loadable}",
            do="Convert to hf, which it loads as well",
        )
    if rules.refuses_quantized and model.quantization:
        raise UnsupportedError("the weights are quantized", why=rules.refuses_quantized, do="Add --dequantize, or convert to hf")
    if quirks.derives_head_dim:
        _check_head_dim(model, engine)
    if quirks.all_layers_sparse and model.dense_layers:
        raise UnsupportedError(
            f"{what} has experts in every layer, whatever the config says; layer {model.dense_layers[0]} has none",
            why="It would serve experts that were never loaded, without a message",
            do="Serve it with another engine",
        )
    if quirks.quantizes_router:
        _check_router(model, engine)


def _check_head_dim(model: Model, engine: str) -> None:
    """Raises RequestError if the config's head dimension is not the one that the engine's class computes."""
    head_dim, derived = model.dimensions["head_dim"], model.dimensions["hidden"] // model.dimensions["heads"]
    if head_dim != derived:
        raise UnsupportedError(
            f"{engine}'s class for a {model.architecture.model_type} model computes a head dimension of hidden size / heads = {derived}, "
            f"the config says {head_dim}",
            why="It would load a part of every head without a message",
            do="Serve it with another engine",
        )


def _check_router(model: Model, engine: str) -> None:
    """Raises RequestError if the config does not exclude the routers of a quantized model from quantization."""
    router = next((weight.name for weight in model.weights.values() if weight.role == "router"), None)
    if router and model.quantization and model.quantization.form_of(router):
        raise UnsupportedError(
            "the config does not say that this router is not quantized",
            where=router,
            why=f"{engine} would build a quantized router and cast the weight to it without a message",
            do="Name the routers in quantization_config, under modules_to_not_convert or ignore",
        )
