"""`quantize=` and `requantize=` for models in several element types: the bits of llm-compressor (fixtures/hf_packed), global scales shared
as engines fuse weights, and MXFP4 as NVFP4 without loss."""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import reshard
from reshard.canonical.quantizing import fused_sets
from reshard.engine.origins.encoded import RECIPES
from reshard.engine.origins.recipe import NotRepresentable
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.geometry import boxes
from reshard.geometry.dtypes import BF16, F16
from reshard.models.lookup import find_model

FIXTURES = Path(__file__).resolve().parent.parent.parent / "fixtures" / "hf_packed"
sys.path.insert(0, str(FIXTURES))

import seeded_models  # noqa: E402

TRUTH = json.loads((FIXTURES / "llm-compressor-types.json").read_text())
CASES = [case.split() for case in TRUTH if " " in case]
NEW = ("mxfp8", "nvfp4", "fp8-channel")


def stored(folder):
    return {name: tensor for path in Path(folder).rglob("*.safetensors") for name, tensor in safetensors.torch.load_file(path).items()}


def described(tensors):
    return {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "sha256": hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest(),
        }
        for name, tensor in tensors.items()
    }


def by_module(tensors):
    """As make.py computes them."""
    found = {}
    for name, each in sorted(described(tensors).items()):
        found.setdefault(name.rpartition(".")[0], hashlib.sha256()).update(json.dumps([name, each]).encode())
    return {name: made.hexdigest()[:16] for name, made in found.items()}


def converted(source, out, **options):
    reshard.convert(reshard.plan(source, **{"to": "hf", **options}), out)
    return out


