"""Mistakes of the merge of an adapter, made with numpy, and named by `explain --adapter`; and no right merge is accused."""

import json
import math

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from helpers.expert_adapters import ALPHA, FAMILIES, TARGETS, E, R, adapter, base, expected, factors, fused, split, write
from helpers.fixture_places import FIXTURES
from helpers.reshard_command import reshard as run

import reshard
from reshard.errors import RequestError

FORGOTTEN, IGNORED, TWICE, NEVER = "the scale was forgotten", "rsLoRA was ignored", "applied twice", "never applied"
EXCHANGED, SLOWEST = "gate and up were exchanged", "read expert-slowest"


def exchanged(made):
    other = {"gate": "up", "up": "gate", "down": "down"}
    return {(e, other[name]): pair for (e, name), pair in made.items()}


def slowest(made, family):
    """The factors by expert when lora_B of the fused form is read as it is not meant: [out, E, r]."""
    arrays, wrong = fused(made, family), {}
    for inner, names in ((".base_layer", ("gate", "up")), ("", ("down",))):
        a, b = (arrays[f"{FAMILIES[family][1]}{inner}.lora_{which}"] for which in "AB")
        for e in range(E):
            own_a, own_b = a.reshape(E, R, -1)[e], b.reshape(len(b), E, R)[:, e]
            if family == "llama4_text":
                own_a, own_b = own_b.T, own_a.T
            rows = own_b.reshape(-1, 2, R).swapaxes(0, 1) if family == "gpt_oss" and inner else own_b.reshape(len(names), -1, R)
            wrong |= {(e, name): (own_a, part) for name, part in zip(names, rows, strict=True)}
    return wrong


def wrong(mistake, family, before, made, right):
    """The weights after a merge with a mistake. right: the right scale."""
    scale = {FORGOTTEN: 1.0, IGNORED: ALPHA / R, TWICE: 2 * right, NEVER: 0.0}.get(mistake, right)
    made = exchanged(made) if mistake == EXCHANGED else slowest(made, family) if mistake == SLOWEST else made
    return expected(family, before, made, scale)


def model(family, tmp_path):
    """A base with values that round."""
    folder, tensors = base(family, tmp_path)
    random = np.random.default_rng(5)
    tensors = {name: (tensor + 0.1 * random.normal(size=tensor.shape)).astype(np.float32) for name, tensor in tensors.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder, tensors


def real(made):
    """Factors whose products round."""
    random = np.random.default_rng(6)
    noise = {key: random.normal(size=pair[0].shape).astype(np.float32) for key, pair in made.items()}
    return {(e, name): (a + 0.1 * noise[e, "gate" if name == "up" else name], b * np.float32(0.3)) for (e, name), (a, b) in made.items()}


def merged_folder(base_folder, tensors):
    """A folder beside the base, with its config and these weights."""
    config = json.loads((base_folder / "config.json").read_text())
    return write(base_folder.parent / "bad", tensors, "model.safetensors", "config.json", config)


@pytest.mark.distinct
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mistake", [None, FORGOTTEN, IGNORED, TWICE, NEVER, EXCHANGED, SLOWEST])
def test_a_mistake_of_the_merge_is_named_and_no_other(mistake, family, tmp_path):
    folder, before = model(family, tmp_path)
    made = real(factors())
    settings = {"use_rslora": True} if mistake == IGNORED else {}
    lora = adapter(tmp_path / "lora", fused(made, family), target_parameters=TARGETS[family], **settings)
    right = ALPHA / math.sqrt(R) if settings else ALPHA / R
    after = wrong(mistake, family, before, made, right)
    bad = merged_folder(folder, after)
    result = reshard.explain(bad, folder, adapter=lora)
    assert result.unexplained == [] and result.missing == []
    if mistake is None:
        assert result.equal
        return
    (named,) = result.mistakes
    assert mistake in named.text
    must = expected(family, before, made, right)
    differ = {name for name in before if not np.allclose(after[name], must[name], rtol=1e-4, atol=1e-4)}
    assert differ == set(named.tensors)


@pytest.mark.distinct
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "mistakes", [(SLOWEST, FORGOTTEN), (EXCHANGED, TWICE), (SLOWEST, EXCHANGED), (SLOWEST, EXCHANGED, FORGOTTEN, TWICE)]
)
def test_mistakes_that_were_made_together_are_all_named(mistakes, family, tmp_path):
    folder, before = model(family, tmp_path)
    made = real(factors())
    lora = adapter(tmp_path / "lora", fused(made, family), target_parameters=TARGETS[family])
    read = slowest(made, family) if SLOWEST in mistakes else made
    read = exchanged(read) if EXCHANGED in mistakes else read
    scale = (1.0 if FORGOTTEN in mistakes else ALPHA / R) * (2 if TWICE in mistakes else 1)
    result = reshard.explain(merged_folder(folder, expected(family, before, read, scale)), folder, adapter=lora)
    assert result.unexplained == []
    assert any(all(mistake in named.text for mistake in mistakes) for named in result.mistakes)
    texts = "; ".join(mistake.text for mistake in result.mistakes)
    assert all(other not in texts for other in {FORGOTTEN, TWICE, SLOWEST, EXCHANGED, IGNORED, NEVER} - {*mistakes})


