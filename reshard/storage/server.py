"""Requests to one server: the only place of reshard that opens a connection of its own, and only to the address that the user gave.

No redirect is followed, no proxy is used, and what the server answers is not trusted: an answer is limited as a whole, in size and in time,
and read as JSON.
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
    import socket

# 40,000 parameters on 8 ranks, as many as large models have, are 40 MB.
_MOST_BYTES = 64 << 20
# Lists, objects and commas of a document. An empty list takes 3 bytes in the answer, and 64 in memory.
_MOST_VALUES = 1 << 20
_MOST_HEADER_BYTES = 64 << 10
_MOST_INFORMATIONAL, _MOST_CHUNKS = 16, 1 << 16
_PART = 1 << 16
# A server reads all its weights before it answers: at 1 GB/s, 80 GB take 80 s. Then nothing keeps it.
_SECONDS, _SECONDS_WITHOUT_PROGRESS = 600.0, 60.0


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
        try:
            with _connection(self.address) as connection:
                connection.sendall(_request(self.address, path, question))
                answer = _Answer(connection, self.address)
                status, reason = answer.status()
                if status in (404, 405):
                    return None
                if not 200 <= status < 300:
                    raise CheckpointError(
                        f"the server answered {status} {printable(reason)[:80]} to {path}",
                        where=self.address,
                        why="reshard follows no redirect and has no key to show" if status < 404 else None,
                        do="Ask the server with curl, and give its answer to `reshard digests --compare FILE`",
                    )
                return _document(answer.body(), self.address)
        except (OSError, UnicodeError) as error:
            raise SystemRefusal(
                f"the server cannot be asked: {printable(str(error))[:200]}", where=self.address, do="Check the address, and that it runs"
            ) from None


def _connection(address: str) -> socket.socket:
    import socket

    parts = urlsplit(address)
    assert parts.hostname
    plain = socket.create_connection((parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)), _SECONDS_WITHOUT_PROGRESS)
    if parts.scheme == "http":
        return plain
    import ssl

    return ssl.create_default_context().wrap_socket(plain, server_hostname=parts.hostname)


def _request(address: str, path: str, question: dict[str, Any] | None) -> bytes:
    parts = urlsplit(address)
    body = b"" if question is None else json.dumps(question).encode()
    head = [f"{'GET' if question is None else 'POST'} {parts.path}{path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
    head += ["Accept: application/json", "Accept-Encoding: identity", "User-Agent: reshard"]
    head += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if question is not None else []
    return "\r\n".join([*head, "", ""]).encode("ascii") + body


class _Answer:
    """One answer, read within its limits. All of it is counted, and the clock is asked before every part that is received."""

    def __init__(self, connection: socket.socket, where: str) -> None:
        self._connection, self._where = connection, where
        self._received, self._has_begun, self._ends_at = bytearray(), False, time.monotonic() + _SECONDS
        self._header_bytes = self._body_bytes = 0
        self._headers: dict[str, str] = {}

    def status(self) -> tuple[int, str]:
        """The status and its reason, after informational answers."""
        for _ in range(_MOST_INFORMATIONAL + 1):
            line = self._header_line()
            match = re.fullmatch(r"HTTP/1\.[01] (\d{3})(?: (.*))?", line)
            if match is None:
                raise self._refusal(f"is not HTTP: it starts with {printable(line[:60])!r}")
            self._headers = self._fields()
            if not 100 <= int(match[1]) < 200:
                return int(match[1]), match[2] or ""
        raise self._refusal(f"comes after more than {_MOST_INFORMATIONAL} informational answers")

    def body(self) -> bytes:
        """The bytes of the body."""
        body = bytearray()
        if "transfer-encoding" in self._headers:
            for _ in range(_MOST_CHUNKS):
                nbytes = self._length(self._body_line().partition(";")[0].strip(), 16)
                if not nbytes:
                    self._fields()
                    break
                body += self._bytes(nbytes)
                self._body_line()
            else:
                raise self._refusal(f"comes in more than {_MOST_CHUNKS:,} chunks")
        elif length := self._headers.get("content-length"):
            body += self._bytes(self._length(length, 10))
        else:
            while self._receive(may_end=True):
                self._count(len(self._received) - self._body_bytes)
            body = self._received
        return bytes(body)

    def _fields(self) -> dict[str, str]:
        """The header fields, or those of a trailer, with names in lower case."""
        fields = {}
        while line := self._header_line():
            name, _, value = line.partition(":")
            fields[name.strip().lower()] = value.strip()
        return fields

    def _header_line(self) -> str:
        line = self._line(_MOST_HEADER_BYTES - self._header_bytes)
        self._header_bytes += len(line)
        return line.decode("latin-1").rstrip("\r\n")

    def _body_line(self) -> str:
        """What stands between the chunks of a body, which counts as a part of it."""
        line = self._line(_MOST_HEADER_BYTES)
        self._count(len(line))
        return line.decode("latin-1").rstrip("\r\n")

    def _line(self, most: int) -> bytes:
        while (end := self._received.find(b"\n", 0, most) + 1) == 0:
            if len(self._received) >= most:
                raise self._refusal(f"has more than {_MOST_HEADER_BYTES >> 10} KiB of headers and trailers")
            self._receive()
        return self._taken(end)

    def _length(self, text: str, base: int) -> int:
        if re.fullmatch(r"[0-9a-fA-F]{1,16}" if base == 16 else r"[0-9]{1,18}", text) is None:
            raise self._refusal(f"has {printable(text[:40])!r} as a length")
        return int(text, base)

    def _bytes(self, nbytes: int) -> bytes:
        self._count(nbytes)
        while len(self._received) < nbytes:
            self._receive()
        return self._taken(nbytes)

    def _taken(self, nbytes: int) -> bytes:
        found = bytes(self._received[:nbytes])
        del self._received[:nbytes]
        return found

    def _count(self, nbytes: int) -> None:
        self._body_bytes += nbytes
        if self._body_bytes > _MOST_BYTES:
            raise self._refusal(f"is longer than {_MOST_BYTES >> 20} MiB")

    def _receive(self, *, may_end: bool = False) -> bool:
        """Receive a part. Returns whether there was one."""
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise self._refusal(f"takes more than {_SECONDS:.0f} s")
        self._connection.settimeout(min(left, _SECONDS_WITHOUT_PROGRESS) if self._has_begun else left)
        part = self._connection.recv(_PART)
        self._has_begun = True
        self._received += part
        if not part and not may_end:
            raise ConnectionError("it broke off its answer")
        return bool(part)

    def _refusal(self, what: str) -> CheckpointError:
        return CheckpointError(f"the server's answer {what}", where=self._where)


def _document(content: bytes, where: str) -> Any:
    if sum(map(content.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise CheckpointError(f"the server's answer has more than {_MOST_VALUES:,} values", where=where)
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        start = printable(content[:60].decode("utf-8", "replace"))
        raise CheckpointError(f"the server's answer is not JSON: it starts with {start!r}", where=where) from None
