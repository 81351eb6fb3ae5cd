"""What averaging checkpoints costs, against reading them all and writing one.

    python benchmarks/averaging.py [--size 1] [--turns 3] [--inputs 4] [--work DIR]

Whole processes, starts included: `--average`, `--slerp` of the first two; and `cp` of all inputs to /dev/null, then of one to the target,
with `sync`. First all inputs lie in the page cache, then none does. They take turns; the best of each counts, because the machine only ever
adds time.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from measuring import RESHARD, Run, given, in_turn, read_into_cache
from synthetic import llama, write_hugging_face

_MOST_TIME, _MOST_MEGABYTES = 1.6, 150
_PART = 64 << 20


def main() -> None:
    inputs = int(_taken("--inputs", "4"))
    options = given(__doc__ or "", 1)
    with tempfile.TemporaryDirectory(prefix="reshard-averaging-", dir=options.work) as folder:
        work, model = Path(folder), llama(options.size)
        write_hugging_face(model, work / "step-0")
        for i in range(1, inputs):
            _write_step(work / "step-0", work / f"step-{i}", i)
        folders = [work / f"step-{i}" for i in range(inputs)]
        files = [path / "model.safetensors" for path in folders]
        for path in folders:
            read_into_cache(path)
        out = work / "out"
        written = out / "model.safetensors"
        reads = " && ".join(f"cp {file} /dev/null" for file in files)
        copied = f"{reads} && mkdir {out} && cp --reflink=never {files[0]} {written} && sync {written}"
        commands: dict[str, list[object]] = {
            "cp": ["sh", "-c", copied],
            "average": [*RESHARD, "convert", *folders, out, "--to", "hf", "--average"],
            "slerp": [*RESHARD, "convert", *folders[:2], out, "--to", "hf", "--slerp", "0.3"],
        }
        for state, cold in (("in the page cache", None), ("on the disk", work)):
            print(f"{inputs} x {files[0].stat().st_size / 1e9:.2f} GB in bfloat16, {state}")
            _show(in_turn(commands, out, options.turns, cold=cold))


def _show(runs: dict[str, list[Run]]) -> None:
    """A line for each command, with a mark where it is above the bar."""
    least = min(run.seconds for run in runs["cp"])
    for name, found in runs.items():
        best, most = min(found, key=lambda run: run.seconds), max(run.megabytes for run in found)
        marks = "  ABOVE THE BAR" if name == "average" and (best.seconds > _MOST_TIME * least or most > _MOST_MEGABYTES) else ""
        times = f"{best.seconds:8.2f} s  {best.seconds / least:6.2f} times  {best.processor:6.2f} s of processors"
        print(f"{name:<12}{times}  {most:5.0f} MB{marks}")


def _taken(flag: str, usual: str) -> str:
    """The value of a flag that `given` does not know, taken out of the command line."""
    if flag not in sys.argv:
        return usual
    at = sys.argv.index(flag)
    _, value = sys.argv.pop(at), sys.argv.pop(at)
    return value


def _write_step(first: Path, folder: Path, number: int) -> None:
    """A later step: the same file, with the last bits of the mantissas changed."""
    folder.mkdir()
    (folder / "config.json").write_text((first / "config.json").read_text())
    draw = np.random.default_rng(number)
    flips = draw.integers(0, 8, _PART // 2, np.uint16)
    with open(first / "model.safetensors", "rb") as source, open(folder / "model.safetensors", "wb") as target:
        header = source.read(8)
        target.write(header + source.read(int.from_bytes(header, "little")))
        while part := source.read(_PART):
            words = np.frombuffer(part, np.uint16)
            target.write((words ^ flips[: len(words)]).tobytes())


if __name__ == "__main__":
    main()
