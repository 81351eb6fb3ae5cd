"""Access: who may ask. On the loopback everybody on this machine may; elsewhere only who knows the token.

    Authorization: Bearer TOKEN                                    clients of the Hub, curl
    Authorization: Basic, with the token as password               browsers
    Authorization: AWS4-HMAC-SHA256                                clients of S3, with the token as secret access key and any access key id

A page of another site that a browser shows could ask a server on the loopback under a name of its own (DNS rebinding). So without a token
the Host header must name the loopback.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from datetime import UTC, datetime, timedelta

from reshard.doors.fronts.messages import Request, encoded, encoded_again
from reshard.geometry.value import value

_LOOPBACK = re.compile(r"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])\.?(?::\d{1,5})?", re.IGNORECASE)
_CREDENTIAL = re.compile(r"[^/]{1,200}/(\d{8}/[\w-]{1,50}/s3/aws4_request)", re.ASCII)
_SIGNED = re.compile(
    r"AWS4-HMAC-SHA256\s+Credential=([^,\s]{1,500})\s*,\s*SignedHeaders=([\w;-]{1,1000})\s*,\s*Signature=([0-9a-f]{64})\s*", re.ASCII
)
_SKEW = timedelta(minutes=15)
_EMPTY = hashlib.sha256(b"").hexdigest()


@value(repr=False)
class Access:
    """Who may ask. token: what clients have to know; empty: nothing."""

    token: str = ""

    def names_this_host(self, request: Request) -> bool:
        """Whether the request is meant for this server. With a token, no page of another site can send it."""
        hosts = [host for host in (request.headers.get("host", ""), request.authority) if host]
        return bool(self.token) or (bool(hosts) and all(_LOOPBACK.fullmatch(host) for host in hosts))

    def allows(self, request: Request, now: datetime | None = None) -> bool:
        """Whether the client knows the token. Everything that is compared takes the same time, whatever differs."""
        if not self.token:
            return True
        scheme, _, given = request.headers.get("authorization", "").strip().partition(" ")
        if scheme.lower() == "bearer":
            return self._is(given.strip())
        if scheme.lower() == "basic":
            try:
                return self._is(base64.b64decode(given, validate=True).decode().partition(":")[2])
            except (ValueError, binascii.Error):
                return False
        return scheme == "AWS4-HMAC-SHA256" and self._has_signed(request, now or datetime.now(UTC))

    def _is(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), self.token.encode())

    def _has_signed(self, request: Request, now: datetime) -> bool:
        """Whether the headers are signed with the token (AWS Signature Version 4)."""
        signed, stamp = _SIGNED.fullmatch(request.headers["authorization"].strip()), request.headers.get("x-amz-date", "")
        if not signed or (sent := _time(stamp)) is None or abs(now - sent) > _SKEW:
            return False
        names, payload = signed[2].split(";"), request.headers.get("x-amz-content-sha256", _EMPTY)
        return {"host", "x-amz-date"} <= {*names} and self._matches(request, (signed[1], stamp), names, payload, signed[3])

    def _matches(self, request: Request, signer: tuple[str, str], names: list[str], payload: str, signature: str) -> bool:
        """Whether a signature is the one of the request. signer: the credential, and the time."""
        scope, stamp = _CREDENTIAL.fullmatch(signer[0]), signer[1]
        if not scope or scope[1][:8] != stamp[:8] or any(name not in request.headers for name in names):
            return False
        query = sorted((encoded(key), encoded(given)) for key, given in request.query)
        canonical = "\n".join(
            (
                request.method,
                encoded_again(request.path),
                "&".join(f"{key}={given}" for key, given in query),
                *(f"{name}:{' '.join(request.headers[name].split())}" for name in names),
                "",
                ";".join(names),
                payload,
            )
        )
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope[1]}\n{hashlib.sha256(canonical.encode('utf-8', 'surrogateescape')).hexdigest()}"
        key = f"AWS4{self.token}".encode()
        for part in scope[1].split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        return hmac.compare_digest(hmac.new(key, text.encode(), "sha256").hexdigest(), signature)


def is_loopback(address: str) -> bool:
    """Whether nobody outside of this machine reaches an address."""
    return bool(_LOOPBACK.fullmatch(f"[{address}]" if ":" in address else address))


def _time(stamp: str) -> datetime | None:
    try:
        return datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None
