"""The fingerprint: a digest of a checkpoint's canonical content that no layout changes.

    block  = SHA-256 of a canonical block's bytes                                            (boxes.blocks: runs of whole rows)
    tensor = SHA-256 of  "reshard-tensor-1" NUL name NUL dtype NUL shape NUL block block ...   (digests as 32 raw bytes)
    root   = SHA-256 of  "reshard-fingerprint-1" NUL tensor tensor ...                         (by name, in code point order)

Name, dtype (as safetensors spells it: BF16) and shape (decimal, "," between) are UTF-8. A block's bytes are its elements
in row-major order, little-endian, as stored. Blocks depend on the shape alone, so they can be hashed in any order, by any
number of workers, while a conversion copies them. Only model weights enter; optimizer state does not, and a tied head counts
once, as the embedding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reshard.geometry.dtypes import DType


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The root digest and each tensor's own, as hexadecimal text."""

    root: str
    tensors: Mapping[str, str]

    def __str__(self) -> str:
        return self.root


def block_digest(data: memoryview) -> bytes:
    """A block's digest, 32 bytes."""
    return hashlib.sha256(data).digest()


def tensor_digest(name: str, dtype: DType, shape: tuple[int, ...], blocks: Iterable[bytes]) -> bytes:
    """A tensor's digest, 32 bytes, from its blocks' digests in canonical order."""
    head = "\0".join(("reshard-tensor-1", name, dtype.name, ",".join(map(str, shape)), ""))
    digest = hashlib.sha256(head.encode())
    for block in blocks:
        digest.update(block)
    return digest.digest()


def fingerprint(tensors: Mapping[str, bytes]) -> Fingerprint:
    """The fingerprint of a whole checkpoint from its tensors' digests by name."""
    root = hashlib.sha256(b"reshard-fingerprint-1\0")
    for name in sorted(tensors):
        root.update(tensors[name])
    return Fingerprint(root.hexdigest(), {name: tensors[name].hex() for name in sorted(tensors)})
