"""Which folder holds a universal checkpoint, and the names of what lies in it."""

from __future__ import annotations

from reshard.errors import IncompleteError
from reshard.storage.files import Files, inside, read_whole

LATEST = "latest_universal"
# The file in which DeepSpeed names the newest tag.
TRACKER = "latest"
ZERO = "zero/"
# The state that is a parameter's full-precision copy.
FP32 = "fp32"


def find_universal_folder(files: Files) -> str | None:
    """The folder that holds zero/, as a prefix of its paths; None if there is none.

    Raises: CheckpointError if `latest_universal` names a tag that is not there.
    """
    listing = files.list()
    if _holds_parameters(files, ""):
        return ""
    if LATEST in listing:
        return _folder_in_latest(files)
    folders = [path for path in listing if path.endswith("/") and _holds_parameters(files, path)]
    return folders[0] if len(folders) == 1 else None


def other_tag_is_latest(files: Files, folder: str) -> bool:
    """Whether `latest` names a tag beside this folder: the one that the run saved, and from which the universal checkpoint was made."""
    if files.size(TRACKER) is None:
        return False
    tag = read_whole(files, TRACKER, limit=4096).decode("utf-8", "replace").strip() + "/"
    return tag != folder and tag in files.list()


def _folder_in_latest(files: Files) -> str:
    text = read_whole(files, LATEST, limit=4096).decode("utf-8", "replace").strip()
    folder = inside(text, where=LATEST).rstrip("/") + "/" if text else "/"
    if not _holds_parameters(files, folder):
        raise IncompleteError(
            f"it names the tag {text!r}, which is not there, or holds no {ZERO}",
            where=LATEST,
            why="The conversion that wrote it was not finished, or its result was removed",
            do="Give the folder that holds zero/, or convert again",
        )
    return folder


def _holds_parameters(files: Files, folder: str) -> bool:
    """Whether a folder holds zero/ with files, or with folders of parameters."""
    if folder + ZERO not in files.list(folder):
        return False
    return any(files.size(path) is not None or files.size(f"{path}{FP32}.pt") is not None for path in files.list(folder + ZERO))