def settings(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize(("model", "dtype", "form"), CASES)
def test_tensors_and_config_are_llm_compressors(model, dtype, form, tmp_path):
    seeded_models.write(model, tmp_path / "source", dtype)
    out = converted(tmp_path / "source", tmp_path / "out", quantize=form)
    assert by_module(stored(out)) == TRUTH[f"{model} {dtype} {form}"]
    if form in NEW:
        ours, theirs = ({**each, "ignore": None} for each in (settings(out), TRUTH["quantization_config"][form]))
        assert ours == theirs


@pytest.mark.parametrize("form", NEW)
def test_the_work_may_be_cut_anywhere(form, tmp_path, monkeypatch):
    monkeypatch.setattr(boxes, "BLOCK_ELEMENTS", 128 * 50)
    for name, size in {"_WIDEST": 64, "_ELEMENTS": 1}.items():
        monkeypatch.setattr(f"reshard.engine.origins.recipe.{name}", size)
    seeded_models.write("qwen3_moe", tmp_path / "source", "float32")
    out = tmp_path / "out"
    reshard.convert(reshard.plan(tmp_path / "source", to="hf", quantize=form), out, workers=4)
    assert by_module(stored(out)) == TRUTH[f"qwen3_moe float32 {form}"]


@pytest.mark.parametrize("form", NEW)
@pytest.mark.parametrize(("trainer", "options"), [("dcp", {"dp": 3}), ("fsdp", {"dp": 2}), ("megatron", {"tp": 2})])
def test_a_training_checkpoint_gives_the_same_bytes(form, trainer, options, tmp_path):
    seeded_models.write("llama", tmp_path / "source", "float32")
    trained = converted(tmp_path / "source", tmp_path / "trained", to=trainer, **options)
    for to, sizes in (("hf", {}), ("vllm", {"tp": 2})):
        expected = converted(tmp_path / "source", tmp_path / f"{to}-expected", to=to, quantize=form, **sizes)
        ours = converted(trained, tmp_path / f"{to}-ours", to=to, quantize=form, model=tmp_path / "source", **sizes)
        assert described(stored(ours)) == described(stored(expected))


@pytest.mark.parametrize("form", NEW)
@pytest.mark.parametrize(
    ("model", "tp", "ep"), [("llama", 2, 1), ("llama", 4, 1), ("qwen3_moe", 1, 1), ("qwen3_moe", 2, 1), ("qwen3_moe", 2, 2)]
)
def test_ranks_hold_what_they_hold_in_steps(model, form, tp, ep, tmp_path):
    seeded_models.write(model, tmp_path / "source", "bfloat16")
    quantized = converted(tmp_path / "source", tmp_path / "hf", quantize=form)
    ranks = []
    for source, options in ((tmp_path / "source", {"quantize": form}), (quantized, {})):
        plan = reshard.plan(source, to="vllm", tp=tp, ep=ep, **options)
        reshard.convert(plan, tmp_path / f"ranks-{len(ranks)}")
        ranks.append([described(stored_in) for stored_in in of_ranks(tmp_path / f"ranks-{len(ranks)}", tp)])
        assert any("input scales of experts" in note for note in plan.layout.notes) == ((model, form) == ("qwen3_moe", "nvfp4"))
    assert ranks[0] == ranks[1]
    assert reshard.verify(quantized, tmp_path / "ranks-0", cast=form == "fp8-channel").equal
    back = converted(tmp_path / "ranks-0", tmp_path / "back")
    ours, theirs = stored(back), stored(quantized)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():  # vLLM holds the scales of rows in float32
        assert torch.equal(ours[name].float(), tensor.float()), name


def of_ranks(folder, tp):
    return [safetensors.torch.load_file(folder / f"model-rank-{rank}-part-0.safetensors") for rank in range(tp)]


def overwrite(path, names):
    """Give the tensors of a file other bytes."""
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    for name in names:
        first, last = header[name]["data_offsets"]
        content[start + first : start + last] = b"\x3e" * (last - first)
    path.write_bytes(content)


def test_input_scales_that_vllm_leaves_unset_are_ones_and_may_be_anything(tmp_path):
    seeded_models.write("qwen3_moe", tmp_path / "source", "bfloat16")
    ranks = converted(tmp_path / "source", tmp_path / "ranks", to="vllm", tp=2, quantize="nvfp4")
    path = ranks / "model-rank-1-part-0.safetensors"
    tensors = safetensors.torch.load_file(path)
    unset = {name: tensor for name, tensor in tensors.items() if name.endswith("input_global_scale")}
    assert {name.rpartition(".")[2]: tuple(tensor.shape) for name, tensor in unset.items()} == {
        "w13_input_global_scale": (2, 2), "w2_input_global_scale": (2,),
    }  # fmt: skip
    assert all((tensor == 1).all() and tensor.dtype == torch.float32 for tensor in unset.values())
    overwrite(path, unset)
    assert "wrong-padding" not in {finding.id for finding in reshard.doctor(ranks, deep=True).findings}
    name = next(name for name in tensors if name.endswith("attn.k_zero_point"))
    overwrite(path, [name])
    assert "wrong-padding" in {finding.id for finding in reshard.doctor(ranks, deep=True).findings}


def test_weights_that_engines_fuse_share_a_global_scale(tmp_path):
    """The oracle: 448 * 6 over the largest magnitude of q, k and v; of gate and up of an expert; of a weight of its own."""
    seeded_models.write("qwen3_moe", tmp_path / "source", "float32")
    plain = stored(tmp_path / "source")
    ours = stored(converted(tmp_path / "source", tmp_path / "nvfp4", quantize="nvfp4"))
    gate_up = plain["model.layers.0.mlp.experts.gate_up_proj"]
    sets = {"self_attn.": [("q_proj", "k_proj", "v_proj"), ("o_proj",)]}
    sets |= {f"mlp.experts.{expert}.": [("gate_proj", "up_proj"), ("down_proj",)] for expert in range(2)}
    for module, names in sets.items():
        for fused in names:
            scales = {ours[f"model.layers.0.{module}{name}.weight_global_scale"].item() for name in fused}
            if "experts" in module:
                stacked = gate_up if len(fused) == 2 else plain["model.layers.0.mlp.experts.down_proj"]
                largest = stacked[int(module.split(".")[2])].abs().max()
            else:
                largest = max(plain[f"model.layers.0.{module}{name}.weight"].abs().max() for name in fused)
            assert scales == {(448.0 * 6.0 / largest).item()}
    all_scales = {tensor.item() for name, tensor in ours.items() if name.endswith("global_scale")}
    assert len(all_scales) == 6


def test_weights_that_are_stored_joined_share_with_what_engines_join_them_to():
    """Qwen3.5 stores q, k and v of linear attention as one weight, and vLLM joins it and that of z."""
    heads = {f"linear_num_{kind}_heads": 4 for kind in ("key", "value")} | {f"linear_{kind}_head_dim": 16 for kind in ("key", "value")}
    config = seeded_models.CONFIGS["llama"] | heads | {"model_type": "qwen3_5_text", "layer_types": ["linear_attention"]}
    model = find_model(config | {"architectures": ["Qwen3_5ForCausalLM"]})
    names = [f"model.layers.0.linear_attn.in_proj_{kind}.weight" for kind in ("qkv", "z", "b", "a")]
    sets = fused_sets(model, names)
    assert [set(sets[name]) for name in names] == [set(names[:2])] * 2 + [set(names[2:])] * 2


def left_out(folder, module):
    """Whether the settings leave a module out, as compressed-tensors and vLLM match it."""
    entries = settings(folder)["ignore"]
    return any(re.match(entry[3:], module) if entry.startswith("re:") else entry == module for entry in entries)


@pytest.mark.parametrize("form", ("fp8-channel", "nvfp4"))
def test_linear_layers_without_scales_are_left_out_under_all_their_names(form, tmp_path):
    """A head that is the embedding has no weight, and transformers 5 calls `visual` model.visual: it would find no scales for them."""
    config = seeded_models.CONFIGS["llama"] | {"tie_word_embeddings": True, "model_type": "qwen2_5_vl"}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
    config |= {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": vision}
    seeded_models.write_random(config, tmp_path / "source")
    out = converted(tmp_path / "source", tmp_path / "out", quantize=form)
    for module in ("lm_head", "visual.blocks.0.attn.qkv", "model.visual.blocks.0.attn.qkv"):
        assert left_out(out, module), module
    for module in ("self_attn.q_proj", "mlp.down_proj"):
        assert not left_out(out, f"model.layers.0.{module}") and not left_out(out, f"model.language_model.layers.0.{module}")


def test_the_type_of_a_conversion_is_that_of_the_arithmetic(tmp_path):
    """As after a conversion to that type: for weights of float32 and `dtype="bf16"`, what earlier versions wrote."""
    seeded_models.write("llama", tmp_path / "source", "float32")
    for dtype in ("bf16", "fp16"):
        narrow = converted(tmp_path / "source", tmp_path / dtype, dtype=dtype)
        for form in ("mxfp4", *NEW):
            in_steps = converted(narrow, tmp_path / f"{dtype}-{form}-steps", quantize=form)
            at_once = converted(tmp_path / "source", tmp_path / f"{dtype}-{form}", quantize=form, dtype=dtype)
            assert described(stored(at_once)) == described(stored(in_steps))


@pytest.mark.parametrize("form", ["fp8-block", "mxfp4", *NEW])
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_a_result_is_compared_with_the_weights_that_it_was_made_from(model, form, tmp_path):
    source = tmp_path / "source"
    seeded_models.write(model, source, "float32")
    out = converted(source, tmp_path / "out", quantize=form)
    narrow = converted(source, tmp_path / "narrow", quantize=form, dtype="bf16")
    trained = converted(source, tmp_path / "trained", to="dcp")
    (trained / "config.json").unlink()
    for plain, result, options in ((source, out, {}), (source, narrow, {"cast": True}), (trained, out, {})):
        compared = reshard.verify(plain, result, **options)
        assert compared.equal, compared.differences
        assert f"compared after {plain} was quantized to {form}, the form of {result}" in compared.notes
    assert reshard.verify(out, source).equal
    assert not reshard.verify(source, narrow).equal
    if form != "fp8-block":  # these ranks would cut its blocks
        ranks = converted(source, tmp_path / "ranks", quantize=form, to="vllm", tp=2)
        assert reshard.verify(source, ranks).equal
    wrong = shutil.copytree(out, tmp_path / "wrong", ignore=shutil.ignore_patterns("reshard*"))
    file = wrong / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.weight_scale"))
    tensors[name].view(torch.uint8)[0, 0] ^= 1
    safetensors.torch.save_file(tensors, file)
    assert [difference.name for difference in reshard.verify(source, wrong).differences] == [name]


def test_the_values_of_mxfp4_stay_when_they_are_quantized_again(tmp_path):
    """Those of MXFP8 and NVFP4 may not: the largest magnitude of a group is rounded, and another scale follows from it."""
    seeded_models.write("llama", tmp_path / "source", "bfloat16")
    values = converted(converted(tmp_path / "source", tmp_path / "once", quantize="mxfp4"), tmp_path / "values", dequantize=True)
    again = converted(converted(values, tmp_path / "twice", quantize="mxfp4"), tmp_path / "again", dequantize=True)
    ours, theirs = stored(again), stored(values)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())  # a zero may lose its sign


@pytest.mark.parametrize("form", NEW)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(form, value, tmp_path):
    seeded_models.write("llama", tmp_path / "source", "bfloat16")
    path = tmp_path / "source" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.layers.0.self_attn.k_proj.weight"][3, 5] = value
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"k_proj\.weight: the values of .* are not all finite"):
        converted(tmp_path / "source", tmp_path / "out", quantize=form)
    assert not (tmp_path / "out").exists()


