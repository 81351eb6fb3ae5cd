"""torch.save files against torch: every stored tensor, read as raw bytes, is the tensor that was saved."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile import lies
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.containers import dcp_metadata, torch_zip
from reshard.containers.torch_zip import LocatedTensor
from reshard.geometry import dtypes
from reshard.storage.claims import HasClaims
from reshard.storage.files import Files, LocalFiles

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONTAINERS = [True, False]


def saved(folder: Path, thing: object, *, zipped: bool = True, name: str = "model.pt") -> Any:
    torch.save(thing, folder / name, _use_new_zipfile_serialization=zipped)
    return torch_zip.read(LocalFiles(folder), name)


def elements(folder: Path, stored: LocatedTensor) -> bytes:
    """The tensor's elements in row-major order, by numpy alone."""
    whole = np.fromfile(folder / stored.path, np.uint8)[stored.byte_offset :] if 0 not in stored.shape else np.empty(0, np.uint8)
    strides = tuple(stride * stored.dtype.itemsize for stride in (*stored.strides, 0))[:-1]
    words = np.ndarray(stored.shape, stored.dtype.word, whole.tobytes(), 0, strides)
    return words.tobytes()


def bits(tensor: torch.Tensor) -> bytes:
    # clone, not contiguous(): a view of one element is contiguous whatever its strides are
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()


def same(folder: Path, stored: LocatedTensor, tensor: torch.Tensor) -> bool:
    described = (tuple(tensor.shape), dtypes.from_torch(str(tensor.dtype), where=""))
    return described == (stored.shape, stored.dtype) and bits(tensor) == elements(folder, stored)


X = torch.arange(24.0).reshape(4, 6)
TENSORS = {
    "contiguous": X,
    "transposed": X.t(),
    "view": X[1:3, 2:5],
    "steps": X[::2, ::3],
    "column": X[:, 4],
    "expanded": torch.arange(3.0).expand(5, 3),
    "channels last": torch.arange(48.0).reshape(2, 3, 2, 4).contiguous(memory_format=torch.channels_last),
    "0-d": torch.tensor(7),
    "0-d view": X[3, 5],
    "empty": torch.empty(0, 3),
    "empty view": X[4:],
    "no columns": torch.empty(3, 0),
    "no columns between": torch.empty(5, 0, 7),
    "parameter": torch.nn.Parameter(X + 1),
    "parameter with an attribute": torch.nn.Parameter(X + 1),
    "tensor with an attribute": X + 2,
    "with gradient": X.clone().requires_grad_(),
} | {f"dtype {name}": torch.ones(3, 2).to(getattr(torch, name)) for name in (dtype.torch for dtype in dtypes._TABLE)}
TENSORS["parameter with an attribute"].tensor_model_parallel = True  # type: ignore[attr-defined]
TENSORS["tensor with an attribute"]._has_been_cloned = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("zipped", CONTAINERS)
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_lies_where_we_say(tmp_path: Path, name: str, zipped: bool) -> None:
    tensor = TENSORS[name]
    assert same(tmp_path, saved(tmp_path, tensor, zipped=zipped), tensor)


@settings(max_examples=60)
@given(st.data())
def test_any_view_lies_where_we_say(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    tensor = torch.arange(2 * 3 * 4 * 5, dtype=torch.int16).reshape(2, 3, 4, 5)
    tensor = tensor.permute(data.draw(st.permutations(range(4))))
    for axis, size in enumerate(tensor.shape):
        start = data.draw(st.integers(0, size))
        tensor = tensor.narrow(axis, start, data.draw(st.integers(0, size - start)))
    folder = tmp_path_factory.mktemp("view")
    assert same(folder, saved(folder, tensor, zipped=data.draw(st.booleans())), tensor)


@pytest.mark.parametrize("zipped", CONTAINERS)
def test_the_objects_around_tensors_stay(tmp_path: Path, zipped: bool) -> None:
    layer = torch.nn.Linear(3, 2)
    root = {
        "model": layer.state_dict(),
        "state": {0: {"step": 3, "exp_avg": X}},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}],
        "size": X.shape,
    }
    read = saved(tmp_path, root, zipped=zipped)
    assert read["groups"] == root["groups"] and read["size"] == (4, 6) and list(read["model"]) == ["weight", "bias"]
    assert same(tmp_path, read["model"]["weight"], layer.weight) and same(tmp_path, read["state"][0]["exp_avg"], X)


