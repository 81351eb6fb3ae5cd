"""LoRA adapters: read from PEFT's form and from training, written as PEFT, merged. The oracle is PEFT itself (fixtures/peft/make.py)."""

import hashlib
import json
import re
import shutil
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from helpers.fixture_places import FIXTURES
from helpers.reshard_command import reshard as run
from helpers.verl_lora import write_verl_lora
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from reshard.canonical import lora
from reshard.canonical.lora import _is_match
from reshard.canonical.name_variants import Names
from reshard.canonical.renaming import with_adapter_names
from reshard.engine.views import LazyTensor
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.geometry.sections import whole
from reshard.models.lookup import find_model

sys.path.insert(0, str(FIXTURES / "hf_packed"))

import seeded_models

PEFT, HF = FIXTURES / "peft", FIXTURES / "hf"
WEIGHTS = "adapter_model.safetensors"
CASES = sorted({path.parent.name for path in PEFT.glob("*/truth.json")} - {"tinker"})  # whose truth is of another library
SINGLE = sorted({path.parent.parent.name for path in PEFT.glob("*/adapter/adapter_config.json")} - {"fsdp2", "zero3", "tinker"})


def truth(case):
    return json.loads((PEFT / case / "truth.json").read_text())


def load(folder, name=WEIGHTS):
    return safetensors.torch.load_file(folder / name)


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def same(left, right):
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)) for name in left
    )


def edited(case, folder, **settings):
    """A copy of an adapter with other settings."""
    shutil.copytree(PEFT / case / "adapter", folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.mark.distinct
@pytest.mark.parametrize("case", CASES)
def test_the_merge_is_that_of_peft_in_float32_rounded_once(case, tmp_path):
    expected = truth(case)
    base = HF / expected["base"]
    plan = reshard.plan(base, to="hf", merge_adapter=PEFT / case / "adapter", dtype="bf16")
    reshard.convert(plan, tmp_path / "out")
    before, after = load(base, "model.safetensors"), load(tmp_path / "out", "model.safetensors")
    changed = {name for name in after if name not in before or not torch.equal(after[name], before[name])}
    assert changed == expected["merged"].keys()
    assert {name: digest(after[name]) for name in changed} == expected["merged"]
    recorded = json.loads((tmp_path / "out" / "reshard.json").read_text())
    assert recorded["source"]["path"] == str(base) and recorded["adapter"]["path"] == str(PEFT / case / "adapter")


def test_every_target_and_every_division_into_blocks_gives_the_same_merge(tmp_path):
    found = set()
    for number, options in enumerate([{"to": "hf"}, {"to": "vllm", "tp": 2}, {"to": "sglang", "tp": 2}, {"to": "megatron", "tp": 2}]):
        plan = reshard.plan(HF / "llama", merge_adapter=PEFT / "patterns" / "adapter", **options)
        result = reshard.convert(plan, tmp_path / str(number))
        found.add(
            reshard.fingerprint(reshard.open(tmp_path / str(number), model=HF / "llama", vocab_size=250 * (number == 3) or None)).root
        )
        assert result.fingerprint.root
    assert len(found) == 1
    rank, every = (
        reshard.open(HF / "llama").view(to="vllm", tp=tp, rank=tp - 1, merge_adapter=PEFT / "plain" / "adapter") for tp in (4, 1)
    )
    name = "model.layers.0.mlp.down_proj.weight"
    assert np.array_equal(rank[name].words(), every[name].words()[:, 66:])


@pytest.mark.parametrize("before", [(), ("dora",), ("patterns", "dora")])
def test_half_a_row_of_a_dora_weight_is_scaled_by_the_length_of_the_whole_row(before, tmp_path):
    adapters = [PEFT / case / "adapter" for case in (*before, "dora")]
    plan = reshard.plan(HF / "llama", to="hf", merge_adapter=adapters)
    reshard.convert(plan, tmp_path / "out")
    name = "model.layers.1.self_attn.v_proj.weight"
    tensor = plan.content.tensors[name]
    lazy = LazyTensor(whole(name, tensor.dtype, tensor.shape), {name: tensor}, plan.source_files)
    assert np.array_equal(
        lazy[:, 16:].words(), load(tmp_path / "out", "model.safetensors")[name][:, 16:].contiguous().view(torch.uint16).numpy()
    )


def test_factors_of_experts_belong_to_one_parameter_each(tmp_path):
    adapter = edited("experts", tmp_path / "adapter")
    tensors = load(adapter)
    outer = {name: tensor for name, tensor in tensors.items() if ".experts.lora_" in name}
    twice = {name.replace(".experts.", ".experts.base_layer."): tensor.clone() for name, tensor in outer.items()}
    safetensors.torch.save_file(tensors | twice, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"which fits none of gate_up_proj"):
        reshard.plan(HF / "qwen3_moe", to="hf", merge_adapter=adapter)
    with pytest.raises(CheckpointError, match=r"the base has no weight model.layers.0.mlp.experts.weight"):
        reshard.plan(HF / "qwen3_moe", to="hf", merge_adapter=edited("experts", tmp_path / "without", target_parameters=None))


@pytest.mark.parametrize("parameters", [("gate_up_proj", "down_proj"), ("down_proj",)], ids="+".join)
def test_factors_of_experts_without_is_transposed_are_exchanged(parameters, tmp_path):
    """Llama 4: experts are [in, out], and PEFT 0.21 takes them as [out, in]. The oracle is the einsum of its ParamWrapper. down_proj is
    square, so that alone it does not show it."""
    seeded_models.write("llama4_text", tmp_path / "base")
    random, experts = np.random.default_rng(5), "model.layers.0.feed_forward.experts"
    factors, updates = {}, {}
    for depth, name in enumerate(parameters):
        rows, columns = {"gate_up_proj": (128, 256), "down_proj": (128, 128)}[name]
        a, b = (random.integers(-3, 4, shape).astype(np.float32) for shape in ((2, columns), (rows, 2)))
        for factor, values in (("A", a), ("B", b)):
            factors[f"base_model.model.{experts}{'.base_layer' * depth}.lora_{factor}.weight"] = torch.from_numpy(values)
        updates[f"{experts}.{name}"] = 2 * np.einsum("oe,ei->eoi", b, a)
    (tmp_path / "adapter").mkdir()
    safetensors.torch.save_file(factors, tmp_path / "adapter" / WEIGHTS)
    targets = [f"feed_forward.experts.{name}" for name in parameters]
    settings = {"peft_type": "LORA", "peft_version": "0.21.2", "r": 1, "lora_alpha": 2, "target_parameters": targets}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    reshard.convert(reshard.plan(tmp_path / "base", to="hf", merge_adapter=tmp_path / "adapter", dtype="fp32"), tmp_path / "out")
    before, after = (load(tmp_path / folder, "model.safetensors") for folder in ("base", "out"))
    for name, update in updates.items():
        assert np.array_equal(after[name], before[name].float().numpy() + update)


SQUARE = {
    "hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 3, "num_experts": 3, "vocab_size": 16, "torch_dtype": "float32",
}  # fmt: skip


def square_model(folder, model_type, **more):
    """A model of small whole numbers, with experts whose matrices are square; its tensors."""
    config = (
        SQUARE | {"model_type": model_type, "layer_types": ["full_attention"], "interleave_moe_layer_step": 1, "use_qk_norm": False} | more
    )
    random = np.random.default_rng(4)
    weights = (
        find_model(config).weights
        if model_type != "unknown"
        else {"model.layers.0.mlp.experts.down_proj": SimpleNamespace(shape=(3, 8, 8))}
    )
    tensors = {name: random.integers(-9, 10, weight.shape).astype(np.float32) for name, weight in weights.items()}
    folder.mkdir()
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    if model_type != "unknown":
        (folder / "config.json").write_text(json.dumps(config))
    return tensors


def adapter_of(folder, factors, **settings):
    """An adapter of rank 1 and alpha 2. factors: {module: (A, B)}, or tensors by their names."""
    tensors = {}
    for module, (a, b) in factors.items():
        tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    folder.mkdir()
    safetensors.numpy.save_file(tensors, folder / WEIGHTS)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 2, **settings}))
    return folder


