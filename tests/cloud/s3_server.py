"""An S3 server for tests: fast, counts what it is asked, and fails on demand. Semantics beyond what is here are tested with moto.

    python tests/cloud/s3_server.py ROOT [PORT]      a server of its own process, for measurements

Objects are lists of part files in ROOT, so that completing an upload copies nothing and reading is sendfile. The index is in memory.
Signatures are not checked. A `Faults` decides for each request whether and how it fails; `lies.py` has what a hostile store answers.
"""

import hashlib
import random
import re
import socket
import struct
import sys
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

READ_FAULTS = ("slowdown", "reset", "truncate", "short", "late-reset")
WRITE_FAULTS = ("slowdown", "reset", "late-reset")


@dataclass
class Faults:
    """Fails a share of the requests. `late-reset`: the request is carried out, and the connection breaks before the answer."""

    share: float = 0.0
    seed: int = 0
    kinds: tuple = (*READ_FAULTS,)
    most: int = 1 << 60
    paths: str = ""  # a regular expression of the keys that fail; empty: all
    methods: tuple = ("GET", "HEAD", "PUT", "POST", "DELETE")
    injected: Counter = field(default_factory=Counter)

    def __post_init__(self):
        self._random, self._lock = random.Random(self.seed), threading.Lock()

    def draw(self, method, key):
        with self._lock:
            if method not in self.methods or not re.search(self.paths, key) or sum(self.injected.values()) >= self.most:
                return None
            if self._random.random() >= self.share:
                return None
            kinds = [kind for kind in self.kinds if method == "GET" or kind in WRITE_FAULTS]
            kind = self._random.choice(kinds) if kinds else None
            self.injected[kind] += 1
            return kind


@dataclass
class Stored:
    """An object, or an upload that is not complete."""

    parts: list  # [(path, bytes)]
    etag: str
    time: float = field(default_factory=time.time)

    @property
    def nbytes(self):
        return sum(nbytes for _, nbytes in self.parts)


