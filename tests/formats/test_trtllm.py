"""TensorRT-LLM checkpoints against what NVIDIA's own writer of them, ModelOpt, puts into each rank's file (fixtures/trtllm), and back."""

import hashlib
import importlib
import json
import shutil

import pytest
from helpers.fixture_places import FIXTURES, HF, patch_stored, read_reference, stored

import reshard
from reshard.adapter import registry
from reshard.errors import CheckpointError, RequestError
from reshard.verbs.roundtrip import materialize

REFERENCES = sorted((FIXTURES / "trtllm").glob("*/*.json"))
SERVED = ("llama", "llama-tied", "llama-biased", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe-sparse", "gpt2")
LAYERS = {model: json.loads((HF / model / "config.json").read_text()) for model in SERVED}
LAYERS = {model: config.get("num_hidden_layers", config.get("n_layer")) for model, config in LAYERS.items()}
READ_BACK = [(model, tp, pp, 1) for model in SERVED for tp, pp in ((1, 1), (8, 1), (2, 2), (1, 3)) if pp <= LAYERS[model]]
READ_BACK += [(model, 4, 1, 4) for model in ("mixtral", "qwen2_moe", "qwen3_moe-sparse")]

OF_REFERENCES = {(*(json.loads(path.read_text())[key] for key in ("model", "tp", "pp")), 1) for path in REFERENCES}


def plan(model, tp=1, pp=1, ep=1, **options):
    return reshard.plan(HF / model, to="trtllm", tp=tp, pp=pp, ep=ep, **options)


def held(folder):
    """Rank -> name -> dtype, shape, sha256."""
    return {
        path.stem: {
            name: {"dtype": dtype, "shape": shape, "sha256": hashlib.sha256(data).hexdigest()}
            for name, (dtype, shape, data) in stored(path).items()
        }
        for path in folder.glob("rank*.safetensors")
    }


def test_there_are_references_for_every_model():
    found = {(path.parent.name, path.stem) for path in REFERENCES}
    assert found >= {(model, degree) for model in SERVED for degree in ("tp1", "tp4")}
    assert found >= {(model, "tp2-pp2") for model in ("llama", "mixtral", "qwen3", "gpt2")} | {("llama-biased", "tp2-pp3")}
    assert len(found) >= 45


# What ModelOpt says of models whose class it would ask, if tensorrt_llm were there: rotary positions for GPT-2, which has learned ones; the
# plain activation and the experts' width for Qwen's MLPs. It has logits in 16 bits; TensorRT-LLM's own conversion has them in 32.
MOE = {"hidden_act", "intermediate_size"}
OTHERWISE = {"gpt2": {"position_embedding_type"}, "qwen2_moe": MOE, "qwen3_moe-sparse": MOE}


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_rank_and_the_config_are_those_of_nvidias_writer(reference, tmp_path):
    """Bit by bit; and what was written reads back: of one conversion."""
    expected = read_reference(reference)
    made = plan(expected["model"], expected["tp"], expected["pp"])
    reshard.convert(made, tmp_path / "out")
    assert held(tmp_path / "out") == expected["ranks"]
    if (expected["model"], expected["tp"], expected["pp"], 1) in READ_BACK:
        reads_back(expected["model"], made, tmp_path / "out", {"tp": expected["tp"], "pp": expected["pp"]})
    config = json.loads(next(each.content for each in made.layout.sidecars if each.path == "config.json"))
    same = (config.keys() & expected["config"].keys()) - OTHERWISE.get(expected["model"], set()) - {"logits_dtype"}
    assert len(same) >= 15
    said = {key: expected["config"][key] for key in same}
    if "experts" in reshard.open(HF / expected["model"]).model.dimensions:
        said["mapping"] = {**said["mapping"], "moe_tp_size": expected["tp"], "moe_ep_size": 1}
    assert {key: config[key] for key in same} == said


def reads_back(model, made, folder, parallel):
    assert reshard.roundtrip(made).losses == ()
    opened = reshard.open(folder)
    assert opened.format == "trtllm" and opened.index.facts.parallel == parallel
    assert reshard.verify(HF / model, folder, cast=True).equal


@pytest.mark.parametrize("model, tp, pp, ep", [case for case in READ_BACK if case not in OF_REFERENCES])
def test_what_nvidias_writer_did_not_write_reads_back(model, tp, pp, ep, tmp_path):
    made = plan(model, tp, pp, ep)
    reshard.convert(made, tmp_path / "out")
    reads_back(model, made, tmp_path / "out", {"tp": tp, "pp": pp, **({"ep": ep} if ep > 1 else {})})


@pytest.mark.parametrize("model", ["llama-biased", "mixtral", "qwen2_moe", "gpt2"])
def test_hf_comes_out_of_it_again(model, tmp_path):
    """Only routers have become wider, which --dtype takes back."""
    reshard.convert(plan(model, 4), tmp_path / "there")
    reshard.convert(reshard.plan(tmp_path / "there", to="hf", dtype="bf16"), tmp_path / "back")
    assert reshard.verify(HF / model, tmp_path / "back").equal


@pytest.mark.parametrize(
    "layers, pp, expected", [(4, 3, (2, 1, 1)), (7, 4, (2, 2, 2, 1)), (32, 5, (7, 7, 6, 6, 6)), (61, 8, (8,) * 5 + (7,) * 3)]
)
def test_layers_are_dealt_to_stages_as_tensorrt_llm_deals_them(layers, pp, expected):
    import torch

    rules = importlib.import_module(type(registry.named("trtllm")).__module__ + ".rules")
    assert (
        rules.remainder_to_first_stages(layers, pp) == expected == tuple(len(part) for part in torch.tensor_split(torch.arange(layers), pp))
    )


@pytest.mark.parametrize("tp", [3, 5, 6, 7, 16])
def test_an_illegal_degree_is_refused_with_the_legal_ones(tp):
    with pytest.raises(RequestError, match=r"Legal tensor-parallel sizes are 1, 2, 4, 8\."):
        plan("llama", tp)


@pytest.mark.parametrize(
    "model, options, why",
    [
        ("llama", {"pp": 3}, "only 2 layers"),
        ("gemma2", {}, "is not known here"),
        ("deepseek_v3", {}, "is not known here"),
        ("qwen3_moe", {}, "layer 1 has none"),
        ("mixtral-6", {"tp": 4, "ep": 4}, "4 ranks do not divide its 6 experts"),
        ("llama", {"engine_version": "0.9"}, "does not apply"),
        ("llama", {"dtype": "fp16", "keep_dtype": ("*norm*",)}, "one element type"),
    ],
)
def test_what_is_not_served_is_refused(model, options, why):
    with pytest.raises(RequestError, match=why):
        reshard.plan(HF / model, to="trtllm", **options)


def test_experts_are_shared_whole(tmp_path):
    reshard.convert(plan("mixtral", 4, ep=4), tmp_path / "out")
    whole = stored(HF / "mixtral" / "model.safetensors")
    names = [f"model.layers.1.block_sparse_moe.experts.{expert}.{name}.weight" for expert in (4, 5) for name in ("w3", "w1")]
    dtype, shape, data = stored(tmp_path / "out" / "rank2.safetensors")["transformer.layers.1.mlp.fc.weight"]
    assert (dtype, shape, data) == ("BF16", [2, 32, 32], b"".join(whole[name][2] for name in names))
    mapping = json.loads((tmp_path / "out" / "config.json").read_text())["mapping"]
    assert mapping == {"world_size": 4, "tp_size": 4, "pp_size": 1, "moe_tp_size": 1, "moe_ep_size": 4}


def test_the_config_follows_the_models(tmp_path):
    shutil.copytree(HF / "llama", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config |= {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 500000.0, **rope}}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    reshard.convert(reshard.plan(tmp_path / "m", to="trtllm", tp=2, dtype="fp16"), tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (said["dtype"], said["norm_epsilon"], said["rotary_base"]) == ("float16", 1e-5, 500000.0)
    assert said["rotary_scaling"] == {"type": "llama3", "rope_theta": 500000.0, **rope}
    back = reshard.open(tmp_path / "out").model_files.config
    assert back["rope_theta"] == 500000.0 and back["rms_norm_eps"] == 1e-5 and back["model_type"] == "llama"


def test_a_missing_rank_and_a_drifted_copy_are_found(tmp_path):
    reshard.convert(plan("llama", 2, 2), tmp_path / "out")
    patch_stored(tmp_path / "out" / "rank3.safetensors", "transformer.ln_f.weight", 0)
    with pytest.raises(CheckpointError, match="rank3"):
        reshard.verify(HF / "llama", tmp_path / "out")
    (tmp_path / "out" / "rank1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="rank1"):
        reshard.open(tmp_path / "out")


def test_tables_that_are_not_cut_are_refused(tmp_path):
    reshard.convert(plan("llama", 2), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_parallel_embedding": False}))
    with pytest.raises(CheckpointError, match="not split by rows"):
        reshard.open(tmp_path / "out")


@pytest.mark.parametrize(
    "key, value, why",
    [
        ("architecture", "FalconForCausalLM", "FalconForCausalLM"),
        ("quantization", {"quant_algo": "FP8"}, "quantized"),
        ("mapping", {"world_size": 2, "tp_size": 10**12, "pp_size": 1}, "world size"),
        ("mapping", {"world_size": 10**12, "tp_size": 10**12, "pp_size": 1}, "rank2.safetensors"),
        ("num_attention_heads", "eight", "positive number"),
        ("quantization", [], None),
        ("moe", "none", None),
    ],
)
def test_what_its_config_says_is_a_claim(key, value, why, tmp_path):
    reshard.convert(plan("llama", 2), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    if why is None:
        assert reshard.verify(HF / "llama", tmp_path / "out").equal
    else:
        with pytest.raises((CheckpointError, RequestError), match=why):
            reshard.open(tmp_path / "out")


def test_there_and_back_for_real_finds_wider_routers_whole_and_a_narrower_cast_lost(tmp_path):
    opened = reshard.open(HF / "mixtral")
    assert materialize(plan("mixtral", 2), opened, work=tmp_path) == []
    lost = materialize(plan("mixtral", 2, dtype="fp16"), opened, work=tmp_path)
    assert len(lost) >= 2 * len(opened.index.tensors) - 4 and all("BF16 on the left" in each for each in lost)
