"""The forms of the adapter of experts, read, merged, and rewritten. The oracle is numpy on whole arrays: W + scale * B x A for each expert.
tests/peft/check.py compares with PEFT and tinker-cookbook themselves."""

import hashlib
import json
import shutil
import time

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from helpers.expert_adapters import (
    ALPHA,
    FAMILIES,
    INNER,
    TARGETS,
    WEIGHTS,
    E,
    H,
    R,
    W,
    adapter,
    base,
    expected,
    factors,
    fused,
    numbers,
    split,
    stacked,
    write,
)
from helpers.fixture_places import FIXTURES

import reshard
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.models.lookup import find_model


def merged(source, folder, out, **options):
    reshard.convert(reshard.plan(source, to="hf", merge_adapter=folder, **options), out)
    return safetensors.numpy.load_file(out / "model.safetensors")


def equal(left, right):
    return left.keys() == right.keys() and all(
        left[name].shape == right[name].shape and left[name].tobytes() == right[name].tobytes() for name in left
    )


def stored(folder):
    return safetensors.numpy.load_file(folder / WEIGHTS)


def rewritten(folder, out, form, model):
    plan = reshard.plan(folder, to="peft", experts=form, model=model)
    reshard.convert(plan, out)
    return out, plan


@pytest.mark.parametrize("family", FAMILIES)
def test_every_form_merges_as_numpy_does(family, tmp_path):
    model, before = base(family, tmp_path)
    made = factors()
    wanted = expected(family, before, made)
    of_form = {
        "split": adapter(tmp_path / "split", split(made, family)),
        "stacked": adapter(tmp_path / "stacked", stacked(made, family)),
        "fused": adapter(tmp_path / "fused", fused(made, family), target_parameters=TARGETS[family]),
    }
    for form, folder in of_form.items():
        assert equal(merged(model, folder, tmp_path / f"out-{form}"), wanted), form
    own = adapter(tmp_path / "own", split(own_a := factors(shared_a=False), family))
    assert equal(merged(model, own, tmp_path / "out-own"), expected(family, before, own_a))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_change_of_form_copies_bits_and_the_way_back_gives_the_same_bits(family, tmp_path):
    model, _ = base(family, tmp_path)
    made = factors()
    sources = {
        "split": adapter(tmp_path / "split", split(made, family)),
        "tinker": adapter(tmp_path / "tinker", stacked(made, family)),
        "fused": adapter(tmp_path / "fused", fused(made, family), target_parameters=TARGETS[family]),
    }
    for form, folder in sources.items():
        for other, wanted in sources.items():
            out, plan = rewritten(folder, tmp_path / f"{form}-{other}", other, model)
            assert equal(stored(out), stored(wanted)), (form, other)
            assert f"the adapter of the experts is written in the form {other}" in plan.layout.notes


@pytest.mark.parametrize("family", FAMILIES)
def test_different_a_of_gate_and_up_double_the_rank_of_the_fused_form(family, tmp_path):
    model, before = base(family, tmp_path)
    made = factors(shared_a=False)
    out, plan = rewritten(adapter(tmp_path / "split", split(made, family)), tmp_path / "out", "fused", model)
    assert any("gate and up have different lora_A" in note for note in plan.layout.notes)
    assert equal(merged(model, out, tmp_path / "merged"), expected(family, before, made))
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"experts.gate_up_proj": 2 * R} and config["alpha_pattern"] == {"experts.gate_up_proj": 2 * ALPHA}
    sizes = {tensor.shape for name, tensor in stored(out).items() if "base_layer" in name}
    assert (E * 2 * R) in {size for shape in sizes for size in shape}


