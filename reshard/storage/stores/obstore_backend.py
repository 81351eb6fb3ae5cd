"""Object stores and web servers through obstore: s3://, gs://, az://, http(s)://.

Checked with obstore 0.12.1. It takes credentials, region and endpoint from the variables that each store's users set, repeats requests
that a server refuses for a while, and continues a body that breaks off. A profile of ~/.aws is read through boto3, if boto3 is installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from reshard.errors import RequestError, UnsupportedError
from reshard.storage.stores.store import Entry, ObjectChanged, Upload

_REFUSED = ("lacked the necessary privileges", "lacked valid authentication")
# Statuses of requests that fail again when they are repeated, such as one to a bucket that is not there. Timeouts (408), conflicts (409)
# and limits (429) are not among them.
_MISTAKE = re.compile(r"status code: 4(?!08|09|29)\d\d")
INSTALL = "Install the extra: pip install 'reshard[cloud]'"


class ObjectStore:
    """`Backend` of the objects below a URL."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        scheme = url.partition("://")[0].lower()
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise UnsupportedError(f"{scheme}:// paths need obstore, which is not installed", where=url, do=INSTALL) from None
        self._obstore, self._is_web = obstore, scheme in ("http", "https")
        of_client = {key.lower(): value for key, value in options.items() if _is_client_option(key, value)}
        options = {key: value for key, value in options.items() if key.lower() not in of_client}
        settings: dict[str, Any] = {
            "client_options": {"allow_http": True, "timeout": "300s", "connect_timeout": "20s", **of_client},
            "retry_config": {
                "max_retries": 10,
                "retry_timeout": timedelta(seconds=300),
                "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=15), "base": 2},
            },
        }
        if scheme.startswith("s3"):
            settings |= _s3_settings(options)
        try:
            self._store: Any = from_url(url, **settings, **options)  # type: ignore[call-overload]
        except Exception as error:
            raise RequestError(
                f"this URL or a --storage-option is not understood: {str(error).splitlines()[0]}",
                where=url,
                do="Options are those of object_store, such as endpoint, region, access_key_id, skip_signature, timeout",
            ) from None

    def list(self, folder: str, *, below: bool) -> Iterator[Entry]:
        if self._is_web:
            return  # web servers list nothing
        prefix = folder.rstrip("/") or None
        with _answering(self._obstore):
            if not below:
                found = self._obstore.list_with_delimiter(self._store, prefix)
                yield from (Entry(f"{path}/", 0, "") for path in found["common_prefixes"])
                yield from map(_entry, found["objects"])
                return
            for page in self._obstore.list(self._store, prefix, chunk_size=1000):
                yield from map(_entry, page)

    def look(self, path: str) -> Entry | None:
        with _answering(self._obstore):
            return _entry({**self._obstore.head(self._store, path), "path": path})

    def read(self, entry: Entry, start: int, stop: int) -> memoryview:
        if start == stop:
            return memoryview(b"")
        options: Any = {"range": (start, stop)}
        # A weak ETag does not promise equal bytes, and S3 refuses a comparison with one.
        if entry.stamp.startswith('"'):
            options["if_match"] = entry.stamp
        try:
            with _answering(self._obstore):
                return memoryview(self._obstore.get(self._store, entry.path, options=options).bytes())
        except self._obstore.exceptions.PreconditionError:
            raise ObjectChanged from None

    def upload(self, path: str, *, part: int, at_once: int) -> Upload:
        self._check_writable()
        return _Writer(self._obstore, self._obstore.open_writer(self._store, path, buffer_size=part, max_concurrency=at_once))

    def create(self, path: str, content: bytes) -> None:
        self._check_writable()
        try:
            with _answering(self._obstore):
                self._obstore.put(self._store, path, content, mode="create", use_multipart=False)
        except self._obstore.exceptions.AlreadyExistsError:
            raise FileExistsError(path) from None

    def remove(self, paths: Sequence[str]) -> None:
        with suppress(FileNotFoundError):
            self._obstore.delete(self._store, list(paths))

    def _check_writable(self) -> None:
        if self._is_web:
            raise NotImplementedError("http(s):// can be read, and not written")


class _Writer:
    """`Upload` of an object. A small one is sent in one request, a larger one in parts."""

    def __init__(self, obstore: Any, file: Any) -> None:
        self._obstore, self._file, self._ended = obstore, file, False

    def write(self, data: bytes) -> None:
        with _answering(self._obstore):
            self._file.write(data)

    def close(self) -> None:
        with _answering(self._obstore):
            self._file.close()
        self._ended = True

    def abort(self) -> None:
        if not self._ended:
            self._ended = True
            # Leaving the context with an exception aborts the upload.
            self._file.__exit__(InterruptedError, InterruptedError("the file is given up"), None)


def _entry(found: Mapping[str, Any]) -> Entry:
    stamp = found["e_tag"] or f"{found['last_modified']} {found['size']}"
    return Entry(found["path"], found["size"], stamp, found["last_modified"].timestamp())


@contextmanager
def _answering(obstore: Any) -> Iterator[None]:
    """Raises PermissionError or ValueError for what the store refuses for good."""
    refusals = (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError)
    try:
        yield
    except Exception as error:
        line = _first_line(error)
        # The writer of obstore raises OSError for everything.
        if isinstance(error, refusals) or any(text in str(error) for text in _REFUSED):
            raise PermissionError(line) from error
        if isinstance(error, obstore.exceptions.GenericError) and _MISTAKE.search(line):
            raise ValueError(line) from error
        raise


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _is_client_option(key: str, value: str) -> bool:
    """Whether an option is one of obstore's HTTP client, such as allow_http or timeout. The value need not be valid.

    obstore 0.12.1 panics if such an option is given among those of the store, and it exports no list of them: a store without
    options of its own is asked.
    """
    from obstore.store import HTTPStore

    options: Any = {key: value}
    try:
        HTTPStore("http://localhost", client_options=options)
    except Exception as error:
        return not str(error).startswith("Invalid key")
    return True


def _s3_settings(options: Mapping[str, str]) -> dict[str, Any]:
    """What obstore does not find on its own: the usual name of the endpoint's variable, and the credentials of a profile of ~/.aws."""
    settings: dict[str, Any] = {}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint and not options.keys() & {"endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url"}:
        settings["endpoint"] = endpoint
    named = {*options, *(name.lower() for name in os.environ)} & {
        "aws_access_key_id",
        "access_key_id",
        "skip_signature",
        "aws_skip_signature",
    }
    folder = Path(os.path.expanduser("~"), ".aws")
    if not named and ("AWS_PROFILE" in os.environ or (folder / "credentials").exists() or (folder / "config").exists()):
        try:
            import boto3
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError:
            return settings
        session = boto3.Session()
        settings["credential_provider"] = Boto3CredentialProvider(session)
        if session.region_name:
            settings.setdefault("region", session.region_name)
    return settings
