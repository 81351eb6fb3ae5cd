"""Messages: a request of a client, and the answer to it, as plain values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any
from urllib.parse import parse_qs, parse_qsl, quote, unquote, urlsplit

from reshard.doors.folder import VirtualFile
from reshard.geometry.value import value

# The most bytes of a query. S3's tokens and prefixes are shorter.
_MOST_QUERY = 16 << 10
JSON, XML, HTML, BYTES = "application/json; charset=utf-8", "application/xml", "text/html; charset=utf-8", "application/octet-stream"


class Malformed(Exception):
    """A request that no client sends: why, in a few words."""


@value
class Request:
    """What a client asks for."""

    method: str
    """GET, HEAD or POST."""
    path: str
    """The path as it was sent, without the query: percent-encoded, and it starts with a slash."""
    query: Sequence[tuple[str, str]]
    """The parameters, decoded."""
    headers: Mapping[str, str]
    """The headers, by their names in lower case."""
    authority: str = ""
    """The host and port of an absolute request target; empty without."""
    body: bytes = b""
    """The content of a POST."""

    @staticmethod
    def of(method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> Request:
        """The request of a request line. The target may be an absolute URL, as S3 clients send it.

        Raises: Malformed.
        """
        try:
            url = urlsplit(target if "://" in target else f"//{target}" if target.startswith("//") else target)
            authority = url.netloc if "://" in target else ""
            path = url.path if "://" in target else target.partition("?")[0].partition("#")[0]
            query = target.partition("?")[2].partition("#")[0]
            if len(query) > _MOST_QUERY:
                raise Malformed("the query is too long")
            pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=100, errors="strict")
        except ValueError as error:
            raise Malformed(str(error)) from None
        path = path or "/"
        if not path.startswith("/") or not path.isascii() or re.search(r"[\x00-\x20\x7f]", path):
            raise Malformed("the path holds characters that have to be encoded")
        return Request(method, path, tuple(pairs), headers, authority, body)

    @property
    def segments(self) -> tuple[str, ...]:
        """The path between its slashes, decoded. Raises Malformed if it is not UTF-8."""
        try:
            return tuple(unquote(part, errors="strict") for part in self.path.split("/")[1:])
        except ValueError:
            raise Malformed("the path is not UTF-8") from None

    def parameter(self, name: str, default: str = "") -> str:
        """A parameter of the query."""
        return next((given for key, given in self.query if key == name), default)

    @property
    def asks_s3(self) -> bool:
        """Whether a client of S3 sends it."""
        names = {key.lower() for key, _ in self.query}
        is_signed = self.headers.get("authorization", "").startswith("AWS4-")
        return is_signed or any(name.startswith("x-amz-") for name in self.headers) or "list-type" in names


@value
class Response:
    """What the server answers: known bytes, or a range of a file."""

    status: int
    """The status of HTTP."""
    body: bytes = b""
    """The content, unless it is that of a file."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """The headers besides Content-Length, Date and Connection."""
    file: VirtualFile | None = None
    """The file of which a range is the content."""
    start: int = 0
    """Where the range starts."""
    stop: int = 0
    """Where the range ends."""

    @property
    def length(self) -> int:
        """The bytes of the content."""
        return len(self.body) if self.file is None else self.stop - self.start

    def having(self, **headers: str) -> Response:
        """The answer with further headers; `_` stands for `-`."""
        return replace(self, headers={**self.headers, **{name.replace("_", "-"): text for name, text in headers.items()}})


def json_answer(document: Any, status: int = 200, **headers: str) -> Response:
    """A JSON document."""
    return Response(status, json.dumps(document).encode(), {"Content-Type": JSON}).having(**headers)


def file_answer(request: Request, file: VirtualFile) -> Response:
    """A file, or the range of it that is asked for. Of several ranges at once, as RFC 9110 allows, the whole file is sent.

    Headers: Range, If-Range, If-Match (412), If-None-Match (304).
    """
    etag = f'"{file.etag}"'
    about = {"ETag": etag, "Accept-Ranges": "bytes", "Content-Type": _type_of(file.path)}
    headers = request.headers
    if "if-match" in headers and not _matches(headers["if-match"], etag):
        return Response(412, b"", about)
    if "if-none-match" in headers and _matches(headers["if-none-match"], etag):
        return Response(304, b"", about)
    whole = Response(200, b"", about, file, 0, file.size)
    ranges = re.fullmatch(r"bytes=\s*(\d{0,20})-(\d{0,20})\s*", headers.get("range", ""))
    if not ranges or not (ranges[1] or ranges[2]) or headers.get("if-range", etag) != etag:
        return whole
    if ranges[1]:
        start, stop = int(ranges[1]), min(int(ranges[2]) + 1, file.size) if ranges[2] else file.size
        if ranges[2] and int(ranges[2]) < start:
            return whole
    else:
        start, stop = max(0, file.size - int(ranges[2])), file.size
    if start >= stop:
        return Response(416, b"", {**about, "Content-Range": f"bytes */{file.size}"})
    return Response(206, b"", {**about, "Content-Range": f"bytes {start}-{stop - 1}/{file.size}"}, file, start, stop)


def _matches(given: str, etag: str) -> bool:
    """Whether a list of ETags names one. Clients leave out the quotes at times."""
    return any(tag.strip().removeprefix("W/").strip('"') in ("*", etag.strip('"')) for tag in given.split(","))


def _type_of(path: str) -> str:
    """The content type of a file. No browser shows as a page what comes from a checkpoint."""
    return "application/json" if path.endswith(".json") else "text/plain; charset=utf-8" if path.endswith((".txt", ".md")) else BYTES


def encoded(text: str, safe: str = "-_.~") -> str:
    """A text as a part of a URL."""
    return quote(text, safe=safe, errors="surrogatepass")


def encoded_again(path: str) -> str:
    """A path that is encoded, in the one spelling that signatures take."""
    return quote(unquote(path, errors="surrogateescape"), safe="/-_.~", errors="surrogateescape")


def form(body: bytes, most: int) -> dict[str, list[str]]:
    """The fields of a form. most: of them. Raises ValueError."""
    return parse_qs(body.decode(), max_num_fields=most, strict_parsing=True)
