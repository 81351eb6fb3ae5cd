"""Strangers at `reshard hub`: requests that are changed at random, on connections that are slow, shared or many.

The oracle: what is answered with 200 or 206 and is a file's content equals the slice of a file of the virtual folder, or is a document of
the server; nothing else of this machine is sent; with a token, nothing but 401, 403 and 400; the server lives, and does not grow.

A recipe is a way of connecting, a kind of change and a seed.
"""

from __future__ import annotations

import http.client
import os
import random
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from hostile.watched import FIXTURES

import reshard
from reshard.doors import server

CASES = ("open", "token", "pipelined", "slow", "many")
KINDS = ("path", "range", "host", "header", "method", "query", "bytes")
SECRET = "a secret of strangers"
_MOST_GROWTH = 150 << 20
_FILES = ("/m/config.json", "/m/model.safetensors", "/org/m/resolve/main/config.json")
_PATHS = (*_FILES, "/api/models/org/m", "/m?list-type=2", "/", "/-/org/m/main")
# fmt: off
_PARTS = ["..", "%2e%2e", "%2f", "//", "\\", "%00", "%ff", "etc/passwd", "proc/self/environ", ";", "?", "#", "%", "é", "{}", "<script>",
          "a" * 5000]
# fmt: on
_RANGES = ["0-", "-1", "99999999999999999999-", "5-1", "--1", "0-0,2-3", "0-18446744073709551616", "-0", "x"]
_HOSTS = ["evil.example", "127.0.0.1", "localhost:1", "[::1]", "127.0.0.1@evil.example", "127.0.0.1 evil", "", "0", "2130706433"]
_HEADERS = ["Content-Length", "Transfer-Encoding", "Expect", "Authorization", "X", "Accept", "x-amz-date", "Content-Type"]
_VALUES = ["-1", "9" * 40, "chunked", "100-continue", "Bearer x", "AWS4-HMAC-SHA256 Credential=a/b", "y" * 50_000, "\x7f", "text/html"]
_METHODS = ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "G" * 3000, ""]
_QUERY = "list-type=2 max-keys=-1 prefix=../ continuation-token=%ff tensor=99999999999 tensor=-1 plan cursor=1e9 limit=x = delimiter=%2F"
_STARTED: dict[str, Any] = {}


def recipes(chance: random.Random, only: str) -> tuple[str, str]:
    """The way of connecting and the kind of change of a recipe."""
    weights = [1 if case == "many" else 20 for case in CASES]  # a thousand connections take seconds
    cases = [case for case in CASES if only in case] if only else chance.choices(CASES, weights)
    return chance.choice(cases or CASES), chance.choice(KINDS)


def started(secret: str) -> Any:
    """A server in this process, and the content of its files."""
    if secret not in _STARTED:
        os.environ["RESHARD_HUB_TOKEN"] = secret
        hub = reshard.hub(FIXTURES / "hf" / "llama", port=0, name="org/m").__enter__()
        del os.environ["RESHARD_HUB_TOKEN"]
        _STARTED[secret] = hub
        folder = reshard.folder(FIXTURES / "hf" / "llama", to="hf")
        _STARTED["files"] = [folder[path].read() for path in folder]
        _STARTED["failures"] = failures = []
        server.HubServer.handle_error = lambda self, request, address: failures.append(traceback.format_exc())
    return _STARTED[secret]


def changed(kind: str, chance: random.Random) -> bytes:
    """A request with a change of a kind."""
    path, headers, method = chance.choice(_PATHS), {"Host": "localhost", "Connection": "close"}, "GET"
    if kind == "path":
        at = chance.randrange(len(path) + 1)
        path = path[:at] + "/".join(chance.choices(_PARTS, k=chance.randrange(1, 4))) + path[at:]
    elif kind == "range":
        path = chance.choice(_FILES)
        headers[chance.choice(["If-Range", "If-Match", "If-None-Match"])] = chance.choice(_RANGES)
        headers["Range"] = "bytes=" + chance.choice((*_RANGES, f"{chance.randrange(300)}-{chance.randrange(9000)}"))
    elif kind == "host":
        headers["Host"] = chance.choice(_HOSTS)
        path = chance.choice(["", f"http://{chance.choice(_HOSTS)}"]) + path
    elif kind == "header":
        headers[chance.choice(_HEADERS)] = chance.choice(_VALUES)
    elif kind == "method":
        method = chance.choice(_METHODS)
    elif kind == "query":
        path = path.partition("?")[0] + "?" + "&".join(chance.choices(_QUERY.split(), k=3))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {given}" for name, given in headers.items())]
    request = bytearray("\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n")
    if kind == "bytes":
        for _ in range(chance.randrange(1, 20)):
            request[chance.randrange(len(request))] = chance.randrange(256)
    return bytes(request)


def run(case: str, kind: str, seed: int, folder: Path) -> tuple[str, str]:
    """The outcome of a recipe, and what was sent and answered."""
    chance = random.Random(seed)
    hub = started(SECRET if case == "token" else "")
    before = _resident()
    request = changed(kind, chance) * (chance.randrange(2, 8) if case == "pipelined" else 1)
    if case == "pipelined":
        request = request.replace(b"Connection: close\r\n", b"")
    number = chance.randrange(600, 1000) if case == "many" else 1
    connections = [_connected(hub.port) for _ in range(number - 1)]
    answer = _asked(hub.port, request, is_slow=case == "slow")
    for connection in connections:
        connection.close()
    text = f"{request[:500]!r} -> {answer[:300]!r}"
    if _STARTED["failures"]:
        return "TRACEBACK", _STARTED["failures"].pop() + text
    if b"root:" in answer or (case == "token" and not _is_refusal(answer)) or not _is_known(request, answer):
        return "WRONG", text
    if not _lives(hub.port):
        return "HANG", text
    if _resident() - before > _MOST_GROWTH:
        return "MEMORY", text
    return ("done" if answer.startswith(b"HTTP/1.1 20") else "refused"), text


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def _asked(port: int, request: bytes, *, is_slow: bool) -> bytes:
    content = b""
    try:
        with _connected(port) as connection:
            for part in [request[at : at + 7] for at in range(0, min(len(request), 700), 7)] if is_slow else [request]:
                connection.sendall(part)
                time.sleep(0.002 if is_slow else 0)
            if not is_slow or len(request) <= 700:
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(1 << 16):
                    content += part
    except OSError:  # refused in the middle of what is sent
        pass
    return content


def _is_refusal(answer: bytes) -> bool:
    return not answer or answer.split(b" ", 2)[1] in (b"400", b"401", b"403", b"405", b"414", b"431", b"505")


def _is_known(request: bytes, answer: bytes) -> bool:
    """Whether the content of an answer is of a file that is served, or a document of the server."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not answer.startswith(b"HTTP/1.1 20") or b"ETag:" not in head or answer.count(b"HTTP/1.1 ") > 1 or request.startswith(b"HEAD"):
        return True
    return any(body in content for content in _STARTED["files"])


def _lives(port: int) -> bool:
    for _ in range(50):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            connection.request("GET", "/m/config.json", headers={"Authorization": f"Bearer {SECRET}"})
            if connection.getresponse().status == 200:
                return True
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.2)  # connections that were closed give their places back
    return False


def _resident() -> int:
    status = Path("/proc/self/status")
    return int(status.read_text().partition("VmRSS:")[2].split()[0]) * 1024 if status.exists() else 0


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        chance = random.Random(number)
        recipe = recipes(chance, "")
        outcome, text = run(*recipe, number, Path())
        if outcome not in ("done", "refused"):
            print(*recipe, number, outcome, text)
    print("threads", threading.active_count())
