"""Several adapters become one, as PEFT's add_weighted_adapter makes it. The oracle is numpy in float32, in the steps of PEFT's code;
tests/peft/check.py compares with PEFT itself."""

import json

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from helpers.expert_adapters import FAMILIES, TARGETS, WEIGHTS, H, R, adapter, base, expected, factors, fused, numbers, split, stacked

import reshard
from reshard.errors import RequestError, UnsupportedError

PREFIX = "base_model.model.model.layers.0."
Q, K = "self_attn.q_proj", "self_attn.k_proj"


def stored(folder, name=WEIGHTS):
    return safetensors.numpy.load_file(folder / name)


def combined(first, others, out, **options):
    plan = reshard.plan(first, to="peft", merge_adapter=("self", *others), **options)
    reshard.convert(plan, out)
    return stored(out), json.loads((out / "adapter_config.json").read_text()), plan


def pair(seed, rank, into=H, out=16):
    values = np.random.default_rng(seed)
    return values.standard_normal((rank, into), np.float32), values.standard_normal((out, rank), np.float32)


def dense(folder, modules, **settings):
    tensors = {f"{module}.lora_{which}": factor for module, made in modules.items() for which, factor in zip("AB", made, strict=True)}
    return adapter(folder, tensors, **{"target_modules": sorted({name.rpartition(".")[2] for name in modules}), **settings})


def f32(number):
    return np.float32(number)


def test_cat_puts_the_factors_in_a_row_with_the_bits_of_peft(tmp_path):
    one, two, other = pair(1, 4), pair(2, 3), pair(3, 4)
    a = dense(tmp_path / "a", {Q: one, K: other}, r=4, lora_alpha=6)
    b = dense(tmp_path / "b", {Q: two}, r=3, lora_alpha=5, use_rslora=True)
    made, config, _ = combined(a, [b], tmp_path / "out", adapter_weight=(0.7, -0.3))
    scale = 5 / 3**0.5
    rows = np.concatenate([one[0] * f32(0.7) * f32(1.5), two[0] * f32(-0.3) * f32(scale)])
    assert made[f"{PREFIX}{Q}.lora_A.weight"].tobytes() == rows.tobytes()
    assert made[f"{PREFIX}{Q}.lora_B.weight"].tobytes() == np.concatenate([one[1], two[1]], axis=1).tobytes()
    filled = np.concatenate([other[0] * f32(0.7) * f32(1.5), np.zeros((3, H), np.float32)])
    assert np.array_equal(made[f"{PREFIX}{K}.lora_A.weight"], filled)  # of the rank of all modules, as PEFT makes it
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (7, 7, False)
    assert config["target_modules"] == ["k_proj", "q_proj"]


def test_linear_adds_the_factors_with_the_bits_of_peft(tmp_path):
    weights, scales = (0.7, -0.3, 1.1), (1.5, 6 / 4**0.5, 1.5)
    pairs = [pair(seed, 4) for seed in range(3)]
    folders = [dense(tmp_path / f"a{i}", {Q: made}, r=4, lora_alpha=6, use_rslora=i == 1) for i, made in enumerate(pairs)]
    made, config, _ = combined(folders[0], folders[1:], tmp_path / "out", adapter_weight=weights, combine="linear")
    for which, name in enumerate(("lora_A", "lora_B")):
        total = np.zeros_like(pairs[0][which])
        for of_adapter, weight, scale in zip(pairs, weights, scales, strict=True):
            sign = -1 if weight < 0 and not which else 1
            total = total + of_adapter[which] * f32(abs(weight * scale) ** 0.5 * sign)
        assert made[f"{PREFIX}{Q}.{name}.weight"].tobytes() == total.tobytes()
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 4, False)


