"""Stores that fsspec knows: hf://, hdfs://, msc://, ssh://, memory:// and what else the user has installed.

hf:// reads the repositories of the Hugging Face Hub through huggingface_hub, with its cache of tokens, HF_TOKEN and HF_ENDPOINT.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from reshard.errors import RequestError, UnsupportedError
from reshard.storage.stores.store import Entry, Upload
from reshard.storage.system_calls import system_refusal

_PACKAGES = {
    "hf://": "huggingface_hub",
    "msc://": "multi-storage-client",
    "ssh://": "paramiko",
    "sftp://": "paramiko",
    "hdfs://": "pyarrow",
}
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "created")
_STAMPS = ("ETag", "etag", "blob_id", "checksum", "mtime", "created", "modified", "last_commit")


class FsspecStore:
    """`Backend` of the files below a URL."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        scheme = url.partition("://")[0].lower()
        package = _PACKAGES.get(f"{scheme}://")
        try:
            import fsspec

            known = scheme in fsspec.available_protocols()
            opened: tuple[Any, str] = fsspec.core.url_to_fs(url, **options) if known else (None, "")
        except ImportError:
            needed = f"fsspec and {package}, which are not both installed" if package else "fsspec, which is not installed"
            packages = "'reshard[hub]'" if package == "huggingface_hub" else f"fsspec {package or ''}".rstrip()
            raise UnsupportedError(f"{scheme}:// paths need {needed}", where=url, do=f"Install: pip install {packages}") from None
        except (TypeError, ValueError) as error:
            raise RequestError(f"this URL or a `storage_option=` is not understood: {error}", where=url) from None
        except OSError as error:  # Some connect at once.
            raise system_refusal(error, "opened", url) from error
        self._files, self._root = opened
        if self._files is None:
            raise UnsupportedError(
                f"{scheme}:// is not a known kind of path",
                where=url,
                do="Give a local path, s3://, gs://, az://, http(s)://, hf://, or install the fsspec package of that storage",
            )
        self._root = self._root.rstrip("/")

    def list(self, folder: str, *, below: bool) -> Iterator[Entry]:
        place = self._place(folder.rstrip("/"))
        if self._files.isfile(place):
            return
        if below:
            yield from (self._entry(info) for info in self._files.find(place, detail=True).values())
            return
        for info in self._files.ls(place, detail=True):
            entry = self._entry(info)
            yield Entry(entry.path + "/", 0, "") if info["type"] == "directory" else entry

    def look(self, path: str) -> Entry | None:
        info = self._files.info(self._place(path))
        return None if info["type"] == "directory" else self._entry(info)

    def read(self, entry: Entry, start: int, stop: int) -> memoryview:
        return memoryview(self._files.cat_file(self._place(entry.path), start=start, end=stop))

    def upload(self, path: str, *, part: int, at_once: int) -> Upload:
        place = self._place(path)
        self._files.makedirs(place.rpartition("/")[0], exist_ok=True)
        return _Writer(self._files, place, part)

    def create(self, path: str, content: bytes) -> None:
        # fsspec has no exclusive creation that all of its stores obey, so two runs at the same moment are not kept apart here.
        if self._files.exists(self._place(path)):
            raise FileExistsError(path)
        upload = self.upload(path, part=max(len(content), 8 << 20), at_once=1)
        upload.write(content)
        upload.close()

    def remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                self._files.rm_file(self._place(path))

    def _place(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _entry(self, info: Mapping[str, Any]) -> Entry:
        stamp = next((info[key] for key in _STAMPS if info.get(key)), "")
        stamp = str(stamp.timestamp() if isinstance(stamp, datetime) else stamp)
        name = info["name"].removeprefix(self._root).lstrip("/") if info["name"].startswith(self._root) else info["name"]
        times = (value.timestamp() if isinstance(value, datetime) else value for key in _TIMES if (value := info.get(key)))
        return Entry(name, info["size"] or 0, f"{stamp} {info['size']}", next((time for time in times if isinstance(time, float)), None))


class _Writer:
    """`Upload` of a file, which appears when it is committed in those stores of fsspec that can do this."""

    def __init__(self, files: Any, place: str, part: int) -> None:
        self._files, self._place, self._ended = files, place, False
        self._file = files.open(place, "wb", block_size=part, autocommit=False)

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def close(self) -> None:
        self._ended = True
        self._file.close()
        self._file.commit()

    def abort(self) -> None:
        if not self._ended:
            self._ended = True
            self._file.discard()
            with suppress(FileNotFoundError):  # some stores show a file from the start
                self._files.rm_file(self._place)
