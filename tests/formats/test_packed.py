"""Packed weights: read, dequantized to the bits of the libraries that own the forms (fixtures/hf_packed), carried unchanged."""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.reshard_command import reshard as run

import reshard
from reshard.engine.origins import decoded, recipe
from reshard.engine.origins.encoded import Quantizer
from reshard.engine.origins.recipe import NotRepresentable
from reshard.errors import CheckpointError, IncompleteError, RequestError, UnsupportedError
from reshard.geometry import boxes
from reshard.plans import summary

FIXTURES = Path(__file__).resolve().parent.parent.parent / "fixtures" / "hf_packed"
sys.path.insert(0, str(FIXTURES))

import seeded_models  # noqa: E402

AFFINE = ("llama-mlx", "llama-mlx-3bit", "qwen3_moe-mlx")  # of MLX, all of whose weights have a bias for each group
CASES = sorted(path.parent.name for path in FIXTURES.glob("*/truth.json"))


def truth_of(case):
    return json.loads((FIXTURES / case / "truth.json").read_text())


def stored(folder):
    return {name: tensor for path in Path(folder).glob("*.safetensors") for name, tensor in safetensors.torch.load_file(path).items()}


def stored_in(path):
    return safetensors.torch.load_file(path)


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def described(tensors):
    return {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "sha256": digest(tensor)}
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_dequantized_values_are_the_librarys_bits(case, tmp_path):
    reshard.convert(reshard.plan(FIXTURES / case, to="hf", dequantize=True), tmp_path / "out")
    assert described(stored(tmp_path / "out")) == truth_of(case)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_small_blocks_of_work_give_the_same_values(case, tmp_path, monkeypatch):
    """Work is cut into blocks and runs that end inside of words and groups."""
    monkeypatch.setattr(boxes, "BLOCK_ELEMENTS", 64 * 5)
    monkeypatch.setattr("reshard.engine.origins.decoded._AT_ONCE", 64 * 3)
    reshard.convert(reshard.plan(FIXTURES / case, to="hf", dequantize=True), tmp_path / "out")
    assert described(stored(tmp_path / "out")) == truth_of(case)


@pytest.mark.parametrize("dtype", [None, "fp32"])
@pytest.mark.parametrize("case", CASES)
def test_tables_hold_what_is_computed_without_them(case, dtype, tmp_path, monkeypatch):
    def values(name):
        reshard.convert(reshard.plan(FIXTURES / case, to="hf", dequantize=True, dtype=dtype), tmp_path / name)
        return described(stored(tmp_path / name))

    made = []
    monkeypatch.setattr(decoded, "_LONG", 1)
    table = decoded._table
    monkeypatch.setattr(decoded, "_table", lambda *about: (made.append(about[2]), table(*about))[1])
    with_tables = values("tables")
    assert bool(made) == (not any(word in case for word in ("awq", "gptq", "asym")) and case not in AFFINE)
    monkeypatch.setattr(decoded, "_is_in_bytes", lambda encoding: False)
    made.clear()
    assert values("computed") == with_tables and not made


@pytest.mark.parametrize("case", CASES)
def test_without_it_every_byte_stays_whatever_dtype_says(case, tmp_path):
    before = stored(FIXTURES / case)
    reshard.convert(reshard.plan(FIXTURES / case, to="hf", dtype="fp32"), tmp_path / "out")
    after, truth = stored(tmp_path / "out"), truth_of(case)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        is_of_mlx_stack = ".switch_mlp." in name and name.rpartition(".")[0] + ".scales" not in before
        is_value = is_of_mlx_stack or (name in truth and truth[name]["sha256"] == digest(tensor))
        plain = is_value and tensor.dtype in (torch.bfloat16, torch.float16)
        assert torch.equal(after[name].flatten().view(torch.uint8), (tensor.float() if plain else tensor).flatten().view(torch.uint8)), name


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_the_values(case):
    opened = reshard.open(FIXTURES / case)
    count = summary.parameter_count(opened.content(), opened.model_files.config)
    assert count == sum(torch.Size(each["shape"]).numel() for each in truth_of(case).values())


EXACT = ("llama-ct-mxfp4", "qwen3_moe-ct-mxfp4")


