"""fsspec's door: `reshard://` names files that do not exist, and computes their bytes when they are read.

    reshard://step-1000!hf/model.safetensors              the file of the conversion of the folder step-1000 to hf
    reshard:///data/step-1000!vllm,tp=8/                  the folder of the conversion to vLLM, for eight ranks
    reshard://model.safetensors                           with checkpoint= and to= among the storage options, a file of that folder

pandas, Ray Data, torch's FsspecReader and whatever else takes URLs of fsspec read them. Nothing can be written. Checked with fsspec 2026.9.
"""

from __future__ import annotations

import threading
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from reshard.doors.folder import Folder, VirtualFile, folder
from reshard.errors import RequestError


class ReshardFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Virtual folders as a file system. Options are the keywords of `reshard.folder`, with `checkpoint` for its source."""

    protocol, root_marker = "reshard", ""

    def __init__(self, checkpoint: Any = None, to: str = "", **options: Any) -> None:
        own = {name: options.pop(name) for name in ("use_listings_cache", "listings_expiry_time", "max_paths") if name in options}
        super().__init__(**own)
        self._checkpoint, self._to, self._options = (
            checkpoint,
            to,
            {key: options[key] for key in options if key not in ("skip_instance_cache", "asynchronous")},
        )
        self._folders: dict[str, Folder] = {}
        self._opening = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(part) for part in path]
        return str(path).removeprefix("reshard://").rstrip("/")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """The entries of a folder, or a file. Raises FileNotFoundError."""
        path = self._strip_protocol(path)
        files, front, inner = self._place(path)
        if inner in files:
            entries = [self._entry(front, files[inner])]
        else:
            prefix = f"{inner}/" if inner else ""
            below = [name_below for name_below in files if name_below.startswith(prefix)]
            if not below:
                raise FileNotFoundError(path)
            names = dict.fromkeys(name_below[len(prefix) :].partition("/")[:2] for name_below in below)
            entries = [
                {"name": f"{front}{prefix}{name}", "size": 0, "type": "directory"} if slash else self._entry(front, files[prefix + name])
                for name, slash in names
            ]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """The length, the type and the ETag of a file, or of a folder. Raises FileNotFoundError."""
        path = self._strip_protocol(path)
        files, front, inner = self._place(path)
        if inner in files:
            return self._entry(front, files[inner])
        if inner and not any(name.startswith(f"{inner}/") for name in files):
            raise FileNotFoundError(path)
        return {"name": path, "size": 0, "type": "directory"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Bytes of a file; negative numbers count from its end. Raises FileNotFoundError, and what reading a virtual file raises."""
        file = self._file(path)
        first, stop, _ = slice(start, end).indices(file.size)
        return file.read(first, max(first, stop))

    def checksum(self, path: str) -> str:
        """The ETag of a file."""
        return self._file(path).etag

    ukey = checksum

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, cache_options: Any = None, **kwargs: Any) -> Any:
        if mode != "rb":
            raise OSError("virtual folders cannot be written")
        return _File(self, path, mode, block_size or "default", cache_options=cache_options, size=self._file(path).size, **kwargs)

    def _file(self, path: str) -> VirtualFile:
        files, _, inner = self._place(self._strip_protocol(path))
        if inner not in files:
            raise FileNotFoundError(path)
        return files[inner]

    def _place(self, path: str) -> tuple[Folder, str, str]:
        """The folder that a path lies in, what precedes the path of a file there, and that path."""
        source, mark, rest = path.rpartition("!")
        if self._checkpoint is not None:
            return self._folder("", self._checkpoint, self._to, {}), "", path
        if not mark:
            do = "Give reshard://CHECKPOINT!FORMAT/PATH, or `checkpoint=` and `to=` as storage options"
            raise RequestError("the URL names no checkpoint and no format", where=f"reshard://{path}", do=do)
        target, _, inner = rest.partition("/")
        to, *options = target.split(",")
        given = {key: int(word) if word.isdecimal() else word or True for key, _, word in (pair.partition("=") for pair in options)}
        return self._folder(f"{source}!{target}", source, to, given), f"{source}!{target}/", inner

    def _folder(self, key: str, source: Any, to: str, options: dict[str, Any]) -> Folder:
        with self._opening:
            if key not in self._folders:
                self._folders[key] = folder(source, to=to, **self._options, **options)
            return self._folders[key]

    @staticmethod
    def _entry(front: str, file: VirtualFile) -> dict[str, Any]:
        return {"name": front + file.path, "size": file.size, "type": "file", "ETag": file.etag}


class _File(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """A file that is open for reading."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        content: bytes = self.fs.cat_file(self.path, start, end)
        return content
