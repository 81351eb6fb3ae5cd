"""What a delta costs, against `cmp` and `zstd` of the same bytes, and what applying it costs, against `cp` and a sync.

    python benchmarks/deltas.py [--size 2] [--turns 3] [--work DIR]

Whole processes, starts included, on a warm cache: a llama in bf16, of which one percent of the elements change, as after a step of
reinforcement learning. `cmp` compares two equal copies, which it reads to the end; `zstd -1` compresses the xor of both checkpoints. They
take turns, and the ratio is taken turn by turn.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from measuring import RESHARD, Run, copy_of, given, header, measured, read_into_cache, remove, row
from synthetic import llama, write_hugging_face

_PART = 1 << 24


def main() -> None:
    options = given(__doc__ or "", 2)
    with tempfile.TemporaryDirectory(prefix="reshard-deltas-", dir=options.work) as folder:
        work = Path(folder)
        base, new, copy, xor, out = (work / name for name in ("base", "new", "copy", "xor", "out"))
        for place in (base, new, copy):
            write_hugging_face(llama(options.size), place)
        with open(xor, "wb") as file:
            for path in sorted(new.glob("*.safetensors")):
                _change(path, base / path.name, file)
        for encoding in ("xor", "overwrite"):
            measured([*RESHARD, "delta", base, new, work / f"delta-{encoding}", "--encoding", encoding])
        header(f"{options.size:g} GB, 1 % of the elements changed", "cmp + zstd")
        compared = [f"cmp {base}/{path.name} {copy}/{path.name}" for path in sorted(base.glob("*.safetensors"))]
        theirs = ["sh", "-c", f"{' && '.join(compared)} && zstd -1 -q -c {xor} > {work}/xor.zst"]
        for encoding in ("xor", "overwrite"):
            ours = [*RESHARD, "delta", base, new, out, "--encoding", encoding]
            row(f"delta, {encoding}", *_in_turn(ours, theirs, (base, new, copy), out, options.turns))
        header("the same", "cp + sync")
        for encoding in ("xor", "overwrite"):
            for name, words in (("hf", ["--to", "hf"]), ("vllm TP 2", ["--to", "vllm", "--tp", "2"])):
                ours = [*RESHARD, "apply", base, work / f"delta-{encoding}", out, *words]
                row(f"apply, {encoding}, {name}", *_in_turn(ours, copy_of(base, out), (base,), out, options.turns))
        row(
            "convert --to hf, without a delta",
            *_in_turn([*RESHARD, "convert", base, out, "--to", "hf"], copy_of(base, out), (base,), out, options.turns),
        )
        for encoding in ("xor", "overwrite"):
            nbytes = sum(path.stat().st_size for path in (work / f"delta-{encoding}").iterdir())
            print(f"\ndelta, {encoding}: {nbytes:,} bytes, {nbytes / xor.stat().st_size:.2%} of the checkpoint")
        print(f"zstd -1 of the xor: {(work / 'xor.zst').stat().st_size:,} bytes")


def _change(path: Path, base: Path, xor: object) -> None:
    """Change one percent of the elements of a file by a small step, and write the xor of both."""
    random, start = np.random.default_rng(1), 8 + int.from_bytes(path.open("rb").read(8), "little")
    new, old = np.memmap(path, np.uint16, "r+", start), np.memmap(base, np.uint16, "r", start)
    for at in range(0, len(new), _PART):
        part = new[at : at + _PART]
        part[random.integers(0, len(part), len(part) // 100)] += 1
        xor.write((part ^ old[at : at + _PART]).tobytes())  # type: ignore[attr-defined]
    new.flush()


def _in_turn(ours: list[object], theirs: list[object], read: tuple[Path, ...], out: Path, turns: int) -> tuple[list[Run], list[Run]]:
    """The runs of two commands, which take turns; one turn before them is not counted."""
    found: tuple[list[Run], list[Run]] = ([], [])
    for turn in range(turns + 1):
        for number, command in enumerate((ours, theirs)) if turn % 2 else reversed([*enumerate((ours, theirs))]):
            for folder in read:
                read_into_cache(folder)
            run = measured(command)
            remove(out)
            if turn:
                found[number].append(run)
    return found


if __name__ == "__main__":
    main()
