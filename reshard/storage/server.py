"""Requests to one server: the only place of reshard that opens a connection, and only to the address that the user gave.

No redirect is followed, no proxy is used, and what the server answers is not trusted: it is limited in size and time, and read as JSON.
"""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from reshard.errors import CheckpointError, RequestError, SystemRefusal, printable
from reshard.geometry.light_dataclass import dataclass

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

# 40,000 parameters on 32 ranks, as many as large models have, are 6 MB.
_MOST_BYTES = 256 << 20
_PART = 1 << 20
# A server reads all its weights to answer: at 1 GB/s, 80 GB take 80 s.
_SECONDS = 1800


def is_server(path: object) -> bool:
    """Whether a path is the address of a server: a scheme, a host and a port, without a path."""
    return isinstance(path, str) and re.fullmatch(r"https?://[^/]+/?", path) is not None


@dataclass(frozen=True, slots=True)
class Server:
    """A server at an address such as http://host:8000."""

    address: str
    """The address without a slash at its end."""

    @staticmethod
    def at(address: str) -> Server:
        """The server at an address. Raises RequestError for an address that has more than a scheme, a host, a port and a path."""
        try:
            parts = urlsplit(address)
            is_whole = bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            is_whole = False
        if not is_whole or parts.scheme not in ("http", "https") or "@" in parts.netloc or parts.query or parts.fragment:
            raise RequestError(
                f"{address!r} is not the address of a server", do="Give a scheme, a host and a port, such as http://localhost:8000"
            )
        return Server(address.rstrip("/"))

    def ask(self, path: str, question: dict[str, Any] | None = None) -> Any:
        """The JSON document that the server answers to a GET of a path, or to a POST if there is a question. None if the server has no such
        path.

        Raises: SystemRefusal if the server cannot be reached, CheckpointError for another answer than a JSON document.
        """
        from http.client import HTTPException
        from urllib.error import HTTPError
        from urllib.request import Request

        data = None if question is None else json.dumps(question).encode()
        request = Request(self.address + path, data=data, headers={"Content-Type": "application/json", "Accept": "application/json"})
        try:
            with _opener().open(request, timeout=_SECONDS) as response:
                return _document(_content(response, self.address), self.address)
        except HTTPError as error:
            with error:
                if error.code in (404, 405):
                    return None
                raise CheckpointError(
                    f"the server answered {error.code} {printable(str(error.reason))[:80]} to {path}",
                    where=self.address,
                    why="reshard follows no redirect and has no key to show" if error.code < 404 else None,
                    do="Ask the server with curl, and give its answer to `reshard digests --compare FILE`",
                ) from None
        except (OSError, HTTPException, UnicodeError) as error:
            reason = getattr(error, "reason", None) or error
            raise SystemRefusal(
                f"the server cannot be asked: {printable(str(reason))[:200]}", where=self.address, do="Check the address, and that it runs"
            ) from None


def _opener() -> OpenerDirector:
    """What opens http and https and nothing else: no redirects, proxies, files or authentication."""
    from urllib.request import HTTPDefaultErrorHandler, HTTPErrorProcessor, HTTPHandler, HTTPSHandler, OpenerDirector

    opener = OpenerDirector()
    for handler in (HTTPHandler, HTTPSHandler, HTTPErrorProcessor, HTTPDefaultErrorHandler):
        opener.add_handler(handler())
    return opener


def _content(response: Any, where: str) -> bytes:
    """The body of an answer, within its limits."""
    deadline, parts, nbytes = time.monotonic() + _SECONDS, [], 0
    while part := response.read1(_PART):
        parts.append(part)
        nbytes += len(part)
        if nbytes > _MOST_BYTES or time.monotonic() > deadline:
            raise CheckpointError(
                f"the server's answer is longer than {_MOST_BYTES >> 20} MiB, or takes more than {_SECONDS} s", where=where
            )
    return b"".join(parts)


def _document(content: bytes, where: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        start = printable(content[:60].decode("utf-8", "replace"))
        raise CheckpointError(f"the server's answer is not JSON: it starts with {start!r}", where=where) from None
