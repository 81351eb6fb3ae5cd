"""Which directories make up a DCP checkpoint. Only names are looked at."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.adapter.save_folders import the_one_save
from reshard.errors import CheckpointError, IncompleteError

if TYPE_CHECKING:
    from reshard.storage.files import Files

METADATA, DATA = ".metadata", ".distcp"
_ANY_METADATA = re.compile(r"(__\d+)?\.metadata")
_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+/")


def first_dcp_path(files: Files) -> str | None:
    """A path that shows a DCP directory, here or one folder below; None if there is none."""
    here = (path for path in files.list() if _ANY_METADATA.fullmatch(path) or path.endswith((DATA, DATA + "/")))
    return next(here, None) or next((folder + METADATA for folder in _folders_below(files)), None)


def dcp_folders(files: Files) -> list[str]:
    """The DCP directories that make up this checkpoint: "" is the directory itself, others have a slash at their end.

    Raises: CheckpointError if the save was not finished, or there is no save; RequestError for several saves.
    """
    listing = files.list()
    if any(_ANY_METADATA.fullmatch(path) for path in listing):
        return [""]
    if any(path.endswith(DATA) for path in listing):
        raise CheckpointError(
            f"there are {DATA} files and no {METADATA}" + (" but .metadata.tmp" if ".metadata.tmp" in listing else ""),
            where=files.root,
            why=f"torch writes {METADATA} last, so this save was not finished, or a copy skipped files that start with a dot",
            do=f"Copy {METADATA} from where the checkpoint was written, or take an earlier checkpoint",
        )
    below = _folders_below(files)
    # accelerate: the model before the optimizer, whose numbers count the model's parameters.
    if accelerate := [folder for folder in below if _ACCELERATE.fullmatch(folder)]:
        return sorted(accelerate, reverse=True)
    folder = the_one_save(files, below)
    if folder is None:
        raise IncompleteError(f"there is no {METADATA}", where=files.root, do="Give the directory that holds it, or another --format")
    return [folder]


def _folders_below(files: Files) -> list[str]:
    return [path for path in files.list() if path.endswith("/") and files.size(path + METADATA) is not None]
