"""What packed weights cost: carried, cut for ranks, dequantized, quantized and requantized, against a plain conversion.

    python benchmarks/packed.py [--size 3] [--turns 3] [--work DIR]

Wall seconds, processor seconds and peak memory of whole processes, starts included. The plain conversion (hf -> hf) is that of as many
bytes: of the unpacked model where values are read or written, of the packed model where its bytes are carried. The conversions take turns;
the best of each counts, because the machine only ever adds time. The bar is 1.5 times the plain conversion, and 120 MB; docs/benchmarks.md
has the aims of single forms. In a model of 1 GB half of the bytes are embeddings, which are not packed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from measuring import RESHARD, Conversion, compare_with_plain, given, measured
from synthetic import llama, write_hugging_face, write_packed

BAR, MEGABYTES = 1.5, 120
HF, RANKS = ["--to", "hf"], ["--to", "vllm", "--tp", "2"]
QUANTIZED, PACKED = ("mxfp4", "fp8-block", "fp8-channel", "mxfp8", "nvfp4"), ("awq", "gptq")
# What is measured -> (source, options, the source of the plain conversion).
CASES = {
    "MXFP4 carried": ("mxfp4", HF, "mxfp4"),
    "MXFP4 cut for 2 ranks": ("mxfp4", RANKS, "mxfp4"),
    "--dequantize MXFP4": ("mxfp4", [*HF, "--dequantize"], "bf16"),
    **{f"--dequantize {form}": (form, [*HF, "--dequantize"], "bf16") for form in (*QUANTIZED[1:], *PACKED)},
    **{f"--quantize {form}": ("bf16", [*HF, "--quantize", form], "bf16") for form in QUANTIZED},
    "--requantize fp8-block": ("mxfp4", [*HF, "--requantize", "fp8-block"], "bf16"),
}


def main() -> None:
    options = given(__doc__ or "", 3)
    with tempfile.TemporaryDirectory(prefix="reshard-packed-", dir=options.work) as folder:
        work = Path(folder)
        write_hugging_face(llama(options.size), work / "bf16")
        for form in PACKED:
            write_packed(llama(options.size), work / form, form)
        for form in QUANTIZED:
            measured([*RESHARD, "convert", work / "bf16", work / form, *HF, "--quantize", form])
        plain = {source: (source, HF, source) for source in ("bf16", "mxfp4")}
        conversions = {name: Conversion(work / source, words, of) for name, (source, words, of) in {**plain, **CASES}.items()}
        compare_with_plain(conversions, work / "out", options.turns, bar=BAR, megabytes=MEGABYTES)


if __name__ == "__main__":
    main()
