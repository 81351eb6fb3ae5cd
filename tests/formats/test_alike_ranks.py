"""Rank files that are recognised instead of parsed give the index that parsing gives. A changed byte is never taken for a known form."""

import random
from collections import OrderedDict

import pytest

import reshard
from reshard.containers import recognised_files, torch_zip

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
    monkeypatch.setattr(recognised_files, "read_ranks", lambda files, ranks, parse: ([], ranks))


def recognised(monkeypatch, folder):
    """The ranks that are recognised when a folder is opened."""
    ranks = []
    found = recognised_files.read_ranks

    def spying(*arguments):
        recognised, left = found(*arguments)
        ranks.extend(rank for alike in recognised for rank in alike.ranks)
        return recognised, left

    with monkeypatch.context() as patch:
        patch.setattr(recognised_files, "read_ranks", spying)
        pieces(folder)
    return ranks


@pytest.mark.parametrize(("ranks", "sizes", "at_least"), [(6, None, 2), (14, None, 6), (262, None, 200), (12, (3, 4), 4)])
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
    changes = [(dice.randrange(len(good)), dice.randrange(1, 256)) for _ in range(60)]
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


def write_zero3(folder, ranks=3):
    """The files of ZeRO-3's ranks, as benchmarks/scale.py writes them, with other values on each rank."""
    tag = folder / "global_step0"
    tag.mkdir(exist_ok=True)
    (folder / "latest").write_text("global_step0")
    shapes = OrderedDict((name, torch.Size(shape)) for name, shape in SHAPES.items())
    part = sum(-(-shape.numel() // ranks) for shape in shapes.values())
    for rank in range(ranks):
        model = {
            "module": OrderedDict((name, torch.empty(0)) for name in shapes),
            "buffer_names": [],
            "param_shapes": [shapes],
            "frozen_param_shapes": OrderedDict(frozen=torch.Size((ranks * 2,))),
            "frozen_param_fragments": OrderedDict(frozen=torch.full((2,), float(rank))),
            "global_steps": 5,
            "dp_world_size": ranks,
            "mp_world_size": 1,
            "ds_version": "0.19.8",
        }
        moments = {"step": torch.tensor(5.0), "exp_avg": torch.randn(part), "exp_avg_sq": torch.rand(part)}
        states = {
            "partition_count": ranks,
            "optimizer_state_dict": {"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]},
            "fp32_flat_groups": [torch.randn(part)],
        }
        # A long name of the folder in the zip moves its members.
        archive = tag / f"{'x' * (1 + 90 * (rank % 2))}.pt"
        torch.save(model, archive)
        archive.replace(tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        optimizer = {"optimizer_state_dict": states, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(optimizer, archive)
        archive.replace(tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def all_parsed(monkeypatch):
    """From now on no file is taken for equal to another."""
    monkeypatch.setattr(recognised_files.EqualFiles, "is_useful", False)


def parsed_paths(monkeypatch, folder):
    """The files that are parsed when a folder is opened."""
    paths = []
    read = torch_zip.read
    with monkeypatch.context() as patch:
        patch.setattr(torch_zip, "read", lambda files, path, **options: paths.append(path) or read(files, path, **options))
        pieces(folder)
    return paths


@pytest.mark.parametrize("ranks", [2, 12])
def test_zero3_files_with_equal_pickles_give_the_same_index(tmp_path, monkeypatch, ranks):
    write_zero3(tmp_path, ranks)
    assert len(parsed_paths(monkeypatch, tmp_path)) == 2
    found = pieces(tmp_path)
    all_parsed(monkeypatch)
    assert len(parsed_paths(monkeypatch, tmp_path)) == 2 * ranks
    assert found == pieces(tmp_path) and len(found) >= 3


@pytest.mark.parametrize("victim", ["zero_pp_rank_1_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_a_changed_byte_of_a_zero3_file_is_never_taken_for_an_equal_one(tmp_path, monkeypatch, victim):
    write_zero3(tmp_path)
    path = tmp_path / "global_step0" / victim
    good, dice, results = path.read_bytes(), random.Random(1), {}
    for change in [(dice.randrange(len(good)), dice.randrange(1, 256)) for _ in range(60)]:
        at, bits = change
        path.write_bytes(good[:at] + bytes([good[at] ^ bits]) + good[at + 1 :])
        results[change] = pieces(tmp_path)
    all_parsed(monkeypatch)
    for (at, bits), found in results.items():
        path.write_bytes(good[:at] + bytes([good[at] ^ bits]) + good[at + 1 :])
        assert found == pieces(tmp_path), f"byte {at} changed by {bits:#x}"
