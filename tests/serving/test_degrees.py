"""At which degrees a model is served, and what each rank holds: equal to what a conversion lays out, byte by byte."""

import json
import math
import time
from collections import Counter
from fnmatch import fnmatchcase

import pytest
import safetensors.torch
import torch
from helpers.fixture_places import DCP, FIXTURES, HF, REFERENCES, UNPLACED, has_a_layer_per_stage, open_case, read_reference, served
from helpers.published_configs import DEEPSEEK_V3, DEEPSEEK_V3_OF_4_LAYERS, LLAMA_70B, parameters_of_deepseek_v3

import reshard
from reshard.adapter import registry
from reshard.errors import RequestError
from reshard.models.lookup import find_model
from reshard.serving.capacity import cached_elements

MODELS = sorted(path.parent.name for folder in ("hf", "hf_fp8") for path in (FIXTURES / folder).glob("*/model.safetensors"))
assert len(MODELS) >= 20
ENGINES = sorted(registry.serving_formats())
assert {"vllm", "sglang"} <= set(ENGINES)
GIB = 2**30


def laid_out(source, to="vllm", **asked):
    """Per (stage, rank) what a conversion lays out: bytes in all, and which box of which weight takes how many of them."""
    held, origins = Counter(), {}
    for file in reshard.plan(source, to=to, **asked).layout.files:
        rank = file.ranks.get("pp", 0), file.ranks["tp"]
        for item in file.tensors:
            tensor = item.tensor
            held[rank] += tensor.nbytes
            boxes = {(s.name, s.box): s.box.volume * tensor.dtype.itemsize for s in tensor.sections} or {tensor.name: tensor.nbytes}
            origins.setdefault(rank, {}).update(boxes)
    return held, origins


def is_legal(source, to="vllm", **asked):
    try:
        reshard.plan(source, to=to, **asked)
    except RequestError:
        return False
    return True


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ep", [False, True], ids=["tp", "ep"])
@pytest.mark.parametrize("to", ENGINES)
def test_every_stage_holds_what_a_conversion_lays_out(model, pp, ep, to):
    """Legal or not, bytes of the fullest rank, and those that it shares with others of its stage."""
    try:
        rows = reshard.degrees(served(model), to=to, tp=(1, 2, 3, 4, 8), pp=(pp,), ep=ep).rows
    except RequestError as refusal:
        with pytest.raises(RequestError) as raised:
            reshard.plan(served(model), to=to, pp=pp)
        assert str(raised.value) == str(refusal)
        return
    for row in rows:
        sizes = {"tp": row.parallel.tp, "pp": pp, "ep": row.parallel.ep, "exclude": UNPLACED.get((to, model), ())}
        assert (row.problem is None) == is_legal(served(model), to, **sizes), row
        if row.problem is not None:
            continue
        held, origins = laid_out(served(model), to, **sizes)
        for stage, found in enumerate(row.stages):
            ranks = [rank for rank in held if rank[0] == stage]
            assert found.weights == max(held[rank] for rank in ranks)
            others = {origin for rank in ranks if rank != (stage, 0) for origin in origins[rank]}
            shared = sum(nbytes for origin, nbytes in origins[stage, 0].items() if origin in others)
            assert found.replicated == shared
        assert row.fullest.weights == max(held.values())


@pytest.mark.parametrize("to", ENGINES)
def test_every_engine_serves_a_llama_and_experts_at_some_degree(to):
    for model in ("llama", "qwen3_moe-sparse"):
        assert not all(row.problem for row in reshard.degrees(HF / model, to=to, tp=(1, 2)).rows)


