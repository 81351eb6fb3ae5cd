"""Trainers' names: read as the published model and written back. The oracle is each trainer's own conversion (fixtures/trainer_names)."""

import hashlib
import json
import re
import shutil

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from helpers.fixture_places import FIXTURES, HF

import reshard
from reshard.canonical.trainer_names import TRAINERS
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.models.lookup import find_model

FOLDER = FIXTURES / "trainer_names"
BASE = FOLDER / "llama"
TRUTH = json.loads((FOLDER / "truth.json").read_text())
CASES = [(model, trainer) for model, trainers in TRUTH.items() for trainer in trainers]


def base_of(model):
    return FOLDER / model if (FOLDER / model).is_dir() else HF / model


def stored(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def written(trainer, folder, base=BASE, **options):
    reshard.convert(reshard.plan(base, to="hf", names=trainer, **options), folder)
    return stored(folder)


def digests(tensors):
    return {
        name: [list(tensor.shape), hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()]
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(("model", "trainer"), CASES)
def test_what_is_written_are_the_bits_of_the_trainers_own_conversion(model, trainer, tmp_path):
    assert digests(written(trainer, tmp_path / "out", base_of(model))) == TRUTH[model][trainer]


def test_every_table_was_compared():
    # Mistral's mixture of experts is compared in test_consolidated.py, nanotron in test_nanotron.py.
    cases = {(trainer, model) for model, trainer in CASES} | {("meta", "mixtral"), ("nanotron", "llama")}
    assert {(table.trainer, (*table.pairs, *table.halves)[0]) for table in TRAINERS} <= cases
    assert cases <= {(table.trainer, model) for table in TRAINERS for model in (*table.pairs, *table.halves)}


@pytest.mark.parametrize(("model", "trainer"), CASES)
def test_a_trainers_names_are_read_as_the_published_model(model, trainer, tmp_path):
    base = base_of(model)
    tensors = written(trainer, tmp_path / "in", base)
    found = reshard.open(tmp_path / "in")
    assert reshard.verify(base, found).equal
    if model == "llama":
        reshard.convert(reshard.plan(found, to="vllm", tp=2), tmp_path / "vllm")
        assert reshard.verify(base, tmp_path / "vllm").equal
    # Meta's and torchtitan's extra tensor is computed from the config.
    extra = {"freqs_cis": torch.ones(4)} if model == "llama" and trainer in ("meta", "torchtitan", "torchtitan-0.2") else {}
    dcp.save({"model": {**tensors, **extra}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert reshard.verify(base, reshard.open(tmp_path / "dcp", model=base)).equal


@pytest.mark.parametrize("base", [BASE, HF / "llama-tied"], ids=["untied", "tied"])
@pytest.mark.parametrize("to", ["dcp", "fsdp"])
@pytest.mark.parametrize("trainer", ["torchtitan", "torchtitan-0.2", "meta", "litgpt", "olmo-core"])
def test_names_of_trainers_come_through_formats_that_keep_names(base, to, trainer, tmp_path):
    """Some names of a trainer are spelled as published ones, such as torchtitan's lm_head.weight: they mean the trainer's all the same."""
    stored_head = {"meta": "output.weight", "torchtitan-0.2": "output.weight", "olmo-core": "lm_head.w_out.weight"}
    tensors = written(trainer, tmp_path / "in", base)
    tensors.setdefault(stored_head.get(trainer, "lm_head.weight"), next(t for n, t in tensors.items() if "emb" in n or "wte" in n).clone())
    if trainer not in ("litgpt", "olmo-core"):
        tensors["freqs_cis"] = torch.ones(4)
    safetensors.torch.save_file(tensors, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "reshard.json").unlink()
    plan = reshard.plan(tmp_path / "in", to=to)
    assert plan.content.tensors.keys() == tensors.keys() and not plan.drops
    reshard.convert(plan, tmp_path / "through")
    result = reshard.convert(reshard.plan(tmp_path / "through", to="hf", model=base), tmp_path / "out")
    assert [drop.example for drop in result.dropped] == ["freqs_cis"] * ("freqs_cis" in tensors)
    assert reshard.verify(base, tmp_path / "out").equal


def test_rows_of_rotary_pairs_are_found_in_pieces_that_begin_inside_of_a_head(tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="hf", names="torchtitan"), tmp_path / "in")
    # Without a config the model is unknown, and names stay.
    (tmp_path / "in" / "config.json").unlink()
    reshard.convert(reshard.plan(tmp_path / "in", to="fsdp", dp=3), tmp_path / "fsdp")
    found = reshard.open(tmp_path / "fsdp", model=HF / "llama")
    assert any("qkv_linear" in tensor.name for tensor in found.index.tensors)
    assert reshard.verify(HF / "llama", found).equal


def test_names_are_recognised_by_all_of_them_and_by_shapes(tmp_path):
    tensors = written("torchtitan", tmp_path / "in")
    folder = tmp_path / "one"
    folder.mkdir()
    shutil.copy(BASE / "config.json", folder)
    safetensors.torch.save_file({**tensors, "layers.0.attention.wqq.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="no such weight"):
        reshard.plan(folder, to="hf")
    safetensors.torch.save_file({**tensors, "norm.weight": torch.ones(8)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"its shape is \[8\]; as a tensor of torchtitan it holds model.norm.weight"):
        reshard.plan(folder, to="hf")
    del tensors["norm.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="has no such weight"):
        reshard.plan(folder, to="hf")


def test_names_of_other_trainers_and_models_are_refused():
    with pytest.raises(RequestError, match=r"unknown trainer.*torchtitan"):
        reshard.plan(BASE, to="hf", names="titan")
    with pytest.raises(UnsupportedError, match=r"known for llama, qwen3, qwen3_moe, deepseek_v3, and this is qwen2"):
        reshard.plan(HF / "qwen2", to="hf", names="torchtitan")


# Of LLaMAMoE in litgpt 0.5.13; q, k and v are concatenated.
LITGPT_MOE = {
    "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "model.layers": "transformer.h", "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2", "self_attn.o_proj": "attn.proj", "block_sparse_moe": "mlp", "w1": "fc_1", "w3": "fc_2",
    "w2": "proj",
}  # fmt: skip


def litgpt_mixtral(folder):
    """The mixture of experts of fixtures/hf/mixtral under litgpt's names."""
    found = {}
    for path in sorted((HF / "mixtral").glob("*.safetensors")):
        for name, tensor in safetensors.torch.load_file(path).items():
            for ours, theirs in LITGPT_MOE.items():
                name = name.replace(ours, theirs)
            found[name] = tensor
    for layer in range(2):
        parts = [found.pop(f"transformer.h.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        found[f"transformer.h.{layer}.attn.qkv.weight"] = torch.cat(parts)
    folder.mkdir()
    safetensors.torch.save_file(found, folder / "model.safetensors")
    return folder


def test_a_model_that_a_trainers_table_does_not_hold_is_told_by_the_trainers_name(tmp_path):
    source = litgpt_mixtral(tmp_path / "in")
    for to in ("hf", "vllm"):
        with pytest.raises(
            UnsupportedError, match=r"those of litgpt, which are known for llama, mistral, and not for mixtral.*own program"
        ):
            reshard.plan(source, to=to, model=HF / "mixtral")
    notes = reshard.convert(reshard.plan(source, to="hf"), tmp_path / "out").notes
    assert any("names are those of litgpt, which transformers and serving engines do not load" in note for note in notes)
    assert not any("litgpt" in note for note in reshard.plan(source, to="dcp").layout.notes)
    more = {**written("litgpt", tmp_path / "llama"), "transformer.h.0.attn.qkv.bias": torch.ones(8)}
    safetensors.torch.save_file(more, tmp_path / "llama" / "model.safetensors")
    (tmp_path / "llama" / "reshard.json").unlink()
    with pytest.raises(UnsupportedError, match=r"qkv\.bias: the names are those of litgpt, and its .*qkv\.bias is not known"):
        reshard.plan(tmp_path / "llama", to="hf")


PROJECTIONS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
PRIME = {"mlp.gate.weight": "mlp.router.gate.weight", "block_sparse_moe.gate.weight": "mlp.router.gate.weight"}
PRIME |= {f"{old}.e_score_correction_bias": "mlp.expert_bias" for old in ("mlp.gate", "block_sparse_moe")}
PRIME |= {f"mlp.shared_experts.{old}.weight": f"mlp.shared_expert.{new}" for old, new in PROJECTIONS.items()}


@pytest.mark.parametrize("model_type", ["glm4_moe", "minimax_m2", "afmoe"])
def test_prime_rl_names_the_experts_and_keeps_the_published_names_of_the_rest(model_type, tmp_path):
    """Dense layers first, biases, shared experts. prime-rl's own conversion was compared with the same rules once."""
    config = json.loads((FIXTURES / "vllm_declared" / f"{model_type}.json").read_text())["config"]
    weights = {name: torch.randn(weight.shape) for name, weight in find_model(config).weights.items() if not weight.optional}
    (tmp_path / "hf").mkdir()
    safetensors.torch.save_file(weights, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    expected, stacks = {}, {}
    for name, value in weights.items():
        expert = re.fullmatch(r"(.*layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.\d+\.(\w+)\.weight", name)
        if expert:
            kind = PROJECTIONS.get(expert[2], expert[2])
            stacks.setdefault(f"{expert[1]}.mlp.experts.{kind}", []).append(value)
        else:
            end = next((end for end in PRIME if name.endswith(end)), "")
            expected[name.removesuffix(end) + PRIME.get(end, "")] = value
    expected |= {name: torch.stack(values) for name, values in stacks.items()}
    assert digests(written("prime-rl", tmp_path / "prime", tmp_path / "hf")) == digests(expected)
    assert reshard.verify(tmp_path / "hf", tmp_path / "prime").equal
    dcp.save({"app": {"model": expected}}, checkpoint_id=tmp_path / "step_2" / "trainer", no_dist=True)
    assert reshard.verify(tmp_path / "hf", reshard.open(tmp_path / "step_2", model=tmp_path / "hf")).equal
