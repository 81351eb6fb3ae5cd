"""The Hub's front: what clients of the Hugging Face Hub ask for. Asked for by huggingface_hub 2.4 and transformers 5.19, and by vLLM 0.32:

    GET       /api/models/ORG/NAME[/revision/REV]                what the repository is, and its files
    GET       /api/models/ORG/NAME/tree/REV[/FOLDER]             its files with their lengths
    GET       /api/models/ORG/NAME/refs, commits/REV             its revisions
    POST      /api/models/ORG/NAME/paths-info/REV                files by their paths; it changes nothing
    HEAD GET  /ORG/NAME/resolve/REV/PATH                         a file

A name that was not announced is a repository that does not exist: a draft model or a tokenizer is never answered with this checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from reshard.doors.catalogue import MAIN, Catalogue, Repository, Revision
from reshard.doors.folder import VirtualFile
from reshard.doors.fronts.messages import Request, Response, file_answer, form, json_answer
from reshard.errors import ReshardError

_API = ("api", "models")
# The most paths that are asked for at once, and the files of a page of a listing.
_MOST_PATHS, _MOST_FILES = 10_000, 1000
_BEGAN = "2026-01-01T00:00:00.000Z"


def answer(request: Request, catalogue: Catalogue) -> Response | None:
    """The answer to a request of the Hub's protocol; None for another one. Raises ReshardError if a revision cannot be opened."""
    segments = request.segments
    if segments[:1] == ("api",):
        return _about(request, catalogue, segments[2:]) if segments[:2] == _API else _not_there("RepoNotFound", "nothing is served there")
    if len(segments) < 5 or segments[2] not in ("resolve", "raw"):
        return None
    repository = catalogue.by_name.get("/".join(segments[:2]))
    if repository is None:
        return None if segments[0] in catalogue.by_bucket else _no_repository("/".join(segments[:2]))
    revision = repository.revision(segments[3])
    if revision is None:
        return _no_revision(segments[3])
    path = "/".join(segments[4:])
    if (file := revision.folder.get(path)) is None:
        return _not_there("EntryNotFound", f"{path} is not a file of {repository.name}", X_Repo_Commit=revision.commit)
    return file_answer(request, file).having(X_Repo_Commit=revision.commit)


def _about(request: Request, catalogue: Catalogue, segments: tuple[str, ...]) -> Response:
    """What the API tells of repositories."""
    if not "".join(segments):
        return json_answer([_model(repository.revision(MAIN), repository) for repository in catalogue.by_name.values()])
    name, (verb, wanted, *folder) = "/".join(segments[:2]), (*segments[2:], *("", "")[: max(0, 4 - len(segments))])
    if (repository := catalogue.by_name.get(name)) is None:
        return _no_repository(name)
    if verb == "refs":
        return json_answer(_refs(repository))
    if (revision := repository.revision(wanted or MAIN)) is None:
        return _no_revision(wanted)
    if verb == "paths-info":
        return _paths_info(request, revision)
    if verb in ("", "revision"):
        return json_answer(_model(revision, repository), X_Repo_Commit=revision.commit)
    if verb == "tree":
        return _tree(request, revision, "/".join(folder))
    if verb == "commits":
        commit = {"id": revision.commit, "title": revision.name, "message": "", "date": _BEGAN, "authors": []}
        return json_answer([commit], X_Repo_Commit=revision.commit)
    return _not_there("EntryNotFound", f"{verb} is not served")


def _model(revision: Revision | None, repository: Repository) -> dict[str, Any]:
    files = revision.folder if revision else {}
    return {
        "_id": hashlib.sha256(repository.name.encode()).hexdigest()[:24],
        "id": repository.name,
        "modelId": repository.name,
        "author": repository.name.partition("/")[0],
        "sha": revision.commit if revision else None,
        "siblings": [{"rfilename": path} for path in files],
        "lastModified": _BEGAN,
        "createdAt": _BEGAN,
        "private": False,
        "gated": False,
        "disabled": False,
        "tags": ["reshard"],
        "downloads": 0,
        "likes": 0,
    }


