"""Digests of every file that reshard writes, for every fixture and target: proof that a change left the output bytes alone.

    python tests/output_bytes.py record before.json     # with the old code installed
    python tests/output_bytes.py compare before.json    # with the new code; exit code 1 and a list if anything differs

A refusal is recorded by the class of its error. The manifest is left out of the comparison: it names paths and times.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
MANIFESTS = ("reshard.json", "reshard.digests")

# Every target with the sizes and options that lay files out differently. Illegal combinations are recorded as refusals.
TARGETS: tuple[dict[str, Any], ...] = (
    {"to": "hf"},
    {"to": "hf", "dtype": "bf16"},
    {"to": "hf", "max_shard_size": 100_000},
    {"to": "hf", "dequantize": True},
    {"to": "dcp"},
    {"to": "dcp", "dp": 3, "optimizer": True},
    {"to": "fsdp", "dp": 2, "optimizer": True},
    {"to": "fsdp", "dp": 3},
    {"to": "deepspeed", "dp": 2},
    {"to": "deepspeed", "dp": 3},
    {"to": "universal"},
    {"to": "megatron", "tp": 2, "optimizer": True},
    {"to": "megatron", "tp": 2, "pp": 2},
    {"to": "megatron", "pp": 2, "vp": 2},
    {"to": "megatron", "tp": 2, "ep": 2, "experts": "grouped", "distributed_optimizer": True, "optimizer": True},
    {"to": "megatron-dist", "tp": 2, "optimizer": True},
    {"to": "megatron-dist", "tp": 1, "pp": 2, "transformer_impl": "transformer_engine"},
    {"to": "megatron-dist", "ep": 2, "experts": "te-grouped"},
    {"to": "vllm"},
    {"to": "vllm", "tp": 2},
    {"to": "vllm", "tp": 4, "dtype": "fp16"},
    {"to": "vllm", "tp": 2, "pp": 2},
    {"to": "vllm", "tp": 2, "ep": 2},
    {"to": "vllm", "tp": 2, "engine_version": "0.8.5"},
    {"to": "vllm", "tp": 2, "dequantize": True},
    {"to": "sglang", "tp": 2},
    {"to": "sglang", "tp": 2, "ep": 2},
    {"to": "trtllm", "tp": 2},
    {"to": "trtllm", "tp": 2, "pp": 2, "dtype": "bf16"},
)


def sources() -> Iterator[tuple[Path, Path | None]]:
    """Every checkpoint among the fixtures, and the folder of its model's config."""
    for folder in sorted({path.parent for path in FIXTURES.rglob("truth.json")}):
        yield folder / "checkpoint", folder / "model" if (folder / "model").exists() else None
    for group in ("hf", "hf_fp8"):
        for folder in sorted(path for path in (FIXTURES / group).iterdir() if path.is_dir()):
            yield folder, None


def digests(source: Path, model: Path | None) -> dict[str, Any]:
    """Target -> path -> SHA-256 of each file that its conversion writes, or the class of the error that refuses it."""
    import reshard

    label = str(source.relative_to(FIXTURES)).removesuffix("/checkpoint")
    found: dict[str, Any] = {}
    try:
        opened = reshard.open(source, model=model)
    except reshard.ReshardError as error:
        return {label: type(error).__name__}
    for options in TARGETS:
        folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            reshard.convert(reshard.plan(opened, **options), folder / "out", workers=1)
            result: Any = {
                str(path.relative_to(folder / "out")): hashlib.sha256(path.read_bytes()).hexdigest()
                for path in sorted((folder / "out").rglob("*"))
                if path.is_file() and path.name not in MANIFESTS
            }
        except reshard.ReshardError as error:
            result = type(error).__name__
        finally:
            shutil.rmtree(folder)
        found[f"{label} -> " + " ".join(f"{name}={value}" for name, value in options.items())] = result
    return found


def record() -> dict[str, Any]:
    """The digests of all fixtures and targets."""
    with ProcessPoolExecutor(2) as pool:
        return {key: value for found in pool.map(digests, *zip(*sources(), strict=True)) for key, value in found.items()}


def main(verb: str, path: str) -> int:
    if verb == "record":
        Path(path).write_text(json.dumps(record(), indent=1))
        return 0
    before, after = json.loads(Path(path).read_text()), record()
    changed = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    for key in changed:
        print(f"{key}: {before.get(key)} -> {after.get(key)}"[:400])
    written = sum(isinstance(value, dict) for value in after.values())
    print(f"{len(after)} conversions, {written} written, {len(after) - written} refused; {len(changed)} differ")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
