"""Contents: the parts of parameters, and facts about them, that one step found. `merged` joins the contents of several steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace

from reshard.canonical.optimizer_state import state_kind
from reshard.containers.torch_zip import AnyTensor, Locations
from reshard.geometry.dtypes import DType
from reshard.geometry.value import value
from reshard.index.index import Kind, ParamGroup, Tensor
from reshard.index.shards import Shards

from ..layout.degrees import ModelRank
from ..layout.states import Shape
from .flat_buffers import pieces_of_whole


@value(eq=False, repr=False)
class ParameterPart:
    """The part of a parameter, of its master or of its optimizer state in the files of one model-parallel rank."""

    kind: Kind
    """Weight, master, moment, ..."""
    name: str
    """The parameter's name in the whole model."""
    stage: int
    """The pipeline stage. Parts of other stages are copies."""
    tp_rank: int
    """The tensor-parallel rank. The parts of all ranks make the whole."""
    dtype: DType
    """The element type."""
    shape: Shape
    """The shape of this rank's part."""
    shards: Shards
    """Where the part's elements lie, in the part's own coordinates."""

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name} {list(self.shape)} {self.dtype} of stage {self.stage}, tp rank {self.tp_rank}>"


@value(eq=False, repr=False)
class Contents:
    """What one step found in the files. Every field may be empty."""

    parts: tuple[ParameterPart, ...] = ()
    """Parts of parameters."""
    empty_shapes: Mapping[tuple[str, int], Shape] = field(default_factory=dict)
    """(name, tensor-parallel rank) -> shape of a part without elements. A rank without attention heads has such parts."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied parameters: second name -> the name under which the parameter is stored."""
    shapeless: tuple[str, ...] = ()
    """Parameters whose shapes are in no file: their masters are read as one row of elements."""
    unnamed: tuple[Tensor, ...] = ()
    """Optimizer state of parameters whose names are unknown."""
    objects: tuple[str, ...] = ()
    """Names of what is stored but is not a tensor."""
    notes: tuple[str, ...] = ()
    """Sentences for a reader of the index."""
    param_groups: tuple[ParamGroup, ...] = ()
    """The optimizer's groups of parameters."""

    def by_tensor(self) -> dict[tuple[Kind, str], list[ParameterPart]]:
        """The parts of each tensor, by kind and name."""
        tensors: dict[tuple[Kind, str], list[ParameterPart]] = {}
        for part in self.parts:
            tensors.setdefault((part.kind, part.name), []).append(part)
        return tensors

    def names(self, kind: Kind) -> set[str]:
        """The names of the tensors of one kind."""
        return {part.name for part in self.parts if part.kind == kind}

    def __repr__(self) -> str:
        return f"<{len(self.parts)} parts of {len({part.name for part in self.parts})} parameters, {len(self.notes)} notes>"


def merged(contents: Iterable[Contents]) -> Contents:
    """The contents of several steps as one. Where steps differ about an alias, the first counts. Param groups are merged by number."""
    steps = list(contents)
    aliases: dict[str, str] = {}
    empty_shapes: dict[tuple[str, int], Shape] = {}
    for step in steps:
        empty_shapes.update(step.empty_shapes)
        for alias, name in step.aliases.items():
            aliases.setdefault(alias, name)
    return Contents(
        parts=tuple(part for step in steps for part in step.parts),
        empty_shapes=empty_shapes,
        aliases=aliases,
        shapeless=_distinct(name for step in steps for name in step.shapeless),
        unnamed=tuple(tensor for step in steps for tensor in step.unnamed),
        objects=_distinct(name for step in steps for name in step.objects),
        notes=_distinct(note for step in steps for note in step.notes),
        param_groups=_merged_groups([step.param_groups for step in steps]),
    )


def _distinct(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _merged_groups(of_steps: Sequence[tuple[ParamGroup, ...]]) -> tuple[ParamGroup, ...]:
    """The groups of all steps: model-parallel ranks list the same groups, each with its own parameters."""
    groups: list[ParamGroup] = []
    for of_step in of_steps:
        for number, group in enumerate(of_step):
            if number < len(groups):
                groups[number] = replace(groups[number], names=_distinct((*groups[number].names, *group.names)))
            else:
                groups.append(group)
    return tuple(groups)


def whole_part(kind: Kind, name: str, tensor: AnyTensor, rank: ModelRank, locations: Locations) -> ParameterPart:
    """The part that a rank's file holds as one tensor."""
    return ParameterPart(kind, name, rank.stage, rank.tp_rank, tensor.dtype, tensor.shape, pieces_of_whole(tensor, locations))


# The state that is a parameter's full-precision copy. The other states have the optimizer's names: "exp_avg", "step", ...
MASTER = "(master)"


def kind_and_name(parameter: str, state: str, *, master: str = MASTER) -> tuple[Kind, str]:
    """The kind and the name of the tensor that is one state of a parameter. master: the state that is its full-precision copy."""
    return ("master", parameter) if state == master else state_kind(parameter, parameter, state)
