"""The optimizer state of a rank of a legacy save: which state belongs to which parameter.

No state is stored under a parameter's name. The state follows the order of the parameters in the model. That is the order of the file's
tensors without buffers. The plain optimizer numbers the parameters through its param groups. The distributed optimizer has them in flat
buffers (flat_buckets.py). Optimizers of dense weights and of experts are chained: then the file has a list of two.

Source: megatron/core/optimizer/{__init__,optimizer,distrib_optimizer}.py of 0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from reshard.canonical.optimizer_state import plain_settings, state_kind
from reshard.containers import torch_zip
from reshard.containers.distributed_tensors import LocalTensor
from reshard.containers.torch_zip import AnyTensor, is_plain_tensor
from reshard.errors import CheckpointError
from reshard.geometry.boxes import row_major
from reshard.geometry.value import value
from reshard.index.index import Kind, ParamGroup
from reshard.storage.files import Files

from ..layout.arguments import Args, parallel_size
from ..layout.flat_buckets import BUFFER_KINDS, BufferedParameter, lay_out_buffer
from ..layout.save_folders import DISTRIBUTED_OPTIMIZER
from .chunk_tensors import ChunkTensor
from .ranks import MegatronRank
from .tensor_boxes import Shape, elements_of, local_tensors, whole_tensor

_MASTERS = "fp32_from_fp16_params"
OF_ADAPTER = "the optimizer's state is left out: of a run that trains a LoRA adapter, reshard does not read it"
"""A note on a checkpoint."""


@value(eq=False)
class ParameterState:
    """A tensor that the optimizer keeps of one parameter."""

    parameter: ChunkTensor
    """The parameter."""
    kind: str
    """torch's name of the kind of state, such as "exp_avg"."""
    stored: AnyTensor
    """Where its elements lie."""


@value
class RankParamGroup:
    """A rank's part of one of the optimizer's param groups."""

    optimizer: int
    """The optimizer in the chain that has the group."""
    number: int
    """The number of the group in that optimizer."""
    names: tuple[str, ...]
    """The canonical names of the rank's parameters in the group."""
    settings: Mapping[str, Any]
    """Its settings as plain values."""


@value(eq=False, repr=False)
class RankOptimizer:
    """The optimizer state of one rank."""

    path: str
    """The file that holds it."""
    states: tuple[ParameterState, ...]
    """The stored tensors, each with its parameter."""
    groups: tuple[RankParamGroup, ...]
    """The rank's part of the param groups."""
    notes: tuple[str, ...]
    """Why state is left out, if some is."""

    def __repr__(self) -> str:
        return f"<{self.path}: {len(self.states)} optimizer tensors in {len(self.groups)} param groups>"


def read_optimizer(files: Files, rank: MegatronRank, args: Args, tensors: Iterable[ChunkTensor]) -> RankOptimizer:
    """The optimizer state of a rank: of the distributed optimizer if the rank has its file, otherwise of the plain optimizer.

    Raises: CheckpointError if the buffers of the distributed optimizer do not fit the parameters.
    """
    parameters = [tensor for tensor in tensors if tensor.is_parameter]
    links = _chain_links(rank.optimizer)
    path = rank.folder + DISTRIBUTED_OPTIMIZER
    if files.size(path) is None:
        return _plain_optimizer(links, parameters, rank.path, is_chain=isinstance(rank.optimizer, list))
    buffers = torch_zip.read(files, path, locate=False)
    return _distributed_optimizer(links, buffers, parameters, _bucket_sizes(rank, args, parameters), path)


def adapter_optimizer(rank: MegatronRank) -> RankOptimizer:
    """No optimizer state, and if there is some, a note that it is left out: the optimizer of a LoRA adapter numbers other parameters."""
    return RankOptimizer(rank.path, (), (), (OF_ADAPTER,) if rank.optimizer else ())


def merged_param_groups(rank_groups: Iterable[RankParamGroup], order: Iterable[str]) -> tuple[ParamGroup, ...]:
    """The param groups of a run, from the parts of all ranks. The settings are those of the first rank.

    order: the model's weights in its order, which each group follows: ZeRO-3 and torch's optimizers load state by position in the group.
    """
    names: dict[tuple[int, int], dict[str, None]] = {}
    settings: dict[tuple[int, int], Mapping[str, Any]] = {}
    for group in rank_groups:
        key = group.optimizer, group.number
        names.setdefault(key, {}).update(dict.fromkeys(group.names))
        settings.setdefault(key, group.settings)
    position = {name: i for i, name in enumerate(order)}
    return tuple(ParamGroup(tuple(sorted(names[key], key=lambda name: position[name])), settings[key]) for key in names)


def canonical_state(state: ParameterState, shapes: Mapping[str, Shape]) -> Iterator[tuple[Kind, str, LocalTensor]]:
    """(kind, name, boxes) of the canonical tensors that a state tensor holds. shapes: the weights' global shapes.

    A state of another shape than its parameter, such as a step count, belongs to each canonical tensor that is fused in the parameter.
    """
    array, stored = state.parameter.array, state.stored
    if stored.shape == state.parameter.shape:
        boxes = local_tensors(array, stored, shapes)
    else:
        boxes = ((name, whole_tensor(stored)) for name in array.names)
    for name, local in boxes:
        kind, known_as = state_kind(name, name, state.kind)
        yield kind, known_as, local


