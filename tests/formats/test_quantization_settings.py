"""The settings of a quantization, wherever they stand: read there, carried with packed weights, and gone with --dequantize."""

import json
import shutil

import pytest
import safetensors.torch
import torch

import reshard
from reshard.errors import CheckpointError, UnsupportedError
from reshard.models.quantization import PLACES, SETTINGS_FILES, quantization_of, quantization_settings, unknown_quantization
from tests.formats.test_packed import FIXTURES, described, stored, truth_of

AWQ_FILE = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM", "modules_to_not_convert": ["lm_head"]}
GPTQ_FILE = {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}
MODELOPT_FILE = {"producer": {"name": "modelopt", "version": "0.29.0"}}
MODELOPT_FILE["quantization"] = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}


def in_text_config(config, settings):
    return config | {"text_config": {"model_type": "llama", "quantization_config": settings}}


def in_compression_config(config, settings):
    return config | {"compression_config": settings}


PLACED = {
    "text_config": ("llama-ct-int4", in_text_config, None, None),
    "compression_config": ("llama-ct-nvfp4", in_compression_config, None, None),
    "quant_config.json": ("llama-awq", None, "quant_config.json", AWQ_FILE),
    "quantize_config.json of AutoAWQ": ("llama-awq", None, "quantize_config.json", AWQ_FILE),
    "quantize_config.json": ("llama-gptq", None, "quantize_config.json", GPTQ_FILE),
    "hf_quant_config.json": ("llama-modelopt-nvfp4", None, "hf_quant_config.json", MODELOPT_FILE),
}


def placed(place, to):
    """A copy of a fixture with its settings at a place; and the name of the file that holds them, if it is not config.json."""
    case, change, file, content = PLACED[place]
    folder = shutil.copytree(FIXTURES / case, to)
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(change(config, settings) if change else config))
    if file:
        (folder / file).write_text(json.dumps(content))
    return folder, case, file


@pytest.mark.parametrize("place", PLACED)
def test_settings_are_read_carried_and_removed_at_each_place(place, tmp_path):
    folder, case, file = placed(place, tmp_path / "source")
    reshard.convert(reshard.plan(folder, to="hf"), tmp_path / "same")
    assert described(stored(tmp_path / "same")) == described(stored(folder))
    for name in filter(None, ("config.json", file)):
        assert (tmp_path / "same" / name).read_bytes() == (folder / name).read_bytes()
    reshard.convert(reshard.plan(folder, to="hf", dequantize=True), tmp_path / "values")
    assert described(stored(tmp_path / "values")) == truth_of(case)
    assert quantization_settings(json.loads((tmp_path / "values" / "config.json").read_text())) is None
    assert not any((tmp_path / "values" / name).exists() for name in SETTINGS_FILES)


def test_a_config_that_is_written_again_does_not_get_the_settings_of_another_file(tmp_path):
    folder, _, file = placed("quant_config.json", tmp_path / "source")
    reshard.convert(reshard.plan(folder, to="hf", dtype="bf16"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))
    assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes()


LISTED = "modules_in_block_to_quantize"
GPTQ_PLACES = {
    "config.json": lambda config, settings: config | {"quantization_config": settings},
    "null": lambda config, settings: config | {"quantization_config": settings | {LISTED: None}},
    "text_config": in_text_config,
    "quantize_config.json": lambda config, settings: config,
}


