"""S3's front, path style: a repository is a bucket, called by the last part of its name. Also what curl and other clients of the web get.

    GET       /                                     the buckets
    HEAD GET  /BUCKET[?list-type=2&prefix=...]      ListObjectsV2, ListObjects, GetBucketLocation
    HEAD GET  /BUCKET/KEY                           an object, with ranges

Keys are the paths of the files; in the bucket of a run, the revision comes first: step-100/config.json.
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from xml.sax.saxutils import escape

from reshard.doors.catalogue import MAIN, Catalogue, Repository
from reshard.doors.folder import VirtualFile
from reshard.doors.fronts.messages import XML, Request, Response, encoded, file_answer
from reshard.errors import printable

_MOST_KEYS = 1000
_WRITTEN = "2026-01-01T00:00:00.000Z"
_WRITTEN_HTTP = "Thu, 01 Jan 2026 00:00:00 GMT"
_SPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


def answer(request: Request, catalogue: Catalogue) -> Response:
    """The answer to a request of S3, or to one for a file by its path. Raises ReshardError if a revision cannot be opened."""
    bucket, *rest = request.segments
    key = "/".join(rest)
    if not bucket:
        return _document("ListAllMyBucketsResult", "<Owner><ID>reshard</ID></Owner>", _element("Buckets", *_buckets(catalogue)))
    if (repository := catalogue.by_bucket.get(bucket)) is None:
        return error_answer(404, "NoSuchBucket", "the bucket is not served here", bucket)
    if request.method not in ("GET", "HEAD"):
        return error_answer(405, "MethodNotAllowed", "nothing can be written here", key)
    if key:
        return _object(request, repository, key)
    if request.method == "HEAD":
        return Response(200, b"", {"x-amz-bucket-region": "us-east-1", "Content-Type": XML})
    if any(name == "location" for name, _ in request.query):
        return _document("LocationConstraint")
    return _listing(request, repository)


def file_of(repository: Repository, key: str) -> VirtualFile | None:
    """The file of a key; None if there is none."""
    name, path = key.split("/", 1) if repository.is_run and "/" in key else (MAIN, key)
    if repository.is_run and (name == MAIN and path == key):
        return None
    revision = repository.revision(name)
    return revision.folder.get(path) if revision else None


def error_answer(status: int, code: str, message: str, resource: str = "") -> Response:
    """An error as S3's clients understand it."""
    return _document("Error", _tag("Code", code), _tag("Message", message), _tag("Resource", resource), space="", status=status)


def _object(request: Request, repository: Repository, key: str) -> Response:
    file = file_of(repository, key)
    if file is None:
        return error_answer(404, "NoSuchKey", "the key does not exist", key)
    answer = file_answer(request, file).having(Last_Modified=_WRITTEN_HTTP)
    codes = {412: ("PreconditionFailed", "the object has another ETag"), 416: ("InvalidRange", "the range lies outside of the object")}
    if answer.status in codes and request.method == "GET":
        error = error_answer(answer.status, *codes[answer.status], key)
        return Response(answer.status, error.body, {**answer.headers, **error.headers})
    return answer


def _buckets(catalogue: Catalogue) -> Iterator[str]:
    return (_element("Bucket", _tag("Name", name), _tag("CreationDate", _WRITTEN)) for name in catalogue.by_bucket)


def _keys(repository: Repository, prefix: str) -> list[tuple[str, VirtualFile | None]]:
    """The keys that begin with a prefix, in order, with their files. A revision of a run that the prefix does not name is not opened: its
    folder stands for it, as a key that ends in a slash."""
    if not repository.is_run:
        revision = repository.revision(MAIN)
        return sorted((path, file) for path, file in (revision.folder if revision else {}).items() if path.startswith(prefix))
    named, slash, inner = prefix.partition("/")
    if not slash:
        return sorted((f"{name}/", None) for name in repository.revisions if name.startswith(prefix))
    revision = repository.revision(named) if named in repository.revisions else None
    files = revision.folder if revision else {}
    return sorted((f"{named}/{path}", file) for path, file in files.items() if path.startswith(inner))


def _listing(request: Request, repository: Repository) -> Response:
    """ListObjectsV2, and ListObjects for older clients."""
    is_second, prefix, delimiter = request.parameter("list-type") == "2", request.parameter("prefix"), request.parameter("delimiter")
    is_encoded = request.parameter("encoding-type") == "url"
    try:
        token = request.parameter("continuation-token")
        after = base64.urlsafe_b64decode(token.encode()).decode() if token else request.parameter("start-after" if is_second else "marker")
        most = max(0, min(int(request.parameter("max-keys", str(_MOST_KEYS))), _MOST_KEYS))
    except (ValueError, binascii.Error):
        return error_answer(400, "InvalidArgument", "the token or the number of keys is not one")
    entries = list(_grouped(_every_key(repository, prefix, delimiter), prefix, delimiter))
    begin = bisect_right(entries, after, key=lambda entry: entry[0])
    page, is_cut = entries[begin : begin + most], begin + most < len(entries) and most > 0

    def shown(text: str) -> str:
        return encoded(text, "/-_.~") if is_encoded else printable(text)

    parts = [_tag("Name", repository.bucket), _tag("Prefix", shown(prefix)), _tag("MaxKeys", str(most))]
    parts += [_tag("Delimiter", shown(delimiter))] if delimiter else []
    parts += [_tag("EncodingType", "url")] if is_encoded else []
    parts += [_tag("IsTruncated", "true" if is_cut else "false")]
    parts += [_tag("KeyCount", str(len(page)))] if is_second else [_tag("Marker", shown(after))]
    if is_cut:
        last = page[-1][0]
        parts += [
            _tag("NextContinuationToken", base64.urlsafe_b64encode(last.encode()).decode())
            if is_second
            else _tag("NextMarker", shown(last))
        ]
    for key, file in page:
        if file is None:
            parts.append(_element("CommonPrefixes", _tag("Prefix", shown(key))))
        else:
            told = {
                "Key": shown(key),
                "LastModified": _WRITTEN,
                "ETag": f'"{file.etag}"',
                "Size": str(file.size),
                "StorageClass": "STANDARD",
            }
            parts.append(_element("Contents", *(_tag(name, text) for name, text in told.items())))
    return _document("ListBucketResult", *parts)


def _every_key(repository: Repository, prefix: str, delimiter: str) -> Iterable[tuple[str, VirtualFile | None]]:
    """The keys that begin with a prefix. Without a delimiter, the files of all revisions of a run are listed."""
    for key, file in _keys(repository, prefix):
        if file is None and delimiter != "/":
            yield from _keys(repository, key)
        else:
            yield key, file


def _grouped(keys: Iterable[tuple[str, VirtualFile | None]], prefix: str, delimiter: str) -> Iterator[tuple[str, VirtualFile | None]]:
    """The keys in order, with one common prefix for those that hold the delimiter behind the prefix."""
    last = ""
    for key, file in keys:
        end = key.find(delimiter, len(prefix)) if delimiter else -1
        if end < 0:
            yield key, file
        elif (common := key[: end + len(delimiter)]) != last:
            last = common
            yield common, None


def _tag(name: str, text: str) -> str:
    return f"<{name}>{escape(text)}</{name}>"


def _element(name: str, *inner: str) -> str:
    return f"<{name}>{''.join(inner)}</{name}>"


def _document(root: str, *inner: str, space: str = _SPACE, status: int = 200) -> Response:
    opening = f"<{root} {space}>" if space else f"<{root}>"
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n{opening}{"".join(inner)}</{root}>'
    return Response(status, text.encode("utf-8", "backslashreplace"), {"Content-Type": XML})