def test_half_precision_at_its_ends():
    """float16: its largest numbers would need a larger scale, and its subnormal ones a smaller one, than the type holds."""
    words = np.array([[65504.0] * 32, [2.0**-24] * 32, [0.0] * 32], np.float16).view(np.uint16)
    for name, largest in (("mxfp4", 49152), ("mxfp8", 57344)):
        codes, scales = RECIPES[name].quantize(words, F16)
        assert RECIPES[name].saturates(words, scales, F16) or name == "mxfp8"
        assert scales.tolist() == [[142 - (2 if name == "mxfp4" else 8)], [127], [127]]
        top = np.ldexp(6 if name == "mxfp4" else 448, int(scales[0, 0]) - 127)
        assert top == largest and (codes[0] == (0x77 if name == "mxfp4" else 0x7E)).all()


# ---- MXFP4 as NVFP4 ----


@pytest.mark.parametrize("case", ["llama-ct-mxfp4", "qwen3_moe-ct-mxfp4"])
def test_mxfp4_becomes_nvfp4_without_loss(case, tmp_path):
    out = converted(FIXTURES / case, tmp_path / "nvfp4", requantize="nvfp4")
    before, after = (
        described(stored(converted(folder, tmp_path / f"{folder.name}-values", dequantize=True))) for folder in (FIXTURES / case, out)
    )
    assert before == after
    assert settings(out)["format"] == "nvfp4-pack-quantized"
    ours, theirs = stored(out), stored(FIXTURES / case)
    for name in (name for name in theirs if name.endswith("weight_packed")):
        assert torch.equal(ours[name], theirs[name]), name
        assert (ours[name.replace("packed", "scale")][:, ::2] == ours[name.replace("packed", "scale")][:, 1::2]).all()
    for fused in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("gate_proj", "up_proj")):
        of_modules = {}
        for name, tensor in ours.items():
            if name.endswith("global_scale") and any(f"{module}." in name for module in fused):
                of_modules.setdefault(name.rsplit(".", 2)[0], set()).add(tensor.item())
        assert of_modules and all(len(scales) == 1 for scales in of_modules.values())
    reshard.convert(reshard.plan(FIXTURES / case, to="vllm", tp=2, requantize="nvfp4"), tmp_path / "at-once")
    reshard.convert(reshard.plan(out, to="vllm", tp=2), tmp_path / "in-steps")
    assert [*map(described, of_ranks(tmp_path / "at-once", 2))] == [*map(described, of_ranks(tmp_path / "in-steps", 2))]


