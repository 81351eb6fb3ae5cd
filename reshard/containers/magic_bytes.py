"""What a file looks like from its first bytes: for messages about a file that is not what its name says."""

from __future__ import annotations

# (byte offset, the bytes there, what they mean). Git LFS pointers and web pages are what failed downloads leave behind.
_SIGNS = (
    (0, b"version https://git-lfs", "a Git LFS pointer: the file itself was never downloaded (git lfs pull)"),
    (0, b"<", "a web page or XML: the download was refused"),
    (0, b"PK\x03\x04", "a zip file"),
    (0, b"PK\x05\x06", "an empty zip file"),
    (0, b"\x28\xb5\x2f\xfd", "zstd-compressed"),
    (0, b"\x1f\x8b", "gzip-compressed"),
    (0, b"GGUF", "a GGUF file"),
    (0, b"\x93NUMPY", "a numpy array"),
    (0, b"\x89HDF", "an HDF5 file"),
    (8, b"{", "a safetensors file"),
    (257, b"ustar", "a tar archive"),
    (0, b"\x80", "a plain pickle"),
)


def describe(head: bytes) -> str:
    """What the file that starts with `head` (262 bytes are enough) looks like, as the end of "it looks like ..."."""
    if not head:
        return "an empty file"
    if not head.strip(b"\0"):
        return "zeros: space was reserved and never written"
    for byte_offset, sign, meaning in _SIGNS:
        if head.startswith(sign, byte_offset):
            return meaning
    return f"nothing known (it starts with {head[:8].hex(' ')})"
