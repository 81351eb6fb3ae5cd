"""Placements for Mooncake: what they say, and what they refuse. tests/live/on_mooncake.py asks Mooncake itself."""

import json
import sys

import pytest
from helpers.fixture_places import FIXTURES, HF

import reshard
from reshard.errors import UnsupportedError
from reshard.live.memory.computed import computed_memory

sys.path.append(str(FIXTURES.parent / "examples" / "live"))
from mooncake_placements import mooncake_placements


def placements(model="llama", ranks=2, of="fsdp", **target):
    config = json.loads((HF / model / "config.json").read_text())
    checkpoint, _ = computed_memory(config, of, ranks if isinstance(ranks, dict) else {"dp": ranks})
    return [json.loads(text) for text in mooncake_placements(reshard.plan(checkpoint, to="vllm", **target), resource="tiny")]


def axes(placement):
    return {tensor["tensor_id"]: {axis["kind"]: axis["semantics"] for axis in tensor["parallel_axes"]} for tensor in placement["tensors"]}


def test_rows_columns_and_whole_tensors_are_told_apart():
    source, target = placements(tp=2)
    split = {tensor["tensor_id"]: tensor["shard_dims"] for tensor in target["tensors"]}
    layer = "model.layers.0"
    assert split[f"{layer}.self_attn.q_proj.weight"] == [0] and split[f"{layer}.self_attn.o_proj.weight"] == [1]
    assert split[f"{layer}.input_layernorm.weight"] == [] and axes(target)[f"{layer}.input_layernorm.weight"] == {"tp": "replicated"}
    assert {each["shard_dims"][0] for each in source["tensors"]} == {0}
    assert [part["participant_id"] for part in source["parts"]] == ["tp0-pp0", "tp1-pp0"]


def test_a_stage_owns_its_layers():
    owners = axes(placements(tp=2, pp=2)[1])
    assert {each["pp"] for each in owners.values()} == {"ownership"}
    assert owners["model.layers.1.mlp.up_proj.weight"] == {"pp": "ownership", "tp": "split"}


def test_experts_that_ranks_share_are_owned():
    owners = axes(placements("qwen3_moe-sparse", tp=2, ep=2)[1])
    assert {semantics["tp"] for name, semantics in owners.items() if ".experts." in name} == {"ownership"}


@pytest.mark.parametrize("given, name, what", [
    ({"tp": 4}, "self_attn.k_proj.weight", "several ranks hold the same part"),
    ({"tp": 2, "dtype": "float32"}, "weight", "cast or computed"),
    ({"tp": 1, "model": "gpt2"}, "weight", "with strides"),
    ({"tp": 2, "ranks": 50}, "weight", "has no part of it"),
])  # fmt: skip
def test_what_a_placement_cannot_say_is_refused_by_name(given, name, what):
    with pytest.raises(UnsupportedError, match=what) as caught:
        placements(**given)
    assert name in caught.value.where and caught.value.do
