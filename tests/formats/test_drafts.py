"""Draft models and layers for multi-token prediction: carried exactly, never taken for another model, never lost beside one."""

import json

import pytest
import torch
from helpers.eagle_draft import CONFIG, make_draft, tensors
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard as run
from safetensors.torch import load_file

import reshard
from reshard.errors import UnsupportedError
from reshard.models.lookup import draft_class, find_model

SERVED_FROM_HF = "serving engines read from its Hugging Face folder"


@pytest.fixture
def draft(tmp_path):
    return make_draft(tmp_path / "draft")


@pytest.mark.parametrize("through", [("dcp", {}), ("fsdp", {"dp": 3})])
def test_a_draft_is_carried_exactly(through, draft, tmp_path):
    target, degrees = through
    reshard.convert(reshard.plan(draft, to=target, **degrees), tmp_path / "trained")
    reshard.convert(reshard.plan(reshard.open(tmp_path / "trained", model=draft), to="hf"), tmp_path / "hf")
    found, expected = load_file(tmp_path / "hf" / "model.safetensors"), tensors()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == CONFIG


def test_a_cast_leaves_the_tables(draft, tmp_path):
    reshard.convert(reshard.plan(draft, to="hf", dtype="fp32"), tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(found["d2t"], tensors()["d2t"]) and found["t2d"].dtype == torch.bool and found["fc.weight"].dtype == torch.float32


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_a_draft_is_never_cut(engine, draft):
    with pytest.raises(UnsupportedError, match=SERVED_FROM_HF):
        reshard.plan(draft, to=engine, tp=2)


def test_inspect_names_the_draft(draft):
    assert "draft model LlamaForCausalLMEagle3" in run("inspect", draft).out


@pytest.mark.parametrize(
    ("named", "is_draft"),
    [
        ("LlamaForCausalLMEagle3", True),
        ("EagleLlamaForCausalLM", True),
        ("Eagle3Qwen3ForCausalLM", True),
        ("PeagleLlamaForCausalLM", True),
        ("PEagleDraftModel", True),
        ("MedusaModel", True),
        ("DeepSeekMTPModel", True),
        ("DFlashDraftModel", True),
        ("Qwen3DSparkModel", True),
        ("Eagle2_5_VLForConditionalGeneration", False),
        ("LlamaForCausalLM", False),
        ("LlamaForSequenceClassification", False),
    ],
)
def test_the_class_tells_a_draft(named, is_draft):
    assert (draft_class({"model_type": "llama", "architectures": [named]}) == named) is is_draft


# The names of published checkpoints, with the number of the layer after the last one.
MTP = {
    "qwen3_next": ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight"],
    "qwen3_5_text": ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"],
    "qwen3_5": ["mtp.pre_fc_norm_embedding.weight"],
    "qwen3_5_moe": ["mtp.layers.0.mlp.experts.gate_up_proj"],
    "exaone_moe": ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"],
    "ernie4_5_moe": ["model.mtp_block.0.self_attn.q_proj.weight", "model.mtp_emb_norm.0.weight", "model.mtp_linear_proj.0.weight"],
    "hy_v3": ["model.layers.{}.enorm.weight", "model.layers.{}.mlp.experts.0.gate_proj.weight"],
    "step3p5": ["model.layers.{}.eh_proj.weight", "model.layers.{}.transformer.shared_head.output.weight"],
    "longcat_flash": ["model.mtp.layers.0.eh_proj.weight"],
    "nemotron_h": ["mtp.layers.0.eh_proj.weight"],
    "mimo": ["model.mtp_layers.0.input_proj.weight"],
}


@pytest.mark.parametrize("model_type", MTP)
def test_layers_that_predict_further_tokens_are_carried(model_type):
    model = model_of_reference(model_type)
    layers = model.dimensions["layers"]
    for name in MTP[model_type]:
        assert model.reason_not_served(name.format(layers)), name
        if "{}" in name:
            assert model.reason_not_served(name.format(layers - 1)) is None, "only layers after the last one are"


@pytest.mark.parametrize(
    "model_type", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "kimi_k2", "bailing_moe"]
)
def test_layers_of_the_models_own_kind_are_declared(model_type):
    """An MTP layer is a layer with experts, with an embedding's and a hidden state's norm and their projection."""
    config = {**model_of_reference(model_type).config, "num_nextn_predict_layers": 1}
    model = find_model(config)
    layer = model.dimensions["layers"]
    names = {weight.name for weight in model.weights.values() if weight.layer == layer}
    assert {f"model.layers.{layer}.{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "input_layernorm")} <= names
    assert any(".mlp.experts.1." in name for name in names)


def model_of_reference(model_type):
    path = FIXTURES / "vllm_declared" / f"{model_type}.json"
    config = json.loads(path.read_text())["config"] if path.exists() else json.loads((HF / model_type / "config.json").read_text())
    return find_model(config)
