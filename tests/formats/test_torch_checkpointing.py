"""torch_checkpointing: files that are missing, of another save, or described by what we do not know."""

import pickle
import shutil

import pytest
from helpers.fixture_places import FIXTURES

import reshard
from reshard.errors import CheckpointError

CASES = FIXTURES / "torch_checkpointing"


@pytest.fixture
def copy(tmp_path):
    return lambda case: shutil.copytree(CASES / case / "checkpoint", tmp_path / "copy")


@pytest.mark.parametrize("case, path", [("fsdp2", "model_3.pt"), ("fsdp2", "optimizer_0.pt"), ("hsdp", "rank_2/model.safetensors")])
def test_a_missing_file_is_named(copy, case, path):
    folder = copy(case)
    (folder / path).unlink()
    with pytest.raises(CheckpointError, match=path):
        reshard.open(folder)


def test_a_missing_rank_without_metadata(copy):
    folder = copy("bare")
    for name in ("model_1.pt", "optimizer_1.pt"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match="is in no file"):
        reshard.open(folder)


def test_a_file_of_another_save(copy):
    folder = copy("fsdp2")
    shutil.copy(CASES / "bare" / "checkpoint" / "model_1.pt", folder / "model_1.pt")
    with pytest.raises(CheckpointError, match=r"in model_1\.pt.*different saves"):
        reshard.open(folder)


def test_files_of_two_ranks_exchanged(copy):
    folder = copy("safetensors")
    (folder / "rank_0").rename(folder / "x")
    (folder / "rank_1").rename(folder / "rank_0")
    (folder / "x").rename(folder / "rank_1")
    opened = reshard.open(folder)  # nothing in such files tells whose they are; replicated norms do, once they are read
    assert reshard.fingerprint(opened).root != reshard.fingerprint(CASES / "safetensors" / "checkpoint").root


def changed(folder, change):
    metadata = pickle.loads((folder / "metadata.pkl").read_bytes())
    change(metadata)
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata))


def test_a_version_that_is_not_known(copy):
    folder = copy("tp")
    changed(folder, lambda metadata: metadata.update(version="3.0"))
    with pytest.raises(CheckpointError, match=r"'3\.0'; 1\.0 and 2\.0"):
        reshard.open(folder)


def test_a_kind_of_metadata_that_is_not_known(copy):
    folder = copy("tp")

    def change(metadata):
        groups = next(iter(metadata["metadata"]["model"]["nested_path_to_metadata"].values()))
        groups[0]["sharding_metadata"]["type"] = "Custom"

    changed(folder, change)
    with pytest.raises(CheckpointError, match="'Custom'"):
        reshard.open(folder)


def test_paths_stay_inside(copy):
    folder = copy("safetensors")
    changed(folder, lambda m: m["metadata"]["model"]["rank_to_layout_info"][2].update(file_path="../x.safetensors"))
    with pytest.raises(CheckpointError, match="outside"):
        reshard.open(folder)


def test_the_first_version_of_the_metadata(copy):
    """The same facts in the form of version 1.0, which the package still converts (distributed_metadata.py, _convert_v1_to_v2)."""
    folder = copy("tp")
    before = reshard.fingerprint(folder).root

    def change(metadata):
        model = metadata["metadata"]["model"]
        flat = {'["model",' + path[1:]: groups for path, groups in model["nested_path_to_metadata"].items()}
        layouts = {rank: {"model": layout} for rank, layout in model["rank_to_layout_info"].items()}
        del metadata["version"]
        metadata.update(metadata=flat, rank_to_layout_info_mappings=layouts)

    changed(folder, change)
    assert reshard.fingerprint(folder).root == before