def test_an_ignored_alpha_pattern_is_named(tmp_path):
    folder, before = model("qwen3_moe", tmp_path)
    made = real(factors())
    settings = {"alpha_pattern": {"experts.down_proj": 5}}
    lora = adapter(tmp_path / "lora", fused(made, "qwen3_moe"), target_parameters=TARGETS["qwen3_moe"], **settings)
    (named,) = reshard.explain(merged_folder(folder, expected("qwen3_moe", before, made, ALPHA / R)), folder, adapter=lora).mistakes
    assert named.text.startswith("alpha_pattern was ignored") and all("down_proj" in name for name in named.tensors)


def rounded(tensor):
    return torch.from_numpy(tensor).bfloat16()


@pytest.mark.distinct
@pytest.mark.parametrize("mistake", [None, FORGOTTEN, TWICE, SLOWEST])
@pytest.mark.parametrize("rounds_product", [False, True])
def test_merges_in_bfloat16_are_read_within_their_rounding(mistake, rounds_product, tmp_path):
    """Updates of the size of a few steps of the weights, some of them smaller."""
    folder, before = model("qwen3_moe", tmp_path)
    made = {key: (a, b * np.float32(0.01)) for key, (a, b) in real(factors()).items()}
    lora = adapter(tmp_path / "lora", fused(made, "qwen3_moe"), target_parameters=TARGETS["qwen3_moe"])
    before = {name: rounded(tensor) for name, tensor in before.items()}
    floats = {name: tensor.float().numpy() for name, tensor in before.items()}
    after = wrong(mistake, "qwen3_moe", floats, made, ALPHA / R)
    bad = merged_folder(folder, after)
    for where, tensors in ((folder, floats), (bad, after)):
        stored = {name: rounded(tensor) for name, tensor in tensors.items()}
        if rounds_product and where is bad:
            stored = {name: before[name] + rounded(after[name] - floats[name]) for name in stored}
        safetensors.torch.save_file(stored, where / "model.safetensors")
    done = run("explain", bad, folder, "--adapter", lora, "--json")
    texts = [each["text"] for each in done.document["mistakes"]]
    assert done.document["unexplained"] == [] and done.code == (mistake is not None), done.document
    assert texts == [] if mistake is None else len(texts) == 1 and mistake in texts[0], texts


