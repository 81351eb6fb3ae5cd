"""Server: the one file of the doors that listens. It reads requests, asks what to answer, and sends it, each connection in a thread.

What strangers can do to it has a limit: the number of connections, the length and the time of a request's head, the time in which a client
takes what it asked for, and the bytes that are under way to all clients together.
"""

from __future__ import annotations

import io
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from reshard.doors.fronts.messages import Malformed, Request, Response, json_answer
from reshard.doors.planned_bytes import CHUNK

# A client may keep a connection for so many seconds without a request; the head of a request, and its body, take at most so many.
_IDLE, _HEAD = 60.0, 10.0
# The seconds in which a client takes a chunk, and the least and the most bytes of one. All chunks together have at most so many.
_SENDING, _LEAST_CHUNK, _UNDER_WAY = 60.0, 64 << 10, 64 << 20
_MOST_HEAD, _MOST_BODY = 32 << 10, 1 << 20
MOST_CONNECTIONS = 512
"""Connections at a time. Each client of the Hub or of S3 has ten or twenty."""
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
# Nothing that a browser gets may run, load or be framed.
_SAFE = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}

Respond = Callable[[Request, str], Response]
"""Answers a request. The second argument is the address of the client. It raises nothing but Malformed."""
Failed = Callable[[Exception], Response]
"""Takes note that a file could not be read, and returns what a client is told if nothing was sent yet."""


class HubServer(ThreadingHTTPServer):
    """Listens at an address, and answers by these functions. Raises OSError if the address cannot be had."""

    daemon_threads, allow_reuse_address, request_queue_size = True, True, 128

    def __init__(self, address: tuple[str, int], respond: Respond, failed: Failed) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.respond, self.failed = respond, failed
        self.sent, self.requests = 0, 0
        """Bytes of content that were sent, and requests that were answered."""
        self._connections, self._streams, self._lock = threading.BoundedSemaphore(MOST_CONNECTIONS), 0, threading.Lock()
        super().__init__(address, Connection)

    def server_bind(self) -> None:
        """Bind without asking for the name of this host, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[0], self.server_address[1]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, if there are not too many."""
        if not self._connections.acquire(blocking=False):
            with suppress(OSError):
                request.settimeout(0)
                request.send(_BUSY)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system gives no more threads
            self._connections.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection, and give its place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection has ended in a way that nothing was prepared for: there is nobody to tell."""

    def count(self, nbytes: int, requests: int = 0) -> None:
        """Count bytes that were sent, and requests that were answered."""
        with self._lock:
            self.sent, self.requests = self.sent + nbytes, self.requests + requests

    @contextmanager
    def streaming(self) -> Iterator[int]:
        """While a file is sent: the bytes of each chunk, so that all clients together have a bounded number under way."""
        with self._lock:
            self._streams += 1
            most = max(_LEAST_CHUNK, min(CHUNK, _UNDER_WAY // (2 * self._streams)))
        try:
            yield most & -_LEAST_CHUNK
        finally:
            with self._lock:
                self._streams -= 1


class _Incoming(io.RawIOBase):
    """What a client sends, with a limit in bytes and in time for each request."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._left, self._deadline, self._waits = connection, 0, 0.0, True

    def begin(self, nbytes: int, seconds: float, *, waits: bool = False) -> None:
        """From now on, so many bytes may come in so many seconds. waits: the time of a head begins with its first byte."""
        self._left, self._deadline, self._waits = nbytes, time.monotonic() + seconds, waits

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if self._left <= 0:
            raise Malformed("the head is too long")
        self._connection.settimeout(left)
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        if self._waits:
            self._waits, self._deadline = False, time.monotonic() + _HEAD
        self._left -= count
        return count