def test_factors_that_all_experts_share_are_stored_once_and_others_are_refused(tmp_path):
    model, before = base("qwen3_moe", tmp_path)
    made = factors()
    for e in range(E):
        made[e, "gate"] = made[0, "gate"][0], made[e, "gate"][1]
        made[e, "up"] = made[0, "gate"][0], made[e, "up"][1]
        made[e, "down"] = made[e, "down"][0], made[0, "down"][1]
    source = adapter(tmp_path / "split", split(made, "qwen3_moe"))
    out, _ = rewritten(source, tmp_path / "shared", "shared", model)
    shapes = {name.split("experts.")[1]: tensor.shape for name, tensor in stored(out).items()}
    assert shapes["w1.lora_A.weight"] == (1, R, H) and shapes["w2.lora_B.weight"] == (1, H, R) and shapes["w3.lora_B.weight"][0] == E
    assert equal(merged(model, out, tmp_path / "merged"), expected("qwen3_moe", before, made))
    back, _ = rewritten(out, tmp_path / "back", "split", model)
    assert equal(stored(back), stored(source))
    other = adapter(tmp_path / "other", split(factors(), "qwen3_moe"))
    with pytest.raises(UnsupportedError, match=r"have different lora_B of down_proj.*`experts=tinker`"):
        reshard.plan(other, to="peft", experts="shared", model=model)


def test_ranks_and_scales_of_parameters_are_those_of_their_modules_in_the_other_form(tmp_path):
    """With rsLoRA and patterns; (rank, alpha) of gate_up_proj is (2, 5), of down_proj (3, 6)."""
    model, before = base("qwen3_moe", tmp_path)
    made = factors()
    for e in range(E):
        made[e, "down"] = numbers(300 + e, 3, INNER), numbers(400 + e, H, 3)
    tensors = fused({key: made[key] for key in made if key[1] != "down"} | {(e, "down"): made[e, "down"] for e in range(E)}, "qwen3_moe")
    settings = {"use_rslora": True, "rank_pattern": {"experts.down_proj": 3}, "alpha_pattern": {"experts.gate_up_proj": 5}}
    source = adapter(tmp_path / "fused", tensors, target_parameters=TARGETS["qwen3_moe"], **settings)
    wanted = expected("qwen3_moe", before, {key: made[key] for key in made if key[1] != "down"}, 5 / 2**0.5)
    wanted = expected("qwen3_moe", wanted, {(e, "down"): made[e, "down"] for e in range(E)}, 6 / 3**0.5)
    out, _ = rewritten(source, tmp_path / "split", "split", model)
    for place, folder in enumerate((source, out)):
        after = merged(model, folder, tmp_path / f"merged{place}")
        assert all(np.allclose(after[name], wanted[name], rtol=0, atol=1e-5) for name in wanted)
    back, _ = rewritten(out, tmp_path / "back", "fused", model)
    assert equal(stored(back), stored(source))
    config = json.loads((back / "adapter_config.json").read_text())
    assert (config["rank_pattern"], config["alpha_pattern"]) == (settings["rank_pattern"], settings["alpha_pattern"])
    with pytest.raises(UnsupportedError, match="`experts=tinker`: the adapter has several ranks"):
        reshard.plan(source, to="peft", experts="tinker", model=model)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"experts": "split"}, r"the base model is not known.*`model=DIR`"),
        ({"experts": "grouped"}, r"`experts=grouped` does not apply to peft"),
        ({"experts": "split", "engine": "vllm"}, "both name a form"),
    ],
)
def test_a_form_that_cannot_be_made_is_refused(options, message, tmp_path):
    base("qwen3_moe", tmp_path)
    folder = adapter(tmp_path / "a", fused(factors(), "qwen3_moe"), target_parameters=TARGETS["qwen3_moe"])
    with pytest.raises(RequestError, match=message):
        reshard.plan(folder, to="peft", **options)