@pytest.mark.parametrize("case", EXACT)
def test_requantized_weights_have_the_same_values(case, tmp_path):
    """Both sides are decoded: the MXFP4 source by its library, the FP8 result here and by torch."""
    reshard.convert(reshard.plan(FIXTURES / case, to="hf", requantize="fp8-block"), tmp_path / "fp8")
    reshard.convert(reshard.plan(tmp_path / "fp8", to="hf", dequantize=True), tmp_path / "values")
    truth = {name: each | {"dtype": "bfloat16"} for name, each in truth_of(case).items()}
    assert described(stored(tmp_path / "values")) == truth
    tensors = stored(tmp_path / "fp8")
    codes = {name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}
    assert codes
    for name, tensor in codes.items():
        scale = tensors[name + "_scale"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        values = (tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]).bfloat16()
        assert digest(values) == truth[name]["sha256"]


def test_values_that_the_other_form_does_not_hold_are_refused(tmp_path):
    folder = shutil.copytree(FIXTURES / "llama-ct-mxfp4", tmp_path / "wide")
    tensors = stored(folder)
    scale = tensors["model.layers.0.mlp.up_proj.weight_scale"]
    scale[0, 0], scale[1, 1] = 200, 60
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight.*span more powers of two"):
        reshard.convert(reshard.plan(folder, to="hf", requantize="fp8-block"), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))
    with pytest.raises(UnsupportedError, match="holds all experts"):
        reshard.plan(FIXTURES / "gpt_oss-mxfp4", to="hf", requantize="fp8-block")


@pytest.mark.parametrize("strange", [1 + 2.0**-20, 1 + 2.0**-4, 2.0**-19, 1e-38, 2.0**-140, np.inf, np.nan])
def test_a_value_that_fp8_does_not_hold_is_found(strange):
    """The largest value of the block is 448 x 2; so its scale is 2, and FP8 holds 2 x 2^-9 and multiples of it."""
    values = np.full((130, 140), -3.5, np.float32)
    values[0, :3] = 896, 2.0**-8, -0.0
    codes, _ = recipe.exact_fp8_block(values.view(np.uint32))
    assert codes.shape == values.shape and codes[0, :4].tolist() == [0x7E, 0x01, 0x80, 0xBE]
    values[5, 7] = strange
    with pytest.raises(NotRepresentable):
        recipe.exact_fp8_block(values.view(np.uint32))


@pytest.mark.parametrize("span", [0, 4, 7, 9, 20])
@pytest.mark.parametrize("top", [-118, -121, -128, -20, 0, 100, 127])
def test_values_in_bfloat16_get_the_codes_that_they_get_in_float32(top, span):
    """Zeros of both signs, the smallest scales, and blocks that FP8 does not hold."""
    draw = np.random.default_rng(span)
    magnitudes = draw.choice(np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6]), (140, 288)) * draw.choice(np.float32([1, -1]), (140, 288))
    with np.errstate(over="ignore"):
        values = magnitudes * np.ldexp(np.float32(0.125), np.maximum(draw.integers(top - span, top + 1, (140, 1)), -129))
    words = values.view(np.uint32)
    assert not (words & 0xFFFF).any()
    results = []
    for each in (words, (words >> 16).astype(np.uint16)):
        try:
            results.append([array.tolist() for array in recipe.exact_fp8_block(each)])
        except NotRepresentable as reason:
            results.append(str(reason))
    assert results[0] == results[1]


def by_llm_compressor(model, form):
    return json.loads((FIXTURES / "llm-compressor.json").read_text())[f"{model} {form}"]


QUANTIZED = [(model, form) for model in seeded_models.CONFIGS for form in ("fp8-block", "mxfp4")]


@pytest.mark.parametrize(("model", "form"), QUANTIZED)
def test_quantized_weights_are_llm_compressors_bits(model, form, tmp_path):
    seeded_models.write(model, tmp_path / "source")
    reshard.convert(reshard.plan(tmp_path / "source", to="hf", quantize=form), tmp_path / "out")
    expected = by_llm_compressor(model, form)
    assert described(stored(tmp_path / "out")) == expected["tensors"]
    ours = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    theirs = expected["quantization_config"]
    assert {ours[key] == theirs[key] for key in ("format", "quant_method", "quantization_status")} == {True}
    for part in ("weights", "input_activations"):
        of_ours, of_theirs = (next(iter(each["config_groups"].values())).get(part) or {} for each in (ours, theirs))
        assert of_ours.items() <= of_theirs.items() and bool(of_ours) == bool(of_theirs)


