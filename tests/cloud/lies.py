"""What a store may answer instead of the truth.

`LIES` has a name for each -> a function of a request to S3Server, which answers it and returns True, or leaves it to the honest server and
returns False. Give one to `S3Server.lie`.

Redirects need a place: `redirecting(status, to)`.
"""

import uuid


def redirecting(status, to, methods=("GET", "HEAD", "PUT", "POST", "DELETE")):
    """Every request of these methods is redirected to the same path below another address."""

    def answer(request):
        if request.command not in methods:
            return False
        request.head(status, 0, {"Location": to + request.path})
        return True

    return answer


def _busy(request):
    request.error(503, "SlowDown")
    return True


def _new_etags(request):
    """Every answer gives the object another ETag, and no comparison with one succeeds."""
    stored = request.server.owner.objects.get(request.at)
    if stored is None or request.command not in ("GET", "HEAD"):
        return False
    stored.etag = uuid.uuid4().hex
    if request.headers.get("If-Match"):
        request.error(412, "PreconditionFailed")
        return True
    return False


def _other_range(request):
    stored = request.server.owner.objects.get(request.at)
    if stored is None or request.command != "GET":
        return False
    request.head(206, 4, {"ETag": f'"{stored.etag}"', "Content-Range": f"bytes 0-3/{stored.nbytes}", "Last-Modified": _DATE})
    request.wfile.write(b"\x00" * 4)
    return True


def _huge(request):
    """The object is said to have 2^62 bytes."""
    if request.command != "HEAD" or request.at not in request.server.owner.objects:
        return False
    request.head(200, 1 << 62, {"ETag": '"x"', "Last-Modified": _DATE, "Accept-Ranges": "bytes"})
    return True


def _no_xml(request):
    if request.at[1]:
        return False
    request.answer(200, b"<html>hello</html>")
    return True


def _refused(request):
    request.error(403, "AccessDenied")
    return True


_DATE = "Mon, 23 Nov 2026 21:47:49 GMT"
LIES = {
    "busy for ever": _busy,
    "a new ETag with every answer": _new_etags,
    "another range than asked for": _other_range,
    "2^62 bytes": _huge,
    "a list that is no XML": _no_xml,
    "everything is forbidden": _refused,
}