def test_adapters_in_bfloat16_are_combined_in_float32_as_peft_loads_them(tmp_path):
    one, two = pair(1, 2), pair(2, 2)
    a, b = dense(tmp_path / "a", {Q: one}), dense(tmp_path / "b", {Q: two})
    halves = {name: tensor.bfloat16() for name, tensor in safetensors.torch.load_file(b / WEIGHTS).items()}
    safetensors.torch.save_file(halves, b / WEIGHTS)
    made, _, _ = combined(a, [b], tmp_path / "out", adapter_weight=(1, 0.1))
    rounded = torch.from_numpy(two[0]).bfloat16().float().numpy()
    assert made[f"{PREFIX}{Q}.lora_A.weight"][2:].tobytes() == (rounded * f32(0.1) * f32(3)).tobytes()


def sources(form, family, tmp_path):
    """Two adapters of experts, with the scale 1, and their factors."""
    made = factors(), {key: (a + numbers(7, *a.shape), b - 1) for key, (a, b) in factors().items()}
    of_form = {"split": split, "stacked": stacked, "fused": fused}[form]
    targets = {"target_parameters": TARGETS[family]} if form == "fused" else {}
    if form == "fused":  # gate and up have one A
        made = made[0], {(e, name): (made[1][e, "gate" if name == "up" else name][0], b) for (e, name), (_, b) in made[1].items()}
    return [adapter(tmp_path / str(i), of_form(own, family), lora_alpha=R, **targets) for i, own in enumerate(made)], made


