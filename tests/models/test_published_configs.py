"""Configs of published models give the numbers of parameters that their publishers state.

tests/declared/published.json holds the sizes that these configs contain, with the keys of the published files: some leave out what
transformers takes anyway. A key that a declaration reads wrongly, or a weight that it lacks, changes the number. "source" names where the
config and the number were read: a repository and its file, or a page; and what of the config was not seen there. "disagreement" says why
the number differs by more than one percent.
"""

import json
import re
from pathlib import Path

import pytest

from reshard.models.lookup import find_model
from reshard.plans.summary import experts
from reshard.training.parameter_counts import parameters

PUBLISHED = json.loads((Path(__file__).resolve().parent.parent / "declared" / "published.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_the_published_number_of_parameters(name):
    row = PUBLISHED[name]
    billions = parameters(find_model(row["config"])) / 1e9
    if "disagreement" in row:
        assert billions != pytest.approx(row["billions"], rel=0.01), "the numbers agree: remove the disagreement"
        assert round(billions) == row["billions"]
    else:
        assert billions == pytest.approx(row["billions"], rel=0.01)


def test_each_row_names_its_source():
    assert len(PUBLISHED) >= 90
    for name, row in PUBLISHED.items():
        assert re.fullmatch(r"config .+; count .+", row.get("source", "")), name


# What the publishers state of parameters that work on one token, in billions, as they round it.
ACTIVE = {
    "Llama-4-Scout": 17,
    "Llama-4-Maverick": 17,
    "ERNIE-4.5-21B-A3B": 3,
    "Hunyuan-A13B": 13,
    "granite-3.1-3b-a800m": 0.8,
    "LFM2-8B-A1B": 1.5,
    "Phi-3.5-MoE": 6.6,
    "AI21-Jamba-Mini-1.6": 12,
    "Moonlight-16B-A3B": 3,
    "Inkling-Small": 12,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_a_published_config_gives_the_published_number_of_active_parameters(name):
    model = find_model(PUBLISHED[name]["config"])
    assert (parameters(model) - experts(model).idle_parameters) / 1e9 == pytest.approx(ACTIVE[name], rel=0.13)


def test_a_dense_model_has_no_experts():
    assert experts(find_model(PUBLISHED["SmolLM3-3B"]["config"])) is None


def test_a_tower_of_which_the_config_says_nothing_has_the_sizes_of_its_class():
    """As in AIN, a fine-tune of Qwen2-VL: transformers saves what differs from the defaults of the class."""
    text = {"model_type": "qwen2_vl", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    model = find_model(
        {**text, "num_key_value_heads": 4, "vision_config": {"in_chans": 3, "model_type": "qwen2_vl", "spatial_patch_size": 14}}
    )
    assert (model.dimensions["vision_layers"], model.dimensions["vision_hidden"]) == (32, 1280)
    assert parameters(model) / 1e9 == pytest.approx(8.29, rel=0.01)


def test_a_key_that_is_null_has_no_default():
    """DeepSeek-V2-Lite sets q_lora_rank to null; the default of the class is 1536."""
    for config, has_rank in (({"q_lora_rank": None}, False), ({}, True)):
        names = find_model({"model_type": "deepseek_v2", "num_hidden_layers": 2, **config}).weights
        assert ("model.layers.0.self_attn.q_a_proj.weight" in names) == has_rank
        assert ("model.layers.0.self_attn.q_proj.weight" in names) != has_rank


def test_a_tower_that_the_config_lacks_does_not_exist():
    text = {"model_type": "gemma4_text", "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    assert not any("tower" in name for name in find_model({"model_type": "gemma4", "text_config": text}).weights)
    assert any("vision_tower" in name for name in find_model({"model_type": "gemma4", "text_config": text, "vision_config": {}}).weights)


def test_layers_are_found_under_numbers_with_a_zero_in_front():
    """transformers 5.23 saves what layer 5 of 30 has of its own as per_layer_config["05"]."""
    text = {
        "model_type": "gemma4_text",
        "head_dim": 256,
        "num_hidden_layers": 12,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    }
    model = find_model({**text, "per_layer_config": {"05": {"head_dim": 512}, "11": {"head_dim": 512}}})
    assert [model.dimensions_in(layer)["head_dim"] for layer in (4, 5, 6, 11)] == [256, 512, 256, 512]
