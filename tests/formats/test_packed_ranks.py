"""Packed forms whose files of ranks were compared with real vLLM (tests/serving/packed.py): what a rank holds, and the way back."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

import reshard
from reshard.errors import UnsupportedError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "fixtures" / "hf_packed"))

import seeded_models

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


def made(form, folder, **more):
    """A model in a form of a library, with random values."""
    config = seeded_models.with_linear(form, **more)
    seeded_models.write_random(config, folder)
    return stored(folder / "model.safetensors")


def test_ranks_of_auto_round_hold_what_those_of_gptq_hold(tmp_path):
    source = made("auto-round", tmp_path / "source")
    without = {name: tensor for name, tensor in source.items() if not name.endswith("g_idx")}
    safetensors.torch.save_file(without, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    reshard.convert(reshard.plan(tmp_path / "source", to="vllm", tp=2), tmp_path / "ranks")
    reshard.convert(reshard.plan(tmp_path / "source", to="hf"), tmp_path / "copy")
    assert stored(tmp_path / "copy" / "model.safetensors").keys() == without.keys()
    assert reshard.verify(tmp_path / "source", tmp_path / "ranks").equal
    front = "model.layers.0.self_attn."
    for rank in range(2):
        held = stored(tmp_path / "ranks" / f"model-rank-{rank}-part-0.safetensors")
        assert torch.equal(held[f"{front}o_proj.qweight"], without[f"{front}o_proj.qweight"].chunk(2)[rank])
        assert torch.equal(held[f"{front}o_proj.scales"], without[f"{front}o_proj.scales"].chunk(2)[rank])
        assert torch.equal(held["model.layers.0.mlp.down_proj.weight"], without["model.layers.0.mlp.down_proj.weight"].chunk(2, 1)[rank])
    reshard.convert(reshard.plan(tmp_path / "source", to="hf", dequantize=True), tmp_path / "values")
    name = f"{front}q_proj."
    codes = torch.stack([without[f"{name}qweight"] >> shift & 15 for shift in range(0, 32, 4)], 1).flatten(0, 1)
    zeros = torch.stack([without[f"{name}qzeros"] >> shift & 15 for shift in range(0, 32, 4)], 2).flatten(1) + 1
    values = without[f"{name}scales"].repeat_interleave(32, 0) * (codes - zeros.repeat_interleave(32, 0))
    assert torch.equal(stored(tmp_path / "values" / "model.safetensors")[f"{name}weight"], values.T)


def test_scales_of_a_cache_by_quark_are_held_beside_attention(tmp_path):
    source = made("quark-kv", tmp_path / "source")
    reshard.convert(reshard.plan(tmp_path / "source", to="vllm", tp=2), tmp_path / "ranks")
    for rank in range(2):
        held = stored(tmp_path / "ranks" / f"model-rank-{rank}-part-0.safetensors")
        for kind in "kv":
            scale = source[f"model.layers.0.self_attn.{kind}_proj.output_scale"]
            assert torch.equal(held[f"model.layers.0.self_attn.attn.{kind}_scale"], scale)
    assert reshard.verify(tmp_path / "source", tmp_path / "ranks").equal


@pytest.mark.parametrize(("tp", "heads"), [(1, [0, 1]), (2, [0]), (4, [0])])
def test_a_rank_holds_the_scales_of_its_own_heads(tp, heads, tmp_path):
    source = made("kv-heads", tmp_path / "source")
    reshard.convert(reshard.plan(tmp_path / "source", to="vllm", tp=tp), tmp_path / "ranks")
    for rank in range(tp):
        held = stored(tmp_path / "ranks" / f"model-rank-{rank}-part-0.safetensors")
        for kind in "kv":
            scales = source[f"model.layers.0.self_attn.{kind}_scale"].flatten()
            assert torch.equal(held[f"model.layers.0.self_attn.attn.{kind}_scale"], scales[[head + rank * 2 // tp for head in heads]])
            assert held[f"model.layers.0.self_attn.attn.{kind}_zero_point"].shape == (len(heads),)
        assert torch.equal(held["model.layers.0.self_attn.attn.q_scale"], torch.ones(len(heads)))
    reshard.convert(reshard.plan(tmp_path / "ranks", to="hf"), tmp_path / "back")
    back = stored(tmp_path / "back" / "model.safetensors")
    assert back.keys() == source.keys() and all(torch.equal(back[name], source[name]) for name in source)


@pytest.mark.parametrize(("form", "change", "why"), [
    ("auto-round", {"extra_config": {"model.layers.0.mlp.up_proj": {"sym": False}}}, "extra_config, model.layers.0.mlp.up_proj"),
    ("auto-round", {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": "8"}}}, "without numbers of bits"),
    ("auto-round", {"extra_config": ["lm_head"]}, "extra_config"),
    ("auto-round", {"packing_format": "auto_round:fp8"}, "auto_round:fp8"),
    ("auto-round", {"data_type": "mx_fp"}, "mx_fp"),
    ("auto-round", {"act_bits": 8}, "quantized activations"),
    ("auto-round", {"block_name_to_quantize": [["model.layers"]]}, "blocks"),
    ("auto-round", {"sym": False}, "sym: false"),
    ("auto-round", {"quant_method": "intel/auto-round"}, "knows it as auto-round alone"),
    ("quark-kv", {"layer_quant_config": {}}, "kv_cache_group"),
    ("kv-heads", {"kv_cache_scheme": {"num_bits": 4, "type": "int"}}, "KV cache"),
])  # fmt: skip
def test_settings_that_vllm_does_not_load_are_named(form, change, why, tmp_path):
    made(form, tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=why):
        reshard.plan(tmp_path / "source", to="vllm", tp=2)


def test_modules_that_auto_round_leaves_are_named_by_expressions(tmp_path):
    settings = seeded_models.LINEAR["auto-round"] | {"extra_config": {".*mlp.*": {"bits": 16}, "q_proj": {"bits": 16}}}
    source = made("auto-round", tmp_path / "source", quantization_config=settings)
    assert {name.split(".")[-2] for name in source if name.endswith("qweight")} == {"k_proj", "v_proj", "o_proj"}
    reshard.convert(reshard.plan(tmp_path / "source", to="hf", dequantize=True), tmp_path / "values")
    assert torch.equal(stored(tmp_path / "values" / "model.safetensors")["lm_head.weight"], source["lm_head.weight"])


def test_modules_of_auto_round_with_their_own_widths(tmp_path):
    """By name before any expression, then by the first expression; each rank holds its share of each width."""
    settings = seeded_models.LINEAR["auto-round-widths"]
    wider = {
        name: of_module | {"bits": 8}
        for name, of_module in settings["extra_config"].items()
        if not name.startswith(".") and "o_proj" not in name
    }
    settings = settings | {"extra_config": settings["extra_config"] | wider}
    source = made("auto-round", tmp_path / "source", quantization_config=settings)
    front, widths = "model.layers.0.", {"self_attn.q_proj": (8, 64), "mlp.gate_proj": (4, 128), "mlp.down_proj": (8, 64)}
    reshard.convert(reshard.plan(tmp_path / "source", to="hf", dequantize=True), tmp_path / "values")
    values = stored(tmp_path / "values" / "model.safetensors")
    for module, (bits, group) in widths.items():
        words, zeros, scales = (source[f"{front}{module}.{kind}"] for kind in ("qweight", "qzeros", "scales"))
        shifts, mask = range(0, 32, bits), (1 << bits) - 1
        codes = torch.stack([words >> shift & mask for shift in shifts], 1).flatten(0, 1)
        offsets = torch.stack([zeros >> shift & mask for shift in shifts], 2).flatten(1) + 1
        assert len(codes) == group * len(scales)
        expected = scales.float().repeat_interleave(group, 0) * (codes - offsets.repeat_interleave(group, 0))
        assert torch.equal(values[f"{front}{module}.weight"], expected.T.half()), module
    assert torch.equal(values[f"{front}self_attn.o_proj.weight"], source[f"{front}self_attn.o_proj.weight"])
    reshard.convert(reshard.plan(tmp_path / "source", to="vllm", tp=2), tmp_path / "ranks")
    for rank in range(2):
        held = stored(tmp_path / "ranks" / f"model-rank-{rank}-part-0.safetensors")
        for kind in ("qweight", "scales"):
            assert torch.equal(held[f"{front}mlp.down_proj.{kind}"], source[f"{front}mlp.down_proj.{kind}"].chunk(2)[rank])
            parts = [source[f"{front}self_attn.{name}_proj.{kind}"].chunk(2, 1)[rank] for name in "qkv"]
            assert torch.equal(held[f"{front}self_attn.qkv_proj.{kind}"], torch.cat(parts, 1))
    assert reshard.verify(tmp_path / "source", tmp_path / "ranks").equal


def test_widths_that_differ_within_a_joined_weight_are_refused(tmp_path):
    settings = seeded_models.LINEAR["auto-round"] | {"extra_config": {"up_proj": {"bits": 8}}}
    made("auto-round", tmp_path / "source", quantization_config=settings)
    with pytest.raises(UnsupportedError, match=r"up_proj\.qweight: it is stored in INT8 .*gate_proj\.qweight in INT4"):
        reshard.plan(tmp_path / "source", to="vllm", tp=2)


def test_zero_points_of_activations_are_held_by_every_rank(tmp_path):
    source = made("w8a8-zero-points", tmp_path / "source")
    reshard.convert(reshard.plan(tmp_path / "source", to="vllm", tp=2), tmp_path / "ranks")
    for rank in range(2):
        held = stored(tmp_path / "ranks" / f"model-rank-{rank}-part-0.safetensors")
        for joined, name in (("qkv", "k"), ("o", "o")):
            for kind in ("input_scale", "input_zero_point"):  # vLLM keeps one for q, k and v
                ours, theirs = (tensors[f"model.layers.0.self_attn.{key}_proj.{kind}"] for tensors, key in ((held, joined), (source, name)))
                assert ours.dtype == theirs.dtype and ours.shape == (1,) and torch.equal(ours, theirs)
    assert reshard.verify(tmp_path / "source", tmp_path / "ranks").equal
    reshard.convert(reshard.plan(tmp_path / "ranks", to="hf"), tmp_path / "back")
    back = stored(tmp_path / "back" / "model.safetensors")
    assert back.keys() == source.keys() and all(torch.equal(back[key], source[key]) for key in source)
    reshard.convert(reshard.plan(tmp_path / "source", to="hf", dequantize=True), tmp_path / "values")
    assert not [name for name in stored(tmp_path / "values" / "model.safetensors") if "input_zero" in name]


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