def test_another_parameter_of_experts_has_no_other_form(tmp_path):
    model, _ = base("gpt_oss", tmp_path)
    name = "mlp.experts.lora_"
    tensors = {f"{name}A.weight": numbers(1, R, 2 * INNER), f"{name}B.weight": numbers(2, E, R)}
    folder = adapter(tmp_path / "a", tensors, target_parameters=["mlp.experts.gate_up_proj_bias"])
    with pytest.raises(UnsupportedError, match=r"the adapter changes model.*gate_up_proj_bias"):
        reshard.plan(folder, to="peft", experts="split", model=model)
    texts = [finding.detail for finding in reshard.serve_check(folder, model=model).findings]
    assert any("gate_up_proj_bias, which vLLM takes for a matrix of the experts" in text for text in texts)


def test_the_head_of_a_classifier_goes_with_every_form(tmp_path):
    model, _ = base("qwen3_moe", tmp_path)
    settings = {"task_type": "SEQ_CLS", "modules_to_save": ["score"], "target_parameters": TARGETS["qwen3_moe"]}
    folder = adapter(tmp_path / "a", fused(factors(), "qwen3_moe"), **settings)
    head = {"base_model.model.score.weight": numbers(4, 3, H)}
    safetensors.numpy.save_file(stored(folder) | head, folder / WEIGHTS)
    out, _ = rewritten(folder, tmp_path / "out", "split", model)
    assert np.array_equal(stored(out)["base_model.model.score.weight"], head["base_model.model.score.weight"])
    reshard.convert(reshard.plan(model, to="hf", merge_adapter=out), tmp_path / "merged")
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForSequenceClassification"] and len(config["id2label"]) == 3


def test_a_stacked_adapter_of_fewer_experts_than_the_base_has_is_refused(tmp_path):
    model, _ = base("qwen3_moe", tmp_path)
    tensors = {name: tensor[:2] for name, tensor in stacked(factors(), "qwen3_moe").items()}
    with pytest.raises(CheckpointError, match="are not those of all experts of the base"):
        reshard.plan(model, to="hf", merge_adapter=adapter(tmp_path / "a", tensors))


def test_experts_stored_with_exchanged_axes_are_read_by_their_shapes(tmp_path):
    """transformers 5.24 saves Qwen3-VL-MoE as [experts, out, in]; it is published as [experts, in, out]."""
    model, before = base("llama4_text", tmp_path)
    exchanged = {name: tensor.swapaxes(1, 2) if tensor.ndim == 3 else tensor for name, tensor in before.items()}
    config = json.loads((model / "config.json").read_text())
    turned = write(tmp_path / "turned", exchanged, "model.safetensors", "config.json", config)
    made = factors()
    after = merged(turned, adapter(tmp_path / "a", split(made, "llama4_text")), tmp_path / "out")
    assert equal(after, expected("llama4_text", before, made))


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.5, -2.0)])
def test_several_adapters_are_added_in_order_with_their_weights(weights, tmp_path):
    model, before = base("qwen3_moe", tmp_path)
    one, two = factors(), factors(shared_a=False)
    folders = [adapter(tmp_path / "one", split(one, "qwen3_moe")), adapter(tmp_path / "two", stacked(two, "qwen3_moe"))]
    wanted = expected("qwen3_moe", before, one, ALPHA / R * weights[0])
    wanted = expected("qwen3_moe", wanted, two, ALPHA / R * weights[1])
    assert equal(merged(model, folders, tmp_path / "out", adapter_weight=weights), wanted)
    recorded = json.loads((tmp_path / "out" / "reshard.json").read_text())["adapter"]
    assert recorded["path"] == str(folders[1]) and recorded["before"]["path"] == str(folders[0])


@pytest.mark.parametrize(
    "given, message",
    [
        ({"adapter_weight": (0.5,)}, "is given for 1 adapter, `merge_adapter=` names 2"),
        ({"merge_adapter": ("a", "self")}, "`merge_adapter=self` comes after another adapter"),
        ({"adapter_weight": (1.0, float("inf"))}, "a finite number is expected"),
    ],
)
def test_weights_that_fit_no_adapter_are_refused(given, message, tmp_path):
    model, _ = base("qwen3_moe", tmp_path)
    with pytest.raises(RequestError, match=message):
        reshard.plan(model, to="hf", **({"merge_adapter": ("a", "b")} | given))


