"""Servers that lie: an honest one, and in front of it a liar that changes some of its answers. Both run in a process of their own.

    stores     tests/cloud/s3_server.py: a checkpoint is read from it or written to it
    servers    tests/helpers/weight_servers.py: `verify CKPT http://` asks it for the digests of its weights

A recipe is a name of LIES, a surface and a seed, which chooses the command and the answers that are changed. An answer may name another
address, where a trap listens: whoever connects to it followed a redirect.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cloud.s3_server import S3Server
from helpers import weight_servers
from helpers.reshard_command import reshard, result_tree
from hostile.watched import FIXTURES, outcome_of

SOURCE = FIXTURES / "hf" / "llama-sharded"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    cut: int | None = None
    """The connection breaks after this many bytes of the body."""
    endless: bytes = b""
    """Sent again and again, up to 64 MB, in place of the body."""

    def with_header(self, name: str, value: str | None) -> Answer:
        others = tuple((key, old) for key, old in self.headers if key.lower() != name.lower())
        return replace(self, headers=others if value is None else (*others, (name, value)))

    def with_body(self, body: bytes) -> Answer:
        return replace(self, body=body).with_header("Content-Length", str(len(body)))


Lie = Callable[[Answer, random.Random, str], Answer]


def redirected(status: int) -> Lie:
    return lambda answer, chance, trap: Answer(status, (("Location", f"{trap}/elsewhere"), ("Content-Length", "0")), b"")


def flipped(answer: Answer, chance: random.Random, trap: str) -> Answer:
    body = bytearray(answer.body)
    for _ in range(min(len(body), chance.choice((1, 1, 8)))):
        body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
    return replace(answer, body=bytes(body))


def listed(old: bytes, new: bytes) -> Lie:
    """A list of keys in which a text is replaced; other answers are not changed."""

    def lie(answer: Answer, chance: random.Random, trap: str) -> Answer:
        return answer.with_body(answer.body.replace(old, new, 1)) if b"<ListBucketResult" in answer.body else answer

    return lie


def header(name: str, *values: str | None) -> Lie:
    return lambda answer, chance, trap: answer.with_header(name, chance.choice(values))


def body_of(make: Callable[[bytes, random.Random], bytes]) -> Lie:
    return lambda answer, chance, trap: answer.with_body(make(answer.body, chance))


NUMBERS = ("0", "1", "-1", "07", "9" * 19, "9" * 400, "18446744073709551616", "abc", "")
ENTITIES = b'<?xml version="1.0"?><!DOCTYPE l [<!ENTITY a "' + b"x" * 1000 + b'">' + b"".join(
    b'<!ENTITY %c "%s">' % (98 + i, b"&%c;" % (97 + i) * 10) for i in range(7)
) + b"]><ListBucketResult><Key>&h;</Key></ListBucketResult>"  # fmt: skip
LIES: dict[str, Lie] = {
    **{f"redirect {status}": redirected(status) for status in (301, 302, 303, 307, 308)},
    **{f"status {status}": (lambda answer, chance, trap, status=status: replace(answer, status=status))
       for status in (200, 204, 206, 304, 400, 403, 404, 412, 416, 500, 503)},
    "length": header("Content-Length", *NUMBERS),
    "range": header("Content-Range", None, "bytes 0-0/1", "bytes 5-9/10", "bytes */7", "bytes 0-9/*", "x", f"bytes 0-9/{'9' * 30}"),
    "etag": header("ETag", None, '"other"', 'W/"weak"', "unquoted", '"' + "x" * 5000 + '"', '"\x7f"'),
    "time": header("Last-Modified", None, "never", "Thu, 01 Jan 1970 00:00:00 GMT", "Fri, 31 Dec 9999 23:59:59 GMT"),
    "encoding": header("Content-Encoding", "gzip", "br", "nonsense"),
    "chunked": header("Transfer-Encoding", "chunked", "gzip, chunked", "x"),
    "type": header("Content-Type", None, "text/html", "application/octet-stream; charset=utf-16"),
    "long header": header("X-Long", "x" * 60_000),
    "many headers": lambda answer, chance, trap: replace(answer, headers=(*answer.headers, *((f"X-{i}", "1") for i in range(3000)))),
    "flip": flipped,
    "shorter": body_of(lambda body, chance: body[: chance.randrange(len(body) + 1)]),
    "longer": body_of(lambda body, chance: body + chance.randbytes(chance.choice((1, 1000, 100_000)))),
    "gzip": body_of(lambda body, chance: gzip.compress(body)),
    "nothing": body_of(lambda body, chance: b""),
    "noise": body_of(lambda body, chance: chance.randbytes(len(body))),
    "nested": body_of(lambda body, chance: b"[" * 200_000),
    "commas": body_of(lambda body, chance: b"[" + b"[]," * 2_000_000 + b"0]"),
    "entities": body_of(lambda body, chance: ENTITIES),
    "broken": lambda answer, chance, trap: replace(answer, cut=chance.randrange(len(answer.body) + 1)),
    "endless": lambda answer, chance, trap: replace(answer, endless=b"x" * 65536).with_header("Content-Length", None),
    "hidden key": listed(b"<Key>", b"<Other>"),
    "key outside": listed(b"<Key>case/", b"<Key>case/../../x"),
    "key elsewhere": listed(b"<Key>case/", b"<Key>/etc/"),
    "huge size": listed(b"<Size>", b"<Size>9999999999999"),
    "negative size": listed(b"<Size>", b"<Size>-"),
    "cut list": listed(b"<IsTruncated>false", b"<NextContinuationToken>x</NextContinuationToken><IsTruncated>true"),
}  # fmt: skip
# What nobody can notice who reads: the bytes have the right length, and nothing tells their digest.
CHANGES_BYTES = ("flip", "noise", "broken", "shorter", "longer", "nothing", "gzip", "encoding")


class _Liar(BaseHTTPRequestHandler):
    """Hands a request to the honest server, and its answer on, changed now and then."""

    protocol_version = "HTTP/1.1"

    def do(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        connection = http.client.HTTPConnection("127.0.0.1", self.server.honest, timeout=30)  # type: ignore[attr-defined]
        try:
            headers = {key: value for key, value in self.headers.items() if key.lower() != "connection"}
            connection.request(self.command, self.path, self.rfile.read(length), headers)
            found = connection.getresponse()
            kept = tuple((key, value) for key, value in found.getheaders() if key.lower() not in ("server", "date", "connection"))
            honest = Answer(found.status, kept, found.read())
        finally:
            connection.close()
        answer = self.server.lie(honest)  # type: ignore[attr-defined]
        self.close_connection = answer is not honest  # so that nobody waits for a body that is shorter than was said
        with contextlib.suppress(OSError):
            self._send(answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do  # noqa: N815  (as http.server calls them)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[: answer.cut])
        if answer.endless:
            for _ in range(1024):
                self.wfile.write(answer.endless)

    def log_message(self, *unused: object) -> None:
        pass


class _LiarServer(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 512

    def __init__(self, honest: int, lie: Callable[[Answer], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), _Liar)
        self.honest, self.lie = honest, lie

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def _serve(kind: str, name: str, seed: int, folder: Path, ready: int) -> None:
    """In a process of its own: the honest server, the liar and the trap."""
    chance, lock = random.Random(f"{kind}|{name}|{seed}|liar"), threading.Lock()
    # Most lies are told rarely, so that what is tried again succeeds and the next answers matter.
    share, most = chance.choice((0.2, 0.6, 1.0)), chance.choice((1, 2, 8 if LIES[name] not in _LASTING else 3))
    trap = socket.create_server(("127.0.0.2", 0))  # another host; that another port is not seen, docs/recipes/stores.md says
    there = f"http://127.0.0.2:{trap.getsockname()[1]}"
    told = 0

    def lie(answer: Answer) -> Answer:
        nonlocal told
        with lock:
            if told >= most or chance.random() >= share:
                return answer
            told += 1
            return LIES[name](answer, chance, there)

    def spring() -> None:
        trap.accept()
        (folder / "trapped").touch()

    with contextlib.ExitStack() as stack:
        if kind == "stores":
            honest = S3Server(folder / "store")
            honest.put_tree("bucket", "case", SOURCE)
            port = int(honest.endpoint.rpartition(":")[2])
        else:
            answers = weight_servers.vllm(weight_servers.held("llama", tp=2))
            address, _ = stack.enter_context(weight_servers.server(answers))
            port = int(address.rpartition(":")[2])
        liar = _LiarServer(port, lie)
        threading.Thread(target=spring, daemon=True).start()
        os.write(ready, str(liar.server_address[1]).encode())
        os.close(ready)
        liar.serve_forever()


# Answers that a client asks for again after a pause, some of them for a minute: told three times at most.
_LASTING = tuple(LIES[name] for name in ("status 500", "status 503", "broken", "shorter", "longer", "length", "endless", "chunked"))


@contextlib.contextmanager
def lying(kind: str, name: str, seed: int, folder: Path) -> Iterator[int]:
    """The port of a server of this kind that tells this lie."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            _serve(kind, name, seed, folder, writing)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            yield int(pipe.read())
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def recipes(chance: random.Random, only: str) -> tuple[str, str]:
    kind = chance.choice([kind for kind in ("stores", "stores", "servers") if only in ("*", kind)])
    return chance.choice([*LIES]), kind


