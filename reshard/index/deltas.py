"""Patches: what deltas change in the elements of a tensor. A delta says what changed between two checkpoints, tensor by tensor.

The form is that of slime, miles and ModelExpress (their `disk_delta.py` and `canonical_delta.py`): of each changed tensor, one zstd frame
of its bytes in the Hugging Face form.

    xor         new bytes ^ old bytes, as many as the tensor has
    overwrite   count as u4, the positions of the changed bytes as u4, ascending, then the new bytes at these positions; little-endian
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from reshard.geometry.value import value

INDEX = "model.safetensors.index.json"
"""The file of a delta that says which frame lies in which file, and what the delta changes."""
OWN_KEY = "reshard_base"
"""The key of that file's metadata by which a delta of ours is told from one that another program wrote: the base as it was named."""
RECORD_KEY = "reshard_record"
"""The key of the digest of all other metadata there, with the checksums of the frames."""
DeltaEncoding = Literal["xor", "overwrite"]
"""How a frame says what changed."""


@value
class DeltaFacts:
    """What a delta says about itself."""

    version: str
    """The version that it makes, such as "000007"."""
    base_version: str
    """The version that it changes."""
    encoding: DeltaEncoding
    """How its frames say what changed."""
    checksum_format: str
    """The algorithm of the checksums: blake3, xxh3-128 or adler32."""
    checksums: Mapping[str, str]
    """By changed tensor, the checksum of its new bytes in hexadecimal digits."""
    base: str | None = None
    """The base as it was named; None if another program wrote the delta. So are the following."""
    base_fingerprint: str | None = None
    """The fingerprint of the base."""
    result: str | None = None
    """The checkpoint that it makes, as it was named."""
    result_fingerprint: str | None = None
    """The fingerprint of that checkpoint."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """By name, the digest of each tensor of that checkpoint, changed or not."""
    step: int | None = None
    """The training step of that checkpoint."""
    counts: tuple[int, int] | None = None
    """The number of changed elements, and that of all."""


@value(eq=False)
class Patch:
    """What one delta changes in one tensor."""

    path: str
    """The file that holds the frame."""
    byte_offset: int
    """Where the frame starts in the file."""
    nbytes: int
    """The length of the frame."""
    encoding: DeltaEncoding
    """How the frame says what changed."""
    checksum_format: str
    """The algorithm of the checksum."""
    checksum: str
    """The checksum of the new bytes."""