@pytest.mark.parametrize("reference", list(filter(has_a_layer_per_stage, REFERENCES)), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_fullest_rank_holds_as_much_as_one_of_real_vllm(reference):
    expected = read_reference(reference)
    ep = expected.get("ep", 1) > 1
    (row,) = reshard.degrees(served(expected["model"]), to="vllm", tp=(expected["tp"],), pp=(expected["pp"],), ep=ep).rows
    sizes = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
    real = [sum(math.prod(t["shape"]) * sizes[t["dtype"]] for t in tensors.values()) for tensors in expected["ranks"].values()]
    assert row.fullest.weights == max(real)


@pytest.mark.parametrize("asked", [{"dtype": "fp32"}, {"dtype": "fp16", "keep_dtype": ("*norm*",)}, {"engine_version": "0.13.0"}])
def test_options_count_as_in_a_conversion(asked):
    (row,) = reshard.degrees(HF / "qwen3", to="vllm", tp=(2,), **asked).rows
    assert row.fullest.weights == max(laid_out(HF / "qwen3", tp=2, **asked)[0].values())


def test_layers_of_other_element_types_are_counted_as_they_are(tmp_path):
    """One layer of fp32 among others of bf16: the layers are not alike."""
    asked = {"dtype": "fp32", "keep_dtype": ("model.layers.1.*",)}
    (row,) = reshard.degrees(HF / "llama", to="vllm", tp=(1,), pp=(2,), **asked).rows
    held, _ = laid_out(HF / "llama", pp=2, **asked)
    assert [stage.weights for stage in row.stages] == [held[0, 0], held[1, 0]] and row.stages[0].weights != row.stages[1].weights


def test_a_training_checkpoint_is_counted_like_what_it_becomes():
    opened = open_case("fsdp2")
    rows = reshard.degrees(opened, to="vllm", tp=(1, 2, 4)).rows
    assert [row.fullest.weights for row in rows] == [max(laid_out(opened, tp=tp)[0].values()) for tp in (1, 2, 4)]
    assert reshard.degrees(DCP / "fsdp2" / "checkpoint", to="vllm", model=DCP / "fsdp2" / "model", tp=(1, 2, 4)).rows == rows


def test_a_checkpoint_that_leaves_something_unsaid_is_asked_about():
    case = FIXTURES / "megatron" / "llama-tp2" / "checkpoint"
    with pytest.raises(RequestError, match="`vocab_size="):
        reshard.degrees(case, to="vllm")
    assert reshard.degrees(case, to="vllm", tp=(2,), vocab_size=50).rows[0].problem is None


@pytest.mark.parametrize("model", MODELS)
def test_a_bare_config_says_the_same_as_the_checkpoint(model, tmp_path):
    (tmp_path / "config.json").write_bytes((served(model) / "config.json").read_bytes())
    for ep in (False, True):
        bare, whole = (reshard.degrees(folder, to="vllm", pp=(1, 2), ep=ep) for folder in (tmp_path, served(model)))
        assert bare == whole


def test_a_model_that_is_not_declared_is_taken_for_one_that_is_named(tmp_path):
    folder = folder_of(tmp_path, LLAMA_70B, model_type="somebodys_own")
    for ask in (lambda **said: reshard.degrees(folder, to="vllm", **said), lambda **said: reshard.estimate(folder, **said)):
        with pytest.raises(RequestError, match=r"'somebodys_own' is not declared.*`architecture="):
            ask()
    assert reshard.degrees(folder, to="vllm", tp=(1,), architecture="llama").rows[0].fullest.weights > 2 * 70_553_706_496
    assert reshard.estimate(folder, architecture="llama").parameters == 70_553_706_496


def test_a_bare_config_without_an_element_type_is_asked_for_one(tmp_path):
    config = json.loads((HF / "llama" / "config.json").read_text())
    config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="`dtype=bf16`"):
        reshard.degrees(tmp_path, to="vllm")
    assert reshard.degrees(tmp_path, to="vllm", dtype="bf16") == reshard.degrees(HF / "llama", to="vllm")


def test_a_quantized_config_counts_a_byte_per_weight_and_its_scales(tmp_path):
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    for name, own in (("bf16", {}), ("fp8", {"quantization_config": quantized})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**DEEPSEEK_V3_OF_4_LAYERS, "torch_dtype": "bfloat16", **own}))
    bf16, fp8 = (reshard.degrees(tmp_path / name, to="vllm", tp=(1, 2, 4, 8, 16, 32), pp=(1, 2, 3, 4)) for name in ("bf16", "fp8"))
    correction, scales = 256, 4 * 4  # the router's corrections and four scales per attention are fp32
    assert bf16.rows[0].fullest.weights == 2 * (parameters_of_deepseek_v3(4) - correction) + 4 * (correction + scales)
    linear = [w.shape for w in find_model(DEEPSEEK_V3_OF_4_LAYERS).weights.values() if "_proj" in w.name and not w.optional]
    saved = sum(n * k - 4 * math.ceil(n / 128) * math.ceil(k / 128) for n, k in linear)
    assert fp8.rows[0].fullest.weights == bf16.rows[0].fullest.weights - saved
    assert not any(row.problem for row in bf16.rows)
    problems = {row.parallel.tp: row.problem for row in fp8.rows}
    assert {tp for tp, problem in problems.items() if problem} == {
        32
    } and "give 576 each, which is not a multiple of the FP8 block of 128" in problems[32]