class S3Server:
    """The server on a port of the loopback interface, in threads of this process."""

    def __init__(self, root, port=0, *, latency=0.0, faults=None):
        self.root, self.latency, self.faults = Path(root), latency, faults or Faults()
        self.root.mkdir(parents=True, exist_ok=True)
        self.objects, self.uploads = {}, {}  # (bucket, key) -> Stored; upload id -> ((bucket, key), {number: (path, bytes, etag)})
        self.written = Counter()  # how often each key was put or completed
        self.requests, self.by_key, self.in_flight, self.most_in_flight = Counter(), Counter(), 0, 0
        self.spans = []  # (key, begin, end) of each request
        self.lie = None  # a function of a request, which answers it and returns True, or returns False
        self.forbidden = ""  # keys with this text in them may not be written
        self.bytes_out = self.bytes_in = 0
        self.sizes = []  # bytes of each range that was asked for
        self.lock = threading.Lock()
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.owner = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self):
        """The variables by which a client finds this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def reset_counts(self):
        with self.lock:
            self.requests, self.by_key, self.most_in_flight, self.bytes_out, self.bytes_in = Counter(), Counter(), 0, 0, 0
            self.sizes, self.written, self.spans = [], Counter(), []

    def longest_chain(self, prefix=""):
        """How many requests for keys that start so came one after the other: each began after the one before it was answered."""
        count, answered = 0, 0.0
        for key, begin, end in sorted(self.spans, key=lambda span: span[2]):
            if key.startswith(prefix) and begin >= answered:
                count, answered = count + 1, end
        return count

    def keys(self, bucket, prefix=""):
        return sorted(key for name, key in self.objects if name == bucket and key.startswith(prefix))

    def content(self, bucket, key):
        return b"".join(Path(path).read_bytes() for path, _ in self.objects[bucket, key].parts)

    def put_tree(self, bucket, prefix, folder):
        """Put the files of a folder; they are served from where they lie."""
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                key = f"{prefix}/{path.relative_to(folder)}"
                etag = hashlib.md5(f"{path.stat().st_mtime_ns}{path}".encode()).hexdigest()
                self.objects[bucket, key] = Stored([(str(path), path.stat().st_size)], etag)


class _Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size, allow_reuse_address = True, 512, True

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version, rbufsize = "HTTP/1.1", 1 << 16

    def setup(self):
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().setup()

    def log_message(self, *args):
        pass

    def do(self):
        owner = self.server.owner
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        self.at, self.query, began = (bucket, key), query, time.monotonic()
        with owner.lock:
            owner.requests[self.command] += 1
            owner.by_key[key] += 1
            owner.in_flight += 1
            owner.most_in_flight = max(owner.most_in_flight, owner.in_flight)
        try:
            if owner.latency:
                time.sleep(owner.latency)
            self.fault = owner.faults.draw(self.command, key)
            if self.fault == "reset":
                return self.break_connection()
            body = self.receive()
            if owner.lie and owner.lie(self):
                return None
            if owner.forbidden and owner.forbidden in key and self.command != "GET":
                return self.error(403, "AccessDenied")
            if self.fault == "slowdown":
                return self.error(503, "SlowDown")
            return getattr(self, self.action())(body)
        finally:
            with owner.lock:
                owner.in_flight -= 1
                owner.spans.append((key, began, time.monotonic()))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do

    def action(self):
        method, query, has_key = self.command, self.query, bool(self.at[1])
        return {
            ("GET", True): "parts_of" if "uploadId" in query else "get", ("HEAD", True): "get",
            ("GET", False): "list_uploads" if "uploads" in query else "list_objects",
            ("PUT", True): "put_part" if "partNumber" in query else "put",
            ("POST", True): "begin" if "uploads" in query else "complete",
            ("POST", False): "delete_many",
            ("DELETE", True): "abort" if "uploadId" in query else "delete",
        }[method, has_key]  # fmt: skip

    def receive(self):
        """The body: in a file of the server if it may be a part of an object, else as bytes."""
        length, owner = int(self.headers.get("Content-Length") or 0), self.server.owner
        if self.command != "PUT":
            return self.rfile.read(length)
        path = owner.root / uuid.uuid4().hex
        digest, done = hashlib.md5(), 0
        buffer = memoryview(bytearray(1 << 20))
        with open(path, "wb", buffering=0) as file:
            while done < length:
                count = self.rfile.readinto(buffer[: min(len(buffer), length - done)])
                if not count:
                    path.unlink()
                    raise ConnectionError("the client went away")
                file.write(buffer[:count])
                if length < 1 << 20:
                    digest.update(buffer[:count])
                done += count
        with owner.lock:
            owner.bytes_in += length
        return str(path), length, digest.hexdigest() if length < 1 << 20 else uuid.uuid4().hex

    # Objects

    def get(self, body):
        stored = self.server.owner.objects.get(self.at)
        if stored is None:
            return self.error(404, "NoSuchKey")
        etag, size = f'"{stored.etag}"', stored.nbytes
        if self.headers.get("If-Match") not in (None, etag):
            return self.error(412, "PreconditionFailed")
        start, stop = 0, size
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, stop = int(match[1]), min(int(match[2]) + 1 if match[2] else size, size)
            if start >= size:
                return self.error(416, "InvalidRange")
        partial = self.headers.get("Range") is not None
        if self.fault == "short" and partial:
            stop = start + max(1, (stop - start) // 2)
        headers = {"ETag": etag, "Last-Modified": formatdate(stored.time, usegmt=True), "Accept-Ranges": "bytes"}
        if partial:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self.head(206 if partial else 200, stop - start, headers)
        if self.command == "HEAD":
            return None
        with self.server.owner.lock:
            self.server.owner.bytes_out += stop - start
            self.server.owner.sizes.append(stop - start)
        if self.fault in ("truncate", "late-reset"):
            stop = start + (stop - start) // 2
        self.send_range(stored, start, stop)
        if self.fault in ("truncate", "late-reset"):
            return self.break_connection() if self.fault == "late-reset" else self.end_connection()
        return None

    def send_range(self, stored, start, stop):
        self.wfile.flush()
        at = 0
        for path, nbytes in stored.parts:
            first, last = max(start, at), min(stop, at + nbytes)
            if first < last:
                with open(path, "rb") as file:
                    self.connection.sendfile(file, first - at, last - first)
            at += nbytes

    def put(self, body):
        path, nbytes, etag = body
        with self.server.owner.lock:
            self.server.owner.written[self.at[1]] += 1
            if self.headers.get("If-None-Match") == "*" and self.at in self.server.owner.objects:
                exists = True
            else:
                exists = False
                self.server.owner.objects[self.at] = Stored([(path, nbytes)], etag)
        if exists:
            return self.error(412, "PreconditionFailed")
        return self.answer(200, b"", {"ETag": f'"{etag}"'})

    def delete(self, body):
        self.server.owner.objects.pop(self.at, None)
        return self.answer(204, b"")

    def delete_many(self, body):
        keys = [unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", body.decode())]
        for key in keys:
            self.server.owner.objects.pop((self.at[0], key), None)
        rows = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return self.answer(200, f"<DeleteResult>{rows}</DeleteResult>".encode())

    def list_objects(self, body):
        bucket, query = self.at[0], self.query
        prefix, after = query.get("prefix", ""), query.get("continuation-token") or query.get("start-after", "")
        keys, folders = [key for key in self.server.owner.keys(bucket, prefix) if key > after], []
        if query.get("delimiter"):
            folders = sorted({prefix + rest.split("/")[0] + "/" for key in keys if "/" in (rest := key[len(prefix) :])})
            keys = [key for key in keys if "/" not in key[len(prefix) :]]
        page, rest = keys[:1000], keys[1000:]
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_iso(stored.time)}</LastModified>"
            f"<ETag>&quot;{stored.etag}&quot;</ETag><Size>{stored.nbytes}</Size></Contents>"
            for key in page
            if (stored := self.server.owner.objects.get((bucket, key)))
        )
        rows += "".join(f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders)
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if rest else ""
        text = (
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{'true' if rest else 'false'}</IsTruncated>{more}{rows}</ListBucketResult>"
        )
        return self.answer(200, text.encode())

    # Uploads in parts

    def begin(self, body):
        upload = uuid.uuid4().hex
        self.server.owner.uploads[upload] = self.at, {}, time.time()
        return self.answer(
            200,
            f"<InitiateMultipartUploadResult><Bucket>{self.at[0]}</Bucket><Key>{escape(self.at[1])}</Key>"
            f"<UploadId>{upload}</UploadId></InitiateMultipartUploadResult>".encode(),
        )

    def put_part(self, body):
        path, nbytes, etag = body
        if self.query["uploadId"] not in self.server.owner.uploads:
            return self.error(404, "NoSuchUpload")
        self.server.owner.uploads[self.query["uploadId"]][1][int(self.query["partNumber"])] = path, nbytes, etag
        return self.answer(200, b"", {"ETag": f'"{etag}"'})

    def complete(self, body):
        owner, upload = self.server.owner, self.query["uploadId"]
        with owner.lock:
            if upload not in owner.uploads:
                return self.error(404, "NoSuchUpload")
            at, parts, _ = owner.uploads[upload]
            if self.headers.get("If-None-Match") == "*" and at in owner.objects:
                return self.error(412, "PreconditionFailed")
            numbers = [int(number) for number in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
            if numbers != sorted(parts) or any(parts[number][1] < 5 << 20 for number in numbers[:-1]):
                return self.error(400, "EntityTooSmall")
            etag = f"{uuid.uuid4().hex}-{len(numbers)}"
            owner.written[at[1]] += 1
            owner.objects[at] = Stored([parts[number][:2] for number in numbers], etag)
            del owner.uploads[upload]
        return self.answer(
            200,
            f"<CompleteMultipartUploadResult><Bucket>{at[0]}</Bucket><Key>{escape(at[1])}</Key>"
            f"<ETag>&quot;{etag}&quot;</ETag></CompleteMultipartUploadResult>".encode(),
        )

    def abort(self, body):
        self.server.owner.uploads.pop(self.query["uploadId"], None)
        return self.answer(204, b"")

    def list_uploads(self, body):
        prefix = self.query.get("prefix", "")
        rows = "".join(
            f"<Upload><Key>{escape(at[1])}</Key><UploadId>{upload}</UploadId><Initiated>{_iso(begun)}</Initiated></Upload>"
            for upload, (at, _, begun) in list(self.server.owner.uploads.items())
            if at[0] == self.at[0] and at[1].startswith(prefix)
        )
        text = (
            f"<ListMultipartUploadsResult><Bucket>{self.at[0]}</Bucket><IsTruncated>false</IsTruncated>{rows}</ListMultipartUploadsResult>"
        )
        return self.answer(200, text.encode())

    def parts_of(self, body):
        _, parts, _ = self.server.owner.uploads[self.query["uploadId"]]
        rows = "".join(f"<Part><PartNumber>{number}</PartNumber><Size>{part[1]}</Size></Part>" for number, part in sorted(parts.items()))
        return self.answer(200, f"<ListPartsResult><IsTruncated>false</IsTruncated>{rows}</ListPartsResult>".encode())

    # Answers

    def head(self, status, length, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def answer(self, status, body, headers=None):
        if self.fault == "late-reset":
            return self.break_connection()
        self.head(status, len(body), {"Content-Type": "application/xml", **(headers or {})})
        self.wfile.write(body)
        return None

    def error(self, status, code):
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self.head(status, 0 if self.command == "HEAD" else len(body), {"Content-Type": "application/xml"})
        if self.command != "HEAD":
            self.wfile.write(body)

    def break_connection(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.end_connection()

    def end_connection(self):
        self.close_connection = True
        self.connection.close()


def _iso(seconds):
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


if __name__ == "__main__":
    server = S3Server(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(server.endpoint, flush=True)
    sys.stdin.read()