@pytest.mark.parametrize("zipped", CONTAINERS)
def test_tensors_that_share_memory_name_one_storage(tmp_path: Path, zipped: bool) -> None:
    read = saved(tmp_path, {"embedding": X, "head": X, "row": X[2], "other": X.clone()}, zipped=zipped)
    assert read["embedding"] == read["head"]
    assert read["row"].storage == read["head"].storage != read["other"].storage
    assert read["row"].byte_offset - read["head"].byte_offset == 2 * 6 * 4


def test_one_storage_may_have_two_types(tmp_path: Path) -> None:
    code = b"(" + lies.tensor() + lies.tensor(where=lies.storage(kind="HalfStorage", count=12), size=(12,), stride=(1,)) + b"t"
    (tmp_path / "model.pt").write_bytes(lies.torch_file(code))
    floats, halves = torch_zip.read(LocalFiles(tmp_path), "model.pt")
    assert elements(tmp_path, floats) == elements(tmp_path, halves) == lies.TENSOR_BYTES


def test_a_renamed_file_keeps_its_root(tmp_path: Path) -> None:
    torch.save(X, tmp_path / "before.pt")
    (tmp_path / "before.pt").rename(tmp_path / "after.bin")
    assert same(tmp_path, torch_zip.read(LocalFiles(tmp_path), "after.bin"), X)


def test_a_file_of_many_tensors_is_read(tmp_path: Path) -> None:
    """The directory is longer than the first read, the pickle longer than the second."""
    tensors = {f"model.layers.{number}.weight": torch.full((3,), number) for number in range(2000)}
    for zipped in CONTAINERS:
        read = saved(tmp_path, tensors, zipped=zipped)
        assert all(same(tmp_path, read[name], tensors[name]) for name in list(tensors)[::99])