def merged(base, adapter, out):
    reshard.convert(reshard.plan(base, to="hf", merge_adapter=adapter), out)
    return safetensors.numpy.load_file(out / "model.safetensors")


def whole_numbers(seed, *shapes):
    random = np.random.default_rng(seed)
    return [random.integers(-3, 4, shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("intermediate", [8, 4], ids=["square", "oblong"])
@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe"])
def test_adapters_of_single_experts_are_added_as_the_declaration_stores_them(model_type, intermediate, tmp_path):
    """gpt-oss holds all experts in one tensor [experts, in, out], qwen3_moe each as [out, in]."""
    before = square_model(tmp_path / "base", model_type, intermediate_size=intermediate, moe_intermediate_size=intermediate)
    factors = {f"model.layers.0.mlp.experts.{expert}.down_proj": whole_numbers(expert, (1, intermediate), (8, 1)) for expert in (0, 2)}
    after = merged(tmp_path / "base", adapter_of(tmp_path / "adapter", factors), tmp_path / "out")
    for expert in (0, 2):
        a, b = factors[f"model.layers.0.mlp.experts.{expert}.down_proj"]
        if model_type == "gpt_oss":
            before["model.layers.0.mlp.experts.down_proj"][expert] += 2 * (b @ a).T
        else:
            before[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"] += 2 * b @ a
    assert all(np.array_equal(after[name], before[name]) for name in before)


# Whether PEFT adds (B x A) transposed to square experts: seen with 0.17.1, 0.18.0, 0.18.1, 0.19.0, 0.19.1, 0.20.0 and 0.21.2 on a module of
# one parameter [3, 8, 8], with and without is_transposed, which gpt-oss alone has here. tests/peft/check.py runs 0.21.2.
RELEASES = [
    ("qwen3_moe", "0.17.1", True), ("qwen3_moe", "0.18.0", True), ("qwen3_moe", "0.18.1", True), ("qwen3_moe", "0.19.0", True),
    ("qwen3_moe", "0.19.1", False), ("qwen3_moe", "0.20.0", False), ("qwen3_moe", "0.21.2", False), ("qwen3_moe", "1.0", False),
    ("qwen3_moe", "0.18.2.dev0@abc", True), ("qwen3_moe", "0.19.1.dev0@abc", None), ("qwen3_moe", "0.19.2.dev0@abc", False),
    ("qwen3_moe", None, None), ("qwen3_moe", "UNKNOWN", None), ("qwen3_moe", 7, None),
    ("gpt_oss", None, True), ("gpt_oss", "0.17.0", True), ("gpt_oss", "0.19.0", False), ("gpt_oss", "0.19.1", True),
    ("gpt_oss", "0.21.2", True), ("gpt_oss", "0.18.2.dev0", None),
    ("llama4_text", None, None), ("llama4_text", "0.21.2", False), ("llama4_text", "0.18.0", True),
    ("unknown", "0.21.2", None), ("unknown", "0.19.0", None), ("unknown", "0.17.0", True),
]  # fmt: skip


@pytest.mark.parametrize("model_type, version, is_transposed", RELEASES)
def test_the_release_of_peft_says_which_axis_of_square_experts_lora_a_meets(model_type, version, is_transposed, tmp_path):
    more = {"moe_intermediate_size": 8} if model_type == "qwen3_moe" else {}
    before = square_model(tmp_path / "base", model_type, **more)
    module = f"model.layers.0.{'feed_forward' if model_type == 'llama4_text' else 'mlp'}.experts"
    a, b = whole_numbers(1, (3, 8), (8, 3))
    about = {} if version is None else {"peft_version": version}
    adapter = adapter_of(tmp_path / "adapter", {module: (a, b)}, target_parameters=["experts.down_proj"], **about)
    if is_transposed is None:
        message = r"lora_A.weight in .*two ways: lora_A meets their axis 1, or their axis 2" + (
            "" if version == "0.21.2" else ".*peft_version"
        )
        with pytest.raises(RequestError, match=message) as refused:
            reshard.plan(tmp_path / "base", to="hf", merge_adapter=adapter)
        assert refused.value.id == "ambiguous"
        return
    after = merged(tmp_path / "base", adapter, tmp_path / "out")
    update = 2 * np.einsum("oe,ei->eio" if is_transposed else "oe,ei->eoi", b, a)
    for expert in range(3):
        name = f"{module}.{expert}.down_proj.weight"
        old, new = (tensors[name] if name in tensors else tensors[f"{module}.down_proj"][expert] for tensors in (before, after))
        assert np.array_equal(new, old + update[expert])


def test_a_shape_that_only_one_axis_fits_needs_no_release(tmp_path):
    """An adapter of PEFT 0.17 whose lora_A meets axis 1 of [E, 8, 4]."""
    before = square_model(tmp_path / "base", "qwen3_moe")
    a, b = whole_numbers(1, (3, 8), (4, 3))
    module = "model.layers.0.mlp.experts"
    after = merged(
        tmp_path / "base", adapter_of(tmp_path / "a", {module: (a, b)}, target_parameters=["experts.down_proj"]), tmp_path / "out"
    )
    for expert, update in enumerate(2 * np.einsum("oe,ei->eio", b, a)):
        name = f"{module}.{expert}.down_proj.weight"
        assert np.array_equal(after[name], before[name] + update)


@pytest.mark.parametrize(
    "module, more, settings, message",
    [
        ("self_attn.k_proj", {"lora_magnitude_vector": (8,)}, {"use_dora": False}, "use_dora False, and lora_magnitude_vector is there"),
        ("self_attn.k_proj", {}, {"use_dora": True}, "use_dora True, and lora_magnitude_vector is not there"),
        ("self_attn.k_proj", {"lora_A.bias": (1,)}, {}, "lora_A.bias has no part in the update"),
        ("self_attn.k_proj", {"lora_embedding_A": (1, 8)}, {}, "the adapter needs two matrices"),
        ("mlp.experts", {"lora_magnitude_vector": (4,)}, {"target_parameters": ["experts.down_proj"]}, "no lora_magnitude_vector in PEFT"),
        ("mlp.experts", {"lora_B.bias": (8,)}, {"target_parameters": ["experts.down_proj"]}, "parameters have no lora_B.bias in PEFT"),
    ],
)
def test_a_tensor_that_has_no_part_in_the_merge_is_refused(module, more, settings, message, tmp_path):
    square_model(tmp_path / "base", "qwen3_moe")
    full = f"model.layers.0.{module}"
    shapes = ((3, 4), (8, 3)) if module == "mlp.experts" else ((1, 8), (8, 1))
    adapter = adapter_of(tmp_path / "adapter", {full: whole_numbers(1, *shapes)}, **settings)
    tensors = safetensors.numpy.load_file(adapter / WEIGHTS)
    tensors |= {f"base_model.model.{full}.{name}": np.ones(shape, np.float32) for name, shape in more.items()}
    safetensors.numpy.save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match=message):
        reshard.plan(tmp_path / "base", to="hf", merge_adapter=adapter)


def test_an_update_that_fits_only_transposed_is_of_another_model(tmp_path):
    """q_proj is [8, 8], gate_proj [8, 16]: PEFT refuses such an adapter, and Linear weights are never transposed."""
    square_model(tmp_path / "base", "llama", intermediate_size=16)
    a, b = whole_numbers(2, (1, 16), (8, 1))
    adapter = adapter_of(tmp_path / "adapter", {"model.layers.0.mlp.gate_proj": (a, b)})
    with pytest.raises(CheckpointError, match=r"its update has the shape \[8, 16\], the base weight \[16, 8\]"):
        reshard.plan(tmp_path / "base", to="hf", merge_adapter=adapter)


PIECES = st.sampled_from(
    ["a", "b", r"\.", ".", "[ab]", "[^a]", r"\d", r"\w", "^", "$", r"\b", "a*", "b+?", ".*", "(?:a|ab)", "layers", "{"]
)
PATTERNS = st.recursive(
    PIECES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}?", "*?", "{3,}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(PATTERNS, st.text("ab.1", max_size=7))
def test_patterns_match_as_in_re(pattern, text):
    """As PEFT's get_pattern_key asks."""
    asked = rf"(.*\.)?({pattern})$"
    try:
        expected = re.match(asked, text) is not None
    except re.error:
        return
    assert _is_match(asked, text, [10**6]) == expected


HOSTILE = ["((((.*)*)*)*)*!", "(a|a)*!", "(.?){60}!", ".*.*.*.*.*.*.*.*.*!", "(.*){1000}!", "((.{0,1000}){0,1000}){0,1000}!",
           "(" * 20 + ".*" + ")*" * 20 + "!", r"(\w+\.)*(\w+\.)*(\w+\.)*!", "(x?|.)*(x?|.)*(x?|.)*!"]  # fmt: skip


@pytest.mark.parametrize("key", HOSTILE)
@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_of_a_stranger_takes_a_moment(key, pattern, tmp_path):
    """`re` takes more than 20 s for most of them. None of them matches, so the merge is that without the pattern."""
    before = square_model(tmp_path / "base", "llama")
    a, b = whole_numbers(3, (1, 8), (8, 1))
    adapter = adapter_of(tmp_path / "adapter", {"model.layers.0.self_attn.q_proj": (a, b)}, **{pattern: {key: 7, "q_proj": 1}})
    began = time.process_time()
    after = merged(tmp_path / "base", adapter, tmp_path / "out")
    assert time.process_time() - began < 10
    scale = 1 if pattern == "alpha_pattern" else 2
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(after[name], before[name] + scale * (b @ a))


@pytest.mark.parametrize(
    "key, message",
    [
        ("(?=.*q)q_proj", "too intricate, or looks around or back"), (r"(q)_proj\3", "looks around"), ("(?>q)_proj", "looks around"),
        ("(" * 2000 + ")" * 2000, "too intricate"), ("(q", "not a regular expression"), ("a{99999999999}", "not a regular expression"),
        (".*" * 20 + "q_proj", "too intricate"),
    ],
)  # fmt: skip
def test_a_pattern_that_is_not_evaluated_is_named(key, message, tmp_path, monkeypatch):
    monkeypatch.setattr(lora, "_MOST_STEPS", 40)
    square_model(tmp_path / "base", "llama")
    adapter = adapter_of(tmp_path / "a", {"model.layers.0.self_attn.q_proj": whole_numbers(3, (1, 8), (8, 1))}, alpha_pattern={key: 7})
    with pytest.raises((CheckpointError, UnsupportedError), match=rf"alpha_pattern has the key .*{message}"):
        reshard.plan(tmp_path / "base", to="hf", merge_adapter=adapter)


def test_an_adapter_with_more_tokens_brings_its_tables_or_names_both_vocabularies(tmp_path):
    tensors = load(PEFT / "plain" / "adapter")
    grown = {name: torch.rand(254, 32).bfloat16() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    adapter = edited("plain", tmp_path / "adapter")
    safetensors.torch.save_file(tensors | {f"base_model.model.{name}": tensor for name, tensor in grown.items()}, adapter / WEIGHTS)
    reshard.convert(reshard.plan(HF / "llama", to="hf", merge_adapter=adapter), tmp_path / "grown")
    of_base = load(tmp_path / "grown", "model.safetensors")
    assert all(torch.equal(of_base[name], tensor) for name, tensor in grown.items())
    assert json.loads((tmp_path / "grown" / "config.json").read_text())["vocab_size"] == 254
    alone = edited("plain", tmp_path / "alone")
    name = "lm_head.weight"
    safetensors.torch.save_file(tensors | {f"base_model.model.{name}": grown[name]}, alone / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"vocabulary of 254, the base has one of 250.*resize_token_embeddings\(254\)"):
        reshard.plan(HF / "llama", to="hf", merge_adapter=alone)
    resized = shutil.copytree(HF / "llama", tmp_path / "resized")
    base = load(resized, "model.safetensors")
    safetensors.torch.save_file(base | {name: torch.zeros(254, 32).bfloat16() for name in grown}, resized / "model.safetensors")
    config = json.loads((resized / "config.json").read_text())
    (resized / "config.json").write_text(json.dumps(config | {"vocab_size": 254}))
    reshard.convert(reshard.plan(resized, to="hf", merge_adapter=adapter), tmp_path / "out")
    merged = load(tmp_path / "out", "model.safetensors")
    assert all(torch.equal(merged[name], tensor) for name, tensor in grown.items())


def test_saved_embeddings_are_no_modules_to_save(tmp_path):
    """save_embedding_layers=True of PEFT, beside which adapter_config.json says null; vLLM's PEFTHelper refuses modules_to_save."""
    adapter = edited("plain", tmp_path / "adapter")
    embeddings = {f"base_model.model.{name}.weight": torch.rand(250, 32).bfloat16() for name in ("lm_head", "model.embed_tokens")}
    safetensors.torch.save_file(load(adapter) | embeddings, adapter / WEIGHTS)
    reshard.convert(reshard.plan(adapter, to="peft"), tmp_path / "out")
    assert same(load(tmp_path / "out"), load(adapter))
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["modules_to_save"] is None


def test_trained_rows_of_an_embedding_are_taken_out_of_a_checkpoint(tmp_path):
    adapter, base = PEFT / "tokens" / "adapter", load(HF / "llama", "model.safetensors")
    of_trainer = {
        f"base_model.model.{name.replace('embed_tokens', 'embed_tokens.token_adapter.base_layer')}": t for name, t in base.items()
    }
    of_trainer = {name.replace("v_proj", "v_proj.base_layer"): tensor for name, tensor in of_trainer.items()}
    parts = {"A.weight": "A.default.weight", "B.weight": "B.default.weight", "delta": "delta.default"}
    for name, tensor in load(adapter).items():
        end = next(part for part in parts if name.endswith(part))
        of_trainer[name.removesuffix(end) + parts[end]] = tensor
    torch.save(of_trainer, tmp_path / "trained.pt")
    plan = reshard.plan(tmp_path / "trained.pt", to="peft", model=HF / "llama", adapter_config=adapter)
    reshard.convert(plan, tmp_path / "out")
    assert same(load(tmp_path / "out"), load(adapter))
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["trainable_token_indices"] == [3, 5]
    with pytest.raises(RequestError, match=r"no adapter_config.json gives trainable_token_indices.*`adapter_config="):
        reshard.plan(tmp_path / "trained.pt", to="peft", model=HF / "llama", lora_alpha="6", base_model="x")


@pytest.mark.parametrize("case", SINGLE)
def test_an_adapter_is_written_as_peft_wrote_it(case, tmp_path):
    reshard.convert(reshard.plan(PEFT / case / "adapter", to="peft"), tmp_path / "out")
    assert same(load(tmp_path / "out"), load(PEFT / case / "adapter"))
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    own = json.loads((PEFT / case / "adapter" / "adapter_config.json").read_text())
    added = {"bias", "inference_mode", "target_modules", "use_rslora"} if case == "tinker" else set()  # Tinker's settings lack them
    assert config.items() >= own.items() and config.keys() - own.keys() == added
    assert reshard.verify(PEFT / case / "adapter", tmp_path / "out").equal


def test_base_and_adapter_of_one_checkpoint_are_separated(tmp_path):
    source, base = PEFT / "fsdp2" / "checkpoint", HF / "qwen3_moe-sparse"
    given = {"lora_alpha": "6", "base_model": "qwen3_moe-sparse"}
    reshard.convert(reshard.plan(source, to="peft", model=base, **given), tmp_path / "adapter")
    assert same(load(tmp_path / "adapter"), load(PEFT / "fsdp2" / "adapter"))
    config, expected = (
        json.loads((folder / "adapter_config.json").read_text()) for folder in (tmp_path / "adapter", PEFT / "fsdp2" / "adapter")
    )
    known = ("r", "lora_alpha", "task_type", "peft_type", "base_model_name_or_path", "bias", "use_rslora")
    assert {key: config[key] for key in known} == {key: expected[key] for key in known}
    assert sorted(config["target_modules"]) == sorted(expected["target_modules"])
    plan = reshard.plan(source, to="hf", model=base, drop_adapter=True)
    assert {drop.kind for drop in plan.drops} == {"adapter"}
    reshard.convert(plan, tmp_path / "base")
    assert reshard.verify(base, tmp_path / "base").equal
    merged = reshard.plan(source, to="hf", model=base, merge_adapter=tmp_path / "adapter", drop_adapter=True)
    reshard.convert(merged, tmp_path / "merged")
    again = reshard.plan(base, to="hf", merge_adapter=PEFT / "fsdp2" / "adapter")
    reshard.convert(again, tmp_path / "again")
    assert reshard.verify(tmp_path / "merged", tmp_path / "again").equal


def test_a_module_saved_whole_of_which_zero3_has_the_master_alone_is_of_the_adapter():
    """Such as the head of a classifier: its name in PEFT's file is that of the base weight, so its kind has to tell it."""
    index = reshard.open(PEFT / "zero3" / "checkpoint", model=FIXTURES / "trainer_names" / "llama").index
    factor = next(tensor for tensor in index.tensors if tensor.kind == "master" and ".lora_A." in tensor.name)
    master = replace(factor, name="base_model.model.score.modules_to_save.default.weight")
    for stored, kinds in (([master], ["adapter"]), ([master, replace(master, kind="adapter")], ["master", "adapter"])):
        named = with_adapter_names(replace(index, tensors=(*index.tensors, *stored))).tensors
        assert [tensor.kind for tensor in named if tensor.name == "base_model.model.score.weight"] == kinds
        assert {tensor.kind for tensor in named if ".lora_A." in tensor.name} == {
            tensor.kind for tensor in index.tensors if ".lora_A." in tensor.name
        }


@pytest.mark.parametrize("files", ["checkpoint", "excluded"])
def test_an_adapter_of_zero3_is_taken_out_of_the_masters(files, tmp_path):
    """Of real ZeRO-3 on two ranks; in `excluded` without the base, by exclude_frozen_parameters."""
    base, given = FIXTURES / "trainer_names" / "llama", {"lora_alpha": "6", "base_model": "../trainer_names/llama"}
    opened = reshard.open(PEFT / "zero3" / files, model=base)
    reshard.convert(reshard.plan(opened, to="peft", dtype="bf16", **given), tmp_path / "adapter")
    assert same(load(tmp_path / "adapter"), load(PEFT / "zero3" / "adapter"))
    if files == "excluded":
        with pytest.raises(UnsupportedError, match="LoRA adapter and no base weights"):
            reshard.plan(opened, to="hf")
        return
    plan = reshard.plan(opened, to="hf", drop_adapter=True)
    assert {drop.kind for drop in plan.drops} >= {"adapter"}
    reshard.convert(plan, tmp_path / "base")
    assert reshard.verify(base, tmp_path / "base").equal
    for source, given in ((opened, {"merge_adapter": "self", "lora_alpha": "6"}), (base, {"merge_adapter": tmp_path / "adapter"})):
        reshard.convert(reshard.plan(source, to="hf", dtype="bf16", **given), tmp_path / f"merged-{source is base}")
    assert reshard.verify(tmp_path / "merged-True", tmp_path / "merged-False").equal


def test_an_average_with_adapters_is_that_of_two_runs(tmp_path):
    """`merge_adapter="self"` is of each checkpoint, before the average; a directory is merged into the average."""
    base, (a, b, merged_a, merged_b) = HF / "qwen3_moe-sparse", (tmp_path / name for name in ("a", "b", "merged-a", "merged-b"))
    for source, merged, alpha in ((a, merged_a, 6), (b, merged_b, 12)):
        write_verl_lora(source)
        (source / "lora_train_meta.json").write_text(json.dumps({"r": 2, "lora_alpha": alpha, "task_type": "CAUSAL_LM"}))
        reshard.convert(reshard.plan(source, to="hf", merge_adapter="self"), merged)
    assert not reshard.verify(merged_a, merged_b).equal
    reshard.convert(reshard.plan([a, b], to="hf", average=True, merge_adapter="self"), tmp_path / "one")
    reshard.convert(reshard.plan([merged_a, merged_b], to="hf", average=True), tmp_path / "two")
    assert reshard.verify(tmp_path / "one", tmp_path / "two").equal
    given, adapter = {"to": "hf", "average": True, "dtype": "fp32"}, PEFT / "fsdp2" / "adapter"
    reshard.convert(reshard.plan([base, merged_b], **given, merge_adapter=adapter), tmp_path / "at-once")
    reshard.convert(reshard.plan([base, merged_b], **given), tmp_path / "mean")
    reshard.convert(reshard.plan(tmp_path / "mean", to="hf", merge_adapter=adapter), tmp_path / "after")
    assert reshard.verify(tmp_path / "at-once", tmp_path / "after").equal


@pytest.fixture
def verl(tmp_path):
    write_verl_lora(tmp_path / "actor")
    return tmp_path / "actor"


@pytest.mark.parametrize("options", [{"to": "hf"}, {"to": "vllm", "tp": 2}, {"to": "megatron"}], ids=lambda options: options["to"])
def test_an_adapter_beside_its_base_is_merged_left_out_or_refused_but_never_lost_in_silence(verl, options, tmp_path):
    with pytest.raises(RequestError, match=r"LoRA adapter of 4 tensors.*`merge_adapter=self`.*`drop_adapter=True`.*`to=peft`"):
        reshard.plan(verl, **options)
    vocabulary = 50 if options["to"] == "megatron" else None
    for name, source, given in (
        ("self", verl, {"merge_adapter": "self"}),
        ("peft", HF / "qwen3_moe-sparse", {"merge_adapter": PEFT / "fsdp2" / "adapter"}),
        ("base", verl, {"drop_adapter": True}),
        ("published", HF / "qwen3_moe-sparse", {}),
    ):
        reshard.convert(reshard.plan(source, **options, **given), tmp_path / name)
    prints = {
        name: reshard.fingerprint(reshard.open(tmp_path / name, model=HF / "qwen3_moe-sparse", vocab_size=vocabulary)).root
        for name in ("self", "peft", "base", "published")
    }
    assert prints["self"] == prints["peft"] != prints["base"] == prints["published"]
    recorded = json.loads((tmp_path / "self" / "reshard.json").read_text())
    assert recorded["adapter"]["path"] == str(verl) and recorded["adapter"]["lora_alpha"] == 6


def test_targets_that_keep_names_carry_the_adapter_and_its_settings(verl, tmp_path):
    reshard.convert(reshard.plan(verl, to="dcp"), tmp_path / "dcp")
    reshard.convert(reshard.plan(tmp_path / "dcp", to="peft", base_model="qwen3_moe-sparse"), tmp_path / "adapter")
    assert same(load(tmp_path / "adapter"), load(PEFT / "fsdp2" / "adapter"))
    reshard.convert(reshard.plan(verl, to="dcp", drop_adapter=True), tmp_path / "base")
    assert not any(tensor.kind == "adapter" for tensor in reshard.open(tmp_path / "base").index.tensors)


def test_what_to_do_with_an_adapter_that_is_not_there_is_refused(verl):
    for given, option in (({"merge_adapter": "self"}, "`merge_adapter=self`"), ({"drop_adapter": True}, "`drop_adapter=True`")):
        with pytest.raises(RequestError, match=f"{option}: no LoRA adapter"):
            reshard.plan(HF / "llama", to="hf", **given)
        with pytest.raises(RequestError, match="`include=` or `exclude=` leaves it out"):
            reshard.plan(verl, to="hf", exclude="*lora*", **given)
    assert reshard.plan(verl, to="hf", exclude="*lora*")
    with pytest.raises(RequestError, match="`lora_alpha=` does not apply to hf"):
        reshard.plan(verl, to="hf", lora_alpha="6", drop_adapter=True)


def test_the_scale_of_an_adapter_that_no_file_tells_is_asked_for(verl):
    (verl / "lora_train_meta.json").unlink()
    with pytest.raises(RequestError, match=r"lora_alpha is not known.*`lora_alpha="):
        reshard.plan(verl, to="hf", merge_adapter="self")
    assert any("use_rslora" in note for note in reshard.plan(verl, to="hf", merge_adapter="self", lora_alpha="6").layout.notes)
    given = PEFT / "fsdp2" / "adapter"
    assert not any("use_rslora" in note for note in reshard.plan(verl, to="hf", merge_adapter="self", adapter_config=given).layout.notes)


def test_the_class_of_a_module_says_how_a_square_weight_is_stored(tmp_path):
    """PEFT sets fan_in_fan_out by it; the settings in a training checkpoint may lack it."""
    adapter = edited("conv1d", tmp_path / "adapter", fan_in_fan_out=False)
    reshard.convert(reshard.plan(HF / "gpt2", to="hf", merge_adapter=adapter), tmp_path / "out")
    after = load(tmp_path / "out", "model.safetensors")
    expected = truth("conv1d")["merged"]
    assert {name: digest(after[name]) for name in expected} == expected


def test_the_next_command_never_leaves_out_what_was_trained(verl):
    shown, about = run("inspect", verl).out, json.loads(run("inspect", verl, "--json").out)
    assert about["outlook"]["next"] == f"reshard convert {verl} out --to vllm --tp 1 --merge-adapter self"
    assert about["outlook"]["next"] in shown and "LoRA of rank 2, alpha 6" in shown
    (verl / "lora_train_meta.json").unlink()
    assert run("inspect", verl).out.count("--merge-adapter self --lora-alpha ALPHA") == 1
    adapter = PEFT / "plain" / "adapter"
    shown = run("inspect", adapter).out
    assert "\n  complete  8 tensors" in shown and f"next      reshard convert BASE merged --to hf --merge-adapter {adapter}\n" in shown
    alone = PEFT / "zero3" / "excluded"
    assert f"next      reshard convert {alone} adapter --to peft" in run("inspect", alone).out


def test_what_no_file_says_must_be_given(tmp_path):
    source, base = PEFT / "fsdp2" / "checkpoint", HF / "qwen3_moe-sparse"
    with pytest.raises(RequestError, match=r"lora_alpha is not known.*`lora_alpha="):
        reshard.plan(source, to="peft", model=base)
    with pytest.raises(RequestError, match=r"task_type is not known.*`task_type="):
        reshard.plan(source, to="peft", lora_alpha="6", base_model="x")
    with pytest.raises(RequestError, match="holds no LoRA adapter"):
        reshard.plan(base, to="peft")
    plan = reshard.plan(source, to="peft", lora_alpha="6", base_model="x", task_type="CAUSAL_LM")
    assert sorted(json.loads(plan.layout.sidecars[0].content)["target_modules"]) == ["q_proj", "v_proj"]


def test_target_modules_are_full_names_if_the_last_parts_would_choose_others(tmp_path):
    tensors = {name: tensor for name, tensor in load(PEFT / "plain" / "adapter").items() if "layers.0.self_attn.v" not in name}
    safetensors.torch.save_file(tensors, tmp_path / "adapter_model.safetensors")
    plan = reshard.plan(tmp_path, to="peft", lora_alpha="6", base_model="x", model=HF / "llama")
    assert set(json.loads(plan.layout.sidecars[0].content)["target_modules"]) == {
        name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "LOHA"}, "LOHA adapter"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed base weights"),
        ({"layer_replication": [[0, 2]]}, "more layers"),
        ({"alora_invocation_tokens": [1]}, "invocation tokens"),
    ],
)
def test_an_adapter_that_is_not_a_scaled_product_is_refused(settings, message, tmp_path):
    with pytest.raises(UnsupportedError, match=f"cannot be merged: .*{message}.*merge_and_unload"):
        reshard.plan(HF / "llama", to="hf", merge_adapter=edited("plain", tmp_path / "adapter", **settings))


@pytest.mark.parametrize(
    "settings", [{"r": "8"}, {"r": True}, {"rank_pattern": True}, {"alpha_pattern": {"q_proj": []}}, {"target_modules": 3}], ids=str
)
def test_settings_of_another_type_are_named(settings, tmp_path):
    folder = edited("plain", tmp_path / "adapter", **settings)
    for plan in (lambda: reshard.plan(folder, to="peft"), lambda: reshard.plan(HF / "llama", to="hf", merge_adapter=folder)):
        with pytest.raises(CheckpointError, match=rf"adapter_config.json: it gives .* for {next(iter(settings))}.* is expected"):
            plan()


def test_an_adapter_of_another_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"update has the shape.*trained on another model"):
        reshard.plan(HF / "mistral", to="hf", merge_adapter=PEFT / "fused" / "adapter", include=())
    with pytest.raises(CheckpointError, match=r"rank 2, adapter_config.json says 3"):
        reshard.plan(HF / "llama", to="hf", merge_adapter=edited("plain", tmp_path / "rank", r=3))
    with pytest.raises(CheckpointError, match=r"gives no lora_alpha"):
        reshard.plan(HF / "llama", to="hf", merge_adapter=edited("plain", tmp_path / "alpha", lora_alpha=None))
    with pytest.raises(RequestError, match=r"quantized.*`dequantize=True`"):
        reshard.plan(FIXTURES / "hf_fp8" / "qwen3_moe-ct-channel", to="hf", merge_adapter=PEFT / "fsdp2" / "adapter")
    with pytest.raises(RequestError, match=r"no adapter in PEFT's form"):
        reshard.plan(HF / "llama", to="hf", merge_adapter=HF / "llama")


