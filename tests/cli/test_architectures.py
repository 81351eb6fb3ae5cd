"""`reshard architectures`: the models that are declared, and how a declaration of another one begins."""

import json
import shutil

import pytest
import safetensors.torch
import torch
from command import reshard
from places import DCP, FIXTURES, HF, VLLM, ranks

from reshard.errors import RequestError
from reshard.models.declared.reader import parse_declaration
from reshard.models.lookup import find_model

MODELS = (
    "llama", "llama-tied", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt2", "gpt_neox", "gemma2",
    "phi3",
)  # fmt: skip
# Models of which a name and a shape leave nothing open.
CLEAR = ("llama", "llama-tied", "mistral", "qwen2", "qwen3")


def renamed(model, to, **other):
    copy = shutil.copytree(HF / model, to)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "mymodel", **other}))
    return copy


def started(folder, *options):
    result = reshard("architectures", "--start", folder, *options)
    assert result.code == 0, result.err
    return result.out


def test_the_list_is_that_of_the_declared_models():
    listed = reshard("architectures", "--json").document
    assert {"llama", "qwen2", "gpt_neox"} <= set(listed) and reshard("architectures").out.split() == listed


@pytest.mark.parametrize("model", CLEAR)
def test_where_nothing_is_open_the_beginning_is_a_whole_declaration(model, tmp_path):
    source = renamed(model, tmp_path / "m")
    (tmp_path / "my.yaml").write_text(started(source))
    made = reshard("convert", source, tmp_path / "out", "--to", "vllm", "--tp", 4, "--architecture", tmp_path / "my.yaml")
    assert made.code == 0, made.err
    assert ranks(tmp_path / "out") == json.loads((VLLM / model / "tp4.json").read_text())["ranks"]


@pytest.mark.parametrize("model", MODELS)
def test_every_role_that_is_written_is_the_built_in_one(model, tmp_path):
    text = started(renamed(model, tmp_path / "m"))
    config = json.loads((HF / model / "config.json").read_text())
    built_in = {weight.declared.name: weight.declared for weight in find_model(config).weights.values()}
    lines = [line.split("#")[0].strip() for line in text.split("\nweights:")[1].split("\n\n")[0].splitlines()[1:]]
    rows = dict(line.split(": ", 1) for line in lines if line)
    certain = {name: value.strip() for name, value in rows.items() if '"?"' not in value}
    for name, value in certain.items():
        role = value.split(":")[1].split(",")[0].strip(" }") if value.startswith("{") else value
        assert role == built_in[name].role and ("transposed: true" in value) == built_in[name].transposed
    assert len(certain) >= 5 and (len(certain) == len(rows)) == (model in CLEAR)
    if '"?"' in text.split("model_type:")[-1]:
        with pytest.raises(RequestError, match=r"a \? stands here"):
            parse_declaration(text.encode(), "my.yaml")


def test_fused_sections_and_square_matrices_are_left_open_with_what_is_known(tmp_path):
    text = started(renamed("gpt2", tmp_path / "m"))
    lines = {line.split(": ")[0].strip(): line for line in text.splitlines()}
    assert 'c_attn.weight: "?"' in lines["transformer.h.{layer}.attn.c_attn.weight"]
    assert "stored as [48, 144]; if it is several in one, write `holds:" in lines["transformer.h.{layer}.attn.c_attn.weight"]
    assert '{role: attention.o, transposed: "?"}' in lines["transformer.h.{layer}.attn.c_proj.weight"]
    assert "{role: mlp.up, transposed: true}" in lines["transformer.h.{layer}.mlp.c_fc.weight"]
    assert "like: gpt2" in text


def test_layers_that_differ_are_left_open(tmp_path):
    text = started(renamed("qwen3_moe", tmp_path / "m"))
    assert 'layers: "?"' in text and 'sparse: "?"' in text and "of 3 layers only" in text
    assert "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight: {role: expert.gate" in text


