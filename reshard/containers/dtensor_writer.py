"""DTensors in the pickle of a torch.save file to be written, as torch itself pickles them. torch is not needed.

A DTensor is its local tensor and a DTensorSpec: the mesh, the placements, the global shape. The attributes of these objects differ between
the versions of torch, and a version reads only its own. Source: torch/distributed/device_mesh.py and tensor/_dtensor_spec.py; measured on
what torch 2.6, 2.8 and 2.10 to 2.13 pickle, and by loading such files with each of them.
"""

from __future__ import annotations

import struct
from typing import Any

from reshard.containers.pickle_writer import Call, Instance, Name, Shared
from reshard.containers.torch_frame import Plain, Tensors
from reshard.geometry.boxes import row_major
from reshard.geometry.dtypes import I32, DType

_SPEC = "torch.distributed.tensor._dtensor_spec"
_DTENSOR = Name("torch.distributed.tensor", "DTensor")
# torch's name for the default process group. The tensors of a mesh of all ranks communicate in it.
_GROUP = "0"


class RowShards:
    """DTensors that are split by rows over a mesh of all ranks, in the pickle of one rank."""

    def __init__(self, tensors: Tensors, ranks: int, rank: int, dimension: str, version: tuple[int, int]) -> None:
        """tensors: those of the pickle. dimension: the name of the mesh's only dimension. version: of the torch that reads the file."""
        self._tensors = tensors
        self._mesh = Shared(_mesh(tensors, ranks, rank, dimension, version))
        self._version = version
        self._layout = Shared(Call(Name("torch.serialization", "_get_layout"), ("torch.strided",)))
        self._device = Shared(Call(Name("torch", "device"), ("cpu",)))

    def add(self, local: Plain, shape: tuple[int, ...]) -> Call:
        """The call that makes the DTensor when it is unpickled. local: the rank's rows; it gets the next storage. shape: the global one."""
        element_type, strides = Name("torch", local.dtype.torch), row_major(shape)
        outer = (_DTENSOR, element_type, shape, strides, 0, self._layout, self._device, False)
        state = {"_local_tensor": self._tensors.add(local), "_spec": self._spec(shape, strides, local.dtype)}
        function = Name("torch._utils", "_rebuild_wrapper_subclass")
        return Call(Name("torch._tensor", "_rebuild_from_type_v2"), (function, _DTENSOR, outer, (None, state)))

    def _spec(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType) -> Instance:
        meta = Instance(Name(_SPEC, "TensorMeta"), args=(Call(Name("torch", "Size"), (shape,)), strides, Name("torch", dtype.torch)))
        state: dict[str, Any] = {
            "mesh": self._mesh,
            "placements": (Instance(Name("torch.distributed.tensor.placement_types", "Shard"), {"dim": 0}),),
            "tensor_meta": meta,
        }
        if self._version >= (2, 10):
            state["shard_order"] = (Instance(Name(_SPEC, "ShardOrderEntry"), args=(0, (0,))),)
        if self._version >= (2, 11):
            state["use_strided_shard_as_shard_order"] = False
        return Instance(Name(_SPEC, "DTensorSpec"), {**state, "_hash": None})


def _mesh(tensors: Tensors, ranks: int, rank: int, dimension: str, version: tuple[int, int]) -> Instance:
    """torch's DeviceMesh of all ranks, as rank `rank` has it."""
    everyone = tuple(range(ranks))
    grid = tensors.add(Plain(I32, (ranks,)), struct.pack(f"<{ranks}i", *everyone))
    state: dict[str, Any]
    if version < (2, 10):
        state = {
            "device_type": "cpu",
            "mesh": grid,
            "mesh_dim_names": (dimension,),
            "_flatten_mesh_list": everyone,
            "_dim_group_infos": [("", list(everyone), _GROUP)],  # up to 2.7
        }
    else:
        state = {
            "_device_type": "cpu",
            "_layout": _mesh_layout(ranks, version),
            "_rank_map": grid,
            "_mesh_dim_names": (dimension,),
            "_root_mesh": None,
            "_flatten_rank_map": everyone,
            "_flatten_mapping": {},
            "_rank": rank,  # since 2.11
        }
    state["_thread_id"] = state["_hash"] = None
    state["_dim_group_names"] = [_GROUP]  # since 2.8
    state["_coordinate_on_dim"] = [rank] if version < (2, 11) else (rank,)
    return Instance(Name("torch.distributed.device_mesh", "DeviceMesh"), state)


def _mesh_layout(ranks: int, version: tuple[int, int]) -> Instance:
    """torch's _MeshLayout of ranks in a row, without gaps."""
    module = "torch.distributed._mesh_layout"
    if version < (2, 13):
        return Instance(Name(module, "_MeshLayout"), {"shape": (ranks,), "stride": (1,)})
    # An axis of one rank is left out.
    flat = Instance(Name(module, "_FlatLayout"), {"shape": (ranks,), "stride": (1,)} if ranks > 1 else {"shape": (), "stride": ()})
    return Instance(Name(module, "_MeshLayout"), {"axes": (flat,)})
