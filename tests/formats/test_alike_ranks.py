"""Rank files that are recognised instead of parsed give the index that parsing gives. A changed byte is never taken for a known form."""

import random
from collections import OrderedDict

import pytest

import reshard
from reshard.containers import alike_files
from reshard.containers.alike_files import AlikeRanks, NotAlike

torch = pytest.importorskip("torch", reason="torch writes the files")

RANKS = 6
SHAPES = {"model.embed_tokens.weight": (26, 8), "model.norm.weight": (8,), "lm_head.weight": (26, 8)}


def write_rank(folder, rank, ranks=RANKS, sizes=None):
    """A file of FSDP2's sharded state dict, as rank `rank` saves it. The last ranks hold fewer rows, or none."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    sizes = sizes or (ranks,)
    names = ("replicate", "shard")[-len(sizes) :]
    mesh = DeviceMesh("cpu", torch.arange(ranks).reshape(sizes), mesh_dim_names=names, _init_backend=False, _rank=rank)
    mesh._dim_group_names = [str(i) for i in range(len(sizes))]
    state = OrderedDict()
    for name, shape in SHAPES.items():
        rows = -(-shape[0] // sizes[-1])
        start = min(shape[0], (rank % sizes[-1]) * rows)
        placements = (*(Replicate() for _ in sizes[1:]), Shard(0))
        stride = (shape[1], 1) if len(shape) > 1 else (1,)
        spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, torch.float32))
        local = torch.arange(start, min(shape[0], start + rows), dtype=torch.float32).reshape(-1, *(1,) * (len(shape) - 1))
        state[name] = DTensor(local.expand(-1, *shape[1:]).contiguous(), spec, requires_grad=False)
    torch.save(state, folder / f"model_world_size_{ranks}_rank_{rank}.pt")


def pieces(folder):
    """Every piece of the index, or the class of the error."""
    try:
        index = reshard.open(folder).index
        return sorted(f"{tensor.name} {tensor.dtype} {tensor.shape} {piece}" for tensor in index.tensors for piece in tensor.pieces())
    except reshard.ReshardError as error:
        return type(error).__name__


def parsed_in_full(monkeypatch):
    """From now on no file is recognised."""
    monkeypatch.setattr(alike_files, "read_ranks", lambda files, ranks, parse: iter([NotAlike(ranks)]))


def recognised(monkeypatch, folder):
    """The ranks that are recognised when a folder is opened."""
    ranks = []
    found = alike_files.read_ranks

    def spying(*arguments):
        for each in found(*arguments):
            ranks.extend(each.ranks if isinstance(each, AlikeRanks) else [])
            yield each

    with monkeypatch.context() as patch:
        patch.setattr(alike_files, "read_ranks", spying)
        pieces(folder)
    return ranks


@pytest.mark.parametrize(("ranks", "sizes", "at_least"), [(6, None, 2), (12, None, 6), (40, None, 25), (300, None, 200), (12, (3, 4), 4)])
def test_recognised_files_give_the_same_index(tmp_path, monkeypatch, ranks, sizes, at_least):
    for rank in range(ranks):
        write_rank(tmp_path, rank, ranks, sizes)
    assert len(recognised(monkeypatch, tmp_path)) >= at_least
    found = pieces(tmp_path)
    parsed_in_full(monkeypatch)
    assert found == pieces(tmp_path) and len(found) >= 3


def test_a_changed_byte_is_never_taken_for_a_known_form(tmp_path, monkeypatch):
    for rank in range(RANKS):
        write_rank(tmp_path, rank)
    victim = tmp_path / f"model_world_size_{RANKS}_rank_3.pt"
    good, dice, results = victim.read_bytes(), random.Random(0), {}
    assert 3 in recognised(monkeypatch, tmp_path)
    changes = [(dice.randrange(len(good)), dice.randrange(1, 256)) for _ in range(150)]
    # The rank and the coordinate are the numbers that may differ: other values must not pass.
    changes += [(at, 3 ^ other) for at in range(len(good) - 1) if good[at : at + 2] == b"K\x03" for at, other in ((at + 1, 2), (at + 1, 4))]
    for change in changes:
        at, bits = change
        victim.write_bytes(good[:at] + bytes([good[at] ^ bits]) + good[at + 1 :])
        results[change] = pieces(tmp_path)
    parsed_in_full(monkeypatch)
    for (at, bits), found in results.items():
        victim.write_bytes(good[:at] + bytes([good[at] ^ bits]) + good[at + 1 :])
        assert found == pieces(tmp_path), f"byte {at} changed by {bits:#x}"


def test_a_file_under_another_ranks_name_is_refused(tmp_path):
    for rank in range(RANKS):
        write_rank(tmp_path, rank)
    (tmp_path / f"model_world_size_{RANKS}_rank_3.pt").replace(tmp_path / f"model_world_size_{RANKS}_rank_2.pt")
    write_rank(tmp_path, 3)
    with pytest.raises(reshard.CheckpointError, match="its name says rank 2"):
        reshard.open(tmp_path)
