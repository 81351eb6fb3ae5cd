"""Files of one rank each: what is missing, what does not belong, what has drifted apart; and whole files with wrapped names."""

import shutil
import subprocess
import sys
import zipfile

import pytest
from helpers.fixture_places import DCP, FIXTURES, FSDP, HF, described, open_case, truth
from helpers.reshard_command import reshard as command_line
from helpers.zip_checksums import with_right_checksums

import reshard
from reshard.containers import inert_pickle, torch_zip
from reshard.errors import CheckpointError, RequestError, ReshardError
from reshard.storage.files import LocalFiles
from reshard.verbs.roundtrip import materialize


@pytest.fixture
def copy(tmp_path):
    """A function that copies a fixture's checkpoint, so that it can be damaged."""

    def made(case):
        return shutil.copytree(FSDP / case / "checkpoint", tmp_path / "copy")

    return made


def rank_file(folder, rank, kind="model"):
    return next(path for path in sorted(folder.glob(f"*rank*{rank}.*")) if kind in path.name)


def flip(path, tensor):
    """Change one bit of a tensor of a torch.save file, as if it had been saved so."""
    found = torch_zip.read(LocalFiles(path), path.name)
    for key in tensor:
        found = found.get("_local_tensor") if key == "local" else found[key]
    raw = bytearray(path.read_bytes())
    raw[found.byte_offset] ^= 1
    path.write_bytes(with_right_checksums(raw))


# ---- what is missing ----


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_missing_rank_is_named(copy, rank):
    folder = copy("verl")
    rank_file(folder, rank).unlink()
    with pytest.raises(CheckpointError, match=rf"^model_world_size_5_rank_{rank}\.pt: the file is not there. 12 of 12 tensors lack"):
        reshard.open(folder)


def test_a_missing_rank_of_the_optimizer_is_named(copy):
    folder = copy("verl")
    rank_file(folder, 2, "optim").unlink()
    with pytest.raises(CheckpointError, match=r"^optim_world_size_5_rank_2\.pt: the file is not there"):
        reshard.open(folder)


def test_several_missing_ranks_are_named_and_inspect_shows_what_is_there(copy):
    folder = copy("verl")
    for rank in (1, 3):
        rank_file(folder, rank).unlink()
    result = command_line("inspect", folder)
    assert result.code == 3 and "model_world_size_5_rank_1.pt: the file is not there, and neither is that of rank 3" in result.err
    assert result.out.startswith(f"{folder}: llama; fsdp, incomplete or damaged; 15 files")
    assert "model_world_size_5_rank_2.pt  " in result.out and "model_world_size_5_rank_3.pt" not in result.out
    assert command_line("inspect", folder, "--json").document["error"]["where"] == "model_world_size_5_rank_1.pt"


def test_a_missing_replica_loses_nothing_and_is_told(copy):
    folder = copy("hsdp")
    for kind in ("model", "optim"):
        rank_file(folder, 3, kind).unlink()
    opened = reshard.open(folder)
    assert any("rank 3 of 4 has no file" in note for note in opened.index.facts.notes)
    weights = {(t.name, t.kind): described(t, opened.files) for t in opened.index.tensors}
    assert weights == truth(FSDP / "hsdp")


def test_both_replicas_of_a_part_missing_is_a_loss(copy):
    folder = copy("hsdp")
    for rank in (1, 3):
        rank_file(folder, rank).unlink()
    with pytest.raises(CheckpointError, match=r"rank_1\.pt: the file is not there, and neither is that of rank 3"):
        reshard.open(folder)


def test_a_rank_file_alone_is_not_a_checkpoint():
    with pytest.raises(RequestError, match=r"Give the directory .*checkpoint"):
        reshard.open(rank_file(FSDP / "verl" / "checkpoint", 0))


# ---- what does not belong ----


def test_replicas_that_disagree_are_named_with_both_files(copy):
    folder = copy("hsdp")
    flip(rank_file(folder, 2), ["model.layers.0.mlp.down_proj.weight", "local"])
    with pytest.raises(CheckpointError, match=r"down_proj\.weight: two copies .*rank_0\.pt and model_world_size_4_rank_2\.pt"):
        reshard.fingerprint(folder)


