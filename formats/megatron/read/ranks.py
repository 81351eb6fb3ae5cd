"""What the files of ranks say, as plain values: the run's settings, and the tensors of every chunk of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.adapter.state_dicts import flat, is_tensor
from reshard.containers import torch_zip
from reshard.containers.inert_pickle import shown
from reshard.containers.torch_zip import AnyTensor
from reshard.errors import CheckpointError
from reshard.storage.files import Files

from ..layout.arguments import Args, plain_args, size
from ..layout.names import IGNORED
from ..layout.save_folders import RankFolder

_MODEL = "model"
# Keys of a file beside the model's and the optimizer's; any other is the trainer's own.
_PLAIN = ("iteration", "checkpoint_version", "num_floating_point_operations_so_far", "opt_param_scheduler", "lr_scheduler", "tokens")


@dataclass(frozen=True, slots=True)
class Topology:
    """Parallel sizes. etp: tensor-parallel size of the experts; vp: chunks per stage."""

    tp: int
    pp: int
    ep: int
    etp: int
    vp: int

    def facts(self) -> dict[str, int]:
        found = {"tp": self.tp, "pp": self.pp, "vp": self.vp, "ep": self.ep}
        return {name: number for name, number in found.items() if number > 1 or name in ("tp", "pp")} | (
            {"etp": self.etp} if self.ep > 1 and self.etp != self.tp else {}
        )


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's file: its coordinates and, chunk by chunk, its tensors by name, in the order in which they were saved.

    objects: names of what is there and is no tensor of the model.
    """

    path: str
    folder: str
    tp: int
    pp: int
    ep: int
    chunks: tuple[Mapping[str, AnyTensor], ...]
    optimizer: Any
    args: Args
    plain: Mapping[str, Any]
    objects: tuple[str, ...]

    @property
    def iteration(self) -> int | None:
        value = self.plain.get("iteration")
        return value if type(value) is int else None

    @property
    def version(self) -> float:
        """The version of the checkpoint's form; files without it are older than 1."""
        value = self.plain.get("checkpoint_version", 0)
        return float(value) if isinstance(value, int | float) else 0.0


def topology_of(args: Args, found: Sequence[RankFolder], where: str) -> Topology:
    """The parallel sizes, from the settings or, where they do not tell, from the folders.

    Raises: CheckpointError if a folder does not belong to them, or one is missing.
    """
    tp = size(args, "tensor_model_parallel_size", "model_parallel_size", default=1 + max(each.tp for each in found))
    pp = size(args, "pipeline_model_parallel_size", default=1)
    ep = size(args, "expert_model_parallel_size")
    if not args:
        pp = 1 + max((each.numbers[0] for each in found if each.numbers), default=0)
    topology = Topology(tp, pp, ep, size(args, "expert_tensor_parallel_size", default=tp), 1)
    places = {coordinates(each, topology): each for each in found}
    for (tp_rank, pp_rank, ep_rank), each in places.items():
        if tp_rank >= tp or pp_rank >= pp or ep_rank >= ep:
            raise CheckpointError(
                f"the run had {_sizes(topology)}, and no rank of this name",
                where=each.folder,
                why="It is left over from a save with other sizes, so its values are of another step",
                do="Move it away",
            )
    for pp_rank in range(pp):
        for tp_rank in range(tp):
            if not any((tp_rank, pp_rank) == place[:2] for place in places):
                raise CheckpointError(
                    f"the folder of tensor-parallel rank {tp_rank}" + (f" of stage {pp_rank}" if pp > 1 else "") + " is not there",
                    where=where,
                    why=f"The run had {_sizes(topology)}; without it weights would be left partly unset",
                    do="Copy it from where the checkpoint was written",
                )
    if lost := sorted(set(range(ep)) - {place[2] for place in places}):
        raise CheckpointError(
            f"no folder of expert-parallel rank {lost[0]} is there",
            where=where,
            why=f"The run had {_sizes(topology)}; without it experts would be missing",
            do="Copy it from where the checkpoint was written",
        )
    return topology


def _sizes(topology: Topology) -> str:
    sizes = {"tensor": topology.tp, "pipeline": topology.pp, "expert": topology.ep}
    return ", ".join(f"{kind}-parallel size {number}" for kind, number in sizes.items() if number > 1 or kind == "tensor")


def coordinates(found: RankFolder, topology: Topology) -> tuple[int, int, int]:
    """(tensor, pipeline, expert) parallel rank: the numbers of a folder's name say only what there are several of."""
    numbers = list(found.numbers)
    pp = numbers.pop(0) if numbers and (topology.pp > 1 or len(numbers) > 1 or topology.ep == 1) else 0
    return found.tp, pp, numbers.pop(0) if numbers else 0


def read_rank(files: Files, found: RankFolder) -> tuple[Mapping[str, Any], Args]:
    """The root of a rank's file and the run's settings. Raises CheckpointError if it holds no model."""
    root = torch_zip.read(files, found.weights, locate=False)
    if not isinstance(root, Mapping) or not any(str(key).startswith(_MODEL) or key == "state_dict" for key in root):
        raise CheckpointError(f"it holds {shown(root)}, not a rank's model", where=found.weights, do="Copy the file again")
    return root, plain_args(root.get("args"))


def rank_of(found: RankFolder, root: Mapping[str, Any], args: Args, place: tuple[int, int, int]) -> Rank:
    """A rank's file as plain values."""
    keys = [_MODEL] if _MODEL in root else sorted((key for key in root if _is_chunk(key)), key=lambda key: int(key.removeprefix(_MODEL)))
    keys = keys or ["state_dict" if "state_dict" in root else ""]
    chunks, objects = [], [str(key) for key in root if key not in (*keys, "optimizer", *_PLAIN)]
    for key in keys:
        tensors: dict[str, AnyTensor] = {}
        module = root[key] if key else root  # NeMo saves the model alone
        for name, value in flat(module) if isinstance(module, Mapping) else ():
            if is_tensor(value) and not IGNORED.fullmatch(name):
                tensors[name] = value
            elif value is not None:
                objects.append(name)
        chunks.append(tensors)
    plain = {key: root[key] for key in _PLAIN if key in root}
    return Rank(found.weights, found.folder, *place, tuple(chunks), root.get("optimizer"), args, plain, tuple(objects))


def _is_chunk(key: Any) -> bool:
    return isinstance(key, str) and key.startswith(_MODEL) and key.removeprefix(_MODEL).isdecimal()