def test_inspect_says_what_the_adapter_is():
    shown = run("inspect", PEFT / "patterns" / "adapter").out
    assert "LoRA of ranks 2 and 3, alpha 6, rsLoRA, on k_proj, o_proj for llama: 8 tensors" in shown and "--merge-adapter" in shown
    about = json.loads(run("inspect", PEFT / "dora" / "adapter", "--json").out)
    assert about["format"] == "peft" and about["adapter"]["alpha"] == 6 and about["adapter"]["dora"] is True


def test_an_interrupted_merge_is_not_resumed_with_another_adapter(tmp_path):
    adapter = edited("plain", tmp_path / "adapter")
    plan = reshard.plan(HF / "llama", to="hf", merge_adapter=adapter)
    other = edited("plain", tmp_path / "other", lora_alpha=8)
    assert plan.identity() != reshard.plan(HF / "llama", to="hf", merge_adapter=other).identity()
    assert plan.identity() != reshard.plan(HF / "llama", to="hf").identity()


def test_a_base_that_reshard_wrote_is_compared_with_its_record_where_the_adapter_replaces_nothing(tmp_path):
    reshard.convert(reshard.plan(HF / "gpt2", to="hf"), tmp_path / "base")
    result = reshard.convert(reshard.plan(tmp_path / "base", to="hf", merge_adapter=PEFT / "saved" / "adapter"), tmp_path / "out")
    assert any("not compared" in note and "because of the merge" in note for note in result.notes)
    assert any("is merged into" in note for note in result.notes)


