"""HybridModel of megatron-core 0.19.2, whose layers are attention or an MLP alone: read as the model of both, or refused by name.

tests/formats/test_truth.py compares the values of the fixtures with those of the processes.
"""

import json
from importlib import import_module

import pytest
from helpers.fixture_places import FIXTURES, described

import reshard
from reshard.adapter.format import Hints
from reshard.errors import CheckpointError
from reshard.models.lookup import find_model
from reshard.storage.files import LocalFiles

hybrid, settings, stages = (import_module(f"reshard.formats.megatron.layout.{name}") for name in ("hybrid", "settings", "stages"))
describe_model = import_module("reshard.formats.megatron.read.run_model").describe_model
CASES = ("hybrid", "hybrid-stages")


def opened(name, checkpoint=None):
    case = FIXTURES / "megatron_0_19" / name
    return reshard.open(checkpoint or case / "checkpoint", model=case / "model")


def values(checkpoint):
    return {(t.name, t.kind): described(t, checkpoint.files) for t in checkpoint.index.tensors if t.kind != "step"}


@pytest.mark.parametrize("target", ["megatron-dist", "megatron", "fsdp_dtensor", "dcp", "deepspeed"])
def test_the_state_arrives_in_other_formats(tmp_path, target):
    checkpoint = opened("hybrid-stages")
    reshard.convert(reshard.plan(checkpoint, to=target, optimizer=True), tmp_path / "out")
    again, before = values(opened("hybrid-stages", tmp_path / "out")), values(checkpoint)
    kinds = ("weight", "master", "moment1", "moment2")
    same = kinds if target.startswith("megatron") else kinds[2:]  # others hold the masters as weights
    assert {kind for _, kind in before} == set(kinds) and len(before) == 4 * len(checkpoint.index.by_kind("weight"))
    assert not [key for key, value in before.items() if key[1] in same and again[key] != value]


