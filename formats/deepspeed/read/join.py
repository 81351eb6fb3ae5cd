"""Parameters, put together from what every rank's files hold of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.adapter.format import Hints
from reshard.canonical.optimizer_state import state_kind
from reshard.containers.torch_zip import AnyTensor, Locations
from reshard.errors import CheckpointError
from reshard.geometry.dtypes import DType
from reshard.index.index import Kind, ParamGroup, Tensor
from reshard.index.shards import Shards, concatenated
from reshard.storage.files import Files

from ..layout.partitions import as_it_is
from ..layout.states import Shape
from ..layout.tag import Tag
from ..layout.tensor_parallel import Joins


@dataclass(frozen=True, slots=True)
class Part:
    """What one tensor-parallel rank of one pipeline stage holds of a parameter."""

    stage: int
    tp_rank: int
    dtype: DType
    shape: Shape
    shards: Shards


@dataclass(slots=True)
class Topology:
    """The degrees of the run: mp_rank = stage * tp + tp_rank."""

    pp: int
    tp: int
    dp: int
    ep: int = 1

    def place(self, mp_rank: int) -> tuple[int, int]:
        return divmod(mp_rank, self.tp)


# How DeepSpeed names the modules of a pipeline that several layers share.
TIED = "tied_modules."


def role_of(name: str, kind: str, *, master: str) -> tuple[Kind, str]:
    """Kind and name of a parameter's master, which is the kind called `master`, or of what the optimizer keeps of it."""
    return ("master", name) if kind == master else state_kind(name, name, kind)


@dataclass(slots=True)
class Reading:
    """What has been read so far. experts: the tensors of an expert's file, by its path."""

    files: Files
    tag: Tag
    hints: Hints
    locations: Locations = field(init=False)
    parts: dict[tuple[Kind, str], list[Part]] = field(default_factory=dict)
    objects: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    nothing: dict[tuple[str, int], Shape] = field(default_factory=dict)
    unnamed: list[Tensor] = field(default_factory=list)
    unread: dict[str, None] = field(default_factory=dict)
    shapeless: dict[str, int] = field(default_factory=dict)
    groups: dict[tuple[int, int], list[ParamGroup]] = field(default_factory=dict)
    experts: dict[str, Mapping[str, AnyTensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.locations = Locations(self.files)

    def add(self, role: Kind, name: str, part: Part) -> None:
        self.parts.setdefault((role, name), []).append(part)

    def add_whole(self, role: Kind, name: str, tensor: AnyTensor, place: tuple[int, int], rank: int = 0) -> None:
        self.add(role, name, Part(*place, tensor.dtype, tensor.shape, as_it_is(tensor, rank, self.locations)))

    def add_unnamed(self, name: str, tensor: AnyTensor) -> None:
        """State of a parameter that is not known, so that nothing can be joined with it."""
        self.unnamed.append(Tensor(name, tensor.dtype, tensor.shape, "state", as_it_is(tensor, 0, self.locations)))

    def add_nothing(self, name: str, shape: Shape, place: tuple[int, int]) -> None:
        """A part without elements: a rank that is left over when heads are dealt out. The optimizer does not know such parameters."""
        self.nothing[name, place[1]] = shape

    def tensors(self, joins: Joins, tp: int) -> Iterator[Tensor]:
        """Every parameter whole: joined over the tensor-parallel ranks; what several stages hold are copies."""
        for (role, name), found in self.parts.items():
            stages: dict[int, list[Part]] = {}
            for part in found:
                stages.setdefault(part.stage, []).append(part)
            first, *others = stages.values()
            if others and len(first[0].shape) < 2 and name.startswith(TIED):
                # PipelineModule keeps only the tied table in step; what lies beside it in the later stages is used by nothing and drifts.
                self.unread[name] = None
                others = []
            joined = [self._joined(name, parts, joins, tp) for parts in (first, *others)]
            (shape, shards), copies = joined[0], joined[1:]
            if differing := [other for other, _ in copies if other != shape]:
                raise CheckpointError(f"one pipeline stage holds {list(shape)}, another {list(differing[0])}", where=name)
            shards = shards.with_copies([copy for _, copy in copies])
            yield Tensor(name, found[0].dtype, shape, role, shards)
        yield from self.unnamed

    def _joined(self, name: str, parts: Sequence[Part], joins: Joins, tp: int) -> tuple[Shape, Shards]:
        if len({part.dtype for part in parts}) > 1:
            raise CheckpointError(f"its parts are of the types {', '.join(sorted({str(part.dtype) for part in parts}))}", where=name)
        by_rank: dict[int, list[Part]] = {}
        for part in parts:
            by_rank.setdefault(part.tp_rank, []).append(part)
        held = {rank: concatenated([part.shards for part in found]) for rank, found in by_rank.items()}
        if tp == 1:
            return parts[0].shape, held[0]
        if not parts[0].shape:  # a step count: the same on all that have one
            first, *others = held.values()
            return (), first.with_copies(others)
        shapes = {rank: found[0].shape for rank, found in by_rank.items()}
        shapes |= {rank: shape for (known, rank), shape in self.nothing.items() if known == name and rank not in shapes}
        if len(shapes) < tp:
            raise CheckpointError(
                f"of {tp} tensor-parallel ranks only {', '.join(map(str, by_rank))} {'hold' if len(by_rank) > 1 else 'holds'} it",
                where=name,
                do="Copy the missing ranks' files from where the checkpoint was written",
            )
        whole = joins.whole(name, [shapes[rank] for rank in range(tp)])
        moved = [
            concatenated([held[rank].moved(box, at) for box, at in moves])
            for rank, moves in enumerate(whole.moves)
            if moves and rank in held
        ]
        return whole.shape, moved[0].with_copies(moved[1:]) if whole.copies else concatenated(moved)
