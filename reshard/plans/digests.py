"""The fingerprint: a digest of a checkpoint's canonical content, the same for every layout.

    block  = SHA-256 of a canonical block's bytes                                            (boxes.blocks: runs of whole rows)
    tensor = SHA-256 of  "reshard-tensor-1" NUL name NUL dtype NUL shape NUL block block ...   (digests as 32 raw bytes)
    root   = SHA-256 of  "reshard-fingerprint-1" NUL tensor tensor ...                         (by name, in code point order)

Name, dtype (by its safetensors name, such as BF16) and shape (decimal numbers with "," between them) are UTF-8. The bytes of a block are
its elements in row-major order, little-endian, as stored. Blocks depend on the shape alone, so they can be hashed in any order, by any
number of workers, while a conversion copies them. The tensors are those of a Content: the model's weights, and optimizer state only if it
was chosen. A tied head counts once, under the name of the embedding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reshard.geometry.dtypes import DType
from reshard.geometry.quantities import plural


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The digests of a checkpoint, as hexadecimal text."""

    root: str
    """The digest of the whole content."""
    tensors: Mapping[str, str]
    """The digest of each tensor by name; empty if only the root was recorded."""

    def __str__(self) -> str:
        return self.root

    def __repr__(self) -> str:
        return f"Fingerprint({self.root}, {plural(len(self.tensors), 'tensor')})"


def block_digest(data: memoryview) -> bytes:
    """The digest of a block, 32 bytes."""
    return hashlib.sha256(data).digest()


def tensor_digest(name: str, dtype: DType, shape: tuple[int, ...], blocks: Iterable[bytes]) -> bytes:
    """The digest of a tensor, 32 bytes, from the digests of its blocks in canonical order."""
    head = "\0".join(("reshard-tensor-1", name, dtype.name, ",".join(map(str, shape)), ""))
    digest = hashlib.sha256(head.encode())
    for block in blocks:
        digest.update(block)
    return digest.digest()


def checkpoint_fingerprint(tensors: Mapping[str, bytes]) -> Fingerprint:
    """The fingerprint of a checkpoint, from the digests of its tensors by name."""
    root = hashlib.sha256(b"reshard-fingerprint-1\0")
    for name in sorted(tensors):
        root.update(tensors[name])
    return Fingerprint(root.hexdigest(), {name: tensors[name].hex() for name in sorted(tensors)})
