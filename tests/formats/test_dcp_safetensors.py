"""DCP on safetensors: what is lost, as far as such files can tell."""

import shutil

import pytest
from helpers.fixture_places import FIXTURES

import reshard
from reshard.errors import CheckpointError

CASES = FIXTURES / "dcp_safetensors"


@pytest.fixture
def copy(tmp_path):
    return lambda case: shutil.copytree(CASES / case / "checkpoint", tmp_path / "copy")


def test_a_lost_middle_rank_is_named(copy):
    folder = copy("sharded")
    next(folder.glob("shard-00002-*")).unlink()
    with pytest.raises(CheckpointError, match="shard-00002"):
        reshard.open(folder)


def test_a_lost_last_rank_is_seen_with_the_config_and_announced_without(copy):
    folder = copy("sharded")
    next(folder.glob("shard-00003-*")).unlink()
    with pytest.raises(CheckpointError, match=r"reach to \[.*the config says"):
        reshard.open(folder, model=CASES / "sharded" / "model")
    assert any("`model=` " in note for note in reshard.open(folder).index.facts.notes)


def test_a_lost_part_is_named(copy):
    folder = copy("sharded-mapped")
    for path in folder.glob("shard-*-model-00002-of-*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        reshard.open(folder)


def test_whole_files_win_over_the_shards_they_were_made_from(copy):
    folder = copy("consolidated")
    assert reshard.open(folder).format == "hf"
    assert reshard.open(folder / "sharded").format == "dcp-safetensors"
    assert reshard.verify(folder, folder / "sharded").equal
    for path in folder.glob("model*"):
        path.unlink()
    assert reshard.open(folder).format == "dcp-safetensors"


def test_files_of_two_saves(copy):
    folder = copy("sharded")
    shutil.copy(next((CASES / "sharded-mapped" / "checkpoint").glob("shard-00001-model-00001-*")), folder)
    with pytest.raises(CheckpointError, match=r"000|parts"):
        reshard.open(folder)