@pytest.mark.parametrize(("model", "form"), QUANTIZED)
def test_quantized_weights_do_not_depend_on_how_the_work_is_cut(model, form, tmp_path, monkeypatch):
    seeded_models.write(model, tmp_path / "source")
    monkeypatch.setattr(boxes, "BLOCK_ELEMENTS", 128 * 50)
    for name, size in {"_WIDEST": 128, "_ELEMENTS": 1}.items():
        monkeypatch.setattr(f"reshard.engine.origins.recipe.{name}", size)
    reshard.convert(reshard.plan(tmp_path / "source", to="hf", quantize=form), tmp_path / "out")
    assert described(stored(tmp_path / "out")) == by_llm_compressor(model, form)["tensors"]


@pytest.mark.parametrize(("model", "form"), [case for case in QUANTIZED if case != ("llama4_text", "fp8-block")])  # vLLM reorders its rows
def test_ranks_of_a_model_that_is_quantized_at_once_hold_what_they_hold_in_steps(model, form, tmp_path):
    """vLLM holds the scales of FP8 blocks in float32, and the recipe computes them in bfloat16."""
    seeded_models.write(model, tmp_path / "source")
    reshard.convert(reshard.plan(tmp_path / "source", to="vllm", quantize=form), tmp_path / "at-once")
    reshard.convert(reshard.plan(tmp_path / "source", to="hf", quantize=form), tmp_path / "quantized")
    reshard.convert(reshard.plan(tmp_path / "quantized", to="vllm"), tmp_path / "in-steps")
    assert described(stored(tmp_path / "at-once")) == described(stored(tmp_path / "in-steps"))


