"""The fingerprint: a digest of a checkpoint's canonical content, the same for every layout.

    block  = H of a canonical block's bytes                                            (boxes.blocks: runs of whole rows)
    tensor = H of  "reshard-tensor-V" NUL name NUL dtype NUL shape NUL block block ...   (digests as 32 raw bytes)
    root   = H of  "reshard-fingerprint-V" NUL tensor tensor ...                         (by name, in code point order)

In version V = 2, H is BLAKE3 and a digest is written "blake3:" and 64 hexadecimal digits. In version 1 (reshard 0.1), H is SHA-256 and a
digest is written as 64 hexadecimal digits. Everything else is the same.

Name, dtype (by its safetensors name, such as BF16) and shape (decimal numbers with "," between them) are UTF-8. The bytes of a block are
its elements in row-major order, little-endian, as stored. Blocks depend on the shape alone, so they can be hashed in any order, by any
number of workers, while a conversion copies them. The tensors are those of a Content: the model's weights, and optimizer state only if it
was chosen. A tied head counts once, under the name of the embedding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Protocol

from blake3 import blake3

from reshard.geometry.dtypes import DType
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.storage.claims import SourceChecks


@value
class Fingerprint:
    """The digests of a checkpoint, as text."""

    root: str
    """The digest of the whole content."""
    tensors: Mapping[str, str]
    """The digest of each tensor by name; empty if only the root was recorded."""
    source_checks: SourceChecks = field(default=SourceChecks(), compare=False)
    """What was compared with the checksums that the files hold, if the verb `fingerprint` read them."""

    def __str__(self) -> str:
        return self.root

    def __repr__(self) -> str:
        return f"Fingerprint({self.root}, {plural(len(self.tensors), 'tensor')})"


class Hash(Protocol):
    """A running hash."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Add bytes."""

    def copy(self) -> Hash:
        """A second hash of the bytes so far."""

    def digest(self) -> bytes:
        """The digest of all bytes so far, 32 bytes."""


@value
class DigestVersion:
    """One definition of digests."""

    number: int
    """The version V in the text that is hashed."""
    prefix: str
    """What precedes the hexadecimal digits of a digest."""
    new: Callable[[], Hash]
    """Begins a hash."""

    def text(self, digest: bytes) -> str:
        """A digest as text."""
        return self.prefix + digest.hex()

    def block(self, data: memoryview) -> bytes:
        """The digest of a block, 32 bytes."""
        running = self.new()
        running.update(data)
        return running.digest()

    def tensor(self, name: str, dtype: DType, shape: tuple[int, ...], blocks: Iterable[bytes]) -> bytes:
        """The digest of a tensor, 32 bytes, from the digests of its blocks in canonical order."""
        running = self.new()
        running.update("\0".join((f"reshard-tensor-{self.number}", name, dtype.name, ",".join(map(str, shape)), "")).encode())
        for block in blocks:
            running.update(block)
        return running.digest()

    def checkpoint(self, tensors: Mapping[str, bytes]) -> Fingerprint:
        """The fingerprint of a checkpoint, from the digests of its tensors by name."""
        running = self.new()
        running.update(f"reshard-fingerprint-{self.number}\0".encode())
        for name in sorted(tensors):
            running.update(tensors[name])
        return Fingerprint(self.text(running.digest()), {name: self.text(tensors[name]) for name in sorted(tensors)})

    def __repr__(self) -> str:
        return f"DigestVersion({self.number})"


def _sha256() -> Hash:
    import hashlib

    return hashlib.sha256()


VERSION_1 = DigestVersion(1, "", _sha256)
VERSION_2 = DigestVersion(2, "blake3:", blake3)
VERSIONS = {version.number: version for version in (VERSION_1, VERSION_2)}
CURRENT = VERSION_2
"""The version that conversions record and `fingerprint` prints."""


def is_digest(value: object, version: DigestVersion = CURRENT) -> bool:
    """Whether a value is a digest of that version, as text."""
    return isinstance(value, str) and re.fullmatch(re.escape(version.prefix) + "[0-9a-f]{64}", value) is not None


def record_digest(*records: object) -> str:
    """The digest of plain values as text, whatever the order of their keys. A record that holds it tells whether it was changed."""
    return content_digest(json.dumps(records, sort_keys=True).encode())


def content_digest(content: bytes) -> str:
    """The digest of the content of a small file, as text: BLAKE3 of its bytes, as `b3sum` prints it."""
    return CURRENT.text(CURRENT.block(memoryview(content)))
