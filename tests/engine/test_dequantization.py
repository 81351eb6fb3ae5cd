"""Quantized weights as values: against torch on whole arrays, for blocks, rows and whole tensors, at odd sizes."""

import json

import pytest
import safetensors.torch
import torch

import reshard
from reshard.errors import CheckpointError, RequestError

BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
ROWS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}
SHAPES = {"a.weight": (300, 200), "b.weight": (128, 257), "c.weight": (5, 7)}


def scale_shape(config, rows, columns):
    if config is BLOCK:
        return (-(-rows // 128), -(-columns // 128))
    return (rows, 1) if config is ROWS else ()


def folder(path, config, scale_dtype=torch.float32):
    """A folder of quantized weights, and what they are worth."""
    torch.manual_seed(0)
    tensors, truth = {"norm.weight": torch.randn(16).bfloat16()}, {}
    kind = "weight_scale_inv" if config is BLOCK else "weight_scale"
    for name, (rows, columns) in SHAPES.items():
        tensors[name] = (torch.randn(rows, columns) * 100).to(torch.float8_e4m3fn)
        scale = (torch.rand(scale_shape(config, rows, columns)) + 0.1).to(scale_dtype)
        tensors[name.replace("weight", kind)] = scale
        if config is STATIC:
            tensors[name.replace("weight", "input_scale")] = torch.tensor(0.5)
        wide = scale.float()
        if config is BLOCK:
            wide = wide.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        truth[name] = (tensors[name].float() * wide).bfloat16()
    path.mkdir()
    safetensors.torch.save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "somebodys_own", "torch_dtype": "bfloat16", "quantization_config": config}))
    return truth | {"norm.weight": tensors["norm.weight"]}


@pytest.mark.parametrize("config", [BLOCK, STATIC, ROWS], ids=["blocks", "whole", "rows"])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_every_value_is_its_element_times_its_scale(config, scale_dtype, tmp_path):
    truth = folder(tmp_path / "fp8", config, scale_dtype)
    plan = reshard.plan(tmp_path / "fp8", to="hf", dequantize=True)
    reshard.convert(plan, tmp_path / "out")
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == truth.keys()
    for name, expected in truth.items():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], expected), name
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    dropped = {drop.name for drop in plan.drops}
    assert dropped == ({name.replace("weight", "input_scale") for name in SHAPES} if config is STATIC else set())


def test_small_blocks_of_work_give_the_same_values(tmp_path, monkeypatch):
    """Work is cut into blocks of rows that do not end where the scales' blocks do."""
    from reshard.geometry import boxes

    truth = folder(tmp_path / "fp8", BLOCK)
    monkeypatch.setattr(boxes, "BLOCK_ELEMENTS", 201 * 50)
    assert len(list(boxes.blocks((300, 200)))) == 6
    reshard.convert(reshard.plan(tmp_path / "fp8", to="hf", dequantize=True), tmp_path / "out")
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], expected) for name, expected in truth.items())


def test_without_it_elements_and_scales_stay_whatever_dtype_says(tmp_path):
    folder(tmp_path / "fp8", BLOCK)
    before = safetensors.torch.load_file(tmp_path / "fp8" / "model.safetensors")
    reshard.convert(reshard.plan(tmp_path / "fp8", to="hf", dtype="fp32"), tmp_path / "out")
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert found["norm.weight"].dtype == torch.float32
    for name in before.keys() - {"norm.weight"}:
        assert found[name].dtype == before[name].dtype
        assert torch.equal(found[name].view(torch.uint8), before[name].view(torch.uint8))


def test_what_is_not_quantized_or_lacks_its_scales_is_said(tmp_path):
    folder(tmp_path / "fp8", BLOCK)
    file = tmp_path / "fp8" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file({name: tensor for name, tensor in tensors.items() if name != "b.weight_scale_inv"}, file)
    with pytest.raises(CheckpointError, match=r"b\.weight.*F8_E4M3.*no weight_scale_inv"):
        reshard.plan(tmp_path / "fp8", to="hf", dequantize=True)
    (tmp_path / "fp8" / "config.json").write_text(json.dumps({"model_type": "somebodys_own"}))
    with pytest.raises(RequestError, match="nothing here is quantized"):
        reshard.plan(tmp_path / "fp8", to="hf", dequantize=True)