def test_a_whole_module_is_stand_ins_around_tensors(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    for zipped in CONTAINERS:
        read = saved(tmp_path, layer, zipped=zipped)
        assert read.class_name == "torch.nn.modules.linear.Linear"
        assert same(tmp_path, read.get("_parameters")["weight"], layer.weight)


def test_a_conjugated_tensor_is_a_stand_in_and_hinders_no_other(tmp_path: Path) -> None:
    """Its bytes are those before conjugation."""
    read = saved(tmp_path, {"conjugated": torch.ones(2, dtype=torch.complex64).conj(), "w": X})
    assert torch_zip.class_of_array(read["conjugated"]) == "torch.Tensor ('conj')" and same(tmp_path, read["w"], X)


def test_a_sparse_tensor_is_a_stand_in_around_tensors(tmp_path: Path) -> None:
    with torch.sparse.check_sparse_tensor_invariants():
        sparse = saved(tmp_path, torch.sparse_coo_tensor([[0]], [1.0], (2,)))
    assert sparse.class_name == "torch._utils._rebuild_sparse_tensor"


class Scaled(torch.Tensor):
    """A tensor whose attributes matter."""


def test_a_tensor_of_a_class_of_its_own_is_a_stand_in_with_its_attributes(tmp_path: Path) -> None:
    scaled = torch.ones(2).as_subclass(Scaled)
    scaled.scale = 3
    for zipped in CONTAINERS:
        read = saved(tmp_path, scaled, zipped=zipped)
        assert read.class_name == f"{__name__}.Scaled" and read.get("scale") == 3
        assert len(read.args) == 1 and same(tmp_path, read.args[0], torch.ones(2))


def test_a_mesh_tensor_is_a_stand_in_with_its_parts(tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor

    wrapped = _dtensor(X)
    assert isinstance(wrapped, DTensor)
    read = saved(tmp_path, {"w": wrapped})["w"]
    assert read.class_name.endswith("DTensor") and read.args[2] == (4, 6)
    assert same(tmp_path, read.get("_local_tensor"), X)
    assert read.get("_spec").get("placements")[0].class_name.endswith("Shard")


def _dtensor(local: torch.Tensor) -> torch.Tensor:
    """A DTensor as one of one rank makes it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        return distribute_tensor(local, init_device_mesh("cpu", (1,)), [Shard(0)])
    finally:
        dist.destroy_process_group()


def test_stored_tensors_go_to_other_processes(tmp_path: Path) -> None:
    stored = saved(tmp_path, X)
    assert pickle.loads(pickle.dumps(stored)) == stored


# ---------------------------------------------------------------- entries of DCP files


class Counting(HasClaims):
    """Files that note every read."""

    def __init__(self, files: Files) -> None:
        self.root, self.list, self.size, self._files = files.root, files.list, files.size, files
        self.reads: list[tuple[str, int, int]] = []

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        self.reads.append((path, byte_offset, len(buffer)))
        self._files.read_into(path, byte_offset, buffer)


def checkpoint(folder: Path, tensors: dict[str, Any]) -> dcp_metadata.DcpMetadata:
    dcp.save(tensors, checkpoint_id=folder / "c", no_dist=True)
    return dcp_metadata.parse((folder / "c" / ".metadata").read_bytes(), where=".metadata")


@pytest.fixture
def odd(tmp_path: Path) -> tuple[Path, dcp_metadata.DcpMetadata]:
    tensors = {name: tensor for name, tensor in TENSORS.items() if name != "expanded"} | {"large": torch.arange(100_000)}
    return tmp_path / "c", checkpoint(tmp_path, tensors | {"note": "seven"})


def entries(metadata: dcp_metadata.DcpMetadata, read: Callable[[str, int, int], LocatedTensor]) -> dict[str, LocatedTensor]:
    return {
        fqn: read(metadata.paths[item.chunks.files[0]], int(item.chunks.entry_offsets[0]), int(item.chunks.entry_nbytes[0]))
        for fqn, item in metadata.tensors.items()
    }


def test_an_entry_of_a_dcp_file_is_the_tensor(odd: tuple[Path, dcp_metadata.DcpMetadata]) -> None:
    folder, metadata = odd
    found = entries(metadata, lambda *place: torch_zip.entry_tensor(LocalFiles(folder), *place))
    assert len(found) == len(TENSORS)
    for name, stored in found.items():
        truth = TENSORS.get(name, torch.arange(100_000))
        assert same(folder, stored, truth), name
        assert (metadata.tensors[name].dtype, metadata.tensors[name].shape) == (stored.dtype, stored.shape)


def test_an_entry_takes_two_small_reads_at_most(odd: tuple[Path, dcp_metadata.DcpMetadata]) -> None:
    folder, metadata = odd
    for fqn in metadata.tensors:
        files = Counting(LocalFiles(folder))
        entries(_only(metadata, fqn), lambda *place, files=files: torch_zip.entry_tensor(files, *place))  # type: ignore[misc]
        assert len(files.reads) <= 2 and sum(nbytes for *_, nbytes in files.reads) < 9000


def _only(metadata: dcp_metadata.DcpMetadata, fqn: str) -> dcp_metadata.DcpMetadata:
    return dcp_metadata.DcpMetadata({fqn: metadata.tensors[fqn]}, {}, metadata.paths, None, None)


def test_an_object_of_a_dcp_file_is_read(odd: tuple[Path, dcp_metadata.DcpMetadata]) -> None:
    folder, metadata = odd
    note = metadata.objects["note"]
    assert torch_zip.read(LocalFiles(folder), note.path, start=note.entry_offset, nbytes=note.entry_nbytes) == "seven"
