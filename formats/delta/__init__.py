"""Delta: what changed between two checkpoints, as slime, miles and ModelExpress write it for live updates.

    model-00000-of-00001.safetensors   of each changed tensor one zstd frame as U8 [n]; __metadata__ maps its name to the checksum of its
                                       new bytes
    model.safetensors.index.json       {"metadata": {"version": "000007", "base_version": "000006", "delta_encoding": "xor" or "overwrite",
                                        "compression_format": "zstd", "checksum_format": "blake3"}, "weight_map": {name: file}}

reshard/index/deltas.py says what a frame holds. Keys of the metadata that begin with `reshard_` are our own: fingerprints and names.
A delta alone holds no weights. `BASE+DELTA` is a checkpoint (reshard/opening/deltas.py), and the verb `delta` writes one.

Source: slime 624b824 (utils/disk_delta.py, update_weight_from_disk_delta.py), modelexpress 0.7.0 (canonical_delta.py).
"""

from __future__ import annotations

import re

from reshard.adapter.format import Format
from reshard.index.deltas import INDEX
from reshard.storage.files import Files, read_range

_FILE = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")


class Delta(Format):
    name = "delta"
    summary = "What changed between two checkpoints: a chain of `BASE+DELTA` is a checkpoint"
    refines = ("hf",)
    changes_base = True

    def detect(self, files: Files) -> str | None:
        if INDEX not in files.list():
            return None
        # Both programs write the metadata first. Ours has the encoding before anything that is long.
        head = read_range(files, INDEX, 0, min(files.size(INDEX) or 0, 1 << 16))
        return f"delta_encoding in {INDEX}" if re.search(rb'"delta_encoding"\s*:', head) else None

    def complete(self, files: Files) -> str | None:
        """Of its files, each one's name tells how many there are."""
        numbered = [match for path in files.list() if (match := _FILE.fullmatch(path))]
        is_whole = INDEX in files.list() and all(len(numbered) == int(match[1]) for match in numbered)
        return f"all files of {INDEX} are there" if is_whole else None


FORMAT = Delta()
