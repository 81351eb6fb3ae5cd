"""IndexBuilder: what several files add, here or in processes of their own, is one index; files that disagree are named."""

import pickle

import pytest

from reshard.adapter.index_builder import IndexBuilder
from reshard.containers.distributed_tensors import LocalTensor
from reshard.containers.torch_zip import LocatedTensor
from reshard.errors import CheckpointError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import BF16, from_torch
from reshard.geometry.meshes import Mesh, Replicated, Sharded, distribution
from reshard.index.coverage import check_index
from reshard.index.index import RunFacts
from reshard.storage.files import VirtualFiles

F32 = from_torch("float32", where="test")
LINE = distribution(Mesh(("fsdp",), (4,)), (Sharded(0),), where="test")
GRID = distribution(Mesh(("ddp", "fsdp"), (2, 2)), (Replicated(), Sharded(0)), where="test")


def files(ranks):
    tree = VirtualFiles("run")
    for rank in range(ranks):
        tree.add(f"{rank}.pt", 1000 + rank, ())
    return tree


def local(rank, ranks=4, dtype=F32, layout=LINE):
    """Two rows of a tensor [2 * ranks, 3]."""
    stored = LocatedTensor(f"{rank}.pt", 100 + rank, dtype, (2, 3), (3, 1), "0")
    return LocalTensor(dtype, (2 * ranks, 3), ((Box((2 * rank, 0), (2, 3)), stored),), layout, rank)


def filled(builder, ranks):
    for rank in ranks:
        builder.add("weight", "a", local(rank), f"{rank}.pt", rank)
        builder.add_objects(["step", f"rng{rank}"])
        builder.add_notes(["a note"])
        builder.add_files([f"{rank}.pt"])
    return builder


def pieces(index):
    (tensor,) = index.tensors
    return [(tensor.shards.piece(i), int(tensor.shards.ranks[i])) for i in range(len(tensor.shards))]


def test_builders_of_several_processes_are_one_index():
    direct = filled(IndexBuilder("made-up", files(4)), range(4)).build(RunFacts("torch", notes=("another",)))
    joined = IndexBuilder("made-up", files(4))
    for ranks in ((0, 1), (2, 3)):
        joined.join(pickle.loads(pickle.dumps(filled(IndexBuilder("made-up", files(4)), ranks))))
    index = joined.build(RunFacts("torch", notes=("another",)))
    assert pieces(index) == pieces(direct) and len(pieces(index)) == 4
    assert index.objects == direct.objects == ("step", "rng0", "rng1", "rng2", "rng3")
    assert index.files == direct.files and [file.nbytes for file in index.files] == [1000, 1001, 1002, 1003]
    assert index.facts.notes == ("a note", "another") and index.facts.mesh == LINE.mesh
    check_index(index)


def test_a_piece_that_is_missing_is_a_hole():
    with pytest.raises(CheckpointError, match="is in no file"):
        check_index(filled(IndexBuilder("made-up", files(4)), (0, 1, 3)).build(RunFacts()))


@pytest.mark.parametrize(
    "other, words",
    [
        (local(1, dtype=BF16), r"0\.pt has it as F32 \[8, 3\], 1\.pt as BF16"),
        (local(1, ranks=5), r"\[10, 3\]"),
        (local(1, layout=GRID), "ddp 2"),
    ],
)
def test_files_that_disagree_are_named(other, words):
    builder = filled(IndexBuilder("made-up", files(4)), [0])
    with pytest.raises(CheckpointError, match=words):
        builder.add("weight", "a", other, "1.pt", 1)
    separate = IndexBuilder("made-up", files(4))
    separate.add("weight", "a", other, "1.pt", 1)
    with pytest.raises(CheckpointError, match=words):
        builder.join(separate)


def test_the_mesh_is_the_one_with_most_dimensions():
    builder = IndexBuilder("made-up", files(4))
    assert builder.parallel(4) == {"ranks": 4}
    builder.add("weight", "a", local(0, layout=GRID), "0.pt")
    builder.add("weight", "b", local(0), "0.pt")
    assert builder.mesh == GRID.mesh and builder.parallel(4) == {"ddp": 2, "fsdp": 2}
