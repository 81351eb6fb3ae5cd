"""Folders of saves: which one of several is meant, and the step that a folder's name tells.

    latest, global_step10/, global_step20/                              a tracker file holds the name of the newest save
    latest_checkpointed_iteration.txt, iter_0000010/, iter_0000020/     a tracker file holds the number of the newest save
    step-10/, step-20/                                                  no tracker file: the user names one: RUN@20

Light: a format's `detect` may use it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from reshard.errors import IncompleteError, RequestError

if TYPE_CHECKING:
    from reshard.storage.files import Files

# The folders in the folder of a step that hold the weights and the optimizer by torch.distributed.checkpoint: NeMo RL before and since 0.4
# and NeMo AutoModel, whose weights can be safetensors files of ranks; transformers' save_pretrained(distributed_checkpoint=True), whose
# weights lie in the folder itself; LeRobot, for accelerate.
WEIGHTS = ("weights/", "weights/model/", "model/", "pretrained_model/pytorch_model_fsdp_0/")
OPTIMIZERS = ("optimizer/", "optimizer/optim/", "optim/", "training_state/optimizer_0/")
# Where whole weights or an adapter lie beside an optimizer: in the model's folder of AutoModel, NeMo RL, LeRobot, Colossal-AI.
_WHOLE = (*WEIGHTS, "model/consolidated/", "weights/model/consolidated/", "pretrained_model/", "modeling/")
# Of torch.distributed.checkpoint, of Colossal-AI, of LeRobot on one process, and of Composer in one file.
_MARKS = (".metadata", "pytorch_optim.bin.index.json", "optimizer_state.safetensors", "optim.pt")
_SHARD = re.compile(r"(?:.*/)?shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors")

# global_step_20, step-20, epoch_0_step_20, checkpoint-20, iter_0000020; Lightning, NeMo: epoch=0-step=20, m--val_loss=1.23-step=20-last;
# Composer: ep0-ba20, and the file ep0-ba20-rank0.pt.
_STEP = re.compile(
    r"(?:epoch[-_]\d+_)?(?:global_)?(?:step|checkpoint|iter)[-_]?(\d+)|(?:.*-)?step=(\d+)(?:[-.].*)?|ep\d+-ba(\d+)(?:-rank0)?"
)


def shards_of_ranks(files: Files, folders: Sequence[str] = WEIGHTS) -> list[re.Match[str]]:
    """The safetensors files of ranks in a folder, or else in one of these folders below it, as torch's HuggingFaceStorageWriter names them.

    The path is the whole match; its groups are the rank, the part of the model, and the number of parts, from 1 on.
    """
    listings = (files.list(folder) for folder in ("", *below(files, folders)))
    matches = ([match for path in listing if (match := _SHARD.fullmatch(path))] for listing in listings)
    return next(filter(None, matches), [])


def whole_weights(files: Files) -> str | None:
    """A file of whole weights, or of an adapter, in one of the folders that can lie beside an optimizer; None if there is none."""
    listing = (path for folder in below(files, _WHOLE) for path in files.list(folder))
    return next((path for path in listing if path.endswith((".safetensors", ".bin")) and not _SHARD.fullmatch(path)), None)


def notes_on_optimizer(files: Files) -> Iterator[str]:
    """A note on the optimizer in another folder beside a folder of weights, named from the folder above both on."""
    root = f"/{files.root.strip('/')}/"
    for folder in (folder for folder in _WHOLE if root.endswith(f"/{folder}")):
        above: Files | None = files
        for _ in range(folder.count("/")):
            above = above.parent() if above else None
        if above and (beside := next((path for mark in _MARKS for path in below(above, (*OPTIMIZERS, "training_state/"), mark)), None)):
            yield f"the optimizer in {beside.rstrip('/')} beside this folder is not read with it"
            return


def without_optimizers(parts: Sequence[str]) -> list[str]:
    """Those of the folders of a step that are not the optimizer of another one beside it."""
    above = {part: part[: -len(name)] for part in parts for name in OPTIMIZERS if f"/{part}/".endswith(f"/{name}")}
    return [part for part in parts if part not in above or all(other in above for other in parts if other.startswith(above[part]))]


def below(files: Files, folders: Sequence[str], name: str = "") -> list[str]:
    """Which of such folders are there; with a name, those in which a file has it."""
    listing = files.list()
    there = [path for path in folders if f"{path.split('/')[0]}/" in listing]
    return [path for path in there if files.size(path + name) is not None] if name else there


def the_one_save(
    files: Files, folders: Sequence[str], *, tracker: str | None = None, folder_name: Callable[[str], str] = str
) -> str | None:
    """The folder of the one save that is meant, with a slash at its end; None if there is no save.

    folders: the folders here that hold a save, each with a slash at its end.
    tracker: the file in which a framework names the newest save.
    folder_name: makes the folder's name from the tracker's text; by default the text is the name.

    Raises: CheckpointError if the tracker names a save that is not there; RequestError for several saves without a tracker.
    """
    if tracker is not None and tracker in files.list():
        return _tracked_save(files, folders, tracker, folder_name)
    if len(folders := without_links(files, folders)) > 1:
        newest = max(folders, key=lambda folder: [int(number) for number in re.findall(r"\d+", folder)])
        raise RequestError(
            f"{len(folders)} saves lie here: {_some(folders)}" + (f"; no file {tracker} names the newest one" if tracker else ""),
            where=files.root,
            do=f"Give one of them, such as {files.root.rstrip('/')}/{newest.rstrip('/')}",
            id="ambiguous",
        )
    return folders[0] if folders else None


def without_links(files: Files, folders: Sequence[str]) -> Sequence[str]:
    """These folders without links to others of them, such as `latest`."""
    from reshard.storage.system_calls import is_url

    if len(folders) < 2 or is_url(files.root):
        return folders
    places = {folder: os.path.join(files.root, folder.rstrip("/")) for folder in folders}
    own = {os.path.realpath(place) for place in places.values() if not os.path.islink(place)}
    return [folder for folder, place in places.items() if not (os.path.islink(place) and os.path.realpath(place) in own)]


def _tracked_save(files: Files, folders: Sequence[str], tracker: str, folder_name: Callable[[str], str]) -> str:
    from reshard.storage.files import inside

    text = tracked_name(files, tracker)
    folder = inside(folder_name(text) or ".", where=tracker).rstrip("/") + "/"
    if folder not in folders:
        raise IncompleteError(
            f"it names the save {text!r}, and {folder.rstrip('/')} {'holds no save' if folder in files.list() else 'is not there'}",
            where=tracker,
            why=f"A complete save is named there, so it was lost or removed later. Saves that lie here: {_some(folders) or 'none'}",
            do="Copy that save from where it was written, or give the folder of another one",
        )
    return folder


def tracked_name(files: Files, tracker: str) -> str:
    """The text of a tracker file."""
    from reshard.storage.files import read_whole

    return read_whole(files, tracker, limit=4096).decode("utf-8", "replace").strip()


def step_of(root: str) -> int | None:
    """The step in one of the last two folder names of a path: global_step_20, step-20/actor, checkpoint-20. None if neither has one."""
    for name in list(filter(None, root.split("/")))[:-3:-1]:
        if match := _STEP.fullmatch(name):
            return int(match[match.lastindex or 0])
    return None


def split_step(path: str | os.PathLike[str]) -> tuple[str, str | None]:
    """The run and the step that RUN@STEP names; the path and None for any other path.

    A path that exists is not taken apart, and @ counts only after the last slash. In hf:// it names a revision.
    """
    text = os.fspath(path)
    run, _, step = text.rpartition("@")
    if not run or not step or "/" in step or text.startswith(("hf://", "http://", "https://")) or _exists(text) or not _exists(run):
        return text, None
    return run, step


def _exists(path: str) -> bool:
    """Whether a file or folder lies at a path, or anything below a URL."""
    from reshard.storage.system_calls import is_url
    from reshard.storage.tar import open_files

    if not is_url(path):
        return os.path.exists(path)
    try:
        return bool(open_files(path).list())
    except RequestError:
        return False


def _some(folders: Sequence[str]) -> str:
    return ", ".join(folder.rstrip("/") for folder in folders[:4]) + (", ..." if len(folders) > 4 else "")