def test_a_file_of_another_step_is_found_on_opening(copy):
    folder = copy("verl")
    flip(rank_file(folder, 4, "optim"), ["state", 0, "step"])
    with pytest.raises(CheckpointError, match="different steps"):
        reshard.open(folder)


def test_files_of_another_number_of_ranks_beside_them(copy):
    folder = copy("verl-groups")
    shutil.copy(rank_file(FSDP / "verl" / "checkpoint", 0), folder)
    with pytest.raises(CheckpointError, match="2 and 5 ranks"):
        reshard.open(folder)


def test_a_renamed_file_is_noticed(copy):
    folder = copy("verl")
    first, second = rank_file(folder, 0), rank_file(folder, 1)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(CheckpointError, match="says it is rank 1's, its name says rank 0"):
        reshard.open(folder)


def test_a_file_of_a_run_on_another_mesh(copy):
    folder = copy("hsdp")
    shutil.copy(rank_file(FSDP / "tp" / "checkpoint", 3), rank_file(folder, 3))
    with pytest.raises(CheckpointError, match=r"on the mesh .*ddp 2 x fsdp 2.*dp 2 x tp 2"):
        reshard.open(folder)


def test_a_file_of_another_model(copy):
    folder = copy("hsdp")
    shutil.copy(rank_file(FSDP / "fsdp1-hsdp" / "checkpoint", 3), rank_file(folder, 3))
    shutil.copy(rank_file(FSDP / "verl-groups" / "checkpoint", 1), rank_file(folder, 1))
    with pytest.raises(CheckpointError, match=r"model\."):
        reshard.open(folder)


def test_the_files_of_two_models_in_one_folder(copy):
    folder = copy("fsdp1-mesh")
    for path in list(folder.glob("pytorch_model_fsdp_0*")):
        shutil.copy(path, folder / path.name.replace("fsdp_0", "fsdp_1"))
    with pytest.raises(CheckpointError, match="2 sets of files"):
        reshard.open(folder)


def test_of_an_actor_and_a_critic_one_must_be_named(tmp_path):
    for name in ("actor", "critic"):
        shutil.copytree(FSDP / "verl-groups" / "checkpoint", tmp_path / "global_step_20" / name)
    with pytest.raises(RequestError, match="`part=actor` or `part=critic`"):
        reshard.open(tmp_path / "global_step_20")
    assert reshard.open(tmp_path / "global_step_20" / "actor").index.facts.step == 20


# ---- flat parameters ----


@pytest.mark.parametrize("case", ["fsdp1-local", "fsdp1-local-orig"])
def test_flat_parameters_need_the_models_config(case, tmp_path):
    with pytest.raises(RequestError, match="`model="):
        reshard.open(FSDP / case / "checkpoint")
    with pytest.raises(CheckpointError, match="`model="):
        reshard.open(FSDP / case / "checkpoint", model=HF / "llama")