def run(name: str, kind: str, seed: int, folder: Path) -> tuple[str, str]:
    """The outcome of a command that meets a liar."""
    chance, target = random.Random(f"{kind}|{name}|{seed}"), folder / "target"
    with lying(kind, name, seed, folder) as port:
        url = f"http://127.0.0.1:{port}"
        if kind == "stores":
            lines = _store_commands(target, ["--storage-option", f"endpoint={url}"])
            with _keys():
                outcome, text = outcome_of(chance.choice(lines), target, server=("127.0.0.1", port))
        else:
            line = ["verify", str(FIXTURES / "hf" / "llama"), url, *chance.choice(([], ["--json"]))]
            outcome, text = outcome_of(line, target, server=("127.0.0.1", port))
        if (folder / "trapped").exists():
            return "CONNECTED ELSEWHERE", text
    if outcome == "done" and target.exists() and name not in CHANGES_BYTES and result_tree(target) != _honest(folder):
        return "WRONG", text
    return outcome, text


def _honest(folder: Path) -> dict[str, bytes]:
    """What the conversion of the honest checkpoint writes."""
    assert reshard("convert", SOURCE, folder / "honest", "--to", "vllm", "--tp", "2", "-q").code == 0
    return result_tree(folder / "honest")


def _store_commands(target: Path, options: list[str]) -> list[list[str]]:
    there, back = "s3://bucket/case", "s3://bucket/new"
    reading = [
        ["inspect", there], ["inspect", there, "--json", "--full"], ["doctor", there], ["fingerprint", there], ["stats", there],
        ["verify", str(SOURCE), there], ["diff", there, str(SOURCE)], ["plan", there, "--to", "vllm", "--tp", "2"],
        ["degrees", there, "--to", "vllm"], ["cat", there, "model.norm.weight"], ["clean", there],
    ]  # fmt: skip
    converting = [["convert", there, str(target), "--to", "vllm", "--tp", "2"]] * 6
    writing = [["convert", str(SOURCE), back, "--to", "vllm", "--tp", "2", *more] for more in ([], [], ["--overwrite"], ["--resume"])]
    return [[*line, *options] for line in (*reading, *converting, *writing)]


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """The environment of a client of the store."""
    settings = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
