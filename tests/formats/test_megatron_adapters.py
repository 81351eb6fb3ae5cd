"""LoRA adapters in Megatron's checkpoints, against Megatron Bridge's own export of them (fixtures/megatron_lora)."""

import json
import shutil
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from helpers.fixture_places import FIXTURES, described, open_case, truth
from helpers.reshard_command import reshard as reshard_command
from helpers.zip_checksums import with_right_checksums
from safetensors.torch import load_file

import reshard
from reshard.adapter.model_files import find_adapter_config
from reshard.canonical.renaming import PREFIX
from reshard.errors import IncompleteError, UnsupportedError
from reshard.geometry.boxes import Box
from reshard.geometry.mosaics import Mosaic, joined, stacked
from reshard.storage.files import LocalFiles

layout = import_module("reshard.formats.megatron.layout.adapters")
by_halves, with_factors = layout.by_halves, layout.with_factors
MegatronTensor = import_module("reshard.formats.megatron.layout.tensors").MegatronTensor
ParallelSizes = import_module("reshard.formats.megatron.layout.stages").ParallelSizes
legacy, parse_name = (
    import_module("reshard.formats.megatron.read.legacy"),
    import_module("reshard.formats.megatron.layout.names").parse_name,
)
GROUPED = ["qwen3-moe-grouped", "qwen3-moe-shared"]
CASES = sorted(path.parent.name for path in (FIXTURES / "megatron_lora").glob("*/truth.json"))
GIVEN = {"lora_alpha": "6", "base_model": "the base"}
ALONE = ["llama-alone", "llama-swift", *GROUPED]
assert len(CASES) >= 10


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


@pytest.mark.parametrize("case", [case for case in CASES if case not in ALONE])
def test_base_and_adapter_are_separated(case, tmp_path):
    folder = FIXTURES / "megatron_lora" / case
    plan = reshard.plan(open_case(folder), to="hf", drop_adapter=True)
    losses = reshard.roundtrip(plan).losses
    assert losses and all(".lora_" in loss and "it is left out: a LoRA adapter, not merged" in loss for loss in losses)
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


SWIFT = FIXTURES / "megatron_lora" / "llama-swift"


def test_ms_swifts_adapter_needs_no_option_but_the_model(tmp_path):
    """args.json beside the save tells the scale and the base; its args hold no size of the model."""
    result = reshard_command("convert", SWIFT / "checkpoint", tmp_path / "adapter", "--to", "peft", "--model", SWIFT / "model")
    assert result.code == 0 and "use_rslora: nothing says" not in result.out
    assert tensors_of(reshard.open(tmp_path / "adapter")) == adapter_of("llama-swift")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert {key: config[key] for key in ("r", "lora_alpha", "use_rslora", "base_model_name_or_path")} == {
        "r": 4, "lora_alpha": 6, "use_rslora": False, "base_model_name_or_path": "the base",
    }  # fmt: skip


