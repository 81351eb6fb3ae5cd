"""DeepSpeed: files that do not belong together are found and named, padding is nobody's, and what is written reads back."""

import json
import re
import shutil
import subprocess
import sys
from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES, described, open_case, truth
from helpers.reshard_command import reshard as run
from helpers.zip_checksums import with_right_checksums

import reshard
from reshard.canonical.content import Selection
from reshard.containers import torch_zip
from reshard.engine.casts import cast
from reshard.engine.views import LazyTensor
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.sections import whole
from reshard.storage.files import LocalFiles

ZERO, PARALLEL, UNIVERSAL = FIXTURES / "deepspeed", FIXTURES / "deepspeed_parallel", FIXTURES / "universal"
CASES = sorted(path for folder in (ZERO, PARALLEL) for path in folder.iterdir() if path.is_dir())
assert len(CASES) >= 40, "without fixtures these tests would pass by testing nothing"


def label(case):
    return f"{case.parent.name}/{case.name}"


def copied(case, tmp_path):
    """A copy of a fixture's checkpoint, and the folder of its tag."""
    folder = shutil.copytree(case / "checkpoint", tmp_path / "copy")
    return folder, folder / (folder / "latest").read_text()


def words(tensor, files):
    return LazyTensor(whole(tensor.name, tensor.dtype, tensor.shape), {tensor.name: tensor}, files).words()


def refused(folder, *texts, model=None):
    with pytest.raises(CheckpointError) as error:
        reshard.open(folder, model=model)
    for text in texts:
        assert re.search(text, str(error.value)), str(error.value)


# ---- one save, all of it ----


@pytest.mark.parametrize("case", ["z1-bf16", "z2-round-robin", "z3-4"])
def test_a_missing_rank_is_named(case, tmp_path):
    folder, tag = copied(ZERO / case, tmp_path)
    gone = sorted(tag.glob("*pp_rank_1_*optim_states.pt"))[0]
    gone.unlink()
    refused(folder, r"of \d data-parallel ranks, 1 has no file", "partition_count")


@pytest.mark.parametrize(
    "case, name, texts",
    [
        (ZERO / "z3-4", "zero_pp_rank_2_mp_rank_00_model_states.pt", ["of 4 data-parallel ranks, 2 has no file"]),
        (PARALLEL / "autotp2-z1", "mp_rank_01_model_states.pt", ["of 2 model-parallel ranks, 1 has no file"]),
        (
            PARALLEL / "autotp2-z1",
            "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt",
            ["model-parallel rank 1 has no file of its optimizer"],
        ),
        (PARALLEL / "pp2-dp2-z1", "layer_02-model_states.pt", [r"layer_02-model_states\.pt", "2 has no file|not there"]),
        (PARALLEL / "moe-ep2-dp4-z2", "layer_0_expert_2_mp_rank_00_model_states.pt", [r"layer_0_expert_2|deepspeed_experts\.2"]),
    ],
    ids=["model states of a rank", "model-parallel rank", "optimizer of a model-parallel rank", "layer of a pipeline", "expert"],
)
def test_a_missing_file_is_named(case, name, texts, tmp_path):
    folder, tag = copied(case, tmp_path)
    (tag / name).unlink()
    refused(folder, *texts)


def test_zero_3_without_the_optimizer_has_no_weights(tmp_path):
    folder, tag = copied(ZERO / "z3-bf16", tmp_path)
    for path in tag.glob("*_optim_states.pt"):
        path.unlink()
    refused(folder, "only copy of the weights")


def test_zero_2_without_the_optimizer_still_has_its_weights(tmp_path):
    folder, tag = copied(ZERO / "z2-tied", tmp_path)
    for path in tag.glob("*_optim_states.pt"):
        path.unlink()
    found = reshard.open(folder).index
    assert {tensor.kind for tensor in found.tensors} == {"weight"} and len(found.tensors) == 12


