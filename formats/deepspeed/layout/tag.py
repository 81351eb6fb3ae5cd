"""The files of a tag: which folder it is, and what each file's name says.

    latest                                                   the tag's name
    <tag>/mp_rank_MM_model_states.pt                         the model, of one tensor-parallel rank of one stage; ZeRO-0, 1, 2
    <tag>/zero_pp_rank_D_mp_rank_MM_model_states.pt          the same of one data-parallel rank; ZeRO-3
    <tag>/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt   its optimizer
    <tag>/layer_LL[-model_TT]-model_states.pt                a layer of a PipelineModule
    <tag>/[layer_L_]expert_E_mp_rank_MM_model_states.pt      an expert of a MoE layer
    <tag>/expp_rank_E_mp_rank_MM_optim_states.pt             the optimizer of an expert-parallel rank, without ZeRO
    <tag>/offloaded_tensors/rankRR/[<kind>-]<ds_id>.tensor.swp   what was swapped to NVMe: a master's row, or a state's

MM = pipeline stage * tensor-parallel size + tensor-parallel rank; D is the data-parallel rank. Source: deepspeed/runtime/engine.py,
_get_ckpt_name, _get_zero_ckpt_name and their like; measured on DeepSpeed 0.14.5, 0.16.9 and 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from reshard.errors import CheckpointError, RequestError
from reshard.storage.files import Files, inside, read_whole

LATEST, _SCRIPT = "latest", "zero_to_fp32.py"
_NAMES = {
    "models": re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "zero_models": re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "optimizers": re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"),
    "layers": re.compile(r"layer_(?P<layer>\d+)(?:-model_(?P<tp>\d+))?-model_states\.pt"),
    "experts": re.compile(r"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "expert_optimizers": re.compile(r"expp_rank_(?P<ep>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"),
}
_SWAPPED = "offloaded_tensors/"
Paths = dict[tuple[int, ...], str]


@dataclass(frozen=True, slots=True)
class Tag:
    """The paths of a tag's files by the numbers in their names, those that may be absent being 0.

    models: (mp). zero_models, optimizers: (dp, mp). layers: (layer, tp). experts: (layer, expert, mp). expert_optimizers: (ep, mp).
    """

    folder: str
    models: Paths = field(default_factory=dict)
    zero_models: Paths = field(default_factory=dict)
    optimizers: Paths = field(default_factory=dict)
    layers: Paths = field(default_factory=dict)
    experts: Paths = field(default_factory=dict)
    expert_optimizers: Paths = field(default_factory=dict)
    swapped: bool = False

    def swapped_of(self, dp: int) -> str | None:
        """The folder of what a data-parallel rank had swapped to NVMe: it has the number of the global rank."""
        return f"{self.folder}{_SWAPPED}rank{dp:02d}/" if self.swapped else None

    def paths(self) -> Iterator[str]:
        for kind in _NAMES:
            yield from getattr(self, kind).values()


def is_file_of_a_tag(path: str) -> bool:
    """Whether a path is named like a file with a model's or an optimizer's states."""
    name = path.rpartition("/")[2]
    return any(pattern.fullmatch(name) for pattern in _NAMES.values())


def find_tag(files: Files) -> str | None:
    """The folder of the tag, as a prefix of its paths; None if there is none here.

    Raises: CheckpointError if `latest` names a tag that is not there; RequestError for several tags without `latest`.
    """
    listing = files.list()
    if any(is_file_of_a_tag(path) for path in listing):
        return ""
    inner = [path for path in listing if path.endswith("/") and any(is_file_of_a_tag(each) for each in files.list(path))]
    # Others may have a file of that name; DeepSpeed puts its script beside it, and a tag that is gone leaves nothing else.
    if LATEST in listing and (inner or _SCRIPT in listing or len(listing) == 1):
        return _named_by_latest(files, inner)
    if len(inner) > 1:
        raise RequestError(
            f"{len(inner)} tags lie here, {', '.join(path.rstrip('/') for path in inner[:4])}, and no file `latest` says which is meant",
            where=files.root,
            do=f"Give one of them, such as {files.root.rstrip('/')}/{inner[-1].rstrip('/')}",
        )
    return inner[0] if inner else None


def _named_by_latest(files: Files, inner: list[str]) -> str:
    text = read_whole(files, LATEST, limit=4096).decode("utf-8", "replace").strip()
    folder = inside(text, where=LATEST).rstrip("/") + "/" if text else ""
    if folder not in inner:
        lying = ", ".join(path.rstrip("/") for path in inner[:4]) or "none"
        raise CheckpointError(
            f"it names the tag {text!r}, which {'has no states' if folder in files.list() else 'is not there'}",
            where=LATEST,
            why=f"DeepSpeed writes it last, so that save was lost or removed afterwards; tags that lie here: {lying}",
            do="Copy that tag's folder from where the checkpoint was written, or give the folder of another tag",
        )
    return folder


def open_tag(files: Files, folder: str) -> Tag:
    """The tag in that folder."""
    tag = Tag(folder, swapped=folder + _SWAPPED in files.list(folder))
    for path in files.list(folder):
        name = path.removeprefix(folder)
        for kind, pattern in _NAMES.items():
            if match := pattern.fullmatch(name):
                found: Paths = getattr(tag, kind)
                numbers = tuple(int(number) if number else 0 for number in match.groups())
                if numbers in found:
                    raise CheckpointError(
                        f"{found[numbers]} lies beside it, with the states of the same rank",
                        where=path,
                        why="They are of saves with different precision; which belongs to the others cannot be known",
                        do="Move the file of the older save away",
                    )
                found[numbers] = path
    for kind in _NAMES:
        kept: Paths = getattr(tag, kind)
        for numbers in sorted(kept):
            kept[numbers] = kept.pop(numbers)
    return tag


def check_ranks(found: Mapping[int, str], ranks: int, what: str, *, why: str) -> None:
    """Raises CheckpointError unless there is a file of every rank 0..ranks - 1, and of no other."""
    if missing := [rank for rank in range(ranks) if rank not in found]:
        some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise CheckpointError(
            f"of {ranks} {what} ranks, {some} {'has' if len(missing) == 1 else 'have'} no file",
            where=next(iter(found.values()), None),
            why=why,
            do="Copy the missing files from where the checkpoint was written",
        )
    if stale := [path for rank, path in found.items() if rank >= ranks]:
        raise CheckpointError(
            f"the run had {ranks} {what} ranks, and none of this number",
            where=stale[0],
            why=f"{why}; the file is left over from a save of more ranks under the same tag, so its values are of another step",
            do=f"Move it away{f', and {len(stale) - 1} more like it' if len(stale) > 1 else ''}",
        )
