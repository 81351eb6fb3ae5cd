"""torch.distributed.checkpoint: what FSDP1, FSDP2, accelerate and torchtitan write.

    .metadata                which box of which tensor is which byte range of which file (a pickle; written last)
    __{rank}_{i}.distcp      the ranges, each a torch.save zip of one tensor, packed without padding
    pytorch_model_fsdp_0/, optimizer_0/     accelerate's save_state: two such directories in one
    step-{n}/                torchtitan: one such directory per step

A file's number is the rank that wrote it, not the rank that trained with it: replicated entries are written by whichever rank has
least to write. Names are flattened; the planner's data in .metadata tells their parts. Where exactly an entry's bytes lie is read from its
own zip directory, when the piece is asked for.
Measured on torch 2.13 (fixtures/dcp); older ones from the facts of their sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.adapter.dcp_reader import DATA, METADATA, DcpFolder, is_rank_metadata
from reshard.adapter.dcp_writer import DcpFile, written_metadata
from reshard.adapter.format import Format, Hints
from reshard.adapter.model_files import ModelFiles
from reshard.adapter.option import MAX_SHARD_SIZE
from reshard.adapter.rank_files import step_of
from reshard.adapter.state_dicts import MODEL_ROOTS
from reshard.canonical.content import Content
from reshard.canonical.optimizer_state import ROOTS as OPTIMIZER_ROOTS
from reshard.canonical.optimizer_state import is_state_key, names_for, parameter_and_kind, plain_groups, plain_settings, state_kind
from reshard.containers import dcp_metadata
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.dtypes import DType
from reshard.geometry.stored import count, part
from reshard.index.index import Index, Kind, ParamGroup, RunFacts, StoredFile, Tensor
from reshard.plans.layout import Layout, Sidecar, row_shard
from reshard.plans.target import Target
from reshard.storage.files import Files

_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+/")
# Words by which trainers name what is neither the model's nor the optimizer's, at the root of the state dict.
_RUN_ROOTS = {"train_state", "lr_scheduler", "scheduler", "lr_schedulers", "dataloader", "rng", "rng_state", "extra_state", "random_states"}


_Key = tuple[str | int, ...]


class Dcp(Format):
    name = "dcp"
    summary = "torch.distributed.checkpoint: FSDP1, FSDP2, accelerate, torchtitan"
    owns = (METADATA, "__*.metadata", "*.distcp")
    options = (MAX_SHARD_SIZE,)
    keeps_names = True

    def detect(self, files: Files) -> str | None:
        listing = files.list()
        here = next((path for path in listing if path == METADATA or path.endswith((DATA, DATA + "/")) or is_rank_metadata(path)), None)
        if here:
            return here
        inner = [path for path in listing if path.endswith("/") and files.size(path + METADATA) is not None]
        return f"{inner[0]}{METADATA}" if inner else None

    def read(self, files: Files, hints: Hints) -> Index:
        tensors: list[Tensor] = []
        stored: dict[str, StoredFile] = {}
        objects: list[str] = []
        notes: list[str] = []
        optimizers: list[_Optimizer] = []
        # The model's parameters in its own order: what an optimizer's numbers count.
        parameters: dict[str, tuple[int, ...]] = {}
        folders = _folders(files)
        version: str | None = None
        for folder in folders:
            found = DcpFolder(files, folder)
            stored.update((file.path, file) for file in found.files)
            objects.extend(folder + name for name in found.metadata.objects)
            optimizer = _Optimizer(found)
            parameters.update(_parameters(found.metadata, hints))
            optimizers.append(optimizer)
            tensors.extend(_tensors(found, optimizer.names(parameters, notes)))
            version = found.metadata.version
        facts = RunFacts(
            producer="torch.distributed.checkpoint",
            version=version,
            step=step_of(f"{files.root}/{folders[0]}"),
            parallel={"writing ranks": len({_writer(path) for path in stored})},
            config=hints.config,
            notes=tuple(notes),
        )

        def param_groups() -> tuple[ParamGroup, ...]:
            return tuple(group for optimizer in optimizers for group in optimizer.param_groups(parameters))

        return Index(self.name, tuple(tensors), tuple(stored.values()), facts, objects=tuple(objects), param_groups=param_groups)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        target.parallel.allow("dp", what="a DCP checkpoint, which any number of ranks can load")
        dtypes = {key: target.dtype_of(tensor) for key, tensor in content.tensors.items()}
        ranks = target.parallel.dp
        growing = list(_laid_out(content, dtypes, ranks, target.max_shard_size))
        files = tuple(file.close({"dp": rank} if ranks > 1 else {}) for rank, file in growing)
        paths = [_state_path(key, bool(content.states)) for key in content.tensors]
        paths += [path for path, _ in _counts(content)]
        paths += [path for path, _ in _group_objects(content.param_groups() if content.states else ())]
        metadata = Sidecar(METADATA, written_metadata([file for _, file in growing], {_fqn(path): path for path in paths}))
        # torch writes .metadata last as well: where it is, everything is.
        return Layout(self.name, files, (*companions.sidecars(dtypes.values()), metadata), target.parallel)


def _laid_out(content: Content, dtypes: Mapping[str, DType], ranks: int, most: int | None) -> Iterator[tuple[int, DcpFile]]:
    """The files of every rank: its rows of every tensor; objects and scalars in the first one's. A file that would grow beyond
    `most` bytes is followed by another."""
    groups = content.param_groups() if content.states else ()
    for rank in range(ranks):
        file, number = DcpFile(f"__{rank}_0{DATA}"), 0
        for path, value in _group_objects(groups) if rank == 0 else ():
            file.add_object(_fqn(path), value)
        for key, tensor in content.tensors.items():
            box = row_shard(tensor.shape, ranks, rank)
            if box is not None:
                if most and file.entries and file.nbytes + box.volume * dtypes[key].itemsize > most:
                    yield rank, file
                    number += 1
                    file = DcpFile(f"__{rank}_{number}{DATA}")
                fqn = _fqn(_state_path(key, bool(content.states)))
                file.add_tensor(fqn, part(fqn, key, dtypes[key], tensor.shape, box), box.offsets, tensor.shape)
        for path, number in _counts(content) if rank == 0 else ():
            file.add_tensor(_fqn(path), count(_fqn(path), number), (), ())
        yield rank, file


def _counts(content: Content) -> Iterator[tuple[_Key, int]]:
    """The steps that torch's optimizers want for every parameter, where the source counts them once."""
    yield from ((("optim", "state", name, "step"), number) for name, number in content.step_counts.items())