def test_a_mistake_of_one_module_and_a_weight_that_the_adapter_does_not_change(tmp_path):
    folder, before = model("qwen3_moe", tmp_path)
    made = real(factors())
    lora = adapter(tmp_path / "lora", split(made, "qwen3_moe"))
    after = expected("qwen3_moe", before, made)
    down = "model.layers.0.mlp.experts.1.down_proj.weight"
    after[down] = before[down]
    after["model.norm.weight"] = after["model.norm.weight"] + 1
    after["model.layers.0.mlp.experts.2.up_proj.weight"] = np.zeros_like(after["model.layers.0.mlp.experts.2.up_proj.weight"])
    result = reshard.explain(merged_folder(folder, after), folder, adapter=lora)
    named = {mistake.text: mistake.tensors for mistake in result.mistakes}
    assert named.pop("the adapter was never applied") == (down,)
    assert [(names, "has one added" in text) for text, names in named.items()] == [(("model.norm.weight",), True)]
    assert result.unexplained == ["model.layers.0.mlp.experts.2.up_proj.weight"]


def test_two_mistakes_with_the_same_weights_are_both_named(tmp_path):
    """With alpha = r and rsLoRA, ignoring rsLoRA and forgetting the scale are the same."""
    folder, before = model("qwen3_moe", tmp_path)
    made = real(factors())
    lora = adapter(tmp_path / "lora", split(made, "qwen3_moe"), use_rslora=True, lora_alpha=R)
    (named,) = reshard.explain(merged_folder(folder, expected("qwen3_moe", before, made, 1.0)), folder, adapter=lora).mistakes
    assert IGNORED in named.text and FORGOTTEN in named.text


@pytest.mark.parametrize("case, base", [("resized", "llama-tied"), ("tied_head", "llama-tied"), ("tied_tokens", "llama-tied")])
def test_a_right_merge_of_tables_of_tokens_has_no_mistake(case, base, tmp_path):
    base, adapter = FIXTURES / "hf" / base, FIXTURES / "peft" / case / "adapter"
    reshard.convert(reshard.plan(base, to="hf", merge_adapter=adapter, dtype="fp32"), tmp_path / "merged")
    result = reshard.explain(tmp_path / "merged", base, adapter=adapter)
    assert not result.mistakes and not result.unexplained


def test_a_directory_without_an_adapter_is_refused(tmp_path):
    folder, _ = model("qwen3_moe", tmp_path)
    with pytest.raises(RequestError, match=r"`adapter=`: there is no adapter in PEFT's form"):
        reshard.explain(folder, folder, adapter=folder)


@pytest.mark.parametrize("case", ["classifier", "tied_saved"])
def test_a_head_that_the_adapter_brings_is_no_difference(case, tmp_path):
    """score.weight in place of lm_head.weight; a head of its own beside a tied embedding."""
    lora = FIXTURES / "peft" / case / "adapter"
    folder = FIXTURES / "hf" / json.loads((FIXTURES / "peft" / case / "truth.json").read_text())["base"]
    reshard.convert(reshard.plan(folder, to="hf", merge_adapter=lora), tmp_path / "merged")
    brought = {"classifier": ["lm_head.weight", "score.weight"], "tied_saved": ["lm_head.weight"]}[case]
    shown = run("explain", tmp_path / "merged", folder, "--adapter", lora)
    assert shown.code == 0 and sorted(shown.out.split("\n")[1:-1]) == [f"  by adapter   {name}" for name in brought], shown.out
    done = run("explain", tmp_path / "merged", folder, "--adapter", lora, "--json").document
    assert (done["missing"], sorted(done["brought"]), done["equal"]) == ([], brought, True)
    tensors = safetensors.torch.load_file(tmp_path / "merged" / "model.safetensors")
    name = brought[-1]
    (tmp_path / "merged" / "reshard.json").unlink()
    safetensors.torch.save_file({**tensors, name: tensors[name] * 2}, tmp_path / "merged" / "model.safetensors")
    done = run("explain", tmp_path / "merged", folder, "--adapter", lora, "--json").document
    assert (done["unexplained"], done["missing"], done["equal"]) == ([name], [], False)
