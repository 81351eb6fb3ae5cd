"""Paths as users give them: local ones, and URLs of stores. Where only a local path serves, a message says how to copy the files."""

from __future__ import annotations

import os
import re
from pathlib import Path

from reshard.errors import RequestError, UnsupportedError, nearest

# Start of a URL -> a command that copies what lies there into the folder {name}.
_COPIES = {
    "s3://": "aws s3 cp --recursive {url} {name}",
    "gs://": "mkdir {name} && gcloud storage cp --recursive '{url}/*' {name}",
    "hf://": "hf download {path} --local-dir {name}",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w-]*(\.[\w-]+)*/[A-Za-z0-9][\w.-]*")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the URL of a store, such as s3://bucket/checkpoint."""
    scheme, colon, _ = os.fspath(path).partition("://")
    return bool(colon) and "/" not in scheme and scheme != "file"


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path, after a check that it is a local one. Raises UnsupportedError, with a command that copies it, for a URL."""
    text = os.fspath(path)
    scheme, colon, rest = text.partition("://")
    if not colon or "/" in scheme:
        return Path(path)
    if scheme == "file":
        raise UnsupportedError("file:// URLs are not supported", where=text, do=f"Give the path /{rest.partition('/')[2]}")
    name = rest.rstrip("/").rpartition("/")[2] or "checkpoint"
    copy = _COPIES.get(scheme + colon)
    command = "`" + copy.format(url=text.rstrip("/"), path=rest.rstrip("/"), name=name) + "`" if copy else "the tool of that storage"
    raise UnsupportedError(
        f"{scheme}:// paths are not supported here", where=text, do=f"Use a local directory: copy with {command}, or mount the storage"
    )


def absolute_place(path: str | os.PathLike[str]) -> str:
    """The absolute path, without a slash at its end; a URL as it is."""
    return os.fspath(path).rstrip("/") if is_url(path) else os.path.abspath(path)


def existing_path(path: str | os.PathLike[str]) -> Path:
    """The local path of a file or directory. Raises RequestError, with the nearest name, if it does not exist."""
    found = local_path(path)
    if not found.exists():
        raise RequestError(f"there is no file or directory {str(path)!r}", do=_instead_of(found), id="not-found")
    return found


def _instead_of(path: Path) -> str | None:
    """What to do about a path that does not exist."""
    if path.parent.is_dir():
        near = nearest(path.name, [entry.name for entry in path.parent.iterdir()])
        return f"Did you mean {path.parent / near}?" if near else None
    if _HUB_ID.fullmatch(str(path)):
        return (
            f"If this is a model of the Hugging Face Hub: `hf download {path} --local-dir {path.name}`, then give the directory {path.name}"
        )
    return None