def test_layers_that_are_alike_are_laid_out_once(tmp_path):
    """61 layers of 256 experts at 24 degrees take a second or two, as only two kinds of layers are laid out."""
    began = time.process_time()
    found = reshard.degrees(folder_of(tmp_path, DEEPSEEK_V3), to="vllm", tp=(1, 2, 4, 8, 16, 32), pp=(1, 2, 3, 4))
    assert time.process_time() - began < 30
    correction, scales = 58 * 256, 61 * 4
    assert found.rows[0].fullest.weights == 2 * (parameters_of_deepseek_v3(61) - correction) + 4 * (correction + scales)


@pytest.fixture
def quantized(tmp_path):
    """A llama whose linears are FP8 with scales per block, of zeros."""
    own = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config = {**LLAMA_70B, **own, "vocab_size": 130, "torch_dtype": "bfloat16", "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    types = {name: torch.float32 if w.is_scale else torch.float8_e4m3fn if w.form else torch.bfloat16 for name, w in weights_of(config)}
    tensors = {name: torch.zeros(w.shape, dtype=types[name]) for name, w in weights_of(config)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def weights_of(config):
    return find_model(config).weights.items()


@pytest.mark.parametrize("asked", [{}, {"dtype": "fp16"}, {"dequantize": True}, {"dequantize": True, "dtype": "fp32"}], ids=str)
def test_quantized_weights_are_counted_as_a_conversion_stores_them(asked, quantized):
    found = reshard.degrees(quantized, to="vllm", tp=(1, 2, 4), pp=(1, 2), **asked)
    for row in found.rows:
        sizes = {"tp": row.parallel.tp, "pp": row.parallel.pp, **asked}
        assert (row.problem is None) == is_legal(quantized, **sizes)
        if row.problem is None:
            assert row.fullest.weights == max(laid_out(quantized, **sizes)[0].values())
    assert [row.parallel.tp for row in found.rows if row.problem] == ([] if "dequantize" in asked else [4, 4])
    (quantized / "model.safetensors").unlink()
    assert reshard.degrees(quantized, to="vllm", tp=(1, 2, 4), pp=(1, 2), **asked) == found


def test_a_reason_names_the_numbers():
    rows = {row.parallel.tp: row.problem for row in reshard.degrees(HF / "llama", to="vllm", tp=(1, 3, 16)).rows}
    assert rows[1] is None and rows[3] == "3 ranks do not divide its 8 attention heads (model.layers.0.self_attn.q_proj.weight)"
    assert "16 ranks do not divide its 8 attention heads" in rows[16]
    (row,) = reshard.degrees(HF / "llama", to="vllm", tp=(2,), ep=True).rows
    assert row.problem == "`ep=2`: a llama model has no experts"


def test_where_all_sizes_are_refused_those_that_are_taken_are_named():
    report = reshard.degrees(HF / "llama", to="vllm", tp=(3, 7), pp=(1, 2))
    assert [(sizes.tp, sizes.pp) for sizes in report.others] == [(tp, pp) for pp in (1, 2) for tp in (1, 2, 4, 8)]
    assert all(row.problem is None for row in reshard.degrees(HF / "llama", to="vllm", tp=(1, 2, 4, 8), pp=(1, 2)).rows)
    assert not reshard.degrees(HF / "llama", to="vllm", tp=(3, 2)).others


# The KV cache.


def folder_of(tmp_path, config, **own):
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16", **own}))
    return tmp_path


def test_the_cache_of_llama_3_70b_stops_shrinking_at_its_8_kv_heads(tmp_path):
    rows = reshard.degrees(folder_of(tmp_path, LLAMA_70B), to="vllm", tp=(1, 2, 4, 8, 16, 32)).rows
    assert [row.cache_per_token for row in rows] == [80 * 2 * 128 * 2 * heads for heads in (8, 4, 2, 1, 1, 1)]
    assert rows[0].cache_per_token == 320 * 1024
    # More ranks than KV heads: neighbours have copies of k and v, 80 layers of 2 x 128 rows.
    copies = 80 * 2 * 128 * 8192 * 2
    assert rows[4].fullest.replicated - rows[3].fullest.replicated == copies


def test_the_latent_cache_of_deepseek_v3_is_the_same_on_every_rank():
    model = find_model(DEEPSEEK_V3)
    assert {cached_elements(model, 0, tp) for tp in (1, 2, 8, 128)} == {512 + 64}


def test_tokens_and_sequences_fill_what_weights_leave(tmp_path):
    found = reshard.degrees(
        folder_of(tmp_path, LLAMA_70B), to="vllm", tp=(1, 2, 8), pp=(1, 2), gpu_memory=80 * GIB, reserve=GIB, max_model_len=8192
    )
    assert found.memory.usable == int(80 * GIB * 0.9) - GIB
    for row in found.rows:
        if row.parallel.tp == 1:
            continue
        tokens = [(found.memory.usable - stage.weights) // stage.cache_per_token for stage in row.stages]
        assert row.capacity.tokens == min(tokens) and row.capacity.sequences == min(tokens) // 8192 > 0
    assert found.rows[0].capacity.nbytes < 0 and (found.rows[0].capacity.tokens, found.rows[0].capacity.sequences) == (0, 0)


def test_the_type_of_the_cache_is_an_option(tmp_path):
    folder = folder_of(tmp_path, LLAMA_70B)
    own, fp8 = (reshard.degrees(folder, to="vllm", tp=(2,), gpu_memory=80 * GIB, kv_dtype=name) for name in (None, "fp8"))
    assert own.rows[0].cache_per_token == 2 * fp8.rows[0].cache_per_token
    assert fp8.rows[0].capacity.tokens // 2 == own.rows[0].capacity.tokens


def test_layers_with_a_window_remember_no_more_than_it(tmp_path):
    types = ["sliding_attention", "full_attention", "full_attention", "full_attention"] * 20
    folder = folder_of(tmp_path, LLAMA_70B, sliding_window=4096, layer_types=types)
    (row,) = reshard.degrees(folder, to="vllm", tp=(4,), gpu_memory=80 * GIB, max_model_len=32768).rows
    (stage,) = row.stages
    assert stage.cache_per_sequence == stage.cache_per_token // 80 * (20 * 4096 + 60 * 32768)
    assert row.capacity.sequences == row.capacity.nbytes // stage.cache_per_sequence
    assert row.capacity.tokens == row.capacity.nbytes * 32768 // stage.cache_per_sequence


def test_a_window_of_which_the_config_does_not_say_whose_it_is_is_told(tmp_path):
    found = reshard.degrees(folder_of(tmp_path, LLAMA_70B, sliding_window=4096), to="vllm", tp=(4,))
    assert any(fnmatchcase(sentence, "*sliding window of 4096*counted in full*") for sentence in found.assumptions)
    unused = reshard.degrees(folder_of(tmp_path, LLAMA_70B, sliding_window=4096, use_sliding_window=False), to="vllm", tp=(4,))
    assert not any("sliding" in sentence for sentence in unused.assumptions)


@pytest.mark.parametrize(
    "asked, words",
    [
        ({"to": "hf"}, "no serving engine"),
        ({"to": "nonsense"}, "Unknown format 'nonsense'"),
        ({"to": "vllm", "kv_dtype": "int3"}, "`kv_dtype=` int3"),
        ({"to": "vllm", "gpu_memory": GIB, "gpu_memory_utilization": 90}, "such as 0.9"),
        ({"to": "vllm", "engine_version": "0.1"}, "oldest"),
        ({"to": "vllm", "max_model_len": 8192}, "`gpu_memory="),
    ],
)
def test_what_cannot_be_answered_is_refused(asked, words):
    with pytest.raises(RequestError) as raised:
        reshard.degrees(HF / "llama", **asked)
    assert words in str(raised.value)


def test_compressed_caches_hold_one_vector_for_several_tokens():
    config = json.loads((FIXTURES / "vllm_declared" / "deepseek_v4.json").read_text())["config"]
    assert [cached_elements(find_model(config), layer, 4) for layer in range(5)] == [512, 512 // 4, 512 // 128, 512 // 4, 512 // 128]
