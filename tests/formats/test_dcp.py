"""DCP directories: what is in them, what is missing in them, and what real torch makes of those that were written."""

import os
import pickle
import re
import shutil

import pytest
from helpers.fixture_places import DCP, open_case

import reshard
from reshard.errors import CheckpointError, MissingFile, RequestError, TruncatedFile


def test_opening_reads_metadata_one_step_count_and_the_end_of_each_file(monkeypatch):
    from reshard.storage.files import LocalFiles

    reads = []
    real = LocalFiles.read_into

    def read_into(self, path, byte_offset, buffer):
        reads.append((path, len(buffer)))
        real(self, path, byte_offset, buffer)

    monkeypatch.setattr(LocalFiles, "read_into", read_into)
    steps = {tensor.shards.path(0) for tensor in open_case("fsdp2").index.tensors if tensor.kind == "step"}
    assert steps == {"__1_0.distcp", "__2_0.distcp", "__3_0.distcp"}
    for path in {path for path, _ in reads if path.endswith(".distcp")}:
        sizes = [size for read, size in reads if read == path]
        assert path in steps and len(sizes) <= 4 and sum(sizes) <= 3 * 4096, f"{path}: {sizes}"


def test_optimizer_tensors_have_roles_and_are_named_as_dropped():
    plan = reshard.plan(open_case("fsdp2"), to="vllm", tp=2)
    assert {drop.kind for drop in plan.drops} == {"moment1", "moment2", "step"}
    assert len(plan.drops) + len(plan.routes) == len(plan.source.tensors)


def test_chunks_of_a_2d_mesh_are_boxes():
    tensor = open_case("fsdp2-tp").index.by_kind("weight")["model.layers.0.self_attn.o_proj.weight"]
    assert len(tensor.shards) == 4 and {tuple(s) for s in tensor.shards.sizes.tolist()} != {tensor.shape}


def test_strides_of_saved_views_are_honoured():
    opened = open_case("odd")
    strided = [t for t in opened.index.tensors if len(t.shape) > 1 and t.shards.extent(0).strides[-1] != 1]
    assert strided, "the fixture holds a transposed tensor"


def test_a_tied_head_is_a_copy_of_the_embedding_where_the_config_says_so():
    opened = open_case("fsdp2-tied")
    content = opened.content()
    assert content.tied == ("lm_head.weight",) and "lm_head.weight" not in content.tensors
    plain = reshard.open(DCP / "fsdp2-tied" / "checkpoint").content()
    assert "lm_head.weight" in plain.tensors


def test_the_step_of_the_run_is_known_from_its_directory():
    assert open_case("titan").index.facts.step == 2


@pytest.mark.parametrize("case", ["fsdp2", "fsdp2-3", "threads", "per-file", "nocollectives", "accelerate"])
def test_a_missing_file_is_named(case, tmp_path):
    copy = shutil.copytree(DCP / case / "checkpoint", tmp_path / "c")
    lost = sorted(path for path in copy.rglob("*.distcp"))[-1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        reshard.open(copy)


def test_a_missing_rank_of_a_save_without_collectives_is_a_hole(tmp_path):
    copy = shutil.copytree(DCP / "nocollectives" / "checkpoint", tmp_path / "c")
    (copy / "__1.metadata").unlink()
    with pytest.raises(CheckpointError, match="is in no file"):
        reshard.open(copy)


def test_a_truncated_file_is_named(tmp_path):
    copy = shutil.copytree(DCP / "fsdp2" / "checkpoint", tmp_path / "c")
    path = copy / "__2_0.distcp"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"__2_0\.distcp.*bytes"):
        reshard.open(copy)


@pytest.mark.parametrize("moved_to", ["__0_0.distcp", "__9_0.distcp"], ids=["behind the tensors", "in a file of its own"])
def test_a_file_that_is_cut_within_an_object_is_named(moved_to, tmp_path):
    """Megatron writes its objects behind the tensors. torch cannot load the entry."""
    torch = pytest.importorskip("torch", reason="torch writes the files")
    dcp = pytest.importorskip("torch.distributed.checkpoint", reason="torch writes the files")
    folder = tmp_path / "c"
    dcp.save({"weight": torch.arange(6.0), "scheduler": {"epochs": [1, 2]}}, checkpoint_id=folder, no_dist=True)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    (entry,) = [entry for index, entry in metadata.storage_data.items() if index.fqn == "scheduler.epochs"]
    content = (folder / entry.relative_path).read_bytes()[entry.offset : entry.offset + entry.length]
    with open(folder / moved_to, "ab") as file:
        entry.offset, entry.relative_path = file.tell(), moved_to
        file.write(content)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert reshard.open(folder).index.tensors and not [each for each in reshard.doctor(folder).findings if each.severity == "error"]
    os.truncate(folder / moved_to, entry.offset + entry.length - 8)
    with pytest.raises(TruncatedFile, match=re.escape(moved_to)):
        reshard.open(folder)
    assert [each.id for each in reshard.doctor(folder).findings if each.severity == "error"] == ["truncated-file"]
    (folder / moved_to).unlink()
    with pytest.raises(MissingFile, match=re.escape(moved_to)):
        reshard.open(folder)


def test_an_unfinished_save_is_refused_with_the_reason(tmp_path):
    copy = shutil.copytree(DCP / "fsdp2" / "checkpoint", tmp_path / "c")
    (copy / ".metadata").rename(copy / ".metadata.tmp")
    with pytest.raises(CheckpointError, match="not finished"):
        reshard.open(copy)


def test_of_several_steps_one_must_be_named(tmp_path):
    for step in (2, 10):
        shutil.copytree(DCP / "titan" / "checkpoint" / "step-2", tmp_path / f"step-{step}")
    with pytest.raises(RequestError, match="`step=10`"):
        reshard.open(tmp_path)
    assert reshard.open(tmp_path / "step-10").index.facts.step == 10


def test_files_of_another_save_are_noticed(tmp_path):
    """A shard file of the same size but of other tensors: what .metadata says and the entries hold disagree."""
    copy = shutil.copytree(DCP / "fsdp2" / "checkpoint", tmp_path / "c")
    first, second = copy / "__0_0.distcp", copy / "__3_0.distcp"
    size = max(first.stat().st_size, second.stat().st_size)
    data = second.read_bytes()
    first.write_bytes(data + bytes(size - len(data)))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        reshard.fingerprint(copy)


def test_files_are_cut_where_they_would_grow_too_large(tmp_path):
    source = DCP / "fsdp2" / "checkpoint"
    reshard.convert(reshard.plan(source, to="dcp", dp=2, max_shard_size=40_000), tmp_path / "out")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.distcp"))
    assert "__0_1.distcp" in files and "__1_1.distcp" in files
    assert all(path.stat().st_size < 45_000 for path in (tmp_path / "out").glob("*.distcp"))
    assert reshard.verify(source, tmp_path / "out").equal