@pytest.mark.parametrize(("to", "sizes"), [("hf", ()), ("vllm", ("--tp", 2))])
def test_ms_swifts_adapter_is_merged_into_a_base_by_its_folder(tmp_path, to, sizes):
    """The base's config lays it out. The values are those of numpy on whole matrices: base + 6 / 4 * (B x A), rounded once."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    reshard.convert(reshard.plan(open_case(FIXTURES / "megatron_lora" / "llama-canonical"), to="hf", drop_adapter=True), base)
    stored = load_file(base / "model.safetensors")
    reshard.convert(reshard.plan(reshard.open(SWIFT / "checkpoint", model=SWIFT / "model"), to="peft"), adapter)
    merged = reshard_command("convert", base, tmp_path / "merged", "--to", to, *sizes, "--merge-adapter", SWIFT / "checkpoint")
    assert merged.code == 0, merged.err
    factors, found = load_file(adapter / "adapter_model.safetensors"), reshard.open(tmp_path / "merged").tensors()
    found = {name: tensor.torch() for name, tensor in found.items()}
    adapted = {name for name in stored if f"{PREFIX}{name.removesuffix('.weight')}.lora_B.weight" in factors}
    assert len(adapted) == 7
    for name, value in stored.items():
        module = f"{PREFIX}{name.removesuffix('.weight')}"
        update = factors[f"{module}.lora_B.weight"].float() @ factors[f"{module}.lora_A.weight"].float() * 1.5 if name in adapted else 0
        assert torch.equal(found[name], (value.float() + update).bfloat16()), name


def test_without_the_model_ms_swifts_adapter_is_not_written_with_fused_layers(tmp_path):
    shown = reshard_command("convert", SWIFT / "checkpoint", tmp_path / "out", "--to", "peft")
    assert shown.code == 2 and "`model=DIR`" not in shown.err and "--model DIR" in shown.err and not (tmp_path / "out").exists()
    looked = reshard_command("inspect", SWIFT / "checkpoint")
    assert f"next      reshard convert BASE merged --to hf --merge-adapter {SWIFT / 'checkpoint'}" in looked.out


def test_args_of_a_run_that_trained_no_adapter_say_nothing_of_one(tmp_path):
    arguments = json.loads((SWIFT / "checkpoint" / "args.json").read_text())
    for given, found in (({}, 6), ({"tuner_type": "full"}, None)):
        (tmp_path / "args.json").write_text(json.dumps({**arguments, **given}))
        settings = find_adapter_config(LocalFiles(tmp_path))
        assert (settings and settings["lora_alpha"]) == found


def test_rows_of_ms_swifts_ranks_are_joined_rank_by_rank():
    """Gate has rows 0..3 and up rows 0..3; of two ranks each has two of both."""
    both = MegatronTensor(tuple(Mosaic.of(name, Box.whole((4, 1))) for name in ("gate", "up")), 0)
    tiles = sorted(layout.by_ranks(both, 2).tiles, key=lambda tile: tile.at[0])
    assert [(tile.name, tile.box.offsets[0], tile.box.sizes[0]) for tile in tiles] == [
        ("gate", 0, 2),
        ("up", 0, 2),
        ("gate", 2, 2),
        ("up", 2, 2),
    ]


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
    found = with_factors(
        linear(Mosaic.of("h.c_fc.weight", Box.whole((8, 20))).transposed()), {"mlp.linear_fc1.adapter.linear_out.weight": 4}
    )
    (a,), (b,) = (found[f"mlp.linear_fc1.adapter.linear_{side}.weight"].whole.tiles for side in ("in", "out"))
    assert (a.name, a.box.sizes) == (f"{PREFIX}h.c_fc.lora_A.weight", (4, 8))
    assert (b.name, b.box.sizes) == (f"{PREFIX}h.c_fc.lora_B.weight", (20, 4))


def test_what_peft_has_no_module_for_is_refused():
    experts = stacked([Mosaic.of("experts.gate_up_proj", Box((0, 0, 0), (1, 8, 4))).item(0)]).item(0)
    with pytest.raises(UnsupportedError, match=r"experts\.gate_up_proj.*in one tensor"):
        with_factors(linear(experts), {"mlp.linear_fc1.adapter.linear_out.weight": 2})
    fused = Mosaic.of("mlp.gate_up_proj.weight", Box.whole((8, 4)))
    with pytest.raises(UnsupportedError, match=r"one projection.*mlp\.gate_up_proj\.weight in its place"):
        with_factors(linear(joined([fused])), {"mlp.linear_fc1.adapter.adapter_up.linear_out.weight": 2})


@pytest.mark.parametrize("case", GROUPED)
def test_adapters_of_grouped_experts_are_merged_into_each_expert(case, tmp_path):
    """The values are those of numpy on whole matrices: base + 6 / 4 * (B x A), rounded once."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    reshard.convert(reshard.plan(open_case(FIXTURES / "megatron_lora" / "qwen3-moe"), to="hf", drop_adapter=True), base)
    reshard.convert(reshard.plan(open_case(FIXTURES / "megatron_lora" / case), to="peft", **GIVEN), adapter)
    reshard.convert(reshard.plan(base, to="hf", merge_adapter=adapter), tmp_path / "merged")
    stored, factors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    adapted = [name for name in stored if f"{PREFIX}{name.removesuffix('.weight')}.lora_B.weight" in factors]
    assert len(adapted) == 4 * 3
    of_down = {value["sha256"] for name, value in adapter_of(case).items() if name.endswith("down_proj.lora_B.weight")}
    assert len(of_down) == (1 if case == "qwen3-moe-shared" else 4)
    for name in adapted:
        a, b = (factors[f"{PREFIX}{name.removesuffix('.weight')}.lora_{which}.weight"].float() for which in "AB")
        assert torch.equal(merged[name], (stored[name].float() + b @ a * 1.5).bfloat16()), name