class Connection(BaseHTTPRequestHandler):
    """A connection of a client, which may send several requests, one after the other."""

    server: HubServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "reshard", ""
    disable_nagle_algorithm = True  # a small answer on a connection that is kept would wait for 40 ms

    def setup(self) -> None:
        super().setup()
        self._incoming = _Incoming(self.connection)
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        """Read a request and answer it."""
        self.close_connection = True
        self._incoming.begin(_MOST_HEAD, _IDLE, waits=True)
        try:
            self.raw_requestline = self.rfile.readline(_MOST_HEAD)
            if not self.raw_requestline:
                return
            self.requestline, self.request_version, self.command = "", "HTTP/1.1", ""
            if self.parse_request():
                self._answer()
        except Malformed as error:
            with suppress(OSError):
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, str(error))
        except (OSError, ValueError):
            self.close_connection = True  # the client has gone, or takes too long

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that cannot be read: called by the standard library, whose pages hold what the client sent."""
        self._refuse(code, HTTPStatus(code).phrase)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: `respond` logs."""

    def _refuse(self, status: int, message: str) -> None:
        self.close_connection = True
        self._send(json_answer({"error": message}, status))

    def _answer(self) -> None:
        keeps = not self.close_connection  # as `parse_request` has read it
        headers: dict[str, str] = {}
        for name, given in self.headers.items():
            lower = name.lower()
            headers[lower] = f"{headers[lower]},{given}" if lower in headers else given
        if self.command not in ("GET", "HEAD", "POST"):
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "files are read here, with GET and HEAD")
            return
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not length.isdecimal() or not length.isascii() or len(length) > 9 or int(length) > _MOST_BODY:
            self._refuse(HTTPStatus.BAD_REQUEST, "a body of that kind or length is not taken")
            return
        try:
            self._incoming.begin(int(length), _HEAD)
            body = self.rfile.read(int(length)) if int(length) else b""
            if len(body) < int(length):
                return
            answer = self.server.respond(Request.of(self.command, self.path, headers, body), self.client_address[0])
        except Malformed as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        self.close_connection = not keeps
        self._send(answer)

    def _send(self, answer: Response) -> None:
        """Send an answer: a small one in one piece, a file in chunks, of which the first is computed before anything is said."""
        self.connection.settimeout(_SENDING)
        sends_body = self.command != "HEAD" and answer.status not in (204, 304)
        if answer.file is None or not sends_body:
            self.connection.sendall(self._head(answer) + (answer.body if sends_body else b""))
            self.server.count(len(answer.body) if sends_body else 0, 1)
            return
        with self.server.streaming() as most:
            chunks = iter(answer.file.chunks(answer.start, answer.stop, most))
            try:
                first = next(chunks, b"")
            except Exception as error:
                self.close_connection = True
                answer = self.server.failed(error)
                self.connection.sendall(self._head(answer) + answer.body)
                return
            self.connection.sendall(b"".join((self._head(answer), first)) if len(first) <= _LEAST_CHUNK else self._head(answer))
            if len(first) > _LEAST_CHUNK:
                self.connection.sendall(first)
            self.server.count(len(first), 1)
            try:
                for chunk in chunks:
                    self.connection.sendall(chunk)
                    self.server.count(len(chunk))
            except OSError:
                self.close_connection = True
            except Exception as error:  # too late for a status: the client sees that bytes are missing
                self.close_connection = True
                self.server.failed(error)

    def _head(self, answer: Response) -> bytes:
        phrase = HTTPStatus(answer.status).phrase
        headers: Mapping[str, object] = {
            "Server": "reshard",
            "Date": self.date_time_string(),
            **({"Content-Length": answer.length} if answer.status not in (204, 304) else {}),
            **_SAFE,
            **answer.headers,
            **({"Connection": "close"} if self.close_connection else {}),
        }
        lines = (f"{name}: {given}" for name, given in headers.items())
        return ("\r\n".join((f"HTTP/1.1 {answer.status} {phrase}", *lines)) + "\r\n\r\n").encode("latin-1", "replace")
