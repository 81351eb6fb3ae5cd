"""Folders of MLX: codes of 2 to 8 bits in words, per-module sizes, what is refused. tests/formats/test_packed.py compares all values."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES
from helpers.reshard_command import reshard as command

import reshard
from reshard.canonical.name_variants import Names
from reshard.errors import UnsupportedError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import bit_run
from reshard.geometry.mosaics import Mosaic, stacked
from reshard.models.libraries.mlx import MODELS
from reshard.models.lookup import find_model
from reshard.models.quantization import quantization_of, unknown_quantization

FOLDER = FIXTURES / "hf_packed" / "llama-mlx"
NAMES = json.loads((FIXTURES / "hf_packed" / "mlx_names.json").read_text())
PUBLISHED = Path(__file__).resolve().parent.parent.parent.parent / "shared" / "published"


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_codes_follow_each_other_bit_by_bit(bits):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 96))
    rows = [sum(int(code) << (bits * place) for place, code in enumerate(row)).to_bytes(96 * bits // 8, "little") for row in codes]
    words = np.frombuffer(b"".join(rows), "<u4").reshape(3, -1)
    packing = bit_run(bits)
    assert np.array_equal(packing.unpacked(words, 1), codes.astype(np.float32))
    assert packing.bits == bits and packing.count * words.shape[1] == 96 * packing.run


@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_a_part_of_the_values_is_read_alone(dtype):
    view = reshard.open(FOLDER).view(to="hf", dequantize=True, dtype=dtype)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"):
        whole = view[name].numpy()
        part = view[name][3:7, 5:71].numpy()
        assert np.array_equal(part.view(np.uint8), np.ascontiguousarray(whole[3:7, 5:71]).view(np.uint8))


def test_the_settings_leave_the_config_with_the_codes(tmp_path):
    reshard.convert(reshard.plan(FOLDER, to="hf", dequantize=True), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"quantization", "quantization_config"} & config.keys()
    reshard.convert(reshard.plan(FOLDER, to="hf"), tmp_path / "copy")
    assert (tmp_path / "copy" / "config.json").read_bytes() == (FOLDER / "config.json").read_bytes()
    assert reshard.verify(FOLDER, tmp_path / "copy").equal


def test_engines_get_the_values_only(tmp_path):
    shown = command("inspect", FOLDER).out
    assert "and 5 other forms" in shown and "--to vllm --tp 1 --dequantize" in shown and "quantized for MLX" in shown
    with pytest.raises(UnsupportedError, match=r"quantized for MLX.*`dequantize=True`"):
        reshard.plan(FOLDER, to="vllm")
    reshard.convert(reshard.plan(FOLDER, to="hf", dequantize=True), tmp_path / "values")
    reshard.convert(reshard.plan(FOLDER, to="vllm", tp=2, dequantize=True), tmp_path / "ranks")
    assert reshard.verify(tmp_path / "values", tmp_path / "ranks").equal


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bits": 7}, "with 7 bits"),
        ({"group_size": 16}, "groups of 16"),
        ({"mode": "fp6"}, "in the mode fp6"),
        ({"model.layers.0.mlp.up_proj": {"mode": "nvfp4", "group_size": 32}}, "in the mode nvfp4 with 4 bits and groups of 32"),
        ({"model.layers.0.mlp.up_proj": {"mode": "nvfp4", "group_size": 16, "global_scale": True}}, "with global scales"),
    ],
)
def test_other_settings_are_refused_by_name(change, reason, tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    assert reason in unknown_quantization(config)
    with pytest.raises(reshard.RequestError, match="mlx"):
        reshard.plan(folder, to="hf", dequantize=True)
    reshard.convert(reshard.plan(folder, to="hf"), tmp_path / "out")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("qwen3_next", "adds one to the norms"),
        ("deepseek_v3", "splits and transposes"),
        ("ernie4_5_moe", "correction"),
        ("gpt2", "other names"),
    ],
)
def test_models_that_mlx_stores_otherwise_are_refused(model_type, reason):
    config = {"model_type": model_type, "quantization": {"bits": 4, "group_size": 64}}
    assert f"of {model_type}, " in unknown_quantization(config) and reason in unknown_quantization(config) and find_model(config) is None


@pytest.mark.parametrize("model_type", MODELS)
def test_names_mean_what_mlx_put_there(model_type):
    """mlx_names.json: where mlx-lm's own code put each published weight, each filled with numbers of its own."""
    found = NAMES[model_type]
    config = json.loads((FIXTURES / found["config"]).read_text())
    names = Names(find_model(config.get("config", config)))
    for stored, published in found["names"].items():
        arrays = [Mosaic.of(name, Box.whole(names.array(name).shape)) for name in published]
        assert names.array(stored) == (arrays[0] if len(arrays) == 1 else stacked(arrays)), stored


def test_a_module_without_scales_is_not_quantized():
    """As MLX's loader: the config of mlx-lm does not name modules that were left out, or whose rows do not divide into groups."""
    folder = FIXTURES / "hf_packed" / "qwen3_moe-mlx"
    opened = reshard.open(folder)
    stored = {name.removesuffix(".scales") for name in opened.index.element_types if name.endswith(".scales")}
    assert "model.layers.0.mlp.gate" in stored and "model.layers.0.self_attn.o_proj" not in stored
    weights = opened.model.weights
    assert "model.layers.0.mlp.gate.scales" in weights and "model.layers.0.self_attn.o_proj.scales" not in weights
    assert weights["model.layers.0.mlp.experts.2.up_proj.weight"].form.name == "INT6 (MLX, group 32)"
    assert weights["model.layers.0.mlp.experts.2.down_proj.weight"].form is None


@pytest.mark.parametrize("case", ["qwen3_moe-mlx", "mixtral-mlx-mxfp4"])
def test_a_model_with_experts_is_served_by_its_values_or_copied_as_it_is(case, tmp_path):
    folder = FIXTURES / "hf_packed" / case
    reshard.convert(reshard.plan(folder, to="hf"), tmp_path / "copy")
    assert (tmp_path / "copy" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    copied, stored = (reshard.open(each).index.element_types for each in (tmp_path / "copy", folder))
    assert copied == stored and any(".switch_mlp." in name for name in copied)
    reshard.convert(reshard.plan(folder, to="hf", dequantize=True), tmp_path / "values")
    reshard.convert(reshard.plan(folder, to="vllm", tp=2, dequantize=True), tmp_path / "ranks")
    assert reshard.verify(tmp_path / "values", tmp_path / "ranks").equal
    assert not command("doctor", folder).out.count("error")


def test_a_module_that_is_listed_as_false_is_not_quantized():
    settings = {"bits": 4, "group_size": 64, "language_model.lm_head": False, "language_model.model.embed_tokens": {"bits": 8}}
    found = quantization_of({"model_type": "llama", "quantization": settings})
    assert found.form_of("lm_head.weight") is None
    for name in ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight"):
        assert found.form_of(name).name == "INT8 (MLX, group 64)"
    assert found.form_of("model.layers.0.mlp.up_proj.weight").name == "INT4 (MLX, group 64)"


@pytest.mark.parametrize("name", ["Qwen3-14B-MLX-4bit", "qwen2-mlx-3bit"])
def test_published_folders_have_the_expected_names(name):
    if not (PUBLISHED / name).is_dir():
        pytest.skip("the names and configs of published folders lie beside the project, not in it")
    model = find_model(json.loads((PUBLISHED / name / "config.json").read_text()))
    stored = json.loads(gzip.decompress((PUBLISHED / name / "index.json.gz").read_bytes()))["weight_map"]
    assert model.weights.keys() == stored.keys()