@pytest.mark.parametrize("form", ["split", "stacked", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_combined_one_by_one(family, form, tmp_path):
    model, before = base(family, tmp_path)
    (a, b), (one, two) = sources(form, family, tmp_path)

    def merged(name, adapters, **options):
        reshard.convert(reshard.plan(model, to="hf", merge_adapter=adapters, **options), tmp_path / name)
        return stored(tmp_path / name, "model.safetensors")

    for how in ("cat", "linear"):
        if how == "cat":
            wanted = expected(family, expected(family, before, one, 4), two, -0.25)
        else:  # the roots of 4 and 0.25, with cross terms
            sign = -1 if form == "fused" and family == "llama4_text" else 1  # whose lora_A meets the output features
            sums = {key: (2 * one[key][0] - sign * two[key][0] / 2, 2 * one[key][1] + sign * two[key][1] / 2) for key in one}
            wanted = expected(family, before, sums, 1)
        _, _, plan = combined(a, [b], tmp_path / how, adapter_weight=(4, -0.25), combine=how, model=model)
        assert any(f"as PEFT's {how} does" in note for note in plan.layout.notes)
        for name, found in (
            ("adapter", merged(f"{how}-of-one", tmp_path / how)),
            ("weights", merged(f"{how}-of-two", (a, b), adapter_weight=(4, -0.25), combine=how)),
        ):
            assert found.keys() == wanted.keys() and all(np.array_equal(found[key], wanted[key]) for key in wanted), (how, name)


def test_the_adapter_that_a_checkpoint_holds_is_combined_with_another_one(tmp_path):
    model, before = base("qwen3_moe", tmp_path)
    (a, b), (one, two) = sources("split", "qwen3_moe", tmp_path)
    both = {f"base_model.model.{name}": tensor for name, tensor in before.items()} | stored(a)
    trained = tmp_path / "trained"
    trained.mkdir()
    named = {name.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default."): tensor for name, tensor in both.items()}
    torch.save({name: torch.from_numpy(np.ascontiguousarray(tensor)) for name, tensor in named.items()}, trained / "state.pt")
    about = {"model": model, "adapter_config": a, "merge_adapter": ("self", b), "adapter_weight": (4, -0.25), "combine": "linear"}
    reshard.convert(reshard.plan(trained / "state.pt", to="hf", **about), tmp_path / "merged")
    reshard.convert(reshard.plan(trained / "state.pt", to="peft", **about), tmp_path / "alone")
    sums = {key: (2 * one[key][0] - two[key][0] / 2, 2 * one[key][1] + two[key][1] / 2) for key in one}
    wanted = expected("qwen3_moe", before, sums, 1)
    merged = stored(tmp_path / "merged", "model.safetensors")
    assert all(np.array_equal(merged[name], wanted[name]) for name in wanted)
    direct, _, _ = combined(a, [b], tmp_path / "direct", adapter_weight=(4, -0.25), combine="linear", model=model)
    alone = stored(tmp_path / "alone")
    assert alone.keys() == direct.keys() and all(alone[name].tobytes() == direct[name].tobytes() for name in direct)
    recorded = json.loads((tmp_path / "merged" / "reshard.json").read_text())["adapter"]
    assert (recorded["combination"], recorded["weight"], recorded["before"]["weight"]) == ("linear", -0.25, 4)


def test_whole_weights_of_one_adapter_are_kept(tmp_path):
    a, b = (dense(tmp_path / name, {Q: pair(seed, 2)}) for seed, name in enumerate("ab"))
    rows = numbers(9, 2, H)
    held = stored(b) | {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": rows}
    safetensors.numpy.save_file(held, b / WEIGHTS)
    config = json.loads((b / "adapter_config.json").read_text())
    (b / "adapter_config.json").write_text(json.dumps(config | {"trainable_token_indices": [7, 3]}))
    made, config, _ = combined(a, [b], tmp_path / "out", adapter_weight=(0.5, 1))
    assert np.array_equal(made["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"], rows)
    assert config["trainable_token_indices"] == [7, 3]
    with pytest.raises(RequestError, match=r"`adapter_weight=0.5`: the adapter holds whole weights"):
        combined(a, [b], tmp_path / "no", adapter_weight=(1, 0.5))
    with pytest.raises(RequestError, match="two of the adapters hold whole weights"):
        combined(b, [b], tmp_path / "no")


REFUSED = [
    ({"combine": "ties"}, RequestError, r"`combine=ties`: no such way.*cat, linear"),
    ({"combine": "cat", "merge_adapter": "self"}, RequestError, "1 adapter cannot be combined"),
    ({"merge_adapter": ("b",)}, RequestError, "names adapters, and not that of the source"),
    ({"experts": "split"}, RequestError, "`experts=` with several adapters"),
    ({"combine": "linear"}, UnsupportedError, "`combine=linear`: the adapters have different ranks"),
]


@pytest.mark.parametrize("given, error, message", REFUSED)
def test_what_cannot_be_combined_is_refused(given, error, message, tmp_path):
    a, b = (dense(tmp_path / name, {Q: pair(rank, rank)}, r=rank) for rank, name in ((2, "a"), (3, "b")))
    given = {key: tuple({"b": b}.get(name, name) for name in text) if isinstance(text, tuple) else text for key, text in given.items()}
    with pytest.raises(error, match=message):
        reshard.plan(a, to="peft", **({"merge_adapter": ("self", b)} | given))


def test_experts_without_a_model_and_in_two_forms_are_refused(tmp_path):
    model, _ = base("qwen3_moe", tmp_path)
    (a, b), _ = sources("fused", "qwen3_moe", tmp_path)
    with pytest.raises(RequestError, match=r"the base model is not known.*`model=DIR`"):
        combined(a, [b], tmp_path / "no")
    other = adapter(tmp_path / "other", stacked(factors(), "qwen3_moe"))
    one = stored(other)
    shared = {name: tensor[:1] if ".w1.lora_A" in name else tensor for name, tensor in one.items()}
    second = adapter(tmp_path / "second", {})
    safetensors.numpy.save_file(shared, second / WEIGHTS)
    with pytest.raises(UnsupportedError, match=r"are of two forms.*`experts=split`"):
        combined(other, [second], tmp_path / "no", model=model)
    dora = dense(tmp_path / "dora", {Q: pair(1, 2)}, use_dora=True)
    safetensors.numpy.save_file(stored(dora) | {f"{PREFIX}{Q}.lora_magnitude_vector": numbers(1, 16)}, dora / WEIGHTS)
    with pytest.raises(UnsupportedError, match="adapters with lora_magnitude_vector are not combined"):
        combined(dora, [dora], tmp_path / "no")