@pytest.mark.parametrize("target", ["megatron-dist", "megatron"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_a_gpt_model(tmp_path, name, target):
    """Megatron refuses a checkpoint whose settings have a pattern for a run of GPTModel (_maybe_setup_gpt_to_hybrid_load)."""
    assert "hybrid_layer_pattern" in opened(name).index.facts.state["args"]
    reshard.convert(reshard.plan(opened(name), to=target), tmp_path / "out")
    written = reshard.open(tmp_path / "out", vocab_size=14)
    args = written.index.facts.state["args"]
    assert not args.get("hybrid_layer_pattern") and args["num_layers"] == written.index.facts.config["num_hidden_layers"]
    assert {key: value for key, value in values(written).items() if key[1] == "weight"} == {
        key: value for key, value in values(opened(name)).items() if key[1] == "weight"
    }


def settings_of(name):
    return dict(opened(name).index.facts.state["args"])


@pytest.mark.parametrize("pattern", ["**--", "-*-*", "M-*-", "D-*-", "*-*-/*-", "*-*", "*--*"])
@pytest.mark.parametrize("given", [True, False])
def test_other_patterns_are_refused_by_name(pattern, given):
    args = settings_of("hybrid-stages") | {"hybrid_layer_pattern": pattern, "num_layers": len(pattern.partition("/")[0])}
    config = json.loads((FIXTURES / "megatron_0_19" / "hybrid-stages" / "model" / "config.json").read_text())
    hints = Hints(config=config) if given else Hints(vocabulary=14)
    with pytest.raises(CheckpointError, match="hybrid_layer_pattern"):
        describe_model(args, hints, 16, "a run")


def test_parameters_have_the_order_of_the_ranks_files():
    """Bucket arrays hold no names: the order is all that tells what lies in them."""
    legacy, ranks, chunks = (import_module(f"reshard.formats.megatron.{name}") for name in ("read.legacy", "read.ranks", "layout.chunks"))
    case = FIXTURES / "megatron_0_19" / "hybrid-stages"
    save = ranks.read_ranks(LocalFiles(case / "checkpoint"), "iter_0000002/")
    model = legacy.legacy_model(save, Hints(vocabulary=14))
    of_run = stages.chunks_of_run(save.args, save.sizes, "a run")
    assert of_run == legacy.stored_chunks(save, model.megatron) and [len(chunk.layers) for chunk in of_run] == [3, 1]
    for rank, chunk in zip(save.ranks, of_run, strict=True):
        view = chunks.RankView(model.megatron, chunk, save.sizes, stages.Rank(pp_rank=rank.pp_rank), model.spec(save.args, "local"))
        assert [parameter.name for parameter in view.parameters()] == list(rank.chunks[0])


def test_attention_without_positions_is_not_a_llama():
    args = settings_of("hybrid-stages") | {"position_embedding_type": "none"}
    with pytest.raises(CheckpointError, match="position_embedding_type"):
        describe_model(args, Hints(vocabulary=14), 16, "a run")


def test_experts_stand_where_the_pattern_says():
    args = settings_of("hybrid-stages") | {"hybrid_layer_pattern": "*E|*-|*E", "num_layers": 6, "pipeline_model_parallel_size": 3}
    args |= {"num_experts": 2, "moe_ffn_hidden_size": 6, "qk_layernorm": True}
    model = describe_model(args, Hints(vocabulary=14), 16, "a run")
    assert (model.config["model_type"], model.config["mlp_only_layers"], model.config["num_hidden_layers"]) == ("qwen3_moe", [1], 3)
    assert [model.megatron.is_sparse(layer) for layer in range(6)] == [False, True, False, False, False, True]
    (name,) = model.megatron.expert(5, 1)["linear_fc2.weight"].names
    assert name == "model.layers.2.mlp.experts.1.down_proj.weight" and not model.megatron.expert(4, 1)
    assert [len(chunk.layers) for chunk in stages.chunks_of_run(args, stages.ParallelSizes(pp=3), "a run")] == [2, 2, 2]


def test_gated_delta_nets_of_a_given_config():
    sizes = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 12, "vocab_size": 14}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
    experts = {"num_experts": 2, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 6, "num_experts_per_tok": 1}
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = {"model_type": "qwen3_next", **sizes, **experts, **kinds}
    args = settings.model_settings(find_model(config)) | {"hybrid_layer_pattern": "GE*E", "num_layers": 4}
    del args["experimental_attention_variant"]  # the pattern says it
    model = describe_model(args, Hints(config=config), 16, "a run").megatron
    assert isinstance(model, hybrid.PairedModel)
    names = {layer: {name.partition(".")[0] for name in model.layer(layer)} for layer in range(4)}
    assert names == {0: {"input_layernorm", "self_attention"}, 1: {"pre_mlp_layernorm", "mlp"}, 2: names[0], 3: names[1]}
    assert "self_attention.in_proj.weight" in model.layer(0) and "self_attention.linear_qkv.weight" in model.layer(2)
    with pytest.raises(CheckpointError, match="experimental_attention_variant"):
        describe_model(args, Hints(vocabulary=14), 16, "a run")


def test_mamba_layers_of_a_given_config():
    sizes = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 12, "vocab_size": 14}
    sizes |= {"mamba_num_heads": 4, "mamba_head_dim": 4, "n_groups": 2, "ssm_state_size": 4, "conv_kernel": 4}
    config = {"model_type": "nemotron_h", **sizes, "hybrid_override_pattern": "M-*-", "mlp_hidden_act": "relu2"}
    own = settings.model_settings(find_model(config))
    args = {name: value for name, value in own.items() if name not in ("is_hybrid_model", "hybrid_override_pattern", "spec")}
    model = describe_model(args | {"hybrid_layer_pattern": "M-|*-"}, Hints(config=config), 16, "a run").megatron
    assert not isinstance(model, hybrid.PairedModel) and "mixer.in_proj.weight" in model.layer(0) and model.layers == 4
    with pytest.raises(CheckpointError, match="hybrid_layer_pattern"):
        describe_model(args | {"hybrid_layer_pattern": "MM*-"}, Hints(config=config), 16, "a run")
    with pytest.raises(CheckpointError, match="hybrid_layer_pattern"):
        describe_model(args | {"hybrid_layer_pattern": "*-*-"}, Hints(config=config), 16, "a run")