def test_a_plan_file_refuses_a_merge_instead_of_losing_it(tmp_path):
    adapter = PEFT / "plain" / "adapter"
    refused = run("plan", HF / "llama", "--to", "hf", "--merge-adapter", adapter, "--plan-out", tmp_path / "plan")
    assert refused.code == 6 and "--merge-adapter names a folder" in refused.err and not (tmp_path / "plan").exists()


def test_the_head_of_gpt_neox_is_known_by_its_name_in_memory():
    model = reshard.open(HF / "gpt_neox").model
    assert Names(model).array("base_model.model.lm_head.weight").names == ("embed_out.weight",)


def test_rows_that_the_adapter_does_not_hold_are_told(tmp_path):
    base = "base_model.model."
    stored = {
        f"{base}{name}": torch.cat([tensor, tensor[:6]]) if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor
        for name, tensor in load(HF / "llama", "model.safetensors").items()
    }
    module = f"{base}model.layers.0.self_attn.q_proj"
    stored[f"{module}.base_layer.weight"] = old = stored.pop(f"{module}.weight")
    stored |= {
        f"{module}.lora_A.default.weight": torch.ones(4, old.shape[1]),
        f"{module}.lora_B.default.weight": torch.ones(old.shape[0], 4),
    }
    torch.save(stored, tmp_path / "model.pt")
    notes = reshard.plan(tmp_path / "model.pt", to="peft", model=HF / "llama", lora_alpha=8).layout.notes
    tables = [note for note in notes if "has 256 rows, and the model 250: the adapter holds none of them" in note]
    assert len(tables) == 2 and all("merge_adapter=self" in note for note in tables)
    config = json.loads((HF / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 256}))
    resized = {"model": tmp_path, "lora_alpha": 8}
    assert not any("rows" in note for note in reshard.plan(tmp_path / "model.pt", to="peft", **resized).layout.notes)
    reshard.convert(reshard.plan(tmp_path / "model.pt", to="hf", merge_adapter="self", **resized), tmp_path / "merged")
    assert load(tmp_path / "merged", "model.safetensors")["lm_head.weight"].shape[0] == 256