@pytest.mark.parametrize(("size", "said"), [(None, "mixes the adapters of several ranks"), (1, "each gets a copy"), (2, None)])
def test_an_adapter_that_all_experts_share_is_taken_of_one_expert_parallel_rank(size, said, tmp_path):
    """Those of several ranks are saved as copies of each other, factor by factor, and are none."""
    case = shutil.copytree(FIXTURES / "megatron_lora" / "qwen3-moe-shared", tmp_path / "case")
    if size:
        settings = f"model:\n  _target_: a.Provider\n  expert_model_parallel_size: {size}\npeft:\n  dim: 4\n"
        (case / "checkpoint" / "iter_0000002" / "run_config.yaml").write_text(settings)
    if said is None:
        with pytest.raises(UnsupportedError, match="2 expert-parallel ranks had a LoRA adapter each"):
            open_case(case)
    else:
        (note,) = open_case(case).index.facts.notes
        assert note.startswith("the experts of a layer share one LoRA adapter") and said in note
        assert ("mixes" in note) is (size is None)


def test_an_adapter_of_a_ranks_experts_is_refused_in_a_legacy_save():
    parsed, rank = parse_name("decoder.layers.0.mlp.experts.linear_fc1.adapter.linear_in.weight"), SimpleNamespace(ep_rank=0, tp_rank=0)
    with pytest.raises(UnsupportedError, match="all experts of a rank have one LoRA adapter"):
        legacy._array(parsed, rank, SimpleNamespace(experts=4), ParallelSizes(), (4, 8), "a file")


@pytest.mark.parametrize("name", ["adapter.weight_magnitude", "adapter.linear_no.weight"])
def test_an_unknown_part_of_an_adapter_is_refused(name, tmp_path):
    """Such as the magnitude vector of DoRA, without which B x A is not the update."""
    shutil.copytree(FIXTURES / "megatron_lora" / "qwen3-moe-legacy", tmp_path / "case")
    old = b"linear_qkv.adapter.linear_in.weight"
    for path in (tmp_path / "case" / "checkpoint").rglob("model_optim_rng.pt"):
        forged = path.read_bytes().replace(old, f"linear_qkv.{name}".encode().ljust(len(old), b"_"))
        path.write_bytes(with_right_checksums(forged))
    with pytest.raises(UnsupportedError, match="a part of an adapter that reshard does not read"):
        open_case(tmp_path / "case")


def test_half_an_adapter_is_incomplete(tmp_path):
    shutil.copytree(FIXTURES / "megatron_lora" / "qwen3-moe-legacy", tmp_path / "case")
    for path in (tmp_path / "case" / "checkpoint").rglob("model_optim_rng.pt"):
        content = path.read_bytes()
        assert content.count(b"linear_qkv.adapter.linear_in.weight") == 1
        forged = content.replace(b"linear_qkv.adapter.linear_in.weight", b"linear_qkv.adapter.abc._extra_state")
        path.write_bytes(with_right_checksums(forged))
    with pytest.raises(IncompleteError, match=r"lora_A\.weight: it is in no file"):
        open_case(tmp_path / "case")
