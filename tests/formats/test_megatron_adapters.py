"""LoRA adapters in Megatron's checkpoints, against Megatron Bridge's own export of them (fixtures/megatron_lora)."""

import json
import shutil
from importlib import import_module

import pytest
from helpers.fixture_places import FIXTURES, described, open_case, truth

import reshard
from reshard.canonical.renaming import PREFIX
from reshard.errors import IncompleteError, UnsupportedError
from reshard.geometry.boxes import Box
from reshard.geometry.mosaics import Mosaic, joined, stacked

layout = import_module("reshard.formats.megatron.layout.adapters")
by_halves, with_factors = layout.by_halves, layout.with_factors
MegatronTensor = import_module("reshard.formats.megatron.layout.tensors").MegatronTensor
RunModel = import_module("reshard.formats.megatron.read.run_model").RunModel
CASES = sorted(path.parent.name for path in (FIXTURES / "megatron_lora").glob("*/truth.json"))
GIVEN = {"lora_alpha": "6", "base_model": "the base"}
assert len(CASES) >= 6


def adapter_of(case):
    return {name: value for (name, role), value in truth(FIXTURES / "megatron_lora" / case).items() if role == "adapter"}


def tensors_of(opened):
    return {tensor.name: described(tensor, opened.files) for tensor in opened.index.tensors}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_is_written_as_megatron_bridge_exports_it(case, tmp_path):
    source = open_case(FIXTURES / "megatron_lora" / case)
    reshard.convert(reshard.plan(source, to="peft", **GIVEN), tmp_path / "adapter")
    assert tensors_of(reshard.open(tmp_path / "adapter")) == adapter_of(case)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 6, "CAUSAL_LM")
    assert config["target_modules"] == sorted({name.split(".")[-3] for name in adapter_of(case)})


@pytest.mark.parametrize("case", [case for case in CASES if case != "llama-alone"])
def test_base_and_adapter_are_separated(case, tmp_path):
    folder = FIXTURES / "megatron_lora" / case
    plan = reshard.plan(open_case(folder), to="hf", drop_adapter=True)
    assert {drop.kind for drop in plan.drops} == {"adapter"}
    reshard.convert(plan, tmp_path / "base")
    base = {name: value for (name, role), value in truth(folder).items() if role == "weight"}
    assert tensors_of(reshard.open(tmp_path / "base")) == base


def test_the_adapter_of_a_checkpoint_is_merged_into_its_base_cut_for_any_ranks(tmp_path):
    source = open_case(FIXTURES / "megatron_lora" / "llama")
    reshard.convert(reshard.plan(source, to="peft", **GIVEN), tmp_path / "adapter")
    reshard.convert(reshard.plan(source, to="hf", drop_adapter=True), tmp_path / "base")
    for to, sizes in (("hf", {}), ("vllm", {"tp": 2})):
        reshard.convert(reshard.plan(source, to=to, merge_adapter="self", lora_alpha="6", **sizes), tmp_path / to)
    reshard.convert(reshard.plan(tmp_path / "base", to="hf", merge_adapter=tmp_path / "adapter"), tmp_path / "merged")
    assert reshard.verify(tmp_path / "merged", tmp_path / "hf").equal
    assert reshard.verify(tmp_path / "hf", tmp_path / "vllm").equal
    assert not reshard.verify(tmp_path / "base", tmp_path / "hf").equal


def test_an_adapter_alone_is_no_model():
    source = open_case(FIXTURES / "megatron_lora" / "llama-alone")
    with pytest.raises(UnsupportedError, match="LoRA adapter and no base weights"):
        reshard.plan(source, to="hf")


@pytest.mark.parametrize("case", ["llama-legacy", "llama-alone"])
def test_a_note_says_that_the_optimizer_of_an_adapter_is_left_out(case):
    (note,) = open_case(FIXTURES / "megatron_lora" / case).index.facts.notes
    assert note.startswith("the optimizer's state is left out")


