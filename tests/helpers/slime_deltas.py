"""Deltas as slime writes and applies them, restated in plain numpy and zstandard from its description (624b824, disk_delta.py): an oracle
that uses nothing of reshard."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from pathlib import Path

import blake3
import numpy as np
import zstandard

Stored = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Name -> (element type as safetensors names it, shape, bytes)."""
CHECKSUMS = {"blake3": lambda data: blake3.blake3(data).hexdigest(), "adler32": lambda data: f"{zlib.adler32(data):08x}"}


def save(path: Path, tensors: Stored, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def load(path: Path) -> tuple[Stored, dict[str, str]]:
    """Read a safetensors file: its tensors, and its metadata."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header.pop("__metadata__", {})
    return {name: (each["dtype"], tuple(each["shape"]), data[slice(*each["data_offsets"])]) for name, each in header.items()}, metadata


def load_folder(folder: Path) -> Stored:
    return {name: stored for path in sorted(folder.glob("*.safetensors")) for name, stored in load(path)[0].items()}


def encoded(old: bytes, new: bytes, encoding: str) -> bytes:
    a, b = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    if encoding == "xor":
        return (a ^ b).tobytes()
    positions = np.flatnonzero(a != b).astype("<u4")
    return struct.pack("<I", len(positions)) + positions.tobytes() + b[positions].tobytes()


def folder_of(path: Path, stored: Stored, config: Path | None = None) -> Path:
    """Write a checkpoint of one file, with the config.json of another folder; returns its path."""
    path.mkdir(parents=True)
    save(path / "model.safetensors", stored)
    if config is not None:
        shutil.copy(config / "config.json", path)
    return path


def changed(stored: Stored, share: float, seed: int) -> Stored:
    """The tensors with other bits in a share of their elements; 0 changes nothing, 1 everything."""
    random = np.random.default_rng(seed)
    result: Stored = {}
    for name, (dtype, shape, data) in stored.items():
        values = np.frombuffer(data, np.uint8).copy()
        chosen = random.random(len(values)) < share
        values[chosen] ^= random.integers(1, 256, int(chosen.sum()), dtype=np.uint8)
        result[name] = dtype, shape, values.tobytes()
    return result


def write_delta(folder: Path, old: Stored, new: Stored, encoding: str, checksum: str, version: int, base_version: int) -> None:
    """Write a delta as slime does: one file here, one frame of each changed tensor."""
    folder.mkdir()
    changed = [name for name in new if new[name][2] != old[name][2]]
    frames, sums = {}, {}
    for name in changed:
        frame = zstandard.ZstdCompressor(level=1).compress(encoded(old[name][2], new[name][2], encoding))
        frames[name] = "U8", (len(frame),), frame
        sums[name] = CHECKSUMS[checksum](new[name][2])
    path = "model-00000-of-00001.safetensors"
    save(folder / path, frames, sums)
    write_index(
        folder, dict.fromkeys(changed, path), delta_encoding=encoding, checksum_format=checksum, version=version, base_version=base_version
    )


def write_index(folder: Path, weight_map: dict[str, str], *, version: int, base_version: int, **metadata: str) -> None:
    about = {"version": f"{version:06d}", "base_version": f"{base_version:06d}", "compression_format": "zstd", **metadata}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": about, "weight_map": weight_map}))


def applied(folder: Path, old: Stored) -> Stored:
    """Apply a delta as slime's receiver does: only the five keys of the metadata that it knows are read."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    about, result = index["metadata"], dict(old)
    assert about["compression_format"] == "zstd"
    assert {path.name for path in folder.glob("*.safetensors")} == set(index["weight_map"].values())
    for path in sorted(set(index["weight_map"].values())):
        frames, sums = load(folder / path)
        assert {name for name, file in index["weight_map"].items() if file == path} == frames.keys() == sums.keys()
        for name, (dtype, shape, frame) in frames.items():
            assert dtype == "U8" and shape == (len(frame),)
            assert zstandard.get_frame_parameters(frame).content_size not in (0, zstandard.CONTENTSIZE_UNKNOWN)
            diff = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
            data = np.frombuffer(old[name][2], np.uint8).copy()
            if about["delta_encoding"] == "xor":
                data ^= diff
            else:
                count = int(diff[:4].view("<u4")[0])
                positions = diff[4 : 4 + 4 * count].view("<u4")
                data[positions] = diff[4 + 4 * count :]
            assert CHECKSUMS[about["checksum_format"]](data.tobytes()) == sums[name], name
            result[name] = (*old[name][:2], data.tobytes())
    return result
