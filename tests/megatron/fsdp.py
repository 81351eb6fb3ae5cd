"""A slow check: real Megatron-FSDP of megatron-core 0.19.2 loads what `--to fsdp_dtensor` wrote, weights, moments, steps and rates.

    python tests/megatron/fsdp.py [--python PATH] [--reshard PATH]

PATH is a Python with the environment of fixtures/megatron_0_19/make.py; without it .venv-megatron-0.19 is made.

The load is that of Megatron-LM (training/checkpointing.py): the state dicts of a new run, its handlers, torch.distributed.checkpoint, and
load_state_dict of model and optimizer, on CPU ranks over gloo. Then the live optimizer tells its main weights and moments, which have to
have the bits of the run that saved the fixture. With one parameter's moment for another's the check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))

from helpers.framework_environments import Environment  # noqa: E402

MEGATRON = Environment("Megatron-0.19", HERE / "requirements_0_19.txt", options=("--no-deps", "--ignore-requires-python"))
FIXTURES = ROOT / "fixtures" / "megatron_fsdp"
# Case of the fixtures -> the tensor-parallel size that decides the padding.
CASES = {"llama-dp2": 1, "llama-tp2-dp2": 2, "mixtral-ep2": 1}
LOADED = """
import os, sys
sys.path[:0] = [{fixtures!r}, {above!r}]
import make, ranks
make.legacy.shared.main = None
if __name__ == "__main__":
    ranks.load_and_tell(make.CASES[{case!r}], {folder!r}, {told!r})
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python")
    parser.add_argument("--reshard", default=str(Path(sys.executable).parent / "reshard"))
    options = parser.parse_args()
    python = options.python or MEGATRON.python()
    wrong = 0
    for case, tp in CASES.items():
        with tempfile.TemporaryDirectory() as work:
            folder, told = Path(work) / "save", Path(work) / "told.json"
            convert = [
                options.reshard,
                "convert",
                FIXTURES / case / "checkpoint",
                folder,
                "--to",
                "fsdp_dtensor",
                "--optimizer",
                "--dp",
                "3",
            ]
            convert += ["--tp", str(tp), "--vocab-multiple", "8", "--model", FIXTURES / case / "model"]
            subprocess.run(list(map(str, convert)), check=True, capture_output=True)
            script = Path(work) / "load.py"
            paths = {"fixtures": str(FIXTURES), "above": str(FIXTURES.parent)}
            script.write_text(LOADED.format(**paths, case=case, folder=str(folder), told=str(told)))
            subprocess.run([str(python), str(script)], check=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})
            loaded, truth = json.loads(told.read_text()), json.loads((FIXTURES / case / "truth.json").read_text())["tensors"]
        settings = loaded.pop("settings")
        differing = [name for name in truth if loaded["tensors"].get(name) != truth[name]]
        is_wrong = bool(differing) or settings["step"] != [2] or len(settings["lr"]) != 1
        wrong += is_wrong
        print(f"{'WRONG' if is_wrong else 'ok'} {case}: {len(truth)} weights with moments, {settings}", *differing[:3], flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
