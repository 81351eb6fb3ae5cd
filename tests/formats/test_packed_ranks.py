"""Packed forms whose files of ranks were compared with real vLLM (tests/serving/packed.py): what a rank holds, and the way back."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

import reshard
from reshard.errors import UnsupportedError

FIXTURES = Path(__file__).resolve().parent.parent.parent / "fixtures" / "hf_packed"


def stored(path):
    return safetensors.torch.load_file(path)


@pytest.mark.parametrize("case", ["llama-ct-w8a8", "llama-quark-fp8", "llama-autofp8-kv"])
def test_ranks_hold_rows_with_their_scales(case, tmp_path):
    source, plan = stored(FIXTURES / case / "model.safetensors"), reshard.plan(FIXTURES / case, to="vllm", tp=2)
    reshard.convert(plan, tmp_path / "ranks")
    assert reshard.verify(FIXTURES / case, tmp_path / "ranks", cast=True).equal
    front = "model.layers.0.self_attn."
    for rank in range(2):
        held = stored(tmp_path / "ranks" / f"model-rank-{rank}-part-0.safetensors")
        parts = [source[f"{front}{name}_proj.weight"].chunk(2)[rank] for name in "qkv"]
        assert torch.equal(held[f"{front}qkv_proj.weight"].view(torch.uint8), torch.cat([part.view(torch.uint8) for part in parts]))
        scales = [source[f"{front}{name}_proj.weight_scale"] for name in "qkv"]
        if case == "llama-ct-w8a8":
            expected = torch.cat([scale.chunk(2)[rank] for scale in scales])
        else:
            expected = torch.cat([scale.reshape(1) for scale in scales])
        assert torch.equal(held[f"{front}qkv_proj.weight_scale"], expected.float())
        if case == "llama-autofp8-kv":
            assert torch.equal(held[f"{front}attn.k_scale"], source[f"{front}k_scale"][0].bfloat16())
    reshard.convert(reshard.plan(tmp_path / "ranks", to="hf"), tmp_path / "back")
    back = stored(tmp_path / "back" / "model.safetensors")
    assert back.keys() == source.keys() and all(torch.equal(back[name].float(), source[name].float()) for name in source)


@pytest.mark.parametrize(("change", "why"), [
    ({"export": {"kv_cache_group": ["*k_proj"]}}, "kv_cache_group"),
    ({"layer_quant_config": {"*": {}}}, "layer_quant_config"),
    ({"global_quant_config": {"weight": {"dtype": "mxfp4", "qscheme": "per_group"}}}, "mxfp4 per_group"),
    ({"global_quant_config": None}, "without global_quant_config"),
])  # fmt: skip
def test_other_settings_of_quark_are_named(change, why, tmp_path):
    folder = shutil.copytree(FIXTURES / "llama-quark-fp8", tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=why):
        reshard.plan(folder, to="vllm", tp=2)
