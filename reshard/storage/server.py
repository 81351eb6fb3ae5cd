"""Requests to one server, and only to the address that the user gave.

No redirect is followed, no proxy is used, and what the server answers is not trusted: an answer is limited as a whole, in size and in time,
and read as JSON.
"""

from __future__ import annotations

import json
import re
from dataclasses import field
from typing import Any
from urllib.parse import urlsplit

from reshard.errors import CheckpointError, RequestError, SystemRefusal, printable
from reshard.geometry.value import value
from reshard.storage.stores.http_answer import Answer, connected

# 40,000 parameters on 8 ranks, as many as large models have, are 40 MB.
_MOST_BYTES = 64 << 20
# Lists, objects and commas of a document. An empty list takes 3 bytes in the answer, and 64 in memory.
_MOST_VALUES = 1 << 20
# A server reads all its weights before it answers: at 1 GB/s, 80 GB take 80 s. Then nothing keeps it.
_SECONDS = 600.0

Question = dict[str, Any] | list[bytes] | None


def is_server(path: object) -> bool:
    """Whether a path is the address of a server: a scheme, a host and a port, and no path but that of OpenAI's API, /v1."""
    return isinstance(path, str) and re.fullmatch(r"https?://[^/]+(/v1)?/?", path) is not None


class Silent(SystemRefusal):
    """A server takes connections, or does not refuse them, and does not answer."""


@value
class Server:
    """A server at an address such as http://host:8000."""

    address: str
    """The address without a slash at its end."""
    key: str | None = field(default=None, repr=False)
    """The key that requests show; None: none."""

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
        return Server(address.rstrip("/").removesuffix("/v1"))

    def ask(self, path: str, question: dict[str, Any] | None = None) -> Any:
        """The JSON document that the server answers to a GET of a path, or to a POST if there is a question. None if the server has no such
        path.

        Raises: SystemRefusal if the server cannot be reached, CheckpointError for another answer than a JSON document.
        """
        status, reason, body = self.answer(path, question)
        if status in (404, 405):
            return None
        if not 200 <= status < 300:
            raise CheckpointError(
                f"the server answered {status} {printable(reason)[:80]} to {path}",
                where=self.address,
                why="reshard follows no redirect and has no key to show" if status < 404 else None,
                do="Ask the server with curl, and give its answer to `reshard digests --compare FILE`",
            )
        return document(body, self.address)

    def answer(self, path: str, question: Question = None, *, seconds: float | None = None) -> tuple[int, str, bytes]:
        """The status, its reason and the body that the server answers to a GET of a path, or to a POST if there is a question.

        question: a document, or the pieces of one as JSON has it. seconds: the longest wait for the whole answer; None: ten minutes.

        Raises: SystemRefusal if the server cannot be reached, CheckpointError for an answer that is not HTTP or beyond a limit.
        """
        try:
            with connected(self.address) as connection:
                for piece in _request(self.address, path, question, self.key):
                    connection.sendall(piece)
                answer = Answer(connection, self.address, most_bytes=_MOST_BYTES, seconds=_SECONDS if seconds is None else seconds)
                return *answer.status(), answer.body()
        except (OSError, UnicodeError) as error:
            raise self._unreached(error) from None

    def own_address(self) -> str:
        """The address of this machine on its way to the server. Raises SystemRefusal if the server cannot be reached."""
        try:
            return own_address(self.address)
        except OSError as error:
            raise self._unreached(error) from None

    def peer_address(self) -> str:
        """The address of the server's machine, as a number. Raises SystemRefusal if the server cannot be reached."""
        try:
            with connected(self.address) as connection:
                return str(connection.getpeername()[0])
        except OSError as error:
            raise self._unreached(error) from None

    def _unreached(self, error: Exception) -> SystemRefusal:
        return (Silent if isinstance(error, TimeoutError) else SystemRefusal)(
            f"the server cannot be asked: {printable(str(error))[:200]}", where=self.address, do="Check the address, and that it runs"
        )


def own_address(address: str) -> str:
    """The address of this machine on its way to an address such as http://host:8000. Raises OSError if nobody listens there."""
    with connected(address) as connection:
        return str(connection.getsockname()[0])


def _request(address: str, path: str, question: Question, key: str | None = None) -> list[bytes]:
    parts = urlsplit(address)
    body = [] if question is None else [json.dumps(question).encode()] if isinstance(question, dict) else question
    head = [f"{'GET' if question is None else 'POST'} {parts.path}{path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
    head += ["Accept: application/json", "Accept-Encoding: identity", "User-Agent: reshard"]
    head += ["Content-Type: application/json", f"Content-Length: {sum(map(len, body))}"] if question is not None else []
    head += [f"Authorization: Bearer {key}"] if key and key.isprintable() else []
    return ["\r\n".join([*head, "", ""]).encode("ascii"), *body]


def document(content: bytes, where: str) -> Any:
    """The JSON document in the body of an answer. Raises CheckpointError if there is none."""
    if sum(map(content.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise CheckpointError(f"the server's answer has more than {_MOST_VALUES:,} values", where=where)
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        start = printable(content[:60].decode("utf-8", "replace"))
        raise CheckpointError(f"the server's answer is not JSON: it starts with {start!r}", where=where) from None
