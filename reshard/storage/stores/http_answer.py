"""Answers of HTTP servers, read without trust: limited as a whole in size and in time. Nothing is followed, decoded or cached here."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from reshard.errors import CheckpointError, printable

if TYPE_CHECKING:
    import socket

_MOST_HEADER_BYTES = 64 << 10
_MOST_INFORMATIONAL, _MOST_CHUNKS = 16, 1 << 16
_PART = 1 << 16
SECONDS_WITHOUT_PROGRESS = 60.0
"""The longest pause in an answer that has begun, and the longest wait for a connection."""


def connected(address: str) -> socket.socket:
    """A connection to the server at an address such as https://host:8000, without a proxy. Raises OSError if there is none."""
    import socket

    parts = urlsplit(address)
    assert parts.hostname
    plain = socket.create_connection((parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)), SECONDS_WITHOUT_PROGRESS)
    return secured(plain, parts.hostname) if parts.scheme == "https" else plain


def secured(plain: socket.socket, host: str) -> socket.socket:
    """A connection that is encrypted, to a host that proves its name."""
    import ssl

    return ssl.create_default_context().wrap_socket(plain, server_hostname=host)


class Answer:
    """One answer, read within its limits. All of it is counted, and the clock is asked before every part that is received."""

    def __init__(self, connection: socket.socket, where: str, *, most_bytes: int, seconds: float) -> None:
        """most_bytes: of the body. seconds: for all of it; nothing else limits the wait for its first byte.

        Methods raise CheckpointError for what is beyond a limit or no HTTP, OSError if the answer breaks off or pauses too long.
        """
        self._connection, self._where, self._most_bytes, self._seconds = connection, where, most_bytes, seconds
        self._received, self._has_begun, self._ends_at = bytearray(), False, time.monotonic() + seconds
        self._header_bytes = self._body_bytes = 0
        self.headers: dict[str, str] = {}
        """The header fields, with names in lower case, once the status is known."""

    def status(self) -> tuple[int, str]:
        """The status and its reason, after informational answers."""
        for _ in range(_MOST_INFORMATIONAL + 1):
            line = self._header_line()
            match = re.fullmatch(r"HTTP/1\.[01] (\d{3})(?: (.*))?", line)
            if match is None:
                raise self._refusal(f"is not HTTP: it starts with {printable(line[:60])!r}")
            self.headers = self._fields()
            if not 100 <= int(match[1]) < 200:
                return int(match[1]), match[2] or ""
        raise self._refusal(f"comes after more than {_MOST_INFORMATIONAL} informational answers")

    def body(self) -> bytes:
        """The bytes of the body."""
        body = bytearray()
        if "transfer-encoding" in self.headers:
            for _ in range(_MOST_CHUNKS):
                nbytes = self._length(self._body_line().partition(";")[0].strip(), 16)
                if not nbytes:
                    self._fields()
                    break
                body += self._bytes(nbytes)
                self._body_line()
            else:
                raise self._refusal(f"comes in more than {_MOST_CHUNKS:,} chunks")
        elif length := self.headers.get("content-length"):
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
        taken = bytes(self._received[:nbytes])
        del self._received[:nbytes]
        return taken

    def _count(self, nbytes: int) -> None:
        self._body_bytes += nbytes
        if self._body_bytes > self._most_bytes:
            raise self._refusal(f"is longer than {self._most_bytes >> 20} MiB")

    def _receive(self, *, may_end: bool = False) -> bool:
        """Receive a part. Returns whether there was one."""
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise self._refusal(f"takes more than {self._seconds:.0f} s")
        self._connection.settimeout(min(left, SECONDS_WITHOUT_PROGRESS) if self._has_begun else left)
        part = self._connection.recv(_PART)
        self._has_begun = True
        self._received += part
        if not part and not may_end:
            raise ConnectionError("it broke off its answer")
        return bool(part)

    def _refusal(self, what: str) -> CheckpointError:
        return CheckpointError(f"the server's answer {what}", where=self._where)
