"""Files of web servers, http:// and https://, read by ranges.

A redirect is followed within the scheme, host and port of the URL. One to another place is refused: nobody has named that place. A proxy
is used if the environment names one (HTTPS_PROXY, HTTP_PROXY, NO_PROXY).
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urljoin, urlsplit

from reshard.errors import RequestError, UnsupportedError, printable
from reshard.storage.stores.http_answer import Answer, connected, secured
from reshard.storage.stores.store import Entry, ObjectChanged, Upload

if TYPE_CHECKING:
    import socket

_MOST_REDIRECTS = 5
_OPTIONS = ("timeout",)


class WebStore:
    """`Backend` of the files below a URL. Web servers list nothing, and are not written."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if not parts.hostname:
            raise RequestError("this URL has no host", where=url)
        self._url, self._origin = url.rstrip("/"), _origin(url)
        self._seconds = _seconds(url, options)

    def list(self, folder: str, *, below: bool) -> Iterator[Entry]:
        return iter(())

    def look(self, path: str) -> Entry | None:
        headers, _ = self._asked("HEAD", path, {}, most_bytes=0)
        size = headers.get("content-length", "")
        if not size.isdecimal():
            raise ValueError("the web server does not tell the length of the file")
        written = parsedate_to_datetime(headers["last-modified"]) if "last-modified" in headers else None
        stamp = headers.get("etag") or f"{written} {size}"
        return Entry(path, int(size), stamp, written.timestamp() if written else None)

    def read(self, entry: Entry, start: int, stop: int) -> memoryview:
        if start == stop:
            return memoryview(b"")
        fields = {"Range": f"bytes={start}-{stop - 1}"}
        # A weak ETag does not promise equal bytes.
        if entry.stamp.startswith('"'):
            fields["If-Match"] = entry.stamp
        headers, body = self._asked("GET", entry.path, fields, most_bytes=stop - start)
        if (sent := headers.get("content-range", "")).partition("/")[0] != f"bytes {start}-{stop - 1}":
            raise ValueError(f"bytes {start}-{stop - 1} were asked for, the web server sends {printable(sent)[:60] or 'another range'}")
        return memoryview(body)

    def upload(self, path: str, *, part: int, at_once: int) -> Upload:
        raise NotImplementedError("http(s):// can be read, and not written")

    def create(self, path: str, content: bytes) -> None:
        self.upload(path, part=0, at_once=0)

    def remove(self, paths: Sequence[str]) -> None:
        self.upload("", part=0, at_once=0)

    def _asked(self, method: str, path: str, fields: Mapping[str, str], *, most_bytes: int) -> tuple[dict[str, str], bytes]:
        """The headers and the body of a file, after redirects within the origin."""
        url = f"{self._url}/{path}" if path else self._url
        for _ in range(_MOST_REDIRECTS + 1):
            with self._connection(url) as connection:
                connection.sendall(_request(method, url, fields, of_proxy=proxy_of(url) is not None))
                answer = Answer(connection, url, most_bytes=most_bytes, seconds=self._seconds)
                status, reason = answer.status()
                if status in (301, 302, 303, 307, 308):
                    url = self._redirected(url, urljoin(url, answer.headers.get("location", "")))
                    continue
                _check(status, reason, is_part="Range" in fields)
                return answer.headers, answer.body() if method == "GET" else b""
        raise ValueError(f"more than {_MOST_REDIRECTS} redirects")

    def _redirected(self, url: str, to: str) -> str:
        if _origin(to) != self._origin:
            raise UnsupportedError(
                f"the web server redirects to {printable(to)[:200]}",
                where=url,
                why="reshard connects only to what you name",
                do="Give that address itself if you trust it, and hf://ORG/NAME for a model of the Hugging Face Hub",
            )
        return to

    def _connection(self, url: str) -> socket.socket:
        parts, proxy = urlsplit(url), proxy_of(url)
        if proxy is None:
            return connected(url)
        tunnel = connected(proxy)
        if parts.scheme == "http":
            return tunnel
        place = f"{parts.hostname}:{parts.port or 443}"
        tunnel.sendall(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n{_credentials('Proxy-Authorization', proxy)}\r\n".encode())
        status, reason = Answer(tunnel, proxy, most_bytes=0, seconds=self._seconds).status()
        if status != 200:
            raise ConnectionError(f"the proxy {proxy} answers {status} {printable(reason)}")
        assert parts.hostname
        return secured(tunnel, parts.hostname)


def _origin(url: str) -> tuple[str, str | None, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _seconds(url: str, options: Mapping[str, str]) -> float:
    """The seconds that a request may take."""
    if unknown := sorted(options.keys() - {*_OPTIONS}):
        raise RequestError(f"`storage_option={unknown[0]}`: web servers have no such option", where=url, do=f"Known: {', '.join(_OPTIONS)}")
    match = re.fullmatch(r"(\d{1,6})(s|m|min|h)", options.get("timeout", "300s"))
    if match is None:
        raise RequestError(f"`storage_option=` timeout={options['timeout']}: not a duration", where=url, do="Give for example timeout=600s")
    return int(match[1]) * {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}[match[2]]


def proxy_of(url: str) -> str | None:
    """The proxy that the environment names for a URL."""
    from urllib.request import getproxies, proxy_bypass

    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _request(method: str, url: str, fields: Mapping[str, str], *, of_proxy: bool) -> bytes:
    parts = urlsplit(url)
    target = quote(f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}", safe="/?%:@!$&'()*+,;=~")
    is_absolute = of_proxy and parts.scheme == "http"
    place = parts.netloc.rpartition("@")[2]
    lines = [f"{method} {f'http://{place}{target}' if is_absolute else target} HTTP/1.1", f"Host: {place}", "Connection: close"]
    lines += ["Accept-Encoding: identity", "User-Agent: reshard", *(f"{name}: {value}" for name, value in fields.items())]
    proxy = proxy_of(url) if is_absolute else None
    credentials = _credentials("Authorization", url) + (_credentials("Proxy-Authorization", proxy) if proxy else "")
    return ("\r\n".join([*lines, ""]) + credentials + "\r\n").encode("latin-1")


def _credentials(field: str, url: str) -> str:
    """The header line with the name and the password in a URL, if it has some."""
    parts = urlsplit(url)
    if parts.username is None:
        return ""
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return f"{field}: Basic {b64encode(pair.encode()).decode()}\r\n"


def _check(status: int, reason: str, *, is_part: bool) -> None:
    """Raises what `Backend` promises for an answer that is not the file."""
    text = f"the web server answers {status} {printable(reason)[:80]}"
    if status in (404, 410):
        raise FileNotFoundError(text)
    if status == 412:
        raise ObjectChanged
    if status in (401, 403, 407):
        raise PermissionError(text)
    if status != (206 if is_part else 200):
        # Timeouts (408), limits (429) and what the server blames on itself may pass.
        raise (OSError if status in (408, 429) or status >= 500 else ValueError)(text)
