"""Runs in an environment with nanotron: loads a folder with nanotron's own code.

python run.py load FOLDER TRUTH           on one rank, and writes what it holds, as in fixtures/nanotron
python run.py save FOLDER TARGET CASE     on the ranks of a case of fixtures/nanotron, and saves it again
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "fixtures" / "nanotron"), str(ROOT / "fixtures")]

import make  # noqa: E402
from free_ports import free_port  # noqa: E402


def save_again(rank: int, folder: Path, target: Path, case: str, port: int) -> None:
    tp, pp, settings = make.CASES[case]
    make._start(rank, tp * pp, port)
    from nanotron.config.models_config import LlamaConfig
    from nanotron.serialize import load_weights

    model, context = make.built(tp, pp, LlamaConfig(**make.SIZES | settings))
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    load_weights(model=model, parallel_context=context, root_folder=folder)
    make.save_model(model, context, target, {})
    make._end()


if __name__ == "__main__":
    mode, folder, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if mode == "load":
        torch.multiprocessing.spawn(make.load, (folder, target, 1, 1, free_port()), nprocs=1)
    else:
        tp, pp, _ = make.CASES[sys.argv[4]]
        torch.multiprocessing.spawn(save_again, (folder, target, sys.argv[4], free_port()), nprocs=tp * pp)