def test_quantised_weights_are_declared_without_their_scales(tmp_path):
    source = shutil.copytree(FIXTURES / "hf_fp8" / "llama-fp8-block", tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "mymodel"}))
    text = started(source)
    assert "_scale" not in text and '"?"' not in text.split("model_type:")[-1]
    (tmp_path / "my.yaml").write_text(text)
    made = reshard("convert", source, tmp_path / "out", "--to", "vllm", "--tp", 2, "--architecture", tmp_path / "my.yaml")
    expected = reshard("convert", FIXTURES / "hf_fp8" / "llama-fp8-block", tmp_path / "expected", "--to", "vllm", "--tp", 2)
    assert (made.code, expected.code) == (0, 0), made.err + expected.err
    assert ranks(tmp_path / "out") == ranks(tmp_path / "expected") != {}


def test_where_all_layers_have_experts_all_are_sparse(tmp_path):
    assert started(renamed("mixtral", tmp_path / "m")).endswith("\nsparse: all\n")


def test_a_missing_head_is_asked_about_and_rotary_frequencies_are_dropped(tmp_path):
    source = renamed("llama-tied", tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    assert "tie_word_embeddings" not in started(source) and config.pop("tie_word_embeddings") is True
    (source / "config.json").write_text(json.dumps(config))
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in (0, 1)}
    safetensors.torch.save_file({**tensors, **frequencies}, source / "model.safetensors")
    text = started(source)
    assert '\ndefaults: {tie_word_embeddings: "?"}    # no head is stored' in text
    assert "\ndropped:\n  model.layers.{layer}.self_attn.rotary_emb.inv_freq: every engine computes it" in text
    assert "inv_freq" not in text.split("dropped:")[0]
    (tmp_path / "my.yaml").write_text(text.replace('"?"}', "true}"))
    plan = reshard("convert", source, tmp_path / "out", "--to", "vllm", "--architecture", tmp_path / "my.yaml")
    assert plan.code == 0 and "rotary_emb" in plan.out, plan.err


def test_a_name_that_is_usual_with_a_shape_that_is_not_is_left_open(tmp_path):
    source = renamed("qwen2", tmp_path / "m", head_dim=16)
    assert 'q_proj.weight: "?"    # stored as [256, 256]; an attention.q, as which it is called, would be [128, 256]' in started(source)
    other = renamed("qwen2", tmp_path / "n")
    tensors = safetensors.torch.load_file(other / "model.safetensors")
    odd = {"model.layers.0.strange: thing #1": torch.zeros(3), "vision.blocks.0.x.weight": torch.zeros(2, 2)}
    safetensors.torch.save_file({**tensors, **odd}, other / "model.safetensors")
    text = started(other)
    assert '  "model.layers.{layer}.strange: thing #1": "?"    # stored as [3]' in text
    assert '  vision.blocks.0.x.weight: "?"    # stored as [2, 2]' in text and "like:" not in text


def test_what_the_config_does_not_say_under_a_usual_key_is_left_open(tmp_path):
    source = renamed("qwen2", tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    config["width"] = config.pop("hidden_size")
    (source / "config.json").write_text(json.dumps(config))
    text = started(source)
    assert '  hidden: "?"    # the key of the config that says it; none of hidden_size,' in text
    assert 'model.norm.weight: "?"' in text and "called as a final_norm usually is" in text


def test_a_training_checkpoint_begins_one_too(tmp_path):
    case = DCP / "fsdp2"
    text = started(case / "checkpoint", "--model", case / "model")
    assert "model.layers.{layer}.self_attn.q_proj.weight: attention.q" in text and '"?"' not in text.split("model_type:")[-1]
    assert reshard("architectures", "--start", case / "checkpoint", "--model", case / "model", "--json").document["declaration"] == text


def test_without_a_config_or_without_the_models_names_there_is_no_beginning():
    refused = reshard("architectures", "--start", DCP / "fsdp2" / "checkpoint")
    assert refused.code == 2 and "--model DIR" in refused.err
    refused = reshard("architectures", "--start", FIXTURES / "megatron" / "llama-tp2" / "checkpoint")
    assert refused.code == 2 and "do not have the model's own names" in refused.err
