"""Print the reshard digest of every tensor below a Hugging Face folder, and the fingerprint: numpy and blake3 alone."""

import json
import sys
from pathlib import Path

import numpy as np
from blake3 import blake3

BLOCK = 2_097_152  # elements
digests = {}
for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    raw = np.memmap(path, np.uint8)
    start = 8 + int(raw[:8].view("<u8")[0])
    header = json.loads(bytes(raw[8:start]))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        dtype, shape, (first, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        digest = blake3("\0".join(("reshard-tensor-2", name, dtype, ",".join(map(str, shape)), "")).encode())
        elements = int(np.prod(shape, dtype=np.int64))
        if elements:
            # The first axis whose rows fit into a block; at each index of the axes before it, blocks are runs of whole rows.
            axis = next((axis for axis in range(len(shape)) if np.prod(shape[axis + 1 :], dtype=np.int64) <= BLOCK), 0)
            row = int(np.prod(shape[axis + 1 :], dtype=np.int64))
            rows = shape[axis] if shape else 1
            data = raw[start + first : start + stop].reshape(-1, rows, row * ((stop - first) // elements))
            for outer in data:
                for at in range(0, rows, BLOCK // row):
                    digest.update(blake3(outer[at : at + BLOCK // row].tobytes()).digest())
        digests[name] = digest.digest()
root = blake3(b"reshard-fingerprint-2\0" + b"".join(digests[name] for name in sorted(digests)))
print("\n".join(f"{name} blake3:{digests[name].hex()}" for name in sorted(digests)))
print(f"fingerprint blake3:{root.hexdigest()}")