@value
class _ChainLink:
    """One of the chained optimizers, as stored."""

    state: Any
    """State by number of the parameter."""
    groups: list[Mapping[str, Any]]
    """The param groups."""
    masters: Any
    """The masters, group by group."""


def _chain_links(optimizer: Any) -> list[_ChainLink]:
    """The chained optimizers; one if they are not chained. Megatron wraps torch's state dict, or stores it alone."""
    links = []
    for stored in optimizer if isinstance(optimizer, list) else [optimizer]:
        outer = stored if isinstance(stored, Mapping) else {}
        inner = outer.get("optimizer", outer)
        inner = inner if isinstance(inner, Mapping) else {}
        groups = inner.get("param_groups")
        listed = [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []
        links.append(_ChainLink(inner.get("state"), listed, outer.get(_MASTERS)))
    return links


def _plain_optimizer(links: Sequence[_ChainLink], parameters: Sequence[ChunkTensor], path: str, *, is_chain: bool) -> RankOptimizer:
    states: list[ParameterState] = []
    groups: list[RankParamGroup] = []
    notes: list[str] = []
    for number, link in enumerate(links):
        numbers = [list(group["params"]) for group in link.groups if isinstance(group.get("params"), list)]
        if not isinstance(link.state, Mapping) or len(numbers) != len(link.groups):
            continue
        members = _members(_link_parameters(parameters, link.groups, is_chain=is_chain, number=number), link.groups)
        if list(map(len, members)) != list(map(len, numbers)):
            notes.append(
                f"the optimizer's state is left out: it has groups of {_lengths(numbers)} parameters, "
                f"and by their settings they would be {_lengths(members)} ({path})"
            )
            continue
        groups.extend(_rank_groups(number, link.groups, members))
        for position, group_members in enumerate(members):
            states.extend(_master_states(link.masters, position, group_members))
            for member, parameter_number in zip(group_members, numbers[position], strict=True):
                states.extend(_parameter_states(member, link.state.get(parameter_number)))
    return RankOptimizer(path, tuple(states), tuple(groups), tuple(notes))


def _lengths(groups: Iterable[Sequence[Any]]) -> str:
    return ", ".join(str(len(group)) for group in groups)


def _master_states(masters: Any, position: int, members: Sequence[ChunkTensor]) -> Iterator[ParameterState]:
    """The masters of a param group; parameters of 4 bytes per element have none."""
    stored = masters[position] if isinstance(masters, list) and position < len(masters) else []
    narrow = [member for member in members if member.stored.dtype.itemsize < 4] if stored else []
    for member, master in zip(narrow, stored, strict=False):
        if is_plain_tensor(master):
            yield ParameterState(member, "master_param", master)


def _parameter_states(parameter: ChunkTensor, states: Any) -> Iterator[ParameterState]:
    if isinstance(states, Mapping):
        yield from (ParameterState(parameter, kind, stored) for kind, stored in states.items() if is_plain_tensor(stored))


def _distributed_optimizer(
    links: Sequence[_ChainLink], buffers: Any, parameters: Sequence[ChunkTensor], bucket_sizes: Sequence[int | None], path: str
) -> RankOptimizer:
    states: list[ParameterState] = []
    groups: list[RankParamGroup] = []
    notes: list[str] = []
    is_chain = isinstance(buffers, list)
    for number, by_chunk in enumerate(buffers if is_chain else [buffers]):
        if not isinstance(by_chunk, Mapping):
            continue  # another rank's file has it
        settings = links[number].groups if number < len(links) else []
        members = _link_parameters(parameters, settings, is_chain=is_chain, number=number)
        groups.extend(_rank_groups(number, settings, _members(members, settings)))
        for buffered, arrays in _buffers(by_chunk, members, path):
            offsets = _parameter_offsets(buffered, arrays, bucket_sizes, path)
            if len(offsets) > 1:
                notes.append(f"the distributed optimizer's state is left out: it can have {len(offsets)} different bucket layouts ({path})")
                continue
            states.extend(_buffer_states(buffered, arrays, offsets.pop()))
    return RankOptimizer(path, tuple(states), tuple(groups), tuple(notes))


def _bucket_sizes(rank: MegatronRank, args: Args, parameters: Sequence[ChunkTensor]) -> list[int | None]:
    """The bucket sizes that a rank can have had (distributed_data_parallel.py): stages after the first have none."""
    if rank.pp_rank:
        return [None]
    size = args.get("ddp_bucket_size")
    if type(count := args.get("ddp_num_buckets")) is int and count > 0:
        size = sum(parameter.elements for parameter in parameters) // count
    data_parallel = parallel_size(args, "data_parallel_size") * parallel_size(args, "context_parallel_size")
    return [None, size if isinstance(size, int) else max(40_000_000, 1_000_000 * data_parallel)]


def _parameter_offsets(
    parameters: Sequence[ChunkTensor], arrays: Mapping[str, Any], bucket_sizes: Sequence[int | None], path: str
) -> set[tuple[int, ...]]:
    """The offsets of the parameters in their buffer, for each bucket size that explains the buffer's length.

    Raises: CheckpointError if no bucket size explains it.
    """
    buffered = [BufferedParameter(parameter.elements, parameter.is_shared) for parameter in parameters]
    layouts = [lay_out_buffer(buffered, size) for size in bucket_sizes]
    offsets = {layout.offsets for layout in layouts if layout.elements == arrays.get("numel_unpadded")}
    if not offsets:
        raise CheckpointError(
            f"a buffer of the distributed optimizer has {arrays.get('numel_unpadded')} elements, "
            f"its {len(parameters)} parameters need {lay_out_buffer(buffered, None).elements}",
            where=path,
            why="The bucket boundaries depend on settings that the file does not tell, and without them the parameters cannot be located",
            do="Save with --ckpt-format torch_dist, or take the weights alone: move distrib_optim.pt away",
        )
    return offsets


def _buffer_states(parameters: Sequence[ChunkTensor], arrays: Mapping[str, Any], offsets: Sequence[int]) -> Iterator[ParameterState]:
    for parameter, offset in zip(parameters, offsets, strict=True):
        for name, kind in BUFFER_KINDS.items():
            if is_plain_tensor(array := arrays.get(name)):
                yield ParameterState(parameter, kind, elements_of(array, offset, parameter.shape, row_major(parameter.shape)))


def _buffers(
    by_chunk: Mapping[Any, Any], parameters: Sequence[ChunkTensor], path: str
) -> Iterator[tuple[list[ChunkTensor], Mapping[str, Any]]]:
    """(its parameters, its arrays) of each buffer: one for each element type of each chunk.

    Raises: CheckpointError if there are other buffers than these.
    """
    expected: list[tuple[str, list[ChunkTensor]]] = []
    for chunk in sorted({parameter.chunk for parameter in parameters}):
        in_chunk = [parameter for parameter in parameters if parameter.chunk == chunk]
        for dtype in dict.fromkeys(parameter.stored.dtype.torch for parameter in in_chunk):
            expected.append((dtype, [parameter for parameter in in_chunk if parameter.stored.dtype.torch == dtype]))
    stored = [(dtypes, arrays) for by_dtype in by_chunk.values() if isinstance(by_dtype, Mapping) for dtypes, arrays in by_dtype.items()]
    stored_dtypes = [str(dtypes[0]).removeprefix("torch.") if isinstance(dtypes, tuple) else "" for dtypes, _ in stored]
    if stored_dtypes != [dtype for dtype, _ in expected] or not all(isinstance(arrays, Mapping) for _, arrays in stored):
        raise CheckpointError(
            f"it holds buffers of {', '.join(stored_dtypes) or 'nothing'}, "
            f"the chunks of the model have {', '.join(dtype for dtype, _ in expected)}",
            where=path,
            why="There is one buffer for each element type of each chunk",
            do="Copy the file again from where the checkpoint was written, or move it away to take the weights alone",
        )
    for (_, members), (_, arrays) in zip(expected, stored, strict=True):
        yield members, arrays


def _link_parameters(
    parameters: Sequence[ChunkTensor], groups: Sequence[Mapping[str, Any]], *, is_chain: bool, number: int
) -> list[ChunkTensor]:
    """The parameters of one of the chained optimizers: experts have an optimizer to themselves."""
    flags = {bool(group.get("is_expert_parallel")) for group in groups}
    if not is_chain or len(flags) > 1:
        return list(parameters)
    is_expert = flags.pop() if flags else number > 0
    return [parameter for parameter in parameters if parameter.is_expert is is_expert]


def _members(parameters: Sequence[ChunkTensor], groups: Sequence[Mapping[str, Any]]) -> list[list[ChunkTensor]]:
    """The parameters of each param group, by the groups' settings.

    Experts, parameters without weight decay and those with a learning rate of their own have groups to themselves.
    """
    has_experts = any(group.get("is_expert_parallel") for group in groups)
    has_decoupled = any(group.get("is_decoupled_lr") for group in groups)

    def flags(parameter: ChunkTensor) -> tuple[bool, bool, bool]:
        return parameter.is_expert and has_experts, parameter.is_decayed, parameter.is_embedding_or_head and has_decoupled

    return [[parameter for parameter in parameters if flags(parameter) == _group_flags(group)] for group in groups]


def _group_flags(group: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    return bool(group.get("is_expert_parallel")), group.get("wd_mult", 1.0) != 0, bool(group.get("is_decoupled_lr"))


def _rank_groups(optimizer: int, groups: Sequence[Mapping[str, Any]], members: Sequence[Sequence[ChunkTensor]]) -> Iterator[RankParamGroup]:
    for number, (group, parameters) in enumerate(zip(groups, members, strict=True)):
        names = dict.fromkeys(name for parameter in parameters for name in parameter.array.names)
        yield RankParamGroup(optimizer, number, tuple(names), plain_settings(group, without=("params",)))