def test_each_band_is_computed_once_for_all_who_need_it(tmp_path, monkeypatch):
    """Blocks of codes end inside of bands, and several threads work."""
    seeded_models.write("llama", tmp_path / "source")
    monkeypatch.setattr(boxes, "BLOCK_ELEMENTS", 128 * 50)
    monkeypatch.setattr("reshard.engine.origins.recipe._ELEMENTS", 1)
    computed = []
    original = Quantizer._computed
    monkeypatch.setattr(
        Quantizer, "_computed", lambda self, worker, band: (computed.append((self._weight.name, band)), original(self, worker, band))[1]
    )
    plan = reshard.plan(tmp_path / "source", to="hf", quantize="fp8-block")
    reshard.convert(plan, tmp_path / "out", workers=4)
    weights = {route.source.origin.weight for route in plan.routes if route.quantized_by}
    assert len(computed) == len(set(computed)) == sum(-(-weight.shape[0] // 128) for weight in weights)


@pytest.mark.parametrize("model", seeded_models.CONFIGS)
def test_a_quantized_model_is_read_again_and_has_the_names_of_its_weights(model, tmp_path):
    seeded_models.write(model, tmp_path / "source")
    reshard.convert(reshard.plan(tmp_path / "source", to="hf", quantize="mxfp4"), tmp_path / "fp4")
    again = reshard.open(tmp_path / "fp4")
    assert not again.model.weights.keys() ^ again.content().tensors.keys()
    reshard.convert(reshard.plan(tmp_path / "fp4", to="vllm", tp=2), tmp_path / "ranks")
    assert reshard.verify(tmp_path / "fp4", tmp_path / "ranks").equal
    reshard.convert(reshard.plan(tmp_path / "fp4", to="hf", dequantize=True), tmp_path / "values")
    assert not any("quantization_config" in json.loads(path.read_text()) for path in (tmp_path / "values").glob("config.json"))


@pytest.mark.parametrize("cut", ["whole", "cut"])
def test_gpt_oss_is_quantized_to_its_published_form(cut, tmp_path, monkeypatch):
    """Its experts lie in one tensor [experts, in, out]. What was MXFP4 has the same values again, and the same scales."""
    published = FIXTURES / "gpt_oss-mxfp4"
    if cut == "cut":
        monkeypatch.setattr(boxes, "BLOCK_ELEMENTS", 100)
        for name, number in {"_IN_COLUMNS": (24, 32), "_WIDEST": 32, "_ELEMENTS": 8}.items():
            monkeypatch.setattr(f"reshard.engine.origins.recipe.{name}", number)
    reshard.convert(reshard.plan(published, to="hf", dequantize=True), tmp_path / "bf16")
    reshard.convert(reshard.plan(tmp_path / "bf16", to="hf", quantize="mxfp4"), tmp_path / "mxfp4")
    ours, theirs = stored(tmp_path / "mxfp4"), stored(published)
    assert {name: tensor.shape for name, tensor in ours.items()} == {name: tensor.shape for name, tensor in theirs.items()}
    for name in (name for name in theirs if not name.endswith("_blocks")):
        assert torch.equal(ours[name], theirs[name]), name
    settings = [json.loads((folder / "config.json").read_text())["quantization_config"] for folder in (tmp_path / "mxfp4", published)]
    assert settings[0]["quant_method"] == settings[1]["quant_method"]
    assert set(settings[0]["modules_to_not_convert"]) >= set(settings[1]["modules_to_not_convert"])
    reshard.convert(reshard.plan(tmp_path / "mxfp4", to="hf", dequantize=True), tmp_path / "values")
    values, expected = stored(tmp_path / "values"), stored(tmp_path / "bf16")
    assert values.keys() == expected.keys() and all(torch.equal(values[name], expected[name]) for name in expected)


def test_gpt_oss_is_quantized_for_ranks_and_for_trainers_alike(tmp_path):
    reshard.convert(reshard.plan(FIXTURES / "gpt_oss-mxfp4", to="hf", dequantize=True), tmp_path / "bf16")
    reshard.convert(reshard.plan(tmp_path / "bf16", to="hf", quantize="mxfp4"), tmp_path / "mxfp4")
    reshard.convert(reshard.plan(tmp_path / "bf16", to="dcp", dp=3), tmp_path / "trained")
    for to, parallel in (("vllm", {"tp": 2}), ("vllm", {"tp": 2, "ep": 2}), ("dcp", {"dp": 2}), ("hf", {})):
        for source in ("bf16", "trained"):
            plan = reshard.plan(tmp_path / source, to=to, model=tmp_path / "bf16", quantize="mxfp4", **parallel)
            reshard.convert(plan, tmp_path / "at-once", overwrite=True)
            reshard.convert(reshard.plan(tmp_path / "mxfp4", to=to, **parallel), tmp_path / "in-steps", overwrite=True)
            assert described(stored(tmp_path / "at-once")) == described(stored(tmp_path / "in-steps"))
            assert reshard.fingerprint(tmp_path / "at-once") == reshard.fingerprint(tmp_path / "in-steps")


def test_several_forms_at_once_and_unknown_ones_are_refused(tmp_path):
    case = FIXTURES / "llama-ct-mxfp4"
    for options in ({"dequantize": True, "requantize": "fp8-block"}, {"requantize": "int4"}, {"quantize": "fp8-block"}):
        with pytest.raises(RequestError):
            reshard.plan(case, to="hf", **options)


def test_ranks_hold_whole_groups_and_words():
    for case in ("llama-ct-int4-asym", "llama-awq", "llama-ct-mxfp8"):
        assert len(reshard.plan(FIXTURES / case, to="vllm", tp=2).layout.files) == 2
        with pytest.raises(RequestError, match=r"which is not a multiple of the .* of 32"):
            reshard.plan(FIXTURES / case, to="vllm", tp=4)
        rows = {row.parallel.tp: row.problem for row in reshard.degrees(FIXTURES / case, to="vllm", tp=(1, 2, 4)).rows}
        assert rows[1] is rows[2] is None and "group" in rows[4]


@pytest.mark.parametrize("case", ["llama-ct-int4", "llama-ct-int4-asym", "qwen3_moe-ct-int4", "llama-gptq"])
def test_what_engines_do_not_keep_comes_back(case, tmp_path):
    """The shapes of weights that vLLM fuses, and GPTQ's groups of input features."""
    folder = shutil.copytree(FIXTURES / case, tmp_path / "source")
    if case == "llama-gptq":  # vLLM has no kernel for zero points
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["sym"] = True
        (folder / "config.json").write_text(json.dumps(config))
    reshard.convert(reshard.plan(folder, to="vllm", tp=2), tmp_path / "ranks")
    found = reshard.verify(folder, tmp_path / "ranks")
    assert found.equal and any("follow from the shapes" in note for note in found.notes)
    assert {finding.id for finding in reshard.doctor(tmp_path / "ranks").findings} == {"missing-tokenizer"}
    assert reshard.degrees(tmp_path / "ranks", to="vllm", tp=(1, 2)).rows == reshard.degrees(folder, to="vllm", tp=(1, 2)).rows
    assert {finding.id for finding in reshard.serve_check(tmp_path / "ranks").findings} == {"missing-tokenizer"}
    for source, out in ((folder, "whole"), (tmp_path / "ranks", "joined")):
        reshard.convert(reshard.plan(source, to="vllm", tp=1), tmp_path / out)
    assert described(stored(tmp_path / "joined")) == described(stored(tmp_path / "whole"))
    reshard.convert(reshard.plan(tmp_path / "ranks", to="hf"), tmp_path / "back")
    assert described(stored(tmp_path / "back")) == described(stored(folder))
    for source, out in ((folder, "expected"), (tmp_path / "ranks", "decoded")):
        reshard.convert(reshard.plan(source, to="hf", dequantize=True), tmp_path / out)
    assert described(stored(tmp_path / "decoded")) == described(stored(tmp_path / "expected"))
    # Other folders must have them, and the right ones.
    other, tensors = shutil.copytree(folder, tmp_path / "other"), stored(folder)
    name = next(name for name in tensors if name.endswith(("weight_shape", "g_idx")))
    tensors[name] = tensors[name] + 1
    safetensors.torch.save_file(tensors, other / "model.safetensors")
    assert [(each.name, each.kind) for each in reshard.verify(folder, other).differences] == [(name, "values")]
    tensors.pop(name)
    safetensors.torch.save_file(tensors, other / "model.safetensors")
    assert [(each.name, each.kind) for each in reshard.verify(folder, other).differences] == [(name, "missing")]


def test_an_engine_gets_no_files_without_what_it_stores(tmp_path):
    """Of the fused weights vLLM stores the last one's shape, and of the others each one's own."""
    folder = shutil.copytree(FIXTURES / "llama-ct-int4", tmp_path / "source")
    tensors = stored(folder)
    tensors.pop("model.layers.0.mlp.down_proj.weight_shape")
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(IncompleteError, match=r"down_proj\.weight_shape: the checkpoint has no such weight"):
        reshard.plan(folder, to="vllm", tp=2)
    reshard.convert(reshard.plan(folder, to="hf"), tmp_path / "whole")
    assert described(stored(tmp_path / "whole")) == described(stored(FIXTURES / "llama-ct-int4"))


def test_act_order_and_missing_components_are_named(tmp_path):
    folder = shutil.copytree(FIXTURES / "llama-gptq", tmp_path / "gptq")
    tensors = stored(folder)
    tensors["model.layers.0.self_attn.q_proj.g_idx"][[0, 40]] = tensors["model.layers.0.self_attn.q_proj.g_idx"][[40, 0]]
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj\.g_idx.*act-order"):
        reshard.convert(reshard.plan(folder, to="hf", dequantize=True), tmp_path / "out")
    tensors.pop("model.layers.0.self_attn.q_proj.qzeros")
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(IncompleteError, match="qzeros"):
        reshard.plan(folder, to="hf", dequantize=True)


def test_codes_by_words_are_those_by_values():
    """All magnitudes that a group with a plain scale can hold, both signs, zeros and subnormals, and odd groups."""
    draw = np.random.default_rng(3)
    for top in (0x0081, 0x0180, 0x0260, 0x1234, 0x3F80, 0x3FE0, 0x407F):
        words = draw.integers(0, top + 1, (64, 96)).astype(np.uint16)
        words[:8] = draw.integers(0, 0x90, (8, 96))
        words[8:12, :32] = 0
        words |= draw.integers(0, 2, words.shape).astype(np.uint16) << np.uint16(15)
        exponents = recipe._exponents(recipe.largest_of_groups(words & 0x7FFF, 32))
        exponents = np.maximum(exponents, recipe._PLAIN[0])
        assert exponents.max() <= recipe._PLAIN[1]
        assert np.array_equal(recipe._codes_by_words(words, words & 0x7FFF, exponents), recipe._codes_by_values(words, exponents))


def test_extreme_values_get_the_codes_of_their_quotients():
    words = np.random.default_rng(4).integers(0, 1 << 16, (64, 70)).astype(np.uint16)
    largest = recipe.largest_of_groups(words & 0x7FFF, 32)
    codes = recipe._codes_by_values(words, recipe._exponents(largest))
    padded = np.pad(codes, ((0, 0), (0, 0)))
    assert np.array_equal(recipe.mxfp4(words)[0], padded[:, 1::2] << 4 | padded[:, ::2])


@pytest.mark.parametrize("store", [False, True], ids=["folder", "store"])
def test_values_near_the_top_of_bfloat16_are_written_as_the_largest_that_is_finite(store, tmp_path):
    """A group up to 3.0e38, for which llm-compressor 0.14 writes zeros. The oracle is the nearest of all values that decode to a number."""
    seeded_models.write("llama", tmp_path / "source")
    tensors, name = stored(tmp_path / "source"), "model.layers.0.mlp.down_proj.weight"
    group = np.float32([3.0e38, -3.3e38, 2.6e38, -1.4e38, 9e37, 5e37, 1e37, 0]).repeat(4)
    tensors[name][0, :32] = torch.from_numpy(group)
    safetensors.torch.save_file(tensors, tmp_path / "source" / "model.safetensors")
    out = f"memory://{tmp_path.name}/out" if store else tmp_path / "out"
    result = reshard.convert(reshard.plan(tmp_path / "source", to="hf", quantize="mxfp4"), out)
    assert [note for note in result.notes if "too large" in note] == [
        f"values of 1 weight, for example of {name}, are too large for mxfp4: the largest value that it holds is written"
    ]
    reshard.convert(reshard.plan(out, to="hf", dequantize=True), tmp_path / "values")
    found = stored(tmp_path / "values")[name]
    codes = np.ldexp([0, 0.5, 1, 1.5, 2, 3, 4, 6], 125)
    words = tensors[name][0, :32].double().numpy()
    nearest = codes[np.abs(codes - np.abs(words)[:, None]).argmin(axis=1)] * np.sign(words)
    assert np.array_equal(found[0, :32].double().numpy(), nearest) and torch.isfinite(found).all()


def test_ranks_of_gpt_oss_share_whole_groups_and_the_last_are_filled_up(tmp_path):
    """vLLM gives each rank as many groups as the first; the experts of this fixture have one."""
    source = FIXTURES / "gpt_oss-mxfp4"
    plan = reshard.plan(source, to="vllm", tp=2)
    reshard.convert(plan, tmp_path / "out")
    assert reshard.verify(source, tmp_path / "out").equal
    first, second = (stored_in(tmp_path / "out" / f"model-rank-{rank}-part-0.safetensors") for rank in range(2))
    before, front = stored(source), "model.layers.0.mlp.experts."
    for ours, theirs in {
        "w13_weight": "gate_up_proj_blocks",
        "w2_weight": "down_proj_blocks",
        "w13_weight_scale": "gate_up_proj_scales",
    }.items():
        name = f"{front}routed_experts.{ours}"
        assert torch.equal(first[name].flatten(), before[front + theirs].flatten())
        assert second[name].shape == first[name].shape and not second[name].any()
    assert torch.equal(first[f"{front}routed_experts.w2_bias"], before[front + "down_proj_bias"])
    assert not second[f"{front}routed_experts.w2_bias"].any()


@pytest.mark.parametrize(("case", "version", "why"), [
    ("qwen3_moe-ct-int4", "0.31.0", "Older versions than 0.32"),
    ("gpt_oss-mxfp4", "0.31.0", "0.32"),
])  # fmt: skip
def test_packed_experts_that_vllm_does_not_load_are_refused(case, version, why):
    with pytest.raises(RequestError, match=why):
        reshard.plan(FIXTURES / case, to="vllm", engine_version=version)


@pytest.mark.parametrize("form", seeded_models.EXPERTS)
def test_packed_experts_come_back_from_vllms_ranks(form, tmp_path):
    """That the ranks are those of vLLM is checked in tests/serving/packed.py."""
    source = tmp_path / "source"
    seeded_models.write_random(seeded_models.with_experts(form), source)
    reshard.convert(reshard.plan(source, to="vllm", tp=2), tmp_path / "ranks")
    assert reshard.verify(source, tmp_path / "ranks").equal
    reshard.convert(reshard.plan(tmp_path / "ranks", to="hf"), tmp_path / "back")
    assert described(stored(tmp_path / "back")) == described(stored(source))


def test_packed_experts_that_depend_on_vllms_kernel_are_refused(tmp_path):
    narrow = seeded_models.with_experts("awq") | {"hidden_size": 64, "head_dim": 8}
    seeded_models.write_random(narrow, tmp_path / "narrow")
    with pytest.raises(UnsupportedError, match="multiple of 128"):
        reshard.plan(tmp_path / "narrow", to="vllm")
    seeded_models.write_random(seeded_models.with_experts("modelopt-nvfp4"), tmp_path / "global")
    with pytest.raises(RequestError, match="depends on the kernel"):
        reshard.plan(tmp_path / "global", to="vllm", tp=2, ep=2)


@pytest.fixture(name="adapter")
def adapter_of_random_model(tmp_path):
    """A LoRA adapter of the random llama."""
    draw, front, tensors = torch.Generator().manual_seed(6), "base_model.model.model.layers.0", {}
    for module, rows, columns in (("self_attn.q_proj", 128, 128), ("mlp.down_proj", 128, 384)):
        tensors[f"{front}.{module}.lora_A.weight"] = torch.randn(4, columns, generator=draw)
        tensors[f"{front}.{module}.lora_B.weight"] = torch.randn(rows, 4, generator=draw)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "bias": "none"}
    folder = tmp_path / "adapter"
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def in_turn(source, work, *steps):
    """The tensors after some conversions, one after the other."""
    for number, options in enumerate(steps):
        reshard.convert(reshard.plan(source, to="hf", **options), work / f"step{number}")
        source = work / f"step{number}"
    return described(stored(source))


@pytest.mark.parametrize("form", ["fp8-block", "mxfp4"])
def test_an_adapter_is_merged_before_the_sum_is_quantized(form, adapter, tmp_path):
    seeded_models.write("llama", tmp_path / "source")
    once = in_turn(tmp_path / "source", tmp_path / "once", {"merge_adapter": adapter, "quantize": form})
    assert once == in_turn(tmp_path / "source", tmp_path / "twice", {"merge_adapter": adapter}, {"quantize": form})
    assert once != in_turn(tmp_path / "source", tmp_path / "plain", {"quantize": form})


def test_an_adapter_is_merged_into_dequantized_values(adapter, tmp_path):
    seeded_models.write("llama", tmp_path / "source")
    reshard.convert(reshard.plan(tmp_path / "source", to="hf", quantize="mxfp4"), tmp_path / "base")
    once = in_turn(tmp_path / "base", tmp_path / "once", {"merge_adapter": adapter, "dequantize": True})
    assert once == in_turn(tmp_path / "base", tmp_path / "twice", {"dequantize": True}, {"merge_adapter": adapter})
    for options in ({}, {"requantize": "fp8-block"}):
        with pytest.raises(RequestError, match="it is quantized"):
            reshard.plan(tmp_path / "base", to="hf", merge_adapter=adapter, **options)


def test_a_fingerprint_says_what_engines_do_not_keep(tmp_path):
    source = FIXTURES / "llama-ct-int4"
    reshard.convert(reshard.plan(source, to="vllm", tp=2), tmp_path / "out")
    of_ranks, of_source = (json.loads(run("fingerprint", folder, "--json", "--full").out) for folder in (tmp_path / "out", source))
    lost = of_source["tensors"].keys() - of_ranks["tensors"].keys()
    assert len(lost) == 3 and of_source["notes"] == []
    (note,) = of_ranks["notes"]
    assert any(f"without {name} and 2 more" in note for name in lost)
    assert note in run("fingerprint", tmp_path / "out").out