@pytest.mark.parametrize(
    "case, name",
    [
        ("z1-bf16", "bf16_zero_pp_rank_5_mp_rank_00_optim_states.pt"),
        ("z3-4", "bf16_zero_pp_rank_11_mp_rank_00_optim_states.pt"),
        ("z3-4", "zero_pp_rank_4_mp_rank_00_model_states.pt"),
    ],
)
def test_a_file_left_over_from_more_ranks_is_named(case, name, tmp_path):
    folder, tag = copied(ZERO / case, tmp_path)
    shutil.copy(tag / re.sub(r"pp_rank_\d+", "pp_rank_0", name), tag / name)
    refused(folder, re.escape(name), "left over")


def test_a_model_parallel_rank_too_many_is_named(tmp_path):
    folder, tag = copied(PARALLEL / "autotp2-z1", tmp_path)
    shutil.copy(tag / "mp_rank_01_model_states.pt", tag / "mp_rank_02_model_states.pt")
    refused(folder, "mp_rank_02_model_states", "left over")
    (tag / "mp_rank_02_model_states.pt").unlink()
    shutil.copy(tag / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", tag / "bf16_zero_pp_rank_0_mp_rank_02_optim_states.pt")
    refused(folder, "bf16_zero_pp_rank_0_mp_rank_02_optim_states")


def test_optimizers_of_two_precisions_under_one_tag_are_named(tmp_path):
    folder, tag = copied(ZERO / "z1-bf16", tmp_path)
    shutil.copy(tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    refused(folder, "the states of the same rank")


@pytest.mark.parametrize(
    "case, other, name, text",
    [
        ("z3-bf16", "z1-bf16", "mp_rank_00_model_states.pt", "without ZeRO-3"),
        ("z1-bf16", "z3-bf16", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "of ZeRO-3"),
        ("z2-bf16-3", "z1-bf16", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "another save|different sizes"),
        ("z3-bf16", "z3-4", "zero_pp_rank_1_mp_rank_00_model_states.pt", "param_shapes|dp_world_size|ranks"),
    ],
    ids=["model states of another stage", "optimizer of another stage", "rank of a run of another size", "parameters of another run"],
)
def test_a_file_of_another_run_is_named(case, other, name, text, tmp_path):
    folder, tag = copied(ZERO / case, tmp_path)
    shutil.copy(next((ZERO / other / "checkpoint").glob(f"*/{name}")), tag)
    refused(folder, re.escape(name), text)


def test_a_rank_of_another_step_is_named(tmp_path):
    folder, _ = copied(ZERO / "z2-bf16-3", tmp_path)
    index = reshard.open(folder).index
    step = next(tensor for tensor in index.tensors if tensor.kind == "step")
    extent = step.shards.extent(2)
    raw = bytearray((folder / extent.path).read_bytes())
    raw[extent.byte_offset : extent.byte_offset + 4] = np.float32(3).tobytes()
    (folder / extent.path).write_bytes(raw)
    refused(folder, "rank_2_", "different steps")


def test_model_states_of_another_step_are_named(tmp_path):
    folder, tag = copied(ZERO / "z3-4", tmp_path)
    path = tag / "zero_pp_rank_3_mp_rank_00_model_states.pt"
    raw = path.read_bytes()
    at = raw.index(b"K\x02", raw.index(b"global_steps"))
    path.write_bytes(with_right_checksums(raw[: at + 1] + b"\x05" + raw[at + 2 :]))
    refused(folder, "rank_3_", "of step 5", "of step 2")


def change_steps(path, key, step):
    raw = path.read_bytes()
    at = raw.index(b"K\x02", raw.index(key))
    path.write_bytes(with_right_checksums(raw[: at + 1] + bytes([step]) + raw[at + 2 :]))


def test_a_model_of_another_step_than_its_optimizer_is_named(tmp_path):
    """As a save leaves it that was stopped between the two: newer weights beside older masters."""
    folder, tag = copied(ZERO / "z2-bf16-3", tmp_path)
    model = tag / "mp_rank_00_model_states.pt"
    weight = reshard.open(folder).index.by_kind("weight")["model.layers.0.mlp.up_proj.weight"].shards.extent(0)
    change_steps(model, b"global_steps", 3)
    found = reshard.open(folder)
    assert any("counted 2 steps, the run 3" in note for note in found.index.facts.notes), "an optimizer begun anew is no fault"
    raw = bytearray(model.read_bytes())
    raw[weight.byte_offset] ^= 1
    model.write_bytes(with_right_checksums(raw))
    refused(folder, "counted 2 steps", "of step 3", "up_proj")


def test_a_tag_that_is_not_there_is_named(tmp_path):
    folder, _ = copied(ZERO / "z1-bf16", tmp_path)
    (folder / "latest").write_text("global_step7")
    refused(folder, "latest", "'global_step7'", "global_step2")


def test_a_tag_that_was_removed_is_named_and_other_files_called_latest_are_not_ours(tmp_path):
    (tmp_path / "latest").write_text("global_step7")
    refused(tmp_path, "latest", "'global_step7'")
    other = shutil.copytree(FIXTURES / "hf" / "llama", tmp_path / "other")
    (other / "latest").write_text("whatever it is")
    assert reshard.open(other).format == "hf"


def test_a_tag_outside_of_the_checkpoint_is_refused(tmp_path):
    folder, _ = copied(ZERO / "z1-bf16", tmp_path)
    (folder / "latest").write_text("../../secret")
    refused(folder, "outside")


def test_several_tags_without_latest_are_asked_for(tmp_path):
    folder, tag = copied(ZERO / "z1-bf16", tmp_path)
    shutil.copytree(tag, folder / "global_step9")
    assert reshard.open(folder).index.facts.step == 2
    (folder / "latest").unlink()
    with pytest.raises(RequestError, match=r"2 checkpoints of 2 steps lie here.*`step=9`"):
        reshard.open(folder)
    assert reshard.open(tag).index.facts.step == 2


def test_a_file_that_was_cut_short_is_named(tmp_path):
    folder, tag = copied(ZERO / "z2-bf16-3", tmp_path)
    path = tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-4000])
    refused(folder, "rank_1_")