def _fqn(path: _Key) -> str:
    return ".".join(map(str, path))


def _state_path(key: str, has_optimizer: bool) -> _Key:
    """Where a tensor is in the state dict: the model's alone, or {"model": ..., "optim": ...} as get_state_dict gives them."""
    if not has_optimizer:
        return (key,)
    if is_state_key(key):
        return ("optim", "state", *parameter_and_kind(key))
    return ("model", key)


def _group_objects(groups: tuple[ParamGroup, ...]) -> Iterator[tuple[_Key, object]]:
    for number, group in enumerate(groups):
        yield ("optim", "param_groups", number, "params"), list(group.names)
        yield from ((("optim", "param_groups", number, name), value) for name, value in group.settings.items())


def _folders(files: Files) -> list[str]:
    """The DCP directories that make up this checkpoint, as prefixes of their paths; "" is the directory itself."""
    listing = files.list()
    if METADATA in listing or any(is_rank_metadata(path) for path in listing):
        return [""]
    if any(path.endswith(DATA) for path in listing):
        raise CheckpointError(
            f"there are {DATA} files and no {METADATA}" + (" but .metadata.tmp" if ".metadata.tmp" in listing else ""),
            where=files.root,
            why=f"torch writes {METADATA} last, so this save was not finished (or the file was lost in a copy that skips dot files)",
            do=f"Copy {METADATA} from where the checkpoint was written, or take an earlier checkpoint",
        )
    inner = [path for path in listing if path.endswith("/") and files.size(path + METADATA) is not None]
    accelerate = [path for path in inner if _ACCELERATE.fullmatch(path)]
    if accelerate:
        return sorted(accelerate, reverse=True)
    if len(inner) == 1:
        return inner
    if not inner:
        raise CheckpointError(f"there is no {METADATA}", where=files.root, do="Give the directory that holds it, or another --format")
    newest = max(inner, key=lambda path: [int(number) for number in re.findall(r"\d+", path)])
    raise RequestError(
        f"{len(inner)} checkpoints lie here: {', '.join(inner[:4])}{' ...' if len(inner) > 4 else ''}",
        where=files.root,
        do=f"Give one of them, such as {files.root.rstrip('/')}/{newest.rstrip('/')}",
    )