def _refs(repository: Repository) -> dict[str, Any]:
    named = []
    for name in (MAIN, *(repository.revisions if repository.is_run else ())):
        try:
            revision = repository.revision(name)
        except ReshardError:  # one damaged step does not hide the others
            continue
        if revision is not None:
            named.append((name, revision.commit))
    heads = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit} for name, commit in named]
    return {"branches": heads, "tags": [], "converts": []}


def _tree(request: Request, revision: Revision, folder: str) -> Response:
    """The entries of a folder, a page at a time: the next page is a link, as the Hub gives it."""
    prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
    below = {path: file for path, file in revision.folder.items() if path.startswith(prefix)}
    if prefix and not below:
        return _not_there("EntryNotFound", f"{folder} is not a folder of {revision.repository}", X_Repo_Commit=revision.commit)
    is_recursive = request.parameter("recursive", "false").lower() in ("true", "1")
    folders = sorted(_folders(below, prefix, is_recursive=is_recursive))
    entries = [{"type": "directory", "oid": _git_oid(path), "size": 0, "path": path} for path in folders]
    entries += [_entry(file) for path, file in below.items() if is_recursive or "/" not in path.removeprefix(prefix)]
    at, page = (int(text) if (text := request.parameter(name)).isdecimal() else 0 for name in ("cursor", "limit"))
    stop = at + min(page or _MOST_FILES, _MOST_FILES)
    answer = json_answer(entries[at:stop], X_Repo_Commit=revision.commit)
    if stop >= len(entries):
        return answer
    host = request.authority or request.headers.get("host", "")
    recursive = "true" if is_recursive else "false"
    return answer.having(Link=f'<http://{host}{request.path}?recursive={recursive}&limit={stop - at}&cursor={stop}>; rel="next"')


def _folders(paths: Iterable[str], prefix: str, *, is_recursive: bool) -> set[str]:
    """The folders below a folder that hold these paths; without `is_recursive`, those directly below."""
    folders = set()
    for path in paths:
        parts = path.removeprefix(prefix).split("/")[:-1]
        folders |= {prefix + "/".join(parts[: depth + 1]) for depth in range(len(parts) if is_recursive else min(len(parts), 1))}
    return folders


def _entry(file: VirtualFile) -> dict[str, Any]:
    """A file as listings tell it. One with tensors is one of LFS: its oid is what the ETag says."""
    if file.content is None:
        lfs = {"oid": file.etag, "size": file.size, "pointerSize": 135}
        return {"type": "file", "oid": file.etag[:40], "size": file.size, "lfs": lfs, "path": file.path}
    return {"type": "file", "oid": file.etag[:40], "size": file.size, "path": file.path}


def _git_oid(path: str) -> str:
    return hashlib.sha256(path.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def _paths_info(request: Request, revision: Revision) -> Response:
    """The entries of the paths that the body names, as JSON or as a form. Paths that do not exist are left out."""
    try:
        if "json" in request.headers.get("content-type", "json"):
            paths = json.loads(request.body or b"{}")["paths"]
        else:
            paths = form(request.body, _MOST_PATHS)["paths"]
        paths = [paths] if isinstance(paths, str) else list(paths)
        if len(paths) > _MOST_PATHS or not all(isinstance(path, str) for path in paths):
            raise ValueError("too many paths, or no texts")
    except (ValueError, KeyError, TypeError, RecursionError):
        return json_answer({"error": "the body is not a list of paths"}, 400)
    folder, entries = revision.folder, list[dict[str, Any]]()
    for path in (path.strip("/") for path in paths):
        if path in folder:
            entries.append(_entry(folder[path]))
        elif path and any(name.startswith(f"{path}/") for name in folder):
            entries.append({"type": "directory", "oid": _git_oid(path), "size": 0, "path": path})
    return json_answer(entries, X_Repo_Commit=revision.commit)


def _no_repository(name: str) -> Response:
    return _not_there("RepoNotFound", f"{name} is not served here")


def _no_revision(name: str) -> Response:
    return _not_there("RevisionNotFound", f"there is no revision {name}")


def _not_there(code: str, message: str, **headers: str) -> Response:
    ascii_message = message.encode("ascii", "backslashreplace").decode()
    plain = "".join(letter for letter in ascii_message if letter.isprintable())[:500]
    return json_answer({"error": message}, 404, X_Error_Code=code, X_Error_Message=plain, **headers)
