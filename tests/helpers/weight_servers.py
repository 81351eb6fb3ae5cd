"""Servers on this machine that answer as told: like vLLM's weight checker, or with a lie.

`LIES` names what a hostile server may send instead of an answer: a name -> the parts of what it sends. `lying(name)` is such a server; it
stops by itself after `SECONDS` or `MOST_BYTES`.
"""

import itertools
import json
import math
import socket
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import reshard as library
from helpers.fixture_places import FIXTURES, HF


@contextmanager
def server(answers):
    """A server that answers paths with (status, body, headers), and remembers what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.do_GET()

        def do_GET(self):
            asked.append((self.command, self.path))
            status, body, headers = answers.get(self.path.partition("?")[0], (404, b"{}", {}))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *unused):
            pass

    asked = []
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_address[1]}", asked
    finally:
        running.shutdown()
        running.server_close()


def held(model, dp=1, **options):
    """What vLLM's ranks hold of a model, by key."""
    one = library.digests(HF / model, to="vllm", **options)
    return {key.replace("dp0", f"dp{replica}", 1): digest for key, digest in one.items() for replica in range(dp)}


def vllm(digests, *, expert_parallel=False, dtype="torch.bfloat16", **more):
    config = {"vllm_config": {"parallel_config": {"enable_expert_parallel": expert_parallel}, "model_config": {"dtype": dtype}}}
    return {
        "/weight_checker": (200, json.dumps({"checksums": digests}).encode(), {}),
        "/server_info": (200, json.dumps(config).encode(), {}),
        **more,
    }


def served_model(name, folder):
    """Makes the model that a real server was asked about, in a folder; returns what the server answered (fixtures/vllm_served)."""
    sys.path.append(str(FIXTURES))
    import named_weights

    recorded = json.loads((FIXTURES / "vllm_served" / f"{name}.json").read_text())
    named_weights.write(folder, recorded["config"], recorded["shapes"])
    return {path: (200, json.dumps(answer).encode(), {}) for path, answer in recorded["answers"].items()}


SECONDS, MOST_BYTES = 20, 1 << 30

_OK = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = _OK + b"Transfer-Encoding: chunked\r\n\r\n"


def _repeated(first, part):
    """What never ends: a start, and a part again and again, in pieces of some kB."""
    return itertools.chain([first], itertools.repeat(part * max(1, 4096 // len(part))))


def _whole(content, *headers):
    return [_OK + b"".join(header + b"\r\n" for header in headers) + b"Content-Length: %d\r\n\r\n" % len(content), content]


def _slowly(parts, pause):
    for part in parts:
        yield part
        time.sleep(pause)


LIES = {
    "endless 100 Continue": lambda: _repeated(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "seventeen early hints": lambda: [b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 17, *_whole(b"{}")],
    "endless headers": lambda: _repeated(_OK, b"X-More: 1\r\n"),
    "a header without end": lambda: _repeated(_OK + b"X: ", b"x"),
    "endless trailers": lambda: _repeated(_CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-More: 1\r\n"),
    "endless chunks": lambda: _repeated(_CHUNKED, b"1\r\n \r\n"),
    "endless extensions of chunks": lambda: _repeated(_CHUNKED, b"1;" + b"x" * 60_000 + b"\r\n \r\n"),
    "an endless body": lambda: _repeated(_OK + b"\r\n", b" "),
    "a length of 2^60": lambda: _repeated(_OK + b"Content-Length: 1152921504606846976\r\n\r\n", b" "),
    "a negative length": lambda: [_OK + b"Content-Length: -1\r\n\r\n{}"],
    "a chunk of 2^63": lambda: [_CHUNKED + b"8000000000000000\r\n{}"],
    "a chunk of no length": lambda: [_CHUNKED + b"xyz\r\n{}"],
    "lists that explode": lambda: _whole(b"[" + b"[]," * 20_000_000 + b"0]"),
    "objects that explode": lambda: _whole(b"[" + b'{"":0},' * 8_000_000 + b"0]"),
    "lists within lists": lambda: _whole(b"[" * 500_000),
    "200 MB of text": lambda: _whole(b'{"checksums": "' + b"x" * 200_000_000 + b'"}'),
    "compressed, though not asked for": lambda: _whole(b"\x1f\x8b" + bytes(1000), b"Content-Encoding: gzip"),
    "no HTTP": lambda: [b"SSH-2.0-OpenSSH_9.6\r\n"],
    "HTTP 0.9": lambda: [b'{"checksums": {}}'],
    "nothing": list,
    "half": lambda: [_OK + b"Content-Length: 1000\r\n\r\n{"],
}
"""What is sent without a pause: name -> a function that makes the parts."""

SLOW_LIES = {
    "silence": lambda: _slowly([b""] * 100, 0.2),
    "headers that drip": lambda: _slowly(itertools.chain([_OK], itertools.repeat(b"X: 1\r\n")), 0.1),
    "100 Continue that drips": lambda: _slowly([b"HTTP/1.1 ", *[b"100 Continue\r\n", b"\r\nHTTP/1.1 "] * 50], 0.2),
    "a body that drips": lambda: _slowly(itertools.chain([_OK + b"\r\n"], itertools.repeat(b" ")), 0.1),
    "trailers that drip": lambda: _slowly(itertools.chain([_CHUNKED + b"0\r\n"], itertools.repeat(b"X: 1\r\n")), 0.1),
    "a body that stops": lambda: itertools.chain([_OK + b"Content-Length: 9\r\n\r\n{"], _slowly([b""] * 100, 0.2)),
}
"""What keeps a client waiting."""


def lying(name):
    """A server that answers every request with a lie, and the list of the lengths of what it has sent."""
    return sending({**LIES, **SLOW_LIES}[name])


def answering(content):
    """A server that answers every request with these bytes."""
    return sending(lambda: [content])


@contextmanager
def sending(make_parts):
    """A server that sends parts of bytes to whoever connects, and the list of the lengths of what it has sent: infinity where the server
    had to end a lie, because the client did not go."""
    sent, closing = [], threading.Event()

    def answer(connection):
        deadline, nbytes = time.monotonic() + SECONDS, 0
        with connection:
            connection.settimeout(1)
            try:
                connection.recv(1 << 16)
                for part in make_parts():
                    if closing.is_set() or time.monotonic() > deadline or nbytes > MOST_BYTES:
                        nbytes = math.inf
                        break
                    connection.sendall(part)
                    nbytes += len(part)
            except OSError:  # the client has gone
                pass
            sent.append(nbytes)

    def accept():
        while not closing.is_set():
            try:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
            except OSError:
                return

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", sent
    finally:
        closing.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