def _tensors(folder: DcpFolder, names: Mapping[Any, str]) -> Iterator[Tensor]:
    for fqn, item in folder.metadata.tensors.items():
        role, name = _role(_key(folder.metadata, fqn), names)
        yield Tensor(name, item.dtype, item.shape, role, folder.shards(item))


@dataclass(frozen=True, slots=True)
class _State:
    """A key of an optimizer's state dict: of which optimizer, of which parameter (name or number), what."""

    root: str
    parameter: str | int
    kind: str


def _key(metadata: dcp_metadata.DcpMetadata, fqn: str) -> _Key:
    """The path of a key in the state dict that was saved; the dotted name alone where the planner did not say."""
    words = (metadata.planner or {}).get(fqn) or (fqn,)
    while len(words) > 1 and words[0] in MODEL_ROOTS:
        words = words[1:]
    return words


def _state(words: _Key) -> _State | None:
    """What an optimizer's key means: ("optim", "state", fqn, "exp_avg"), ("optimizer", "state.<fqn>.exp_avg"), or with a number
    in place of the fqn."""
    root, rest = _optimizer(words)
    if rest[:1] == ("state",) and len(rest) > 2:
        return _State(root, _number_or_name(rest[1]), ".".join(map(str, rest[2:])))
    if len(rest) == 1 and str(rest[0]).startswith("state."):
        name, _, kind = str(rest[0]).removeprefix("state.").rpartition(".")
        return _State(root, _number_or_name(name), kind) if name else None
    return None


def _number_or_name(word: str | int) -> str | int:
    """The planner turns a dict's numbers into text; no parameter is called by a number alone."""
    return int(word) if isinstance(word, str) and word.isdecimal() else word


def _optimizer(words: _Key) -> tuple[str, _Key]:
    """The word by which the optimizer is called and what follows it; ("", ()) if the key is of something else."""
    first, dot, others = str(words[0]).partition(".")
    if first not in OPTIMIZER_ROOTS:
        return "", ()
    rest: _Key = (others, *words[1:]) if dot else words[1:]
    while rest and isinstance(rest[0], int):  # a list of optimizers
        first, rest = f"{first}.{rest[0]}", rest[1:]
    return first, rest


def _role(words: _Key, names: Mapping[Any, str]) -> tuple[Kind, str]:
    """What a tensor is to the run, and its name in the model."""
    dotted = ".".join(map(str, words))
    if (state := _state(words)) is not None:
        name = state.parameter if isinstance(state.parameter, str) else names.get((state.root, state.parameter))
        return state_kind(name, state.parameter, state.kind)
    if _optimizer(words)[0] or str(words[0]).partition(".")[0] in _RUN_ROOTS:
        return "state", dotted
    return "weight", dotted


def _parameters(metadata: dcp_metadata.DcpMetadata, hints: Hints) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's floating-point tensors, in the order in which they were saved; a tied head is no parameter of its own."""
    order = [fqn for fqn in metadata.planner or () if fqn in metadata.tensors] or list(metadata.tensors)
    model = hints.model
    tied = model.architecture.tied[0] if model and model.is_tied else None
    found = ((_role(_key(metadata, fqn), {}), metadata.tensors[fqn]) for fqn in order)
    return {name: item.shape for (role, name), item in found if role == "weight" and item.dtype.floating and name != tied}


