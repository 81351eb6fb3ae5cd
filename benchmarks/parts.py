"""What it costs to share one conversion: eight parts with a plan file on this machine, against one process.

    python benchmarks/parts.py [--size 2] [--parts 8] [--turns 3] [--work DIR]

Processor seconds of whole processes, starts included: they show the work, whatever else the machine does. One process and the parts take
turns. The bar is 1.15 times one process and 0.4 s for each part.
"""

from __future__ import annotations

import argparse
import filecmp
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measuring import RESHARD, measured, remove
from synthetic import llama, write_hugging_face


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=2, help="GB of the checkpoint")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--work", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reshard-parts-", dir=options.work) as folder:
        work = Path(folder)
        source, one, many, plan = (work / name for name in ("source", "one", "many", "plan"))
        write_hugging_face(llama(options.size), source)
        target = ["--to", "vllm", "--tp", "8"]
        planned = measured([*RESHARD, "plan", source, *target, "--plan-out", plan])
        print(f"plan file: {plan.stat().st_size:,} bytes, {planned.processor:.2f} s")
        of_one, of_parts = [], []
        for _ in range(options.turns):
            of_one.append(measured([*RESHARD, "convert", source, one, *target]).processor)
            with ThreadPoolExecutor(options.parts) as pool:
                commands = [
                    [*RESHARD, "convert", source, many, "--plan", plan, "--part", f"{i}/{options.parts}"] for i in range(options.parts)
                ]
                of_parts.append(sum(run.processor for run in pool.map(measured, commands)))
            assert not filecmp.dircmp(one, many).left_only and (many / "reshard.json").exists()
            assert all(filecmp.cmp(path, many / path.name, shallow=False) for path in one.glob("*.safetensors"))
            print(f"one process {of_one[-1]:.2f} s, {options.parts} parts {of_parts[-1]:.2f} s", flush=True)
            remove(one, many)
        # The machine only ever adds time.
        alone, shared = min(of_one), min(of_parts)
        bar = 1.15 * alone + 0.4 * options.parts
        print(
            f"{options.size:g} GB hf -> vllm tp8: one process {alone:.2f} s (median {statistics.median(of_one):.2f}), "
            f"{options.parts} parts {shared:.2f} s (median {statistics.median(of_parts):.2f}), bar {bar:.2f} s"
        )


if __name__ == "__main__":
    main()
