"""Magic bytes: what kind of file the first bytes show, for messages about a file that is not what its name says."""

from __future__ import annotations

# (byte offset, the bytes there, the kind of file). Git LFS pointers and web pages are left by failed downloads.
_SIGNS = (
    (0, b"version https://git-lfs", "a Git LFS pointer: the file itself was never downloaded (run git lfs pull)"),
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
    """The kind of a file that starts with `head`, as the end of a sentence "it looks like ...". 262 bytes are enough."""
    if not head:
        return "an empty file"
    if not head.strip(b"\0"):
        return "zeros: space was reserved, but never written"
    for byte_offset, sign, meaning in _SIGNS:
        if head.startswith(sign, byte_offset):
            return meaning
    return f"no known kind of file (it starts with the bytes {head[:8].hex(' ')})"