class _Optimizer:
    """The optimizer's part of one metadata: which names its numbers stand for, and its param groups."""

    def __init__(self, folder: DcpFolder) -> None:
        self._folder, self._metadata = folder, folder.metadata
        self._shapes: dict[str, dict[int, tuple[int, ...]]] = {}
        for fqn, item in self._metadata.tensors.items():
            state = _state(_key(self._metadata, fqn))
            if state and isinstance(state.parameter, int) and state.kind != "step":
                self._shapes.setdefault(state.root, {})[state.parameter] = item.shape

    def names(self, parameters: Mapping[str, tuple[int, ...]], notes: list[str]) -> Mapping[Any, str]:
        """(optimizer, number) -> name of a parameter, as far as it is certain; adds a note on how it is known, or why not."""
        found: dict[Any, str] = {}
        for root, shapes in self._shapes.items():
            groups = [settings for _, settings in sorted(self._groups(root, {"params", "param_names"}).items())]
            numbers = [group["params"] for group in groups if isinstance(group.get("params"), list)]
            names, told = names_for({"param_groups": groups}, numbers, shapes, list(parameters.items()))
            notes.extend(told)
            found.update({(root, number): name for number, name in names.items()})
        return found

    def param_groups(self, parameters: Mapping[str, tuple[int, ...]]) -> tuple[ParamGroup, ...]:
        """The param groups of every optimizer here. Those of a flattened state dict are taken together by equal settings."""
        names = self.names(parameters, [])
        roots = dict.fromkeys(_optimizer(_key(self._metadata, fqn))[0] for fqn in self._metadata.objects)
        found: list[ParamGroup] = []
        for root in filter(None, roots):
            by_key = self._groups(root, None)
            listed = [settings for key, settings in sorted(by_key.items()) if isinstance(key, int)]
            own = {number: name for (of, number), name in names.items() if of == root}
            own |= {each: each for group in listed for each in group.get("params", ()) if isinstance(each, str)}
            found.extend(plain_groups(listed, own))
            found.extend(_together({key: settings for key, settings in by_key.items() if isinstance(key, str)}))
        return tuple(found)

    def _groups(self, root: str, wanted: set[str] | None) -> dict[str | int, dict[str, Any]]:
        """Settings by param group (its number, or in a flattened state dict the parameter's name); only the wanted ones are read."""
        found: dict[str | int, dict[str, Any]] = {}
        for fqn, item in self._metadata.objects.items():
            of, rest = _optimizer(_key(self._metadata, fqn))
            if of != root or not rest or not str(rest[0]).startswith("param_groups"):
                continue
            group: str | int
            if rest[0] == "param_groups" and len(rest) > 2:
                group, setting = rest[1], ".".join(map(str, rest[2:]))
            else:
                name, _, setting = str(rest[0]).removeprefix("param_groups.").rpartition(".")
                group = int(name) if name.isdecimal() else name
            if wanted is None or setting in wanted:
                found.setdefault(group, {})[setting] = self._folder.value(item)
        return found


def _together(by_parameter: Mapping[str, Mapping[str, Any]]) -> Iterator[ParamGroup]:
    """A flattened state dict repeats the settings for every parameter; those with equal ones were a group."""
    found: dict[str, tuple[list[str], Mapping[str, Any]]] = {}
    for name, settings in by_parameter.items():
        plain = plain_settings(settings)
        found.setdefault(repr(sorted(plain.items())), ([], plain))[0].append(name)
    yield from (ParamGroup(tuple(names), settings) for names, settings in found.values())


def _writer(path: str) -> str:
    match = re.search(r"__(\d+)_", path)
    return match[1] if match else path


FORMAT = Dcp()
