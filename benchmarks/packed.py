"""What packed weights cost: carried, cut for ranks, dequantized, quantized and requantized, against a plain conversion.

    python benchmarks/packed.py [--size 3] [--turns 3] [--work DIR]

Wall seconds, processor seconds and peak memory of whole processes, starts included. The plain conversion (hf -> hf) is that of as many
bytes: of the unpacked model where values are read or written, of the packed model where its bytes are carried. The conversions take turns;
the best of each counts, because the machine only ever adds time. The bar is 1.5 times the plain conversion, and 120 MB. In a model of 1 GB
half of the bytes are embeddings, which are not packed.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from measuring import RESHARD, measured, read_into_cache, remove
from synthetic import llama, write_hugging_face

BAR, MEGABYTES = 1.5, 120
HF, RANKS = ["--to", "hf"], ["--to", "vllm", "--tp", "2"]
# What is measured -> (source, options, the source of the plain conversion).
CASES = {
    "MXFP4 carried": ("mxfp4", HF, "mxfp4"),
    "MXFP4 cut for 2 ranks": ("mxfp4", RANKS, "mxfp4"),
    "--dequantize MXFP4": ("mxfp4", [*HF, "--dequantize"], "bf16"),
    "--dequantize FP8": ("fp8-block", [*HF, "--dequantize"], "bf16"),
    "--quantize mxfp4": ("bf16", [*HF, "--quantize", "mxfp4"], "bf16"),
    "--quantize fp8-block": ("bf16", [*HF, "--quantize", "fp8-block"], "bf16"),
    "--requantize fp8-block": ("mxfp4", [*HF, "--requantize", "fp8-block"], "bf16"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=3, help="GB of the model in bfloat16")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--work", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reshard-packed-", dir=options.work) as folder:
        work = Path(folder)
        write_hugging_face(llama(options.size), work / "bf16")
        for form in ("mxfp4", "fp8-block"):
            measured([*RESHARD, "convert", work / "bf16", work / form, *HF, "--quantize", form])
        plain = {source: (source, HF, source) for source in ("bf16", "mxfp4")}
        runs = {name: [] for name in (*plain, *CASES)}
        for _ in range(options.turns):
            for name, (source, words, _) in {**plain, **CASES}.items():
                read_into_cache(work / source)
                runs[name].append(measured([*RESHARD, "convert", work / source, work / "out", *words]))
                remove(work / "out")
        wall = {name: min(run.seconds for run in of_case) for name, of_case in runs.items()}
        processor = {name: min(run.processor for run in of_case) for name, of_case in runs.items()}
        for name, of_case in runs.items():
            plain_name, megabytes = CASES[name][2] if name in CASES else name, max(run.megabytes for run in of_case)
            ratios = wall[name] / wall[plain_name], processor[name] / processor[plain_name]
            verdict = "" if max(ratios) <= BAR and megabytes <= MEGABYTES else "  above the bar"
            print(
                f"{name:24} {wall[name]:6.2f} s ({processor[name]:.2f} s of processors)  {ratios[0]:4.2f} ({ratios[1]:4.2f}) x plain  "
                f"{megabytes:4.0f} MB{verdict}"
            )


if __name__ == "__main__":
    main()
