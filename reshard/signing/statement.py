"""What is signed about a folder, and the file that carries it: the OpenSSF Model Signing format 1.0.

    model.sig   a Sigstore bundle: {"mediaType", "verificationMaterial": {"publicKey": {"hint": digest of the key}}, "dsseEnvelope"}
    envelope    DSSE: {"payload": the statement in base64, "payloadType", "signatures": [{"sig"}]}; signed is `Bundle.signed_bytes`
    statement   in-toto 1: one subject, the folder; the predicate lists each file with its SHA-256

The fingerprint of the weights stands under `subject[0].annotations.reshard`. Statement and predicate may have no other keys; a subject may,
and in-toto has `annotations` for that (resource_descriptor.md). It is signed with the rest, and other verifiers ignore it.

Sources: spec/v1.0.md and schemas/v1.0 of github.com/ossf/model-signing-spec. tests/signing/check.py compares with model-signing 1.1.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from reshard.errors import CheckpointError, UnsupportedError
from reshard.geometry.value import value
from reshard.plans.digests import VERSIONS, is_digest
from reshard.storage.json_input import parsed

SIGNATURE = "model.sig"
"""The name of the bundle in the folder that it signs."""
ALGORITHMS = ("sha256", "blake2b", "blake3")
"""How files are hashed; reshard signs SHA-256."""
# Longer than the statement of 100,000 files.
MOST_BYTES = 64 << 20
_MEDIA_TYPE, _PAYLOAD_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json", "application/vnd.in-toto+json"
_STATEMENT, _PREDICATE = "https://in-toto.io/Statement/v1", "https://model_signing/signature/v1.0"


@value
class Statement:
    """What the owner of a key says about a folder."""

    name: str
    """The name that the folder had."""
    files: Mapping[str, str]
    """The digest of each file, in hexadecimal digits, by its path."""
    algorithm: str = "sha256"
    """How they are hashed."""
    ignored: tuple[str, ...] = ()
    """Paths that are not covered, with what lies below them."""
    follows_links: bool = False
    """Whether links count as what they lead to."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What reshard says of the weights: fingerprint, format, step, version."""

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the weights; None if another program made the statement."""
        text = self.about.get("fingerprint")
        return str(text) if any(is_digest(text, version) for version in VERSIONS.values()) else None

    @property
    def step(self) -> int | None:
        """The step of the run; None if it is not known."""
        step = self.about.get("step")
        return step if isinstance(step, int) else None

    def __str__(self) -> str:
        return self.name if self.step is None else f"{self.name}, step {self.step}"

    def payload(self) -> bytes:
        """The statement as it is signed."""
        paths = sorted(self.files)  # by code points, as the specification asks
        resources = [{"name": path, "digest": self.files[path], "algorithm": self.algorithm} for path in paths]
        serialization = {
            "method": "files",
            "hash_type": self.algorithm,
            "allow_symlinks": self.follows_links,
            "ignore_paths": list(self.ignored),
        }
        subject = {"name": self.name, "digest": {"sha256": self._root()}, "annotations": {"reshard": dict(self.about)}}
        predicate = {"resources": resources, "serialization": serialization}
        return json.dumps({"_type": _STATEMENT, "subject": [subject], "predicateType": _PREDICATE, "predicate": predicate}).encode()

    def _root(self) -> str:
        """The digest of all files together: SHA-256 of their digests, in the order of their paths."""
        return hashlib.sha256(b"".join(bytes.fromhex(self.files[path]) for path in sorted(self.files))).hexdigest()

    @classmethod
    def parse(cls, payload: bytes, *, where: str) -> Statement:
        """The statement of a bundle. Raises CheckpointError if it is none, UnsupportedError if it hashes files in a way that is unknown."""
        try:
            document = parsed(payload)
            (subject,), predicate = document["subject"], document["predicate"]
            resources, how, about = predicate["resources"], predicate["serialization"], subject.get("annotations", {}).get("reshard", {})
            types = document["_type"], document["predicateType"]
            files = {str(file["name"]): bytes.fromhex(file["digest"]).hex() for file in resources}
            statement = cls(
                str(subject["name"]),
                files,
                how["hash_type"],
                tuple(map(str, how.get("ignore_paths", ()))),
                how["allow_symlinks"] is True,
                about if isinstance(about, dict) else {},
            )
            is_whole = len(files) == len(resources) > 0 and subject["digest"]["sha256"] == statement._root()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _broken("what it signs is no statement about the files of a model", where) from None
        if types != (_STATEMENT, _PREDICATE) or not is_whole:
            raise _broken("what it signs is not a statement of OpenSSF Model Signing 1.0, or contradicts itself", where)
        if how["method"] != "files" or statement.algorithm not in ALGORITHMS:
            what = f"it signs {str(how['method'])[:40]!r} by {str(statement.algorithm)[:40]!r}"
            raise UnsupportedError(
                f"{what}, and whole files by {', '.join(ALGORITHMS)} are known", where=where, do="Use model_signing verify"
            )
        return statement


@value
class Bundle:
    """A statement with its signature."""

    payload: bytes
    """The statement as it is signed."""
    signature: bytes
    """The signature of `signed_bytes`."""
    key: str | None
    """The digest of the public key (`keys.py`); None if the bundle does not tell it, as those before model-signing 1.1."""

    @property
    def signed_bytes(self) -> bytes:
        """The bytes that are signed."""
        return signed_bytes(self.payload)

    def content(self) -> bytes:
        """The bundle as a file."""
        envelope = {
            "payload": base64.b64encode(self.payload).decode(),
            "payloadType": _PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(self.signature).decode(), "keyid": ""}],
        }
        material = {"publicKey": {"hint": self.key}, "tlogEntries": []}
        return json.dumps({"mediaType": _MEDIA_TYPE, "verificationMaterial": material, "dsseEnvelope": envelope}).encode() + b"\n"

    @classmethod
    def parse(cls, content: bytes, *, where: str) -> Bundle:
        """The bundle in a file. Raises CheckpointError if it is none, UnsupportedError if it was not signed with a key."""
        try:
            document = parsed(content)
            envelope, material = document["dsseEnvelope"], document["verificationMaterial"]
            (signature,) = envelope["signatures"]
            payload, signed = (base64.b64decode(text, validate=True) for text in (envelope["payload"], signature["sig"]))
            types, key = (document["mediaType"], envelope["payloadType"]), material.get("publicKey")
            hint = key.get("hint") if key is not None else None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _broken("it is no bundle of a signature", where) from None
        if types != (_MEDIA_TYPE, _PAYLOAD_TYPE):
            raise _broken(f"it is a bundle of another kind, {str(types[0])[:80]!r} with {str(types[1])[:80]!r}", where)
        if key is None:
            raise UnsupportedError(
                "it was signed with a certificate or by Sigstore, and not with a key", where=where, do="Use model_signing verify"
            )
        return cls(payload, signed, hint if isinstance(hint, str) else None)


def signed_bytes(payload: bytes) -> bytes:
    """The bytes that are signed for a payload: the pre-authentication encoding of DSSE 1."""
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD_TYPE), _PAYLOAD_TYPE.encode(), len(payload), payload)


def _broken(what: str, where: str) -> CheckpointError:
    return CheckpointError(what, where=where, do="Copy it again from where the folder was signed, or sign the folder again")
