"""What checksums cost: cp, hf to hf, hf to dcp and dcp to hf in turns, with and without the checksums of the source.

    python benchmarks/checksums.py [--size 4] [--turns 5] [--work DIR]
    BEFORE=PYTHON python benchmarks/checksums.py ...     # PYTHON has an older reshard, whose runs take turns with ours

The dcp is written by reshard: its storages carry CRC-32. The ratios are of pairs, and it is the processor time that counts. BEFORE can
also be an environment without `isal`, to compare with zlib's CRC-32.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from measuring import RESHARD, copy_of, given, header, in_turn, measured, row
from synthetic import llama, write_hugging_face


def main() -> None:
    options, before = given(__doc__ or "", 4), os.environ.get("BEFORE")
    with tempfile.TemporaryDirectory(prefix="reshard-checksums-", dir=options.work) as folder:
        hf, dcp, out = (Path(folder) / name for name in ("hf", "dcp", "out"))
        write_hugging_face(llama(options.size), hf)
        measured([*RESHARD, "convert", hf, dcp, "--to", "dcp"])
        cases: dict[str, list[object]] = {
            "hf to hf": [hf, out, "--to", "hf"],
            "hf to vllm TP 8": [hf, out, "--to", "vllm", "--tp", "8"],
            "hf to dcp": [hf, out, "--to", "dcp"],
            "dcp to hf": [dcp, out, "--to", "hf"],
        }
        commands = {"cp": copy_of(hf, out)}
        for name, words in cases.items():
            commands[name] = [*RESHARD, "convert", *words]
            if before:
                commands[f"{name}, before"] = [before, "-m", "reshard", "convert", *words]
        if b"--no-source-checksums" in subprocess.run([*RESHARD, "convert", "--help"], capture_output=True, check=True).stdout:
            commands["dcp to hf, unchecked"] = [*commands["dcp to hf"], "--no-source-checksums"]
        runs = in_turn(commands, out, options.turns)
        header(f"{options.size:g} GB")
        for name in [name for name in commands if name != "cp"]:
            row(name, runs[name], runs["cp"])
        for name in cases if before else ():
            row(f"{name}, against before", runs[name], runs[f"{name}, before"])


if __name__ == "__main__":
    main()
