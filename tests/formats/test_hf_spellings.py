"""Hugging Face folders under other names than the published ones, by real transformers 5: read as published, and written --like them."""

import hashlib
import json
import shutil

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from helpers.fixture_places import HF, VLLM, described, ranks, read_reference, stored

import reshard
from reshard.errors import CheckpointError, RequestError
from reshard.verbs.roundtrip import materialize

CASES = sorted(path.parent.name for path in HF.glob("*/published.json"))
FUSED = [case for case in CASES if case.endswith("-fused")]
assert len(CASES) >= 6 and len(FUSED) >= 5


# Of GPT2Model, which has no head: an embedding model, whose names have no `transformer.` in front.
BARE = "gpt2-bare"


def published(case):
    weights = json.loads((HF / case / "published.json").read_text())
    return {name.removeprefix("transformer."): weight for name, weight in weights.items()} if case == BARE else weights


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def weights(folder):
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in stored(path).items()}


def convert(source, folder, **options):
    reshard.convert(reshard.plan(source, **{"to": "hf", **options}), folder)
    return folder


def edited(case, folder, edit):
    """A copy of a fixture of one file with other tensors in it."""
    shutil.copytree(HF / case, folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(
        {name: each.contiguous() for name, each in edit(tensors).items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


@pytest.mark.parametrize("case", CASES)
def test_it_is_read_as_it_is_published(case):
    opened = reshard.open(HF / case)
    content = opened.content().tensors
    assert {name: described(tensor, opened.files) for name, tensor in content.items()} == published(case)
    assert case == BARE or "stored under other names" in reshard.plan(opened, to="hf").layout.notes[0]


@pytest.mark.parametrize("case", CASES)
def test_it_is_written_as_it_is_published(case, tmp_path):
    out = convert(HF / case, tmp_path / "out")
    found = {
        name: {"dtype": dtype, "shape": shape, "sha256": hashlib.sha256(data).hexdigest()}
        for name, (dtype, shape, data) in weights(out).items()
    }
    assert found == published(case)
    assert reshard.verify(out, HF / case).equal


@pytest.mark.parametrize("case", CASES)
def test_like_makes_the_very_files_that_transformers_wrote(case, tmp_path):
    apart = convert(HF / case, tmp_path / "apart")
    fused = convert(apart, tmp_path / "fused", like=HF / case)
    assert files_of(fused) == files_of(HF / case)
    back = convert(fused, tmp_path / "back", like=apart)
    assert files_of(back) == files_of(apart)
    if (index := HF / case / "model.safetensors.index.json").exists():
        wanted, found = json.loads(index.read_text()), json.loads((fused / index.name).read_text())
        assert found["weight_map"] == wanted["weight_map"] and found["metadata"]["total_size"] == wanted["metadata"]["total_size"]


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_is_proven(case, tmp_path):
    apart = convert(HF / case, tmp_path / "apart")
    for source, like in ((apart, HF / case), (HF / case, None), (HF / case, HF / case)):
        opened = reshard.open(source)
        plan = reshard.plan(opened, to="hf", like=like)
        proof = reshard.roundtrip(plan)
        assert not proof.losses and proof.tensors == len(published(case))
        assert not materialize(plan, opened, work=tmp_path)


def test_a_shard_size_goes_before_the_files_of_the_reference(tmp_path):
    out = convert(HF / "mixtral-fused", tmp_path / "out", like=HF / "mixtral-fused", max_shard_size=4_000)
    assert len(files_of(out)) > 2 and weights(out) == weights(HF / "mixtral-fused")
    assert reshard.verify(out, HF / "mixtral-fused").equal


@pytest.mark.parametrize("options", [{"to": "fsdp", "dp": 3}, {"to": "dcp"}], ids=str)
def test_formats_that_a_run_goes_on_from_keep_the_sources_names(options, tmp_path):
    """transformers 5 trains with fused experts, so its checkpoints have them, too: cut over ranks."""
    case = "qwen2_moe-fused"
    opened = reshard.open(HF / case)
    plan = reshard.plan(opened, **options)
    assert {route.name for route in plan.routes} == set(weights(HF / case)) and "names stay" in plan.layout.notes[0]
    assert not reshard.roundtrip(plan).losses and not materialize(plan, opened, work=tmp_path)
    reshard.convert(plan, tmp_path / "ranks")
    assert reshard.verify(tmp_path / "ranks", HF / case).equal
    assert {t.name for t in reshard.open(tmp_path / "ranks").index.tensors} == set(weights(HF / case))
    out = convert(tmp_path / "ranks", tmp_path / "out")
    assert {name: shape for name, (_, shape, _) in weights(out).items()} == {n: each["shape"] for n, each in published(case).items()}
    assert reshard.verify(out, HF / case).equal


def test_where_one_of_two_has_a_config_it_speaks_for_both(tmp_path):
    apart = convert(HF / "mixtral-fused", tmp_path / "apart")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(HF / "mixtral-fused" / "model.safetensors", bare)
    assert reshard.verify(bare, apart).equal and reshard.verify(apart, bare).equal


def test_a_prefix_of_all_names_is_taken_off_first(tmp_path):
    case = "mixtral-fused"
    wrapped = edited(case, tmp_path / "m", lambda tensors: {f"policy.{name}": each for name, each in tensors.items()})
    assert convert(wrapped, tmp_path / "out", strip_prefix="policy.")
    assert {name: hashlib.sha256(data).hexdigest() for name, (_, _, data) in weights(tmp_path / "out").items()} == {
        name: each["sha256"] for name, each in published(case).items()
    }


@pytest.mark.parametrize("old, new", [("", "language_model."), ("model.", "model.language_model.")])
def test_the_text_model_of_a_larger_one_is_read(old, new, tmp_path):
    case = "mixtral-fused"
    larger = edited(
        case,
        tmp_path / "larger",
        lambda tensors: {new + name.removeprefix(old) if name.startswith(old) else name: each for name, each in tensors.items()},
    )
    assert reshard.verify(larger, HF / case).equal
    assert files_of(convert(larger, tmp_path / "out", like=HF / case)) == files_of(HF / case)
    assert files_of(convert(HF / case, tmp_path / "back", like=larger)) == files_of(larger)


def test_q_k_v_and_gate_up_are_fused_and_taken_apart(tmp_path):
    def fuse(tensors):
        for layer in ("model.layers.0.", "model.layers.1."):
            for fused, parts in (("self_attn.qkv", ("self_attn.q", "self_attn.k", "self_attn.v")), ("mlp.gate_up", ("mlp.gate", "mlp.up"))):
                tensors[f"{layer}{fused}_proj.weight"] = torch.cat([tensors.pop(f"{layer}{part}_proj.weight") for part in parts])
        return tensors

    fused = edited("llama", tmp_path / "fused", fuse)
    assert reshard.verify(fused, HF / "llama").equal
    assert weights(convert(HF / "llama", tmp_path / "out", like=fused)) == weights(fused)
    assert files_of(convert(fused, tmp_path / "back", like=HF / "llama")) == files_of(HF / "llama")


def test_phi3_has_them_fused_and_is_written_apart(tmp_path):
    """The other way round from llama: what is published is fused."""

    def take_apart(tensors):
        config = json.loads((HF / "phi3" / "config.json").read_text())
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        heads, kv_heads = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
        for layer in range(config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            qkv = tensors.pop(at + "self_attn.qkv_proj.weight").split([heads, kv_heads, kv_heads])
            gate_up = tensors.pop(at + "mlp.gate_up_proj.weight").chunk(2)
            tensors |= {f"{at}self_attn.{letter}_proj.weight": part for letter, part in zip("qkv", qkv, strict=True)}
            tensors |= {f"{at}mlp.{name}_proj.weight": part for name, part in zip(("gate", "up"), gate_up, strict=True)}
        return tensors

    apart = edited("phi3", tmp_path / "apart", take_apart)
    assert weights(apart).keys() != weights(HF / "phi3").keys() and reshard.verify(apart, HF / "phi3").equal
    plan = reshard.plan(HF / "phi3", to="hf", like=apart)
    assert not reshard.roundtrip(plan).losses
    reshard.convert(plan, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(apart)
    assert files_of(convert(apart, tmp_path / "back", like=HF / "phi3")) == files_of(HF / "phi3")


@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("degree", ["tp2", "tp4-ep"])
def test_from_fused_experts_every_rank_holds_what_real_vllm_holds(model, degree, tmp_path):
    names = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj")}
    module, gate, up, down = names[model]
    config = json.loads((HF / model / "config.json").read_text())
    experts = config.get("num_local_experts") or config["num_experts"]

    def fuse(tensors):
        for at in {name.split(f".{module}.experts.")[0] for name in tensors if f".{module}.experts." in name}:
            each = [{p: tensors.pop(f"{at}.{module}.experts.{i}.{p}.weight") for p in (gate, up, down)} for i in range(experts)]
            tensors[f"{at}.mlp.experts.gate_up_proj"] = torch.stack([torch.cat([held[gate], held[up]]) for held in each])
            tensors[f"{at}.mlp.experts.down_proj"] = torch.stack([held[down] for held in each])
        return tensors

    fused, expected = edited(model, tmp_path / "fused", fuse), read_reference(VLLM / model / f"{degree}.json")
    assert not any(".experts.0." in name for name in weights(fused))
    plan = reshard.plan(fused, to="vllm", tp=expected["tp"], ep=expected.get("ep", 1))
    reshard.convert(plan, tmp_path / "out")
    assert ranks(tmp_path / "out") == expected["ranks"]


def test_like_brings_the_element_types_tensor_by_tensor(tmp_path):
    def widen(tensors):
        return {name: each.float() if "norm" in name or name.endswith("gate.weight") else each for name, each in tensors.items()}

    reference = edited("mixtral-fused", tmp_path / "reference", widen)
    apart = convert(HF / "mixtral-fused", tmp_path / "apart")
    plan = reshard.plan(apart, to="hf", like=reference)
    reshard.convert(plan, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(reference)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert not reshard.roundtrip(plan).losses, "these casts lose nothing"


def test_headers_are_enough(tmp_path):
    case, reference = "qwen3_moe-fused", tmp_path / "reference"
    shutil.copytree(HF / case, reference)
    for path in reference.glob("*.safetensors"):
        raw = path.read_bytes()
        path.write_bytes(raw[: 8 + int.from_bytes(raw[:8], "little")])
    with pytest.raises(CheckpointError, match="are incomplete"):
        reshard.open(reference)
    assert files_of(convert(HF / case, tmp_path / "out", like=reference)) == files_of(HF / case)


def test_what_does_not_fit_is_told_all_at_once(tmp_path):
    def change(tensors):
        tensors["model.visual.proj.weight"] = torch.zeros(2, 2)
        tensors["model.layers.0.mlp.experts.down_proj"] = tensors["model.layers.0.mlp.experts.down_proj"].mT
        tensors["model.norm.weight"] = tensors["model.norm.weight"].view(torch.int16)
        return tensors

    reference = edited("mixtral-fused", tmp_path / "reference", change)
    with pytest.raises(RequestError) as caught:
        reshard.plan(HF / "mixtral-fused", to="hf", like=reference)
    for wanted in (
        "not in the source: 1 (model.visual.proj.weight)",
        "another shape: 1 (model.layers.0.mlp.experts.down_proj ([4, 12, 8] there, [4, 8, 12] here))",
        "an element type that cannot be cast: 1 (model.norm.weight (I16 there, BF16 here))",
        str(reference),
    ):
        assert wanted in str(caught.value)


def test_what_the_reference_has_no_place_for_is_told(tmp_path):
    fewer = edited("mixtral-fused", tmp_path / "fewer", lambda tensors: {n: t for n, t in tensors.items() if "q_proj" not in n})
    with pytest.raises(RequestError, match=r"no place for: 2 \(model\.layers\.0\.self_attn\.q_proj\.weight, .*`exclude="):
        reshard.plan(HF / "mixtral-fused", to="hf", like=fewer)
    assert len(weights(convert(HF / "mixtral-fused", tmp_path / "out", like=fewer, exclude=("*q_proj*",)))) == 19


def test_what_the_reference_has_twice_is_told(tmp_path):
    def double(tensors):
        tensors["model.layers.0.block_sparse_moe.gate.weight"] = tensors["model.layers.0.mlp.gate.weight"].clone()
        return tensors

    twice = edited("mixtral-fused", tmp_path / "twice", double)
    with pytest.raises(RequestError, match=r"several places for: 1 \(model\.layers\.0\.block_sparse_moe\.gate\.weight"):
        reshard.plan(HF / "mixtral-fused", to="hf", like=twice)
    assert reshard.verify(twice, HF / "mixtral-fused").equal, "as a source it is read: both are compared"


def test_two_copies_that_disagree_are_found(tmp_path):
    def disagree(tensors):
        tensors["model.layers.0.block_sparse_moe.gate.weight"] = tensors["model.layers.0.mlp.gate.weight"] + 1
        return tensors

    plan = reshard.plan(edited("mixtral-fused", tmp_path / "m", disagree), to="hf")
    with pytest.raises(CheckpointError, match=r"block_sparse_moe\.gate\.weight"):
        reshard.convert(plan, tmp_path / "out")


def test_what_nobody_needs_of_the_reference_is_left_out_with_a_note(tmp_path):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
        return tensors

    reference = edited("llama-tied", tmp_path / "reference", add)
    plan = reshard.plan(HF / "llama-tied", to="hf", like=reference)
    notes = " ".join(plan.layout.notes)
    assert "lm_head.weight; it is tied to model.embed_tokens.weight" in notes and "inv_freq; every engine computes it" in notes
    reshard.convert(plan, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(HF / "llama-tied")


def test_of_a_model_that_is_not_declared_only_equal_names_are_matched(tmp_path):
    def copied(case, to):
        folder = shutil.copytree(HF / case, tmp_path / to)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "somebodys_own"}))
        return folder

    own = copied("mixtral-fused", "own")
    assert files_of(convert(own, tmp_path / "out", like=HF / "mixtral-fused")) == files_of(HF / "mixtral-fused")
    apart = convert(HF / "mixtral-fused", tmp_path / "apart")
    with pytest.raises(RequestError, match=r"experts\.0\.w1\.weight.*only.*"):
        reshard.plan(own, to="hf", like=apart)


def test_like_is_hfs_own_option_and_brings_element_types():
    with pytest.raises(RequestError, match="`like=` does not apply to vllm"):
        reshard.plan(HF / "llama", to="vllm", like=HF / "llama")
    with pytest.raises(RequestError, match="`dtype="):
        reshard.plan(HF / "llama", to="hf", like=HF / "llama", dtype="fp32")
    with pytest.raises(RequestError, match="no file or directory"):
        reshard.plan(HF / "llama", to="hf", like=HF / "nowhere")


@pytest.mark.parametrize("target", ["megatron", "megatron-dist"])
def test_a_run_of_transformers_5_goes_on_in_megatron(target, tmp_path):
    """What the optimizer keeps of fused experts is cut as they are; torch's own writer, names as the model has them in memory."""
    case, kinds = "mixtral-fused", {"exp_avg": "moment1", "exp_avg_sq": "moment2"}
    model = safetensors.torch.load_file(HF / case / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    state = {
        name: {kind: torch.rand(each.shape, generator=generator) for kind in kinds} | {"step": torch.tensor(5.0)}
        for name, each in model.items()
    }
    groups = [{"params": list(model), "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}]
    dcp.save({"model": model, "optim": {"state": state, "param_groups": groups}}, checkpoint_id=tmp_path / "run", no_dist=True)
    opened = reshard.open(tmp_path / "run", model=HF / case)
    reshard.convert(reshard.plan(opened, to=target, optimizer=True), tmp_path / "out")
    found = {(t.name, t.kind): t for t in reshard.open(tmp_path / "out", model=HF / case).index.tensors}
    files = reshard.open(tmp_path / "out", model=HF / case).files
    for expert in range(4):
        for stored_name, part in (("w1", slice(0, 12)), ("w3", slice(12, 24)), ("w2", slice(None))):
            fused = "model.layers.1.mlp.experts." + ("down_proj" if stored_name == "w2" else "gate_up_proj")
            own = f"model.layers.1.block_sparse_moe.experts.{expert}.{stored_name}.weight"
            for kind, role in kinds.items():
                expected = state[fused][kind][expert, part].contiguous().numpy().tobytes()
                assert described(found[own, role], files)["sha256"] == hashlib.sha256(expected).hexdigest()


def test_a_run_goes_on_under_its_own_names_with_its_optimizer(tmp_path):
    case = "mixtral-fused"
    model = safetensors.torch.load_file(HF / case / "model.safetensors")
    state = {name: {"exp_avg": each.float() + 1, "step": torch.tensor(5.0)} for name, each in model.items()}
    dcp.save(
        {"model": model, "optim": {"state": state, "param_groups": [{"params": list(model), "lr": 0.1}]}},
        checkpoint_id=tmp_path / "run",
        no_dist=True,
    )
    opened = reshard.open(tmp_path / "run", model=HF / case)
    reshard.convert(reshard.plan(opened, to="fsdp", dp=3, optimizer=True), tmp_path / "out")
    result = reshard.open(tmp_path / "out", model=HF / case)
    assert {(t.name, t.kind) for t in result.index.tensors} == {(n, role) for n in model for role in ("weight", "moment1", "step")}
    assert reshard.verify(opened, result).equal


def quantized(case, folder):
    """Linear layers in 8 bits, a scale for each block of 4 x 4 (weight_scale_inv), those of fused experts as transformers names them."""

    def quantize(tensors):
        scales = {}
        for name, each in tensors.items():
            if "experts" in name or "self_attn" in name:
                *outer, rows, columns = each.shape
                beside = f"{name}_scale_inv" if "experts" in name else name.replace(".weight", ".weight_scale_inv")
                scales[beside] = 1 + torch.rand(
                    *outer, -(-rows // 4), -(-columns // 4), generator=torch.Generator().manual_seed(len(scales))
                )
        return {n: each.to(torch.float8_e4m3fn) if "experts" in n or "self_attn" in n else each for n, each in tensors.items()} | scales

    edited(case, folder, quantize)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_block_scales_are_fused_with_their_experts(tmp_path):
    fused = quantized("mixtral-fused", tmp_path / "fused")
    tensors = safetensors.torch.load_file(fused / "model.safetensors")
    apart = convert(fused, tmp_path / "apart")
    found = safetensors.torch.load_file(apart / "model.safetensors")
    at, expert = "model.layers.0.mlp.experts.", "model.layers.0.block_sparse_moe.experts.2."
    assert torch.equal(found[expert + "w3.weight_scale_inv"], tensors[at + "gate_up_proj_scale_inv"][2, 3:])
    assert torch.equal(found[expert + "w3.weight"].view(torch.uint8), tensors[at + "gate_up_proj"][2, 12:].view(torch.uint8))
    assert torch.equal(found[expert + "w2.weight_scale_inv"], tensors[at + "down_proj_scale_inv"][2])
    assert files_of(convert(apart, tmp_path / "back", like=fused)) == files_of(fused)
    assert json.loads((apart / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(RequestError, match=r"no place for: .*weight_scale_inv"):
        reshard.plan(apart, to="hf", like=HF / "mixtral-fused")
    values = convert(apart, tmp_path / "values", like=HF / "mixtral-fused", dequantize=True)
    down = safetensors.torch.load_file(values / "model.safetensors")[at + "down_proj"]
    blocks = tensors[at + "down_proj_scale_inv"].repeat_interleave(4, 1).repeat_interleave(4, 2)
    assert torch.equal(down, (tensors[at + "down_proj"].float() * blocks).to(torch.bfloat16))


@pytest.mark.parametrize("reference", ["llama-bin", "llama-bin-sharded", "llama/model.safetensors"])
def test_pickles_and_single_files_are_references_too(reference, tmp_path):
    plan = reshard.plan(HF / "llama-sharded", to="hf", like=HF / reference)
    assert not plan.layout.notes and [file.path for file in plan.layout.files] == ["model.safetensors"]
    reshard.convert(plan, tmp_path / "out")
    assert weights(tmp_path / "out") == weights(HF / "llama")