@pytest.mark.parametrize("place", GPTQ_PLACES)
def test_vllm_is_told_which_modules_gptq_quantized(place, tmp_path):
    """Otherwise it takes them from the names in the headers, looks for the parts of fused modules, and finds none (tests/serving/packed.py
    starts it)."""
    folder = shutil.copytree(FIXTURES / "llama-gptq", tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config") | {"sym": True}
    (folder / "config.json").write_text(json.dumps(GPTQ_PLACES[place](config, settings)))
    if place == "quantize_config.json":
        (folder / place).write_text(json.dumps(settings))
    reshard.convert(reshard.plan(folder, to="vllm", tp=2), tmp_path / "ranks")
    written = quantization_settings(json.loads((tmp_path / "ranks" / "config.json").read_text()))
    (modules,) = written.pop(LISTED)
    assert sorted(modules) == sorted(name.removesuffix(".qweight") for name in stored(folder) if name.endswith(".qweight"))
    assert written == settings | {"quant_method": "gptq"}
    reshard.convert(reshard.plan(tmp_path / "ranks", to="vllm", tp=1), tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_bytes() == (tmp_path / "ranks" / "config.json").read_bytes()


@pytest.mark.parametrize("case", ["llama-awq", "llama-gptq"])
def test_vllm_gets_the_lists_that_are_there(case, tmp_path):
    folder = shutil.copytree(FIXTURES / case, tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"sym": True, LISTED: [["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]]}
    (folder / "config.json").write_text(json.dumps(config))
    reshard.convert(reshard.plan(folder, to="vllm", tp=2), tmp_path / "ranks")
    assert (tmp_path / "ranks" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.mark.parametrize("case", ["llama-ct-int4", "llama-modelopt-nvfp4", "llama-modelopt-fp8-channel", "llama-gptq", "gpt_oss-mxfp4"])
def test_packed_weights_without_settings_are_refused(case, tmp_path):
    folder = shutil.copytree(FIXTURES / case, tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="packed, and no settings say how") as caught:
        reshard.plan(folder, to="hf")
    assert PLACES in str(caught.value) and all(name in PLACES for name in SETTINGS_FILES)
    assert any("no settings" in finding.detail for finding in reshard.doctor(folder).findings)


def test_cache_scales_may_be_absent(tmp_path):
    """ModelOpt writes none if it takes 1 for all of them."""
    folder = shutil.copytree(FIXTURES / "llama-modelopt-nvfp4-kv", tmp_path / "source")
    tensors = {name: tensor for name, tensor in stored(folder).items() if not name.endswith(("k_scale", "v_scale"))}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    reshard.convert(reshard.plan(folder, to="hf"), tmp_path / "out")
    assert described(stored(tmp_path / "out")) == described(tensors)
    with pytest.raises(UnsupportedError, match="no such scale"):
        reshard.plan(folder, to="vllm")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}, "modelopt with quant_algo MIXED_PRECISION and no quantized_layers"),
        ({"quant_algo": "w4a8_awq"}, "modelopt with quant_algo W4A8_AWQ"),
        ({"quant_algo": "NVFP4", "kv_cache_scheme": "NVFP4"}, "modelopt with the KV cache in NVFP4"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "INT8"}, "modelopt with the KV cache in INT8"),
    ],
)
def test_what_is_not_read_is_named(settings, expected):
    assert unknown_quantization({"quantization_config": {"quant_method": "modelopt", **settings}}) == expected


LINEAR = {"targets": ["Linear"], "format": "pack-quantized", "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({}, "compressed-tensors with several config_groups for the same modules"),
        ({"targets": ["Embedding"]}, "compressed-tensors for the modules ['Embedding']"),
        ({"targets": ["re:.*self_attn.*"], "format": "marlin-24"}, "compressed-tensors in the format marlin-24"),
        ({"targets": ["re:.*self_attn.*"]}, None),
    ],
)
def test_groups_that_are_not_read_are_named(other, expected):
    settings = {"quant_method": "compressed-tensors", "config_groups": {"group_0": LINEAR, "group_1": LINEAR | other}}
    assert unknown_quantization({"quantization_config": settings}) == expected


@pytest.mark.parametrize("sparse", ["sparse-24-bitmask", "dense"])
def test_sparse_weights_are_named(sparse):
    settings = {"quant_method": "compressed-tensors", "config_groups": {"group_0": LINEAR}, "sparsity_config": {"format": sparse}}
    expected = None if sparse == "dense" else "compressed-tensors with sparse weights in the format sparse-24-bitmask"
    assert unknown_quantization({"quantization_config": settings}) == expected


def test_settings_of_an_inner_model_name_its_modules():
    settings = {"quant_method": "compressed-tensors", "config_groups": {"group_0": LINEAR}, "ignore": ["lm_head", "re:model.layers.1.*"]}
    quantization = quantization_of({"text_config": {"quantization_config": settings}})
    weights = {"language_model.lm_head.weight": False, "lm_head.weight": False, "language_model.model.layers.1.mlp.up_proj.weight": False}
    weights["language_model.model.layers.0.mlp.up_proj.weight"] = True
    assert {name: quantization.form_of(name) is not None for name in weights} == weights


def test_vllm_keeps_cache_scales_in_the_type_of_the_model_and_a_note_says_so(tmp_path):
    plan = reshard.plan(FIXTURES / "llama-modelopt-nvfp4-kv", to="vllm", tp=2)
    assert any("rounded to the type of the model" in note for note in plan.layout.notes)
    reshard.convert(plan, tmp_path / "out")
    given = stored(FIXTURES / "llama-modelopt-nvfp4-kv")["model.layers.0.self_attn.k_proj.k_scale"]
    found = stored(tmp_path / "out")["model.layers.0.self_attn.attn.k_scale"]
    assert torch.equal(found, given.bfloat16()) and found.dtype == torch.bfloat16 and found.shape == ()


def test_modelopt_excludes_words_of_names_and_wildcards():
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    settings["quantization"]["exclude_modules"] = ["lm_head", "router", "model.layers.1", "model.layers.2.self_attn*", "vision_tower*"]
    quantization = quantization_of({"quantization_config": settings})
    weights = {
        "model.layers.0.self_attn.q_proj.weight": True,
        "model.layers.0.block_sparse_moe.router.weight": False,
        "model.layers.0.router_proj.weight": True,
        "model.layers.1.mlp.up_proj.weight": False,
        "model.layers.10.mlp.up_proj.weight": True,
        "model.layers.2.self_attn.o_proj.weight": False,
        "language_model.model.layers.1.mlp.up_proj.weight": False,
        "language_model.lm_head.weight": False,
        "vision_tower.encoder.fc1.weight": False,
    }
    assert {name: quantization.form_of(name) is not None for name in weights} == weights
