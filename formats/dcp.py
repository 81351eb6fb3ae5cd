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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from reshard.adapter import Hints
from reshard.containers import dcp_metadata, torch_zip
from reshard.errors import CheckpointError, RequestError
from reshard.extents import Extent
from reshard.files import Files, inside, read_whole
from reshard.index import Index, Role, RunFacts, Shards, StoredFile, Tensor

_METADATA, _DATA = ".metadata", ".distcp"
_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+/")
_STEP = re.compile(r"(?:step|checkpoint|global_step|iter)[-_]?(\d+)")
_METADATA_LIMIT = 4 << 30

# Words by which trainers name the parts of what they save, at the root of the state dict.
_MODEL_ROOTS = {"model", "module", "state_dict", "app", "model_state_dict"}
_OPTIMIZER_ROOTS = {"optim", "optimizer", "optimizers", "optimizer_state_dict"}
_RUN_ROOTS = {"train_state", "lr_scheduler", "scheduler", "lr_schedulers", "dataloader", "rng", "rng_state", "extra_state", "random_states"}
_STATE_ROLES: dict[str, Role] = {
    "exp_avg": "moment1",
    "momentum_buffer": "moment1",
    "exp_avg_sq": "moment2",
    "step": "step",
    "master_param": "master",
    "fp32_param": "master",
}


class Dcp:
    name = "dcp"
    summary = "torch.distributed.checkpoint: FSDP1, FSDP2, accelerate, torchtitan"
    owns = (_METADATA, "__*.metadata", "*.distcp")

    def detect(self, files: Files) -> str | None:
        listing = files.list()
        here = next((path for path in listing if path == _METADATA or path.endswith((_DATA, _DATA + "/")) or _is_rank_metadata(path)), None)
        if here:
            return here
        inner = [path for path in listing if path.endswith("/") and files.size(path + _METADATA) is not None]
        return f"{inner[0]}{_METADATA}" if inner else None

    def read(self, files: Files, hints: Hints) -> Index:
        tensors: list[Tensor] = []
        stored: dict[str, StoredFile] = {}
        objects: list[str] = []
        folders = _folders(files)
        for folder in folders:
            metadata = _metadata(files, folder)
            paths = tuple(inside(folder + path, where=folder + _METADATA) for path in metadata.paths)
            stored.update((file.path, file) for file in _checked_files(files, folder, metadata, paths))
            objects.extend(folder + name for name in metadata.objects)
            tensors.extend(_tensors(files, metadata, paths))
        step = _STEP.fullmatch(f"{files.root}/{folders[0]}".rstrip("/").rpartition("/")[2])
        facts = RunFacts(
            producer="torch.distributed.checkpoint",
            version=metadata.version,
            step=int(step[1]) if step else None,
            parallel={"writing ranks": len({_writer(path) for path in stored})},
            config=hints.config,
        )
        return Index(self.name, tuple(tensors), tuple(stored.values()), facts, objects=tuple(objects))


def _folders(files: Files) -> list[str]:
    """The DCP directories that make up this checkpoint, as prefixes of their paths; "" is the directory itself."""
    listing = files.list()
    if _METADATA in listing or any(_is_rank_metadata(path) for path in listing):
        return [""]
    if any(path.endswith(_DATA) for path in listing):
        raise CheckpointError(
            f"there are {_DATA} files and no {_METADATA}" + (" but .metadata.tmp" if ".metadata.tmp" in listing else ""),
            where=files.root,
            why=f"torch writes {_METADATA} last, so this save was not finished (or the file was lost in a copy that skips dot files)",
            do=f"Copy {_METADATA} from where the checkpoint was written, or take an earlier checkpoint",
        )
    inner = [path for path in listing if path.endswith("/") and files.size(path + _METADATA) is not None]
    accelerate = [path for path in inner if _ACCELERATE.fullmatch(path)]
    if accelerate:
        return sorted(accelerate, reverse=True)
    if len(inner) == 1:
        return inner
    if not inner:
        raise CheckpointError(f"there is no {_METADATA}", where=files.root, do="Give the directory that holds it, or another --format")
    newest = max(inner, key=lambda path: [int(number) for number in re.findall(r"\d+", path)])
    raise RequestError(
        f"{len(inner)} checkpoints lie here: {', '.join(inner[:4])}{' ...' if len(inner) > 4 else ''}",
        where=files.root,
        do=f"Give one of them, such as {files.root.rstrip('/')}/{newest.rstrip('/')}",
    )


def _is_rank_metadata(path: str) -> bool:
    return re.fullmatch(r"__\d+\.metadata", path) is not None