def test_a_missing_parameter_of_a_universal_checkpoint_is_named(tmp_path):
    folder = shutil.copytree(UNIVERSAL / "z1-groups" / "checkpoint", tmp_path / "copy")
    shutil.rmtree(next(folder.glob("*/zero/*norm.weight")))
    refused(folder, r"norm\.weight")


# ---- values ----


@pytest.mark.parametrize("case", CASES, ids=label)
def test_masters_round_to_the_models_copy(case):
    """A check of its own: a master of another parameter would not."""
    opened = open_case(case)
    weights, masters = opened.index.by_kind("weight"), opened.index.by_kind("master")
    for name in weights.keys() & masters.keys():
        master, weight = masters[name], weights[name]
        rounded = cast(words(master, opened.files), master.dtype, weight.dtype)
        assert np.array_equal(rounded, words(weight, opened.files)), name


@pytest.mark.parametrize("case", ["z3-4", "z3-subgroups", "z2-bf16-3", "z1-bf16-optimizer"])
def test_padding_is_nobodys(case, tmp_path):
    """Whatever lies between the parameters of a flat buffer: no tensor changes."""
    before = open_case(ZERO / case)
    expected = truth(ZERO / case)
    folder, _ = copied(ZERO / case, tmp_path)
    owned: dict[str, list[tuple[int, int]]] = {}
    for tensor in before.index.tensors:
        for piece in tensor.pieces():
            size = piece.box.volume * piece.extent.dtype.itemsize
            owned.setdefault(piece.extent.path, []).append((piece.extent.byte_offset, piece.extent.byte_offset + size))
    changed = 0
    for path, ranges in owned.items():
        raw = bytearray((folder / path).read_bytes())
        ranges.sort()
        for (_, stop), (start, _) in pairwise(ranges):
            if 0 < start - stop < 64:  # within one storage: between storages lies a zip header, which is longer
                raw[stop:start] = b"\xff" * (start - stop)
                changed += start - stop
        (folder / path).write_bytes(raw)
    assert changed or not case.startswith("z3"), "ZeRO-3 fills up every parameter"
    after = reshard.open(folder, model=ZERO / case / "model" if (ZERO / case / "model").exists() else None)
    assert {(t.name, t.kind): described(t, after.files) for t in after.index.tensors} == expected


