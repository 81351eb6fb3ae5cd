"""Keys in PEM files: elliptic curves P-256, P-384 and P-521, as the registry of OpenSSF Model Signing lists them.

    openssl ecparam -name prime256v1 -genkey -noout -out release.key
    openssl pkey -in release.key -pubout -out release.pub

Nothing of a private key is in a message, a log or a record. Its passphrase comes from RESHARD_KEY_PASSPHRASE alone. The package
`cryptography` does the arithmetic; it is loaded when a key is used.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.value import value
from reshard.storage.system_calls import existing_path, system_errors

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey

PASSPHRASE = "RESHARD_KEY_PASSPHRASE"
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_MOST_BYTES = 1 << 16
_MAKE = "openssl ecparam -name prime256v1 -genkey -noout -out release.key"


@value(eq=False)
class PublicKey:
    """A key that signatures are checked with."""

    _key: EllipticCurvePublicKey

    @property
    def digest(self) -> str:
        """The SHA-256 of its PEM text, by which bundles name it."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        return hashlib.sha256(self._key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()

    def has_signed(self, data: bytes, signature: bytes) -> bool:
        """Whether the owner of the private key has signed these bytes."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, data, _algorithm(self._key))
        except InvalidSignature:
            return False
        return True

    def __repr__(self) -> str:
        return f"PublicKey({self.digest[:12]})"


@value(eq=False)
class PrivateKey:
    """A key that signs. Nothing shows what is in it."""

    _key: EllipticCurvePrivateKey

    @property
    def public(self) -> PublicKey:
        """The key that its signatures are checked with."""
        return PublicKey(self._key.public_key())

    def sign(self, data: bytes) -> bytes:
        """The signature of these bytes: ECDSA, in DER."""
        return self._key.sign(data, _algorithm(self._key.public_key()))

    def __repr__(self) -> str:
        return f"PrivateKey of {self.public!r}"


def private_key(path: str | os.PathLike[str]) -> PrivateKey:
    """The private key in a PEM file. Raises RequestError if it holds none that can sign, or its passphrase is missing or wrong."""
    content, name = _content(path), f"`key=` {os.fspath(path)}"
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    passphrase, key = os.environ.get(PASSPHRASE, ""), None
    try:
        try:
            key = load_pem_private_key(content, None)
        except TypeError:  # it is encrypted
            if not passphrase:
                raise RequestError("the key is encrypted", where=name, do=f"Set its passphrase in the environment: {PASSPHRASE}") from None
            key = load_pem_private_key(content, passphrase.encode())
    except (ValueError, UnsupportedAlgorithm):
        what, do = "it is no private key in PEM", f"Give the private key, such as one of `{_MAKE}`"
        if b"ENCRYPTED" in content:
            what, do = f"the key cannot be decrypted: {PASSPHRASE} is not its passphrase", "Set it to the key's passphrase"
        raise RequestError(what, where=name, do=do) from None
    if not isinstance(key, EllipticCurvePrivateKey) or key.curve.name not in _CURVES:
        raise _other_kind(name)
    return PrivateKey(key)


def public_key(path: str | os.PathLike[str]) -> PublicKey:
    """The public key in a PEM file. Raises RequestError if it holds none that can check a signature."""
    content, name = _content(path), f"`signed_by=` {os.fspath(path)}"
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm):
        is_private = b"PRIVATE KEY-----" in content
        raise RequestError(
            "it is a private key, which must stay with who signs" if is_private else "it is no public key in PEM",
            where=name,
            do="Give the public key: openssl pkey -in release.key -pubout -out release.pub",
        ) from None
    if not isinstance(key, EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise _other_kind(name)
    return PublicKey(key)


def _algorithm(key: EllipticCurvePublicKey) -> ECDSA:
    """ECDSA with the hash that belongs to the size of the curve."""
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512

    hashes = {256: SHA256(), 384: SHA384(), 521: SHA512()}
    return ECDSA(hashes[key.key_size])


def _content(path: str | os.PathLike[str]) -> bytes:
    """The content of a key's file."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "signatures need the package cryptography, which is not installed", do="Install it with `pip install cryptography`"
        ) from None
    with system_errors("read", Path(path)), open(existing_path(path), "rb") as file:
        return file.read(_MOST_BYTES)


def _other_kind(name: str) -> RequestError:
    return RequestError(
        "it is a key of another kind", where=name, why="OpenSSF Model Signing has P-256, P-384 and P-521", do=f"Make one: {_MAKE}"
    )
