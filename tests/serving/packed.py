"""The slow check of packed weights: real vLLM lays out the fixtures in fixtures/hf_packed as reshard does.

    python tests/serving/packed.py --engine-python VLLM_PYTHON [case ...]

Each case is traced at TP 1 and 2 with vLLM's own loader (`reshard learn`), and converted with the learned layout and with reshard's own
rules: all names, shapes, element types and bytes must be equal. No kernel for these weights runs on a CPU; what vLLM would not even trace
there is refused. That the values are those of the libraries is checked by fixtures/hf_packed/make.py --check, in its own environment.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open

import reshard
from reshard.verbs.learn import write_layout

FIXTURES = Path(__file__).resolve().parent.parent.parent / "fixtures" / "hf_packed"
CASES = ("llama-ct-int4", "llama-ct-int4-asym", "llama-ct-int4-channel", "llama-ct-nvfp4", "llama-ct-mxfp4", "llama-ct-mxfp8",
         "llama-modelopt-nvfp4", "llama-modelopt-mxfp8", "llama-awq", "llama-gptq", "qwen3_moe-ct-mxfp4", "llama-modelopt-nvfp4-kv",
         "llama-modelopt-fp8", "llama-modelopt-fp8-channel")  # fmt: skip
SIZES = (1, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-python", required=True)
    parser.add_argument("cases", nargs="*", default=CASES)
    given = parser.parse_args()
    failed = 0
    for case in given.cases:
        with tempfile.TemporaryDirectory() as work:
            different = list(differences(prepared(case, Path(work)), Path(work), given.engine_python))
        failed += bool(different)
        print(f"{'FAILED' if different else 'passed'}  {case}" + "".join(f"\n        {each}" for each in different), flush=True)
    print(f"{len(given.cases) - failed} passed, {failed} failed")
    return 1 if failed else 0


def prepared(case: str, work: Path) -> Path:
    """A copy of a case. vLLM loads symmetric GPTQ alone; its layout is that of this fixture without the zero points' values."""
    folder = shutil.copytree(FIXTURES / case, work / "source")
    if "gptq" in case:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"]["sym"] = True
        path.write_text(json.dumps(config))
    return folder


def differences(source: Path, work: Path, python: str) -> list[str]:
    """What differs between the files by reshard's rules and those by the layout of vLLM's loader."""
    write_layout(reshard.learn(source, engine="vllm", tp=SIZES, engine_python=python), work / "layout.json")
    found = []
    for tp in SIZES:
        written = {}
        for name, options in {"rules": {}, "learned": {"layout": work / "layout.json"}}.items():
            reshard.convert(reshard.plan(source, to="vllm", tp=tp, **options), work / f"{name}{tp}")
            written[name] = tensors(work / f"{name}{tp}")
        for key in sorted(written["rules"].keys() | written["learned"].keys()):
            ours, theirs = (written[name].get(key) for name in ("rules", "learned"))
            if ours != theirs:
                found.append(f"TP {tp}, {key}: {ours and ours[:2]} by the rules, {theirs and theirs[:2]} by vLLM")
    return found


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """(file, tensor) -> its element type, shape and bytes."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                words = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                found[f"{path.name} {name}"] = str(tensor.dtype), tuple(tensor.shape), words
    return found


if __name__ == "__main__":
    sys.exit(main())