def test_the_halves_of_each_ranks_rows_are_put_together():
    """Rank 0 holds rows 0..3, rank 1 rows 4..7; saved are 0, 1, 4, 5, 2, 3, 6, 7."""
    array = by_halves(Mosaic.of("b", Box.whole((8, 1))), 4)
    order = sorted((tile.at[0] + i, tile.box.offsets[0] + i) for tile in array.tiles for i in range(tile.box.sizes[0]))
    assert order == list(enumerate([0, 1, 4, 5, 2, 3, 6, 7]))


def linear(*blocks):
    return {"mlp.linear_fc1.weight": MegatronTensor(blocks, 0)}


def test_a_transposed_weight_has_factors_that_are_not():
    """Conv1D's [in, out]: PEFT's lora_A is [r, in] and lora_B [out, r] all the same."""
    found = with_factors(linear(Mosaic.of("h.c_fc.weight", Box.whole((8, 20))).transposed()), {"mlp.linear_fc1.adapter": 4})
    (a,), (b,) = (found[f"mlp.linear_fc1.adapter.linear_{side}.weight"].whole.tiles for side in ("in", "out"))
    assert (a.name, a.box.sizes) == (f"{PREFIX}h.c_fc.lora_A.weight", (4, 8))
    assert (b.name, b.box.sizes) == (f"{PREFIX}h.c_fc.lora_B.weight", (20, 4))


def test_what_peft_has_no_module_for_is_refused():
    experts = stacked([Mosaic.of("experts.gate_up_proj", Box((0, 0, 0), (1, 8, 4))).item(0)]).item(0)
    with pytest.raises(UnsupportedError, match=r"experts\.gate_up_proj.*in one tensor"):
        with_factors(linear(experts), {"mlp.linear_fc1.adapter": 2})
    fused = Mosaic.of("mlp.gate_up_proj.weight", Box.whole((8, 4)))
    with pytest.raises(UnsupportedError, match=r"one projection.*mlp\.gate_up_proj\.weight in its place"):
        with_factors(linear(joined([fused])), {"mlp.linear_fc1.adapter.adapter_up": 2})


def test_an_adapter_that_experts_share_is_refused():
    with pytest.raises(UnsupportedError, match="all experts of a rank share one LoRA adapter"):
        RunModel(None, {}).with_adapters([("mlp.experts.linear_fc1.adapter.linear_out.weight", (2, 24, 4))])


@pytest.mark.parametrize("name", ["adapter.weight_magnitude", "adapter.linear_no.weight"])
def test_an_unknown_part_of_an_adapter_is_refused(name, tmp_path):
    """Such as the magnitude vector of DoRA, without which B x A is not the update."""
    shutil.copytree(FIXTURES / "megatron_lora" / "qwen3-moe-legacy", tmp_path / "case")
    old = b"linear_qkv.adapter.linear_in.weight"
    for path in (tmp_path / "case" / "checkpoint").rglob("model_optim_rng.pt"):
        path.write_bytes(path.read_bytes().replace(old, f"linear_qkv.{name}".encode().ljust(len(old), b"_")))
    with pytest.raises(UnsupportedError, match="a part of an adapter that reshard does not read"):
        open_case(tmp_path / "case")


def test_half_an_adapter_is_incomplete(tmp_path):
    shutil.copytree(FIXTURES / "megatron_lora" / "qwen3-moe-legacy", tmp_path / "case")
    for path in (tmp_path / "case" / "checkpoint").rglob("model_optim_rng.pt"):
        content = path.read_bytes()
        assert content.count(b"linear_qkv.adapter.linear_in.weight") == 1
        path.write_bytes(content.replace(b"linear_qkv.adapter.linear_in.weight", b"linear_qkv.adapter.abc._extra_state"))
    with pytest.raises(IncompleteError, match=r"lora_A\.weight: it is in no file"):
        open_case(tmp_path / "case")
