"""Object stores through obstore: s3://, gs://, az://.

Checked with obstore 0.12.1. It takes credentials, region and endpoint from the variables that each store's users set, repeats requests
that a server refuses for a while, and continues a body that breaks off. A profile of ~/.aws is read through boto3, if boto3 is installed.

obstore follows redirects and has no option against it. Those of a server that the user has named as S3's endpoint are kept on its host:
every other host is only reached through a proxy that does not exist.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from reshard.errors import RequestError, SystemRefusal, UnsupportedError
from reshard.storage.stores.store import Entry, ObjectChanged, Upload
from reshard.storage.stores.web_backend import proxy_of

_REFUSED = ("lacked the necessary privileges", "lacked valid authentication")
# Statuses of requests that fail again when they are repeated, such as one to a bucket that is not there. Timeouts (408), conflicts (409)
# and limits (429) are not among them.
_MISTAKE = re.compile(r"status code: 4(?!08|09|29)\d\d")
# Without other credentials, object_store asks the cloud in which the machine may stand: by the path of that request, what to set elsewhere.
_TO_SET = {
    "/latest/": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (which needs boto3)",
    "/computeMetadata/": "GOOGLE_APPLICATION_CREDENTIALS",
    "/metadata/identity/": "AZURE_STORAGE_ACCOUNT_KEY",
}
# Answers to such a request that another attempt may change: too many at a time, or an error of the server.
_MAY_PASS = re.compile(r"status code: (429|5\d\d)")
_ASKED_THE_CLOUD = re.compile(r"https?://[^/\s]+(/latest/(?=api/token|meta-data/)|/computeMetadata/|/metadata/identity/)")
_REQUEST = re.compile(r"Generic \w+ error: (?:Error performing \w+ request: )*(?:Error performing [A-Z]+ https?://([^/\s]+)\S* in \S+ - )?")
_ANSWER = re.compile(r"status code: (\d{3} [A-Za-z -]+)(?:: (.*))?")
_RETRIES: dict[str, Any] = {
    "max_retries": 10,
    "retry_timeout": timedelta(seconds=300),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=15), "base": 2},
}
_ENDPOINTS = ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url")
# A proxy that cannot be: no server listens at port 0.
_NO_PROXY_AT = "127.0.0.1:0"
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
        self._obstore, self._url = obstore, url
        of_client = {key.lower(): value for key, value in options.items() if _is_client_option(key, value)}
        options = {key: value for key, value in options.items() if key.lower() not in of_client}
        settings = _s3_settings(options) if scheme.startswith("s3") else {}
        fence = _fence(settings, options, of_client)
        client = {"allow_http": True, "timeout": "300s", "connect_timeout": "10s", **fence, **of_client}

        def opened(retry: dict[str, Any]) -> Any:
            return from_url(url, client_options=client, retry_config=retry, **settings, **options)  # type: ignore[call-overload]

        try:
            # `Store` repeats requests, and says so. The parts of an upload can only be repeated below.
            self._store, self._writing = opened({"max_retries": 0}), opened(_RETRIES)
        except Exception as error:
            raise RequestError(
                f"this URL or a `storage_option=` is not understood: {_cause(error)}",
                where=url,
                do="Options are those of object_store, such as endpoint, region, access_key_id, account_name, skip_signature, timeout",
            ) from None

    def list(self, folder: str, *, below: bool) -> Iterator[Entry]:
        prefix = folder.rstrip("/") or None
        with _answering(self._obstore, self._url):
            if not below:
                listed = self._obstore.list_with_delimiter(self._store, prefix)
                yield from (Entry(f"{path}/", 0, "") for path in listed["common_prefixes"])
                yield from map(_entry, listed["objects"])
                return
            for page in self._obstore.list(self._store, prefix, chunk_size=1000):
                yield from map(_entry, page)

    def look(self, path: str) -> Entry | None:
        with _answering(self._obstore, self._url):
            return _entry({**self._obstore.head(self._store, path), "path": path})

    def read(self, entry: Entry, start: int, stop: int) -> memoryview:
        if start == stop:
            return memoryview(b"")
        options: Any = {"range": (start, stop)}
        # A weak ETag does not promise equal bytes, and S3 refuses a comparison with one.
        if entry.stamp.startswith('"'):
            options["if_match"] = entry.stamp
        try:
            with _answering(self._obstore, self._url):
                return memoryview(self._obstore.get(self._store, entry.path, options=options).bytes())
        except self._obstore.exceptions.PreconditionError:
            raise ObjectChanged from None

    def upload(self, path: str, *, part: int, at_once: int) -> Upload:
        return _Writer(self._obstore, self._url, self._obstore.open_writer(self._writing, path, buffer_size=part, max_concurrency=at_once))

    def create(self, path: str, content: bytes) -> None:
        try:
            with _answering(self._obstore, self._url):
                self._obstore.put(self._store, path, content, mode="create", use_multipart=False)
        except self._obstore.exceptions.AlreadyExistsError:
            raise FileExistsError(path) from None

    def remove(self, paths: Sequence[str]) -> None:
        with suppress(FileNotFoundError):
            self._obstore.delete(self._store, list(paths))


class _Writer:
    """`Upload` of an object. A small one is sent in one request, a larger one in parts."""

    def __init__(self, obstore: Any, url: str, file: Any) -> None:
        self._obstore, self._url, self._file, self._ended = obstore, url, file, False

    def write(self, data: bytes) -> None:
        with _answering(self._obstore, self._url):
            self._file.write(data)

    def close(self) -> None:
        with _answering(self._obstore, self._url):
            self._file.close()
        self._ended = True

    def abort(self) -> None:
        if not self._ended:
            self._ended = True
            # Leaving the context with an exception aborts the upload.
            self._file.__exit__(InterruptedError, InterruptedError("the file is given up"), None)


def _entry(info: Mapping[str, Any]) -> Entry:
    stamp = info["e_tag"] or f"{info['last_modified']} {info['size']}"
    return Entry(info["path"], info["size"], stamp, info["last_modified"].timestamp())


@contextmanager
def _answering(obstore: Any, url: str) -> Iterator[None]:
    """Raises PermissionError, ValueError or SystemRefusal for what the store refuses for good, OSError for what may pass."""
    refusals = (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError)
    try:
        yield
    except Exception as error:
        cause = _cause(error)
        if (asked := _ASKED_THE_CLOUD.search(str(error))) and not _MAY_PASS.search(str(error)):
            raise SystemRefusal(
                "no credentials are set, and this machine gets none from a cloud",
                where=url,
                do=f"Set {_TO_SET[asked[1]]}; a public bucket needs `storage_option=` skip_signature=true",
            ) from error
        # The writer of obstore raises OSError for everything.
        if isinstance(error, refusals) or any(text in str(error) for text in _REFUSED):
            raise PermissionError(cause) from error
        if f"{_NO_PROXY_AT}," in str(error):
            raise ValueError("the store redirects to another host, and reshard connects only to what you name") from error
        if "<Code>NoSuchBucket</Code>" in str(error):
            raise ValueError("the bucket does not exist") from error
        if isinstance(error, obstore.exceptions.GenericError):
            raise (ValueError if _MISTAKE.search(str(error)) else OSError)(cause) from error
        raise


def _cause(error: Exception) -> str:
    """What went wrong, without the names of the requests that object_store puts before it."""
    line = str(error).splitlines()[0]
    if answer := _ANSWER.search(line):
        code = re.search(r"<Code>(\w+)</Code>", str(error))
        said = code[1] if code else answer[2]
        return f"the server answers {answer[1]}" + (f": {said}" if said else "")
    request = _REQUEST.match(line)
    if request and request[1] and "error sending request" in line:
        return f"no answer from {request[1]}"
    return _REQUEST.sub("", line)


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
    if endpoint and not options.keys() & {*_ENDPOINTS}:
        settings["endpoint"] = endpoint
    named = _names_credentials(options)
    folder = Path(os.path.expanduser("~"), ".aws")
    if not named and ("AWS_PROFILE" in os.environ or (folder / "credentials").exists() or (folder / "config").exists()):
        try:
            import boto3
            from botocore.exceptions import ProfileNotFound
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError:
            return settings
        try:
            session = boto3.Session()
        except ProfileNotFound as error:
            raise RequestError(f"AWS_PROFILE={os.environ.get('AWS_PROFILE')}: {error}", do="Name a profile of ~/.aws") from None
        # A file that only sets the region has no credentials; obstore looks for them on its own then.
        if session.get_credentials() is not None:
            settings["credential_provider"] = Boto3CredentialProvider(session)
        if session.region_name:
            settings.setdefault("region", session.region_name)
    return settings


def _names_credentials(options: Mapping[str, str]) -> bool:
    names = {"aws_access_key_id", "access_key_id", "skip_signature", "aws_skip_signature"}
    return bool({*options, *(name.lower() for name in os.environ)} & names)


def _fence(settings: Mapping[str, Any], options: Mapping[str, str], of_client: Mapping[str, str]) -> dict[str, Any]:
    """Options of the client that keep it on the host of an S3 endpoint: every other host is asked for through a proxy that cannot be, and a
    server that encrypts is not left for one that does not.

    Not where the user's own proxy decides what is reached, nor where obstore itself asks the cloud's other servers for credentials.
    """
    endpoint = settings.get("endpoint") or next((options[key] for key in _ENDPOINTS if key in options), None)
    asks_itself = not (_names_credentials(options) or "credential_provider" in settings)
    if not endpoint or asks_itself or "proxy_url" in of_client or proxy_of(endpoint):
        return {}
    parts = urlsplit(endpoint)
    return {"proxy_url": f"http://{_NO_PROXY_AT}", "proxy_excludes": parts.hostname or "", "allow_http": parts.scheme != "https"}