@pytest.mark.parametrize("case", ["fsdp1-local", "fsdp1-local-orig"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_missing_run_of_a_flat_parameter(copy, case, rank):
    folder = copy(case)
    rank_file(folder, rank).unlink()
    with pytest.raises(CheckpointError):
        reshard.open(folder, model=FSDP / case / "model")


# ---- names ----


def test_what_wrappers_put_into_names_is_taken_off_and_told():
    for case, part in (("full-compile", "_orig_mod."), ("full-ddp", "module."), ("full-wrapped", "_checkpoint_wrapped_module.")):
        notes = open_case(FSDP / case).index.facts.notes
        assert any("parts that wrappers add" in note and part in note for note in notes), case


def test_two_names_that_become_one_are_refused(tmp_path):
    import torch

    torch.save({"_orig_mod.a": torch.zeros(2), "a": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"_orig_mod\.a and a have the same name"):
        reshard.open(tmp_path)


def test_numbers_of_an_ambiguous_optimizer_stay_numbers_and_are_not_carried(tmp_path):
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    groups = [{"params": [model[1].weight, model[1].bias]}, {"params": [model[0].weight, model[0].bias]}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "model.pt")
    opened = reshard.open(tmp_path)
    assert any("not certain" in note for note in opened.index.facts.notes)
    assert not [t for t in opened.index.tensors if t.kind == "moment1"]
    with pytest.raises(RequestError, match="is not known"):
        reshard.plan(opened, to="dcp", optimizer=True)


# ---- there and back ----


def test_from_fsdp_by_hf_and_dcp_to_fsdp_and_every_bit_comes_back(tmp_path):
    source = FSDP / "verl" / "checkpoint"
    steps = [("hf", {}), ("dcp", {"dp": 4}), ("fsdp", {"dp": 3}), ("dcp", {}), ("fsdp", {"dp": 7})]
    before = source
    for number, (to, sizes) in enumerate(steps):
        reshard.convert(reshard.plan(before, to=to, model=source / "huggingface", **sizes), tmp_path / str(number))
        before = tmp_path / str(number)
        assert reshard.verify(source, before).equal
    assert reshard.fingerprint(before).root == reshard.fingerprint(source).root


@pytest.mark.parametrize("to", ["dcp", "fsdp"])
@pytest.mark.parametrize("case", ["verl", "verl-groups", "verl-tied", "tp", "full-compile", "fsdp1-local-orig"])
def test_the_optimizers_state_is_carried_along(case, to, tmp_path):
    source = open_case(FSDP / case)
    made = reshard.plan(source, to=to, dp=3, optimizer=True)
    assert reshard.roundtrip(made).losses == ()
    reshard.convert(made, tmp_path / "out")
    written = reshard.open(tmp_path / "out", model=FSDP / case / "model")
    expected = truth(FSDP / case)
    if case == "verl-tied":
        del expected["lm_head.weight", "weight"]
    assert {(t.name, t.kind): described(t, written.files) for t in written.index.tensors} == expected
    groups = written.index.param_groups()
    assert [group.settings["lr"] for group in groups] == [0.01] * len(groups) and groups
    assert [group.names for group in groups] == [group.names for group in source.index.param_groups()]


def test_state_of_another_kind_is_carried_under_its_own_name(tmp_path):
    reshard.convert(reshard.plan(open_case("groups"), to="dcp", optimizer=True), tmp_path / "out")
    written = reshard.open(tmp_path / "out")
    assert {(t.name, t.kind): described(t, written.files) for t in written.index.tensors} == truth("groups")


@pytest.mark.parametrize("to", ["hf", "vllm"])
def test_what_serves_holds_no_optimizer(to):
    with pytest.raises(RequestError, match="no optimizer state"):
        reshard.plan(open_case("fsdp2"), to=to, optimizer=True)


def test_without_an_optimizer_there_is_none_to_carry():
    with pytest.raises(RequestError, match="no optimizer state"):
        reshard.plan(HF / "llama", to="dcp", optimizer=True)


@pytest.mark.parametrize("to, sizes", [("hf", {"dp": 2}), ("vllm", {"dp": 2}), ("dcp", {"tp": 2}), ("fsdp", {"pp": 2})])
def test_sizes_that_a_format_does_not_have(to, sizes):
    with pytest.raises(RequestError, match=f"`{next(iter(sizes))}=2`"):
        reshard.plan(HF / "llama", to=to, **sizes)


@pytest.mark.parametrize("folder", [FIXTURES / "torch_versions" / "2.2.2" / "full-legacy" / "checkpoint", DCP / "zstd" / "checkpoint"])
@pytest.mark.parametrize("to", ["dcp", "fsdp"])
def test_any_source_can_be_written(folder, to, tmp_path):
    reshard.convert(reshard.plan(folder, to=to, dp=2), tmp_path / "out")
    assert reshard.verify(folder, tmp_path / "out").equal


def test_ranks_that_several_processes_read_are_the_same_checkpoint():
    """In an interpreter of its own: other tests leave threads behind, and then nothing is forked."""
    script = f"""
import os
import reshard
from reshard.adapter import processes
from reshard.containers import recognised_files
recognised_files.read_ranks = lambda files, ranks, parse: ([], ranks)  # none is recognised
folder = {str(FSDP / "verl-groups" / "checkpoint")!r}
def described():
    index = reshard.open(folder).index
    return [(t.name, t.kind, t.shape, list(map(t.shards.piece, range(len(t.shards))))) for t in index.tensors], index.facts, index.objects
alone = described()
os.cpu_count, processes._FEWEST, forks = (lambda: 2), 1, []
fork = os.fork
os.fork = lambda: (forks.append(1), fork())[1]
assert described() == alone and len(forks) == 2
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_inspect_shows_the_mesh_and_the_ranks(capsys):

    text = command_line("inspect", FSDP / "tp" / "checkpoint").out
    assert "dp 2 x tp 2: 4 ranks" in text and "_StridedShard(0, split_factor=2)" in text
    name = "model.norm.weight"
    pieces = command_line("inspect", FSDP / "hsdp-tp" / "checkpoint", "--tensor", name, "--json").document["tensors"][0]
    assert sorted(piece["rank"] for piece in pieces["pieces"]) == list(range(8))
    assert sum(piece["replica"] for piece in pieces["pieces"]) == 6
    assert [each["placement"] for each in pieces["placements"]] == ["Replicate", "Shard(0)", "Replicate"]


def test_extra_state_of_another_step(copy):
    import torch

    folder = copy("verl")
    path = rank_file(folder, 3, "extra_state")
    state = torch.load(path, weights_only=False)
    state["lr_scheduler"]["last_epoch"] += 1
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"extra_state_world_size_5_rank_3\.pt: its learning-rate schedule is at step 3"):
        reshard.open(folder)


@pytest.mark.parametrize("name", ["rank_{}.pt", "rank{}.bin", "model-rank-{}.pth", "checkpoint.rank.{}.ckpt"])
def test_any_name_that_ends_in_a_rank_will_do(copy, tmp_path, name):
    folder = copy("verl-groups")
    for path in list(folder.iterdir()):
        if "model" not in path.name:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for rank in (0, 1):
        rank_file(folder, rank).rename(folder / name.format(rank))
    assert reshard.verify(FSDP / "verl-groups" / "checkpoint", folder).equal


def test_what_accelerate_lays_beside_a_full_state_dict_is_not_taken_for_it(copy):
    import torch

    folder = copy("full-fsdp1")
    torch.save({"last_epoch": 2}, folder / "scheduler.bin")
    torch.save({"epoch": 1, "seed": 3}, folder / "sampler.bin")
    assert reshard.verify(FSDP / "full-fsdp1" / "checkpoint", folder).equal


@pytest.mark.parametrize(
    "case", [FSDP / "tp", FSDP / "fsdp1-local", FIXTURES / "torch_checkpointing" / "fsdp2", DCP / "fsdp2"], ids=lambda case: case.name
)
@pytest.mark.parametrize("to, options", [("dcp", {"optimizer": True}), ("fsdp", {"dp": 2, "optimizer": True}), ("vllm", {"tp": 2})])
def test_there_and_back_for_real(case, to, options):
    if to == "vllm" and case.name == "fsdp1-local":
        pytest.skip("heads of 6 elements and biases of the MLP: no engine serves that model")
    source = open_case(case)
    assert materialize(reshard.plan(source, to=to, **options), source) == []


def test_a_local_tensor_of_another_size_than_its_placements_say(copy):
    import torch
    from torch.distributed.tensor import DTensor  # noqa: F401  # torch.load needs it

    folder = copy("verl")
    path = rank_file(folder, 2)
    state = torch.load(path, weights_only=True)
    tensor = state["model.layers.0.mlp.up_proj.weight"]
    tensor._local_tensor = tensor._local_tensor[:-1].clone()
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight in .*rank_2\.pt: rank 2 holds \[4, 16\] of \[24, 16\]; at fsdp 2"):
        reshard.open(folder)


def test_a_raw_optimizer_of_flat_parameters_does_not_stand_in_the_way():
    opened = open_case(FSDP / "fsdp1-raw")
    assert any("flat parameters" in note for note in opened.index.facts.notes)
    assert not [t for t in opened.index.tensors if t.kind in ("moment1", "moment2")]
    with pytest.raises(RequestError, match="`optimizer=True`"):
        reshard.plan(opened, to="dcp", optimizer=True)


def test_a_tensor_beside_the_model_is_no_weight(tmp_path):
    import torch

    torch.save({"model": {"a.weight": torch.ones(2)}, "step": torch.tensor(5)}, tmp_path / "model.pt")
    assert [(t.name, t.kind) for t in reshard.open(tmp_path).index.tensors] == [("a.weight", "weight"), ("step", "state")]


def test_one_ranks_part_of_another_format_is_not_taken_for_a_model(tmp_path):
    import torch

    for name in ("model_optim_rng.pt", "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save({"model": {"a": torch.ones(2)}}, tmp_path / name)
        with pytest.raises(ReshardError, match=r"no known format|states|optimizer_state_dict"):
            reshard.open(tmp_path / name)


def test_model_and_optimizer_in_one_file_of_each_rank(tmp_path):
    import torch
    from torch.distributed.tensor import DTensor  # noqa: F401  # torch.load needs it

    source = FSDP / "verl-groups" / "checkpoint"
    for rank in (0, 1):
        model, optimizer = (torch.load(rank_file(source, rank, kind), weights_only=True) for kind in ("model", "optim"))
        torch.save({"model": model, "optimizer": optimizer, "step": torch.tensor(2)}, tmp_path / f"state_rank{rank}.pt")
    opened = reshard.open(tmp_path)
    assert {(t.name, t.kind): described(t, opened.files) for t in opened.index.tensors} == truth(FSDP / "verl-groups")
    assert len(opened.index.param_groups()) == 2


def test_buffers_are_not_counted_by_an_optimizers_numbers(copy):
    import torch
    from torch.distributed.tensor import DTensor  # noqa: F401  # torch.load needs it

    folder = copy("verl")
    for rank in range(5):
        path = rank_file(folder, rank)
        state = torch.load(path, weights_only=True)
        torch.save({"model.scale": torch.arange(5.0), **state}, path)
    opened = reshard.open(folder)
    found = {(t.name, t.kind): described(t, opened.files) for t in opened.index.tensors}
    assert found.pop(("model.scale", "weight"))["shape"] == [5]
    assert found == truth(FSDP / "verl")


VERSIONS = [f"2.{minor}" for minor in range(6, 14)]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_files_of_every_version_of_torch_hold_the_same(version, tmp_path):
    source = open_case(FSDP / "verl")
    reshard.convert(reshard.plan(source, to="fsdp", dp=3, optimizer=True, torch_version=version), tmp_path / "out")
    written = reshard.open(tmp_path / "out", model=FSDP / "verl" / "model")
    assert {(t.name, t.kind): described(t, written.files) for t in written.index.tensors} == truth(FSDP / "verl")
    assert written.index.facts.parallel == {"fsdp": 3}


def attributes(path):
    """Of the first DTensor in a file of torch.save: the class and the attributes of its spec, its mesh, and of what they hold."""
    with zipfile.ZipFile(path) as archive:
        pickle = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    values = inert_pickle.load(pickle, where="", storage=lambda _: None).values()
    first = next(value for value in values if value.class_name.endswith("_rebuild_from_type_v2"))
    pending, found = [first.args[3][1]["_spec"]], {}
    while pending:
        value = pending.pop()
        if isinstance(value, tuple | list):
            pending += value
        elif isinstance(value, inert_pickle.Inert):
            found[value.class_name] = set(value.state or ())
            pending += map(value.get, found[value.class_name])
    return found


@pytest.mark.parametrize("version, case", [("2.6", FIXTURES / "torch_versions" / "2.6.0" / "fsdp2"), ("2.13", FSDP / "verl")])
def test_a_mesh_has_the_attributes_that_torch_gives_it(version, case, tmp_path):
    reshard.convert(reshard.plan(open_case(FSDP / "verl"), to="fsdp", dp=3, torch_version=version), tmp_path / "out")
    ours, theirs = (attributes(next(place.glob("model_world_size_*_rank_1.pt"))) for place in (tmp_path / "out", case / "checkpoint"))
    assert ours.keys() == theirs.keys() and len(ours) > 3
    assert {name: ours[name] ^ theirs[name] for name in ours if ours[name] != theirs[name]} == (
        {"torch.distributed.device_mesh.DeviceMesh": {"_dim_group_names"}} if version == "2.6" else {}
    )


def test_the_default_is_the_installed_torch_or_else_the_newest(monkeypatch):
    source = open_case(FSDP / "verl")
    for installed, expected in {"2.8.0+cu128": "2.8", "2.4.1": "2.13", "3.0.0": "2.13"}.items():
        monkeypatch.setattr("importlib.metadata.version", lambda name, installed=installed: installed)
        assert f"those of torch {expected};" in " ".join(reshard.plan(source, to="fsdp").layout.notes)


def test_ranks_whose_files_are_alike_are_laid_out_once():
    files = reshard.plan(open_case(FSDP / "verl"), to="fsdp", dp=600).layout.files
    assert len(files) == 600 and len({id(file.tensors.form) for file in files}) < 30