def test_single_trained_rows_replace_those_of_the_base(tmp_path):
    model, before = base("qwen3_moe", tmp_path)
    rows = numbers(9, 2, H)
    tensors = split(factors(), "qwen3_moe")
    source = adapter(tmp_path / "a", tensors, trainable_token_indices=[7, 3])
    held = stored(source) | {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": rows}
    safetensors.numpy.save_file(held, source / WEIGHTS)
    wanted = expected("qwen3_moe", before, factors())
    wanted["model.embed_tokens.weight"][[7, 3]] = rows
    assert equal(merged(model, source, tmp_path / "out"), wanted)
    with pytest.raises(RequestError, match="the adapter holds whole weights"):
        reshard.plan(model, to="hf", merge_adapter=source, adapter_weight=0.5)
    config = json.loads((source / "adapter_config.json").read_text())
    (source / "adapter_config.json").write_text(json.dumps(config | {"trainable_token_indices": [7, 50]}))
    with pytest.raises(CheckpointError, match=r"for 2 rows of \[50, 20\]"):
        reshard.plan(model, to="hf", merge_adapter=source)


SERVED = [  # (family, form, settings, the finding, what it says), as vLLM 0.32's own functions do on CPU tensors
    ("qwen3_moe", "fused", {}, "not-served", "vLLM refuses fused experts of qwen3_moe: its class reads the form split"),
    ("qwen3_moe", "split", {}, "adapter-served", "--max-lora-rank of at least 2"),
    ("mixtral", "fused", {}, "never-applied", "never applies them"),
    ("mixtral", "split", {"rank_pattern": {"w1": 16}}, "adapter-served", "--max-lora-rank of at least 16"),
    ("gpt_oss", "fused", {}, "adapter-served", "applies all of it"),
    ("gpt_oss", "split", {}, "not-served", "its class reads the form fused"),
    ("gpt_oss", "tinker", {}, "not-served", "--enable-moe-shared-loras alone"),
    ("qwen3_moe", "split", {"use_dora": True}, "not-served", "vLLM has no DoRA"),
    ("qwen3_moe", "split", {"modules_to_save": ["lm_head"]}, "not-served", "modules_to_save has lm_head"),
    ("qwen3_moe", "split", {"trainable_token_indices": [1]}, "not-served", "single rows of the embedding"),
    ("qwen3_moe", "split", {"init_lora_weights": "pissa_niter_4"}, "not-served", "init_lora_weights is pissa_niter_4"),
    ("qwen3_moe", "split", {"init_lora_weights": "gaussian"}, "adapter-served", "applies all of it"),
]


@pytest.mark.parametrize("family, form, settings, kind, text", SERVED)
def test_serve_check_says_what_vllm_does_with_an_adapter(family, form, settings, kind, text, tmp_path):
    model, _ = base(family, tmp_path)
    tensors = {"fused": fused, "split": split, "tinker": stacked}[form](factors(), family)
    more = {"target_parameters": TARGETS[family]} if form == "fused" else {}
    folder = adapter(tmp_path / "a", tensors, **more, **settings)
    report = reshard.serve_check(folder, model=model)
    (finding,) = [finding for finding in report.findings if finding.severity == "error" or finding.id.startswith("adapter-")]
    assert finding.id == kind and text in finding.detail
    if kind == "not-served" and settings == {}:
        out, _ = rewritten(folder, tmp_path / "out", "fused" if family == "gpt_oss" else "split", model)
        reshard.convert(reshard.plan(folder, to="peft", engine="vllm", model=model), tmp_path / "engine")
        assert equal(stored(out), stored(tmp_path / "engine"))
        assert not [finding for finding in reshard.serve_check(out, model=model).findings if finding.severity == "error"]


REFUSED_BY_SGLANG = [  # (family, form, settings, what it says), as SGLang 0.5.23's own loader does on CPU tensors
    ("qwen3_moe", "fused", {}, "its server stops at the first request"),
    ("gpt_oss", "fused", {}, "its server stops at the first request"),
    ("mixtral", "split", {"target_modules": ["w1", "w2", "w3"]}, "target_modules has w1, w2, w3"),
    ("qwen3_moe", "split", {"target_modules": ".*_proj"}, "target_modules is a regular expression"),
    ("qwen3_moe", "split", {"use_rslora": True}, "does not read use_rslora"),
]


@pytest.mark.parametrize("family, form, settings, text", REFUSED_BY_SGLANG)
def test_serve_check_says_what_sglang_refuses_and_engine_sglang_mends_it(family, form, settings, text, tmp_path):
    model, _ = base(family, tmp_path)
    more = {"target_parameters": TARGETS[family]} if form == "fused" else {}
    folder = adapter(tmp_path / "a", {"fused": fused, "split": split}[form](factors(), family), **more, **settings)

    def found_in(source):
        return [finding for finding in reshard.serve_check(source, engine="sglang", model=model).findings if finding.severity == "error"]

    (finding,) = found_in(folder)
    assert text in finding.detail and "`engine=sglang`" in finding.do
    reshard.convert(reshard.plan(folder, to="peft", engine="sglang", model=model), tmp_path / "engine")
    assert not found_in(tmp_path / "engine")
    config = json.loads((tmp_path / "engine/adapter_config.json").read_text())
    assert not config["use_rslora"] and {"gate_proj", "up_proj", "down_proj"} <= {*config["target_modules"]}
    scale = config["lora_alpha"] / config["r"]
    assert scale == pytest.approx(ALPHA / R**0.5 if settings.get("use_rslora") else ALPHA / R, rel=1e-15)
    assert equal(merged(model, tmp_path / "engine", tmp_path / "1"), merged(model, folder, tmp_path / "2"))


def test_experts_of_llama4_and_shared_factors_are_not_served_by_sglang(tmp_path):
    for family, tensors, text in (
        ("llama4_text", split(factors(), "llama4_text"), "does not start"),
        ("qwen3_moe", {n: t[:1] if "w2.lora_B" in n else t for n, t in stacked(factors(), "qwen3_moe").items()}, "all experts share"),
    ):
        (tmp_path / family).mkdir()
        model, _ = base(family, tmp_path / family)
        report = reshard.serve_check(adapter(tmp_path / family / "a", tensors), engine="sglang", model=model)
        assert [finding.id for finding in report.findings if text in finding.detail] == ["not-served"]


@pytest.mark.parametrize("family, kind", [
    ("qwen3_moe", "adapter-served"), ("gpt_oss", "adapter-served"), ("qwen3_5_moe_text", "adapter-not-checked"),
])  # fmt: skip
def test_serve_check_says_which_experts_the_loader_of_sglang_was_given(family, kind, tmp_path):
    model, _ = base(family, tmp_path)
    report = reshard.serve_check(adapter(tmp_path / "a", split(factors(), family)), engine="sglang", model=model)
    assert [finding.id for finding in report.findings if "adapter-" in finding.id] == [kind]


@pytest.mark.parametrize("case, base, text", [
    ("conv1d", "gpt2", "vLLM's class for gpt2 takes no adapters"),
    ("tied_saved", "llama-tied", "modules_to_save has embed_tokens"),
    ("resized", "llama-tied", "trained with 253 tokens, the base has 250"),
    ("tied_head", "qwen2", "changes lm_head, and vLLM's class for qwen2 adapts no tables of tokens"),
    ("classifier", "llama", "applies all of it"),
    ("bias", "llama", "vLLM has no biases of adapters"),
])  # fmt: skip
def test_serve_check_says_what_vllm_does_with_an_adapter_of_peft(case, base, text):
    report = reshard.serve_check(FIXTURES / "peft" / case / "adapter", model=FIXTURES / "hf" / base)
    assert any(text in finding.detail for finding in report.findings)
    errors = [finding for finding in report.findings if finding.id == "not-served"]
    assert bool(errors) == (case != "classifier")


def test_whole_tensors_beside_the_factors_are_not_served(tmp_path):
    folder = shutil.copytree(FIXTURES / "peft/plain/adapter", tmp_path / "a")
    held = safetensors.torch.load_file(folder / WEIGHTS) | {"base_model.model.model.norm.weight": torch.ones(4)}
    safetensors.torch.save_file(held, folder / WEIGHTS)
    (finding,) = reshard.serve_check(folder, model=FIXTURES / "hf/llama").findings
    assert finding.id == "not-served" and "model.norm.weight, a whole tensor" in finding.detail


@pytest.mark.parametrize("family", ["", "qwen3_5_moe", "nemotron_h"])
def test_the_split_form_of_an_adapter_of_tinker_has_the_tensors_of_tinker_cookbook(family, tmp_path):
    """fixtures/peft/make_tinker.py; one factor is shared by all experts, and the head has Tinker's name. Of Qwen3.5 the language part has
    another prefix; of Nemotron two modules become one of twice the rank, and empty factors are left out."""
    folder = FIXTURES / "peft/tinker" / family
    truth = json.loads((folder / "truth.json").read_text())
    out, _ = rewritten(
        folder / "adapter", tmp_path / "out", "split", FIXTURES / "hf" / truth["base"] if "base" in truth else folder / "model"
    )
    made = safetensors.torch.load_file(out / WEIGHTS)
    digests = {n: hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for n, t in sorted(made.items())}
    assert len(digests) == truth["tensors"] and hashlib.sha256(json.dumps(digests).encode()).hexdigest() == truth["split"]
    config = json.loads((out / "adapter_config.json").read_text())
    if family == "nemotron_h":
        assert config["rank_pattern"] == {"mixer.in_proj": 4} and config["alpha_pattern"] == {"mixer.in_proj": 12}
    if family == "qwen3_5_moe":  # and back
        back, _ = rewritten(out, tmp_path / "back", "tinker", folder / "model")
        again, first = (safetensors.torch.load_file(place / WEIGHTS) for place in (back, folder / "adapter"))
        assert again.keys() == first.keys() and all(torch.equal(again[name], first[name]) for name in first)


SPLIT = {
    "qwen3_5_moe": (
        "model.language_model.layers.0.linear_attn.in_proj_qkv",
        "layers.0.linear_attn",
        ("in_proj_q", "in_proj_k", "in_proj_v"),
    ),
    "nemotron_h": ("backbone.layers.0.mixer.in_proj", "layers.0.mixer", ("gate_proj", "x_proj")),
}


@pytest.mark.parametrize("family", SPLIT)
def test_projections_that_tinker_adapts_apart_change_their_rows_of_the_fused_weight(family, tmp_path):
    folder, (fused_name, module, parts) = FIXTURES / "peft/tinker" / family, SPLIT[family]
    config = json.loads((folder / "model" / "config.json").read_text())
    before = {name: numbers(i, *weight.shape) for i, (name, weight) in enumerate(find_model(config).weights.items())}
    model = write(tmp_path / "base", before, "model.safetensors", "config.json", config)
    after = merged(model, folder / "adapter", tmp_path / "out")[f"{fused_name}.weight"]
    held = safetensors.torch.load_file(folder / "adapter" / WEIGHTS)
    a, b = ([held[f"base_model.model.model.{module}.{part}.lora_{which}.weight"].float().numpy() for part in parts] for which in "AB")
    wanted = before[f"{fused_name}.weight"].copy()
    rows = np.concatenate([3 * (right @ left) for left, right in zip(a, b, strict=True)])
    wanted[: len(rows)] += rows
    assert np.allclose(after, wanted, rtol=0, atol=1e-5) and not np.array_equal(
        after[: len(rows)], before[f"{fused_name}.weight"][: len(rows)]
    )


@pytest.mark.parametrize("family", SPLIT)
def test_an_adapter_of_tinker_without_experts_has_the_names_of_the_model(family, tmp_path):
    """By its base alone, as tinker-cookbook names them; for an engine, what the model has as one module is one, and merges as before."""
    folder, (fused_name, module, parts) = FIXTURES / "peft/tinker" / family, SPLIT[family]
    truth = json.loads((folder / "truth.json").read_text())["dense"]
    held = {n: t for n, t in safetensors.torch.load_file(folder / "adapter" / WEIGHTS).items() if ".experts." not in n}
    dense = shutil.copytree(folder / "adapter", tmp_path / "dense")
    safetensors.torch.save_file(held, dense / WEIGHTS)
    plan = reshard.plan(dense, to="peft", model=folder / "model")
    assert any("the modules have the names" in note for note in plan.layout.notes)
    reshard.convert(plan, tmp_path / "out")
    made = safetensors.torch.load_file(tmp_path / "out" / WEIGHTS)
    digests = {n: hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for n, t in sorted(made.items())}
    assert len(digests) == truth["tensors"] and hashlib.sha256(json.dumps(digests).encode()).hexdigest() == truth["split"]
    reshard.convert(reshard.plan(dense, to="peft", model=folder / "model", engine="vllm"), tmp_path / "engine")
    joined = safetensors.torch.load_file(tmp_path / "engine" / WEIGHTS)
    assert any(name.endswith(f"{module}.{fused_name.rpartition('.')[2]}.lora_A.weight") for name in joined)
    assert not any(f"{module}.{part}." in name for name in joined for part in parts)
    reshard.convert(reshard.plan(dense, to="peft"), tmp_path / "copied")
    assert safetensors.torch.load_file(tmp_path / "copied" / WEIGHTS).keys() == held.keys()
    before = find_model(json.loads((folder / "model/config.json").read_text())).weights
    weights = {name: numbers(i, *weight.shape) for i, (name, weight) in enumerate(before.items())}
    config = json.loads((folder / "model/config.json").read_text())
    model = write(tmp_path / "base", weights, "model.safetensors", "config.json", config)
    one, other = merged(model, dense, tmp_path / "1"), merged(model, tmp_path / "engine", tmp_path / "2")
    assert one.keys() == other.keys() and all(np.allclose(one[name], other[name], rtol=0, atol=1e-5) for name in one)
    assert not np.array_equal(one[f"{fused_name}.weight"], weights[f"{fused_name}.weight"])


def test_an_adapter_of_tinker_is_copied_bit_by_bit(tmp_path):
    source = FIXTURES / "peft/tinker/adapter"
    reshard.convert(reshard.plan(source, to="peft"), tmp_path / "out")
    made, wanted = (safetensors.torch.load_file(folder / WEIGHTS) for folder in (tmp_path / "out", source))
    assert made.keys() == wanted.keys() and all(torch.equal(made[name], wanted[name]) for name in wanted)


def _hostile():
    made = {"split": split(factors(), "qwen3_moe"), "fused": fused(factors(), "qwen3_moe"), "stacked": stacked(factors(), "qwen3_moe")}
    good = {form: {f"{name}.weight": tensor for name, tensor in tensors.items()} for form, tensors in made.items()}
    expert = "mlp.experts.0.gate_proj"
    yield (
        "ranks that no number of experts divides",
        {name: tensor[:-1] if "lora_A" in name else tensor[:, :-1] for name, tensor in good["fused"].items()},
    )
    yield "three axes where two are", {name: tensor[None] for name, tensor in good["split"].items()}
    yield "two axes where three are", {name: tensor[0] for name, tensor in good["stacked"].items()}
    yield "no elements", {name: tensor[:0] for name, tensor in good["stacked"].items()} | good["split"]
    yield (
        "an expert that is not there",
        good["split"]
        | {f"mlp.experts.{10**30}.gate_proj.lora_{which}.weight": good["split"][f"{expert}.lora_{which}.weight"] for which in "AB"},
    )
    yield "a number that is none", {name.replace(".0.", ".\u0663."): tensor for name, tensor in good["split"].items()}
    yield "names outside of the base", {name.replace("mlp.", "../../"): tensor for name, tensor in good["split"].items()}
    yield "one factor without the other", {name: tensor for name, tensor in good["stacked"].items() if "lora_A" in name}
    yield "two forms of one adapter", good["split"] | good["stacked"]
    yield "two names of one factor", good["split"] | {f"{expert}.lora_A.bias.weight": good["split"][f"{expert}.lora_A.weight"]}
    yield (
        "many entries",
        good["split"] | {f"mlp.experts.{n}.x.lora_{which}.weight": np.zeros((1, 1), np.float32) for n in range(40_000) for which in "AB"},
    )


HOSTILE = dict(_hostile())


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_adapter_is_refused_in_a_moment_and_nothing_is_written(case, tmp_path):
    model, _ = base("qwen3_moe", tmp_path)
    tensors = {name.removesuffix(".weight"): tensor for name, tensor in HOSTILE[case].items()}
    folder = adapter(tmp_path / "a", tensors, target_parameters=TARGETS["qwen3_moe"] if "divides" in case else None)
    began = time.process_time()
    plans = [lambda: reshard.plan(model, to="hf", merge_adapter=folder)]
    plans += [lambda form=form: reshard.plan(folder, to="peft", experts=form, model=model) for form in ("fused", "split", "tinker")]
    for plan in plans:
        with pytest.raises((CheckpointError, RequestError, UnsupportedError)):
            plan()
    assert time.process_time() - began < 20


@pytest.mark.distinct
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_the_adapter_saves_whole_take_the_place_of_the_bases(family, tmp_path):
    """modules_to_save=["experts"]: PEFT saves the parameters of the module, stacked as transformers 5 has them."""
    folder, before = base(family, tmp_path)
    module, prefix = FAMILIES[family][1:]
    whole = {"gate_up_proj": numbers(7, E, 2 * INNER, H), "down_proj": numbers(8, E, H, INNER)}
    stored = {name: tensor.swapaxes(1, 2) if family in ("gpt_oss", "llama4_text") else tensor for name, tensor in whole.items()}
    k = "base_model.model.model.layers.0.self_attn.k_proj"
    tensors = {f"base_model.model.model.layers.0.{module}.{name}": tensor for name, tensor in stored.items()}
    tensors |= {f"{k}.lora_A.weight": numbers(9, R, H), f"{k}.lora_B.weight": np.zeros((8, R), np.float32)}
    config = {"peft_type": "LORA", "r": R, "lora_alpha": ALPHA, "modules_to_save": ["experts"], "target_modules": ["k_proj"]}
    lora = write(tmp_path / "lora", tensors, WEIGHTS, "adapter_config.json", config)
    reshard.convert(reshard.plan(folder, to="hf", merge_adapter=lora), tmp_path / "out")
    must = dict(before)
    for (e, name), _ in factors().items():
        plain = f"model.layers.0.{prefix}.{e}.{W[name] if family == 'mixtral' else f'{name}_proj'}.weight"
        if plain in before:
            must[plain] = {"gate": whole["gate_up_proj"][e, :INNER], "up": whole["gate_up_proj"][e, INNER:]}.get(
                name, whole["down_proj"][e]
            )
    must |= {f"model.layers.0.{prefix}.{name}": tensor for name, tensor in stored.items() if f"model.layers.0.{prefix}.{name}" in before}
    merged = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == must.keys()
    assert [name for name in merged if not np.array_equal(merged[name], must[name])] == []
    changed = [name for name in merged if not np.array_equal(merged[name], before[name])]
    assert len(changed) == (2 if family in ("gpt_oss", "llama4_text") else 3 * E)