def test_without_a_model_copy_the_master_is_the_weight():
    opened = open_case(ZERO / "z3-frozen")
    found = opened.content().tensors
    assert {tensor.kind for tensor in found.values()} == {"weight", "master", "buffer"}
    assert found["llama.model.embed_tokens.weight"].dtype.name == "BF16", "frozen weights are kept as they are"
    with pytest.raises(RequestError, match="`weights=model`"):
        opened.content(Selection(weights="model"))


@pytest.mark.parametrize("case", ["z3-bf16", "z3-tied", "z2-bf16-3"])
def test_what_serves_is_the_same_from_any_stage(case, tmp_path):
    """ZeRO-3's masters cast to bf16 are the weights that the model computed with; ZeRO-2 has them."""
    source = ZERO / case
    result = run(
        "convert", source / "checkpoint", tmp_path / "out", "--to", "vllm", "--tp", 2, "--dtype", "bf16", "--model", source / "model"
    )
    assert result.code == 0, result.err
    masters = reshard.open(source / "checkpoint", model=source / "model")
    served = reshard.open(tmp_path / "out")
    comparison = reshard.verify(masters, served, cast=True)
    assert comparison.equal and comparison.tensors >= 11


def test_a_universal_checkpoint_of_zero_2_has_its_frozen_weights_in_the_module(tmp_path):
    """ds_to_universal copies the run's model file, which lists frozen weights twice: whole in the module, and as fragments."""
    source = ZERO / "z2-frozen"
    assert run("convert", source / "checkpoint", tmp_path / "out", "--to", "universal").code == 0
    tag = tmp_path / "out" / (tmp_path / "out" / "latest_universal").read_text()
    shutil.copy(next((source / "checkpoint").glob("*/mp_rank_00_model_states.pt")), tag)
    (tag / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    # Another program has written here since reshard did.
    (tmp_path / "out" / "reshard.json").unlink()
    found = reshard.open(tmp_path / "out")
    read = {(t.name, t.kind): described(t, found.files) for t in found.index.tensors}
    assert read == truth(source)


def test_every_step_of_reading_is_a_value_that_prints_on_one_line():
    layout, read = (import_module(f"reshard.formats.deepspeed.{name}") for name in ("layout.tag", "read.index"))
    files = LocalFiles(PARALLEL / "megatron-pp2-tp2" / "checkpoint")
    tag = layout.open_tag(files, layout.find_tag_folder(files))
    states = read.read_run_states(files, tag)
    degrees = read.degrees_of_run(states)
    parts = read.parts_of_run(files, states, degrees, {})
    group = states.first_optimizer.groups[0]
    for step in (tag, states, states.first_model, states.first_optimizer, group, degrees, parts):
        assert len(repr(step)) < 200 and "\n" not in repr(step)
    assert repr(degrees) == "Parallel(tp=2, pp=2, ep=1, dp=1)"
    assert repr(parts) == "<314 parts of 32 parameters>"


@pytest.mark.parametrize("module", ["reshard.formats.deepspeed", "reshard.formats.deepspeed.universal"])
def test_a_format_is_found_without_its_reader(module):
    script = f"import sys, {module}\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert module in loaded and not {"numpy", "torch"} & {*loaded}
    assert not any(name.startswith(("reshard.formats.deepspeed.read", "reshard.index", "reshard.plans")) for name in loaded)


# ---- writing ----

SOURCES = ["z1-bf16", "z1-groups", "z2-round-robin", "z2-tied", "z2-frozen", "z3-4", "z3-subgroups", "z3-frozen", "z3-tied", "z2-fp16"]


@pytest.mark.parametrize("to, options", [("universal", ()), ("deepspeed", ("--dp", 3)), ("deepspeed", ("--dp", 1))])
@pytest.mark.parametrize("case", SOURCES)
def test_what_is_written_reads_back(case, to, options, tmp_path):
    source = ZERO / case / "checkpoint"
    proven = run("roundtrip", source, "--to", to, *options, "--json")
    assert proven.code == 0 and not proven.document["losses"], proven.err + proven.out
    made = run("convert", source, tmp_path / "out", "--to", to, *options, "--json")
    assert made.code == 0, made.err
    expected, found = truth(ZERO / case), reshard.open(tmp_path / "out")
    read = {(t.name, t.kind): described(t, found.files) for t in found.index.tensors}
    kept = {key: value for key, value in expected.items() if key[1] != "weight" or (key[0], "master") not in expected}
    assert read == kept
    before = reshard.open(source).index.param_groups()
    assert [(group.names, dict(group.settings)) for group in found.index.param_groups()] == [
        (group.names, dict(group.settings)) for group in before
    ]


def test_experts_and_tensor_parallel_parts_become_universal(tmp_path):
    for case in ("moe-ep2-dp4-z2", "autotp2-dp2-z3", "pp2-dp2-z1", "megatron-pp2-tp2-info"):
        source = PARALLEL / case
        model = ("--model", source / "model") if (source / "model").exists() else ()
        assert run("convert", source / "checkpoint", tmp_path / case, "--to", "universal", *model).code == 0
        assert run("verify", source / "checkpoint", tmp_path / case, "--optimizer", "--weights", "master").code == 0


def test_a_source_without_optimizer_state_is_refused(tmp_path):
    result = run("convert", FIXTURES / "hf" / "llama", tmp_path / "out", "--to", "universal")
    assert (
        result.code == 2 and "always writes optimizer state, and this checkpoint has none" in result.err and not (tmp_path / "out").exists()
    )


def test_bf16_weights_of_another_trainer_become_masters(tmp_path):
    source = FIXTURES / "dcp" / "fsdp2"
    made = run("convert", source / "checkpoint", tmp_path / "out", "--to", "deepspeed", "--dp", 2, "--model", source / "model")
    assert made.code == 0, made.err
    found = reshard.open(tmp_path / "out")
    assert {(t.kind, t.dtype.name) for t in found.index.tensors} == {
        ("master", "F32"), ("moment1", "F32"), ("moment2", "F32"), ("step", "F32")
    }  # fmt: skip
    assert reshard.verify(reshard.open(source / "checkpoint", model=source / "model"), found, cast=True).equal


def test_overwriting_replaces_the_whole_tag(tmp_path):
    for dp in (4, 2):
        result = run("convert", ZERO / "z3-4" / "checkpoint", tmp_path / "out", "--to", "deepspeed", "--dp", dp, "--overwrite")
        assert result.code == 0, result.err
        assert reshard.open(tmp_path / "out").index.facts.parallel["dp"] == dp
    assert len(list((tmp_path / "out" / "global_step2").iterdir())) == 4


def test_inspect_tells_ranks_and_runs():
    result = run("inspect", ZERO / "z3-4" / "checkpoint", "--tensor", "llama.lm_head.weight", "--json")
    document = json.loads(result.out)
    assert document["parallel"]["dp"] == 4 and document["producer"] == "DeepSpeed ZeRO-3" and document["version"] == "0.19.8"
    pieces = next(t for t in document["tensors"] if t["kind"] == "master")["pieces"]
    assert sorted({piece["rank"] for piece in pieces}) == [0, 1, 2, 3]


def test_how_tensor_parallel_parts_lie_is_never_guessed():
    """0.18 notes nothing: q_proj is cut, lm_head is whole on every rank. The config's shapes tell; without them it is asked for."""
    case = FIXTURES / "deepspeed_versions" / "0.18.2-autotp2-z1"
    assert reshard.open(case / "checkpoint", model=case / "model").index.by_kind("weight")["lm_head.weight"].shape == (50, 16)
    refused(case / "checkpoint", "2 tensor-parallel ranks", "`model=DIR`")


def test_tied_weights_are_known_by_their_memory_where_nothing_notes_them(tmp_path):
    """Only global rank 0 writes shared_params."""
    folder, tag = copied(ZERO / "z2-tied", tmp_path)
    path = tag / "mp_rank_00_model_states.pt"
    raw = path.read_bytes()
    assert raw.count(b"shared_params") == 1
    path.write_bytes(with_right_checksums(raw.replace(b"shared_params", b"shared_nobody")))
    found = reshard.open(folder).index
    assert dict(found.facts.tied) == {"lm_head.weight": "model.embed_tokens.weight"} and "lm_head.weight" in found.by_kind("master")


def test_sub_groups_are_cut_as_the_run_cuts_them(tmp_path):
    """DeepSpeed pairs them by number when it loads."""

    def groups(folder):
        path = sorted(folder.rglob("*pp_rank_1_*optim_states.pt"))[0]
        root = torch_zip.read(LocalFiles(path), path.name, locate=False)
        return [flat.shape for flat in root["optimizer_state_dict"]["fp32_flat_groups"]]

    source = ZERO / "z3-subgroups" / "checkpoint"
    assert run("convert", source, tmp_path / "out", "--to", "deepspeed", "--dp", 3).code == 0
    assert groups(tmp_path / "out") == groups(source) and len(groups(source)) == 4


def test_quantized_frozen_weights_without_scales_are_refused(tmp_path):
    """zero_quantized_nontrainable_weights does not run on a CPU; the file is put together from a real one."""
    import torch

    folder, tag = copied(ZERO / "z3-frozen", tmp_path)
    for path in tag.glob("*_model_states.pt"):
        states = torch.load(path, weights_only=True)
        states["frozen_param_fragments"] = {name: part.to(torch.int8) for name, part in states["frozen_param_fragments"].items()}
        torch.save(states, path)
    refused(folder, "quantized", "scales", "frozen|embed_tokens|k_proj|gain")


def test_masters_that_were_swapped_away_are_refused(tmp_path):
    """NVMe offload leaves empty groups in the file and swap files beside it; put together from a real checkpoint, as above."""
    import torch

    folder, tag = copied(ZERO / "z3-4", tmp_path)
    (tag / "offloaded_tensors" / "rank00").mkdir(parents=True)
    for path in tag.glob("*_optim_states.pt"):
        flats = {"fp32_flat_groups": [torch.empty(0)], "partition_count": 4, "optimizer_state_dict": {"state": {}, "param_groups": []}}
        torch.save({"optimizer_state_dict": flats | {"zero_stage": 3}, "ds_config": {}}, path)
    refused(folder, "swapped to NVMe", "offloaded_tensors")


def test_what_was_swapped_to_nvme_is_read_from_its_files(tmp_path):
    """Real swap files have a mebibyte or more, so here a real ZeRO-3 checkpoint is brought into their form: elements in files named by the
    masters' ds_id, empty groups in the states. On a real one of 100 MB all tensors were equal to the truth, too."""
    import torch

    folder, tag = copied(ZERO / "z3-subgroups", tmp_path)
    for rank in range(3):
        path = tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        root = torch_zip.read(LocalFiles(path), path.name)
        states = root["optimizer_state_dict"]
        swap = tag / "offloaded_tensors" / f"rank{rank:02d}"
        swap.mkdir(parents=True)
        raw = path.read_bytes()

        def swapped(flat, name, swap=swap, raw=raw):
            data = raw[flat.byte_offset : flat.byte_offset + 4 * flat.shape[0]]
            (swap / f"{name}.tensor.swp").write_bytes(data + b"\xff" * (-len(data) % 1024))
            return torch.empty(0)

        flats, kept = [], {}
        for i, flat in enumerate(states["fp32_flat_groups"]):
            name = f"0_{13 + i}"
            empty = swapped(flat, name)
            empty.ds_id = name
            flats.append(empty)
            inner = states["optimizer_state_dict"]["state"][i]
            kept[i] = {kind: swapped(inner[kind], f"{kind}-{name}") for kind in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(2.0)}
        groups = states["optimizer_state_dict"]["param_groups"]
        made = {"fp32_flat_groups": flats, "partition_count": 3, "optimizer_state_dict": {"state": kept, "param_groups": groups}}
        torch.save({"optimizer_state_dict": made | {"zero_stage": 3}, "ds_config": {}}, path)
    opened = reshard.open(folder)
    assert {(t.name, t.kind): described(t, opened.files) for t in opened.index.tensors} == truth(ZERO / "z3-subgroups")
    (tag / "offloaded_tensors" / "rank01" / "0_14.tensor.swp").unlink()
    refused(folder, "rank_1_|rank01", "elements")


def test_a_master_whose_shape_is_in_no_file_is_one_row(tmp_path):
    """Until 0.18 what says "expert" in its name is dropped from the model's file, and beside experts there are no param_shapes."""
    case = FIXTURES / "deepspeed_versions" / "0.14.5-moe-ep2-dp4-z2"
    folder, tag = copied(case, tmp_path)
    path = tag / "mp_rank_00_model_states.pt"
    raw = path.read_bytes()
    assert raw.count(b"head.weight") == 1
    path.write_bytes(with_right_checksums(raw.replace(b"head.weight", b"hand.weight")))
    opened = reshard.open(folder)
    master = described(opened.index.by_kind("master")["head.weight"], opened.files)
    expected = truth(case)["head.weight", "master"]
    assert master["sha256"] == expected["sha256"] and master["shape"] == [np.prod(expected["shape"])]
    assert any("one row: head.weight" in note for note in opened.index.facts.notes)


def test_a_universal_checkpoint_says_how_tensor_parallel_ranks_cut_it(tmp_path):
    """The keys are those that ds_to_universal writes for the same run."""
    assert run("convert", PARALLEL / "megatron-pp2-tp2-info" / "checkpoint", tmp_path / "out", "--to", "universal").code == 0

    def keys(name):
        path = next((tmp_path / "out").glob(f"*/zero/{name}/exp_avg.pt"))
        return {key: value for key, value in torch_zip.read(LocalFiles(path), path.name).items() if key != "param"}

    assert keys("2.mlp.dense_4h_to_h.weight") == {"cat_dim": 1}
    assert keys("2.mlp.dense_h_to_4h.weight") == {"cat_dim": 0}
    assert keys("2.input_layernorm.weight") == {}
    assert keys("tied_modules.embed.word_embeddings.weight") == {"cat_dim": 0, "vocab_tensor": True}


def test_groups_without_settings_keep_those_of_the_run_that_loads_them(tmp_path):
    """Elastic checkpoints have none: a universal checkpoint leaves them to the run, ZeRO-3 shards cannot."""
    source = ZERO / "z1-elastic" / "checkpoint"
    assert run("convert", source, tmp_path / "out", "--to", "universal").code == 0
    assert run("verify", source, tmp_path / "out", "--optimizer", "--weights", "master").code == 0
    for to in ("deepspeed", "fsdp"):
        refusal = run("convert", source, tmp_path / to, "--to", to, "--optimizer")
        assert refusal.code == 2 and "param groups" in refusal.err