def with_exponents(folder, exponents):
    """llama-ct-mxfp4 with codes of 6 and 0.5, and these exponents in the first groups of v_proj, whose others are 120."""
    shutil.copytree(FIXTURES / "llama-ct-mxfp4", folder)
    path, name = folder / "model.safetensors", "model.layers.0.self_attn.v_proj.weight"
    tensors = safetensors.torch.load_file(path)
    for scale in (each for each in tensors if each.endswith("weight_scale") and ("q_proj" in each or "k_proj" in each or "v_proj" in each)):
        tensors[scale].fill_(120)
    tensors[f"{name}_packed"].fill_(0x17)
    tensors[f"{name}_scale"].view(-1)[: len(exponents)] = torch.tensor(exponents, dtype=torch.uint8)
    safetensors.torch.save_file(tensors, path)
    return folder


def test_groups_of_mxfp4_that_span_17_powers_fit_and_18_do_not(tmp_path):
    fits = with_exponents(tmp_path / "fits", [103, 120])
    out = converted(fits, tmp_path / "nvfp4", requantize="nvfp4")
    before, after = (described(stored(converted(folder, tmp_path / f"{folder.name}-values", dequantize=True))) for folder in (fits, out))
    assert before == after
    with pytest.raises(CheckpointError, match=r"v_proj\.weight: .*span more powers of two than the scales of NVFP4"):
        converted(with_exponents(tmp_path / "not", [102, 120]), tmp_path / "out", requantize="nvfp4")
    assert not (tmp_path / "out").exists()