def _metadata(files: Files, folder: str) -> dcp_metadata.DcpMetadata:
    if files.size(folder + _METADATA) is not None:
        return dcp_metadata.parse(read_whole(files, folder + _METADATA, limit=_METADATA_LIMIT), where=folder + _METADATA)
    # Saved without collectives: each rank wrote its own.
    parts = [path for path in files.list(folder) if _is_rank_metadata(path.removeprefix(folder))]
    return dcp_metadata.merge([dcp_metadata.parse(read_whole(files, path, limit=_METADATA_LIMIT), where=path) for path in parts])


def _checked_files(files: Files, folder: str, metadata: dcp_metadata.DcpMetadata, paths: tuple[str, ...]) -> Iterator[StoredFile]:
    """The files that the metadata names. Raises CheckpointError if one is missing, or shorter than the entries that it should hold."""
    needed = [0] * len(paths)
    for item in metadata.tensors.values():
        chunks = item.chunks
        for i in set(chunks.files.tolist()):
            rows = chunks.files == i
            needed[i] = max(needed[i], int((chunks.entry_offsets[rows] + chunks.entry_nbytes[rows]).max()))
    for path, nbytes in zip(paths, needed, strict=True):
        size = files.size(path)
        if size is None or size < nbytes:
            raise CheckpointError(
                "the file is not there" if size is None else f"the file has {size:,} bytes, its entries end at {nbytes:,}",
                where=path,
                why=f"{folder + _METADATA} names it, and {_held(metadata, paths.index(path))}",
                do="Copy that file from where the checkpoint was written",
            )
        yield StoredFile(path, size)


def _held(metadata: dcp_metadata.DcpMetadata, file: int) -> str:
    names = [name for name, item in metadata.tensors.items() if (item.chunks.files == file).any()]
    return f"it holds parts of {len(names)} tensors, such as {names[0]}" if names else "it holds none of the weights"


def _tensors(files: Files, metadata: dcp_metadata.DcpMetadata, paths: tuple[str, ...]) -> Iterator[Tensor]:
    # Entries are looked up when their piece is asked for; neighbouring blocks ask for the same one.
    locate = lru_cache(maxsize=4096)(lambda path, start, nbytes: torch_zip.entry_extent(files, path, start, nbytes))
    for fqn, item in metadata.tensors.items():
        if item.transforms:
            raise CheckpointError(
                f"its entries were transformed by {', '.join(item.transforms)}",
                where=fqn,
                why="Only entries stored as they are can be read",
                do="Save the checkpoint without stream extensions",
            )
        role, name = _place((metadata.planner or {}).get(fqn) or (fqn,))
        chunks = item.chunks
        yield Tensor(
            name,
            item.dtype,
            item.shape,
            role,
            Shards(paths, chunks.offsets, chunks.sizes, chunks.files, chunks.entry_offsets, _extent(_Located(paths, fqn, item, locate))),
        )


@dataclass(frozen=True, slots=True)
class _Located:
    paths: tuple[str, ...]
    fqn: str
    item: dcp_metadata.TensorItem
    locate: Callable[[str, int, int], torch_zip.StoredTensor]


def _extent(of: _Located) -> Callable[[int], Extent]:
    """A function from a row to where its bytes lie, checked against what .metadata says of it."""

    def extent(i: int) -> Extent:
        chunks = of.item.chunks
        path, sizes = of.paths[chunks.files[i]], tuple(chunks.sizes[i].tolist())
        stored = of.locate(path, int(chunks.entry_offsets[i]), int(chunks.entry_nbytes[i]))
        if stored.shape != sizes or stored.dtype != of.item.dtype:
            raise CheckpointError(
                f"the entry holds {stored.dtype} {list(stored.shape)}, {_METADATA} says {of.item.dtype} {list(sizes)}",
                where=f"{of.fqn} in {path}",
                why="The files are from different saves",
                do="Copy all files of one save again",
            )
        return Extent(path, stored.byte_offset, stored.strides, stored.dtype)

    return extent


def _place(path: tuple[str | int, ...]) -> tuple[Role, str]:
    """What a tensor is to the run, and its name in the model, from its path in the saved state dict.

    Paths: ("model", fqn), (fqn,), ("optim", "state", fqn, "exp_avg"), ("optimizer", "state.<fqn>.exp_avg"), ("app", "optim", ...).
    """
    words = [str(word) for word in path]
    while len(words) > 1 and words[0] in _MODEL_ROOTS:
        words = words[1:]
    root, dotted = words[0], ".".join(words)
    if root in _RUN_ROOTS or root.split(".")[0] in _RUN_ROOTS:
        return "state", dotted
    if root in _OPTIMIZER_ROOTS or root.split(".")[0] in _OPTIMIZER_ROOTS:
        inner = dotted.partition(".")[2]
        name, _, kind = inner.removeprefix("state.").rpartition(".")
        if inner.startswith("state.") and kind in _STATE_ROLES:
            return _STATE_ROLES[kind], name
        return "state", dotted
    return "weight", dotted


def _writer(path: str) -> str:
    match = re.search(r"__(\d+)_", path)
    return match[1] if match else path


FORMAT = Dcp()