def test_every_group_of_mxfp4_has_a_scale_of_nvfp4():
    """All exponents but the ends, and all codes; the oracle decodes with numpy."""
    draw = np.random.default_rng(5)
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    recipe = RECIPES["exact-nvfp4"]
    for top in (-100, -50, 0, 60, 120):
        powers = draw.integers(top - 14, top + 1, (64, 4))
        powers[0, 0] = top
        codes = draw.integers(0, 16, (64, 128))
        codes[0, :32] = 7
        values = (numbers[codes].reshape(64, 4, 32) * np.ldexp(1.0, powers)[..., None]).astype(np.float32).reshape(64, 128)
        words = (values.view(np.uint32) >> 16).astype(np.uint16)
        shared = recipe.shared(np.array([(words & 0x7FFF).max()], np.uint16), BF16)
        made, scales = recipe.quantize(words, BF16, shared)
        halves = np.stack([made & 15, made >> 4], axis=-1).reshape(64, 128)
        decoded = torch.from_numpy(scales).view(torch.float8_e4m3fn).float().numpy()
        found = numbers[halves] * np.repeat(decoded.astype(np.float64) / np.float64(shared), 16, axis=1)
        assert np.array_equal(found.astype(np.float32).view(np.uint32), values.view(np.uint32))
    with pytest.raises(NotRepresentable):
        recipe.quantize(np.array([[0x3F81] * 32], np.uint16), BF16, np.float32(1))


@pytest.mark.parametrize(("case", "options", "error", "why"), [
    ("llama-ct-int4", {"requantize": "nvfp4"}, UnsupportedError, "Only the values of MXFP4"),
    ("llama-ct-mxfp8", {"requantize": "nvfp4"}, UnsupportedError, "Only the values of MXFP4"),
    ("gpt_oss-mxfp4", {"requantize": "nvfp4"}, UnsupportedError, "it holds all experts"),
    ("deepseek_v4-mxfp4", {"requantize": "nvfp4"}, RequestError, "the model is not known"),
    ("llama-ct-mxfp4", {"quantize": "nvfp4"}, RequestError, "quantized already"),
    ("llama-ct-mxfp4", {"requantize": "mxfp8"}, RequestError, "no such form"),
])  # fmt: skip
def test_what_has_no_such_form_is_refused(case, options, error, why):
    with pytest.raises(error, match=why):
        reshard.plan(FIXTURES / case, to="hf", **options)


def test_rows_that_are_no_whole_groups_are_refused(tmp_path):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "num_hidden_layers": 1}
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "vocab_size": 8,
    }
    seeded_models.write_random(seeded_models.CONFIGS["llama"] | config | sizes, tmp_path / "source")
    for form, group in (("nvfp4", 16), ("mxfp8", 32)):
        with pytest.raises(UnsupportedError, match=f"24 input features, which is not a multiple of the group of {group}"):
            reshard.plan(tmp_path / "source", to="hf", quantize=form)
    assert converted(tmp_path / "source", tmp_path / "out", quantize="fp8-channel").is_dir()
