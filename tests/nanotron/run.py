"""Real nanotron, asked line by line (helpers/asked_process.py): loads a folder with nanotron's own code, on ranks that are forked.

A request has `folder`, and
    truth           the file that gets what one rank holds, as in fixtures/nanotron
    target, case    the folder into which the ranks of a case of fixtures/nanotron save it again
The answer is what failed.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "fixtures" / "nanotron"), str(ROOT / "fixtures"), str(ROOT / "tests")]

import make  # noqa: E402
from free_ports import free_port  # noqa: E402
from helpers import asked_process as questions  # noqa: E402

# What ranks import, in an order in which it can be.
NEEDED = ("nanotron.config.models_config", "nanotron.serialize", "nanotron.trainer", "nanotron.models.llama",
          "transformers.models.llama.modeling_llama")  # fmt: skip
start = partial(torch.multiprocessing.start_processes, start_method="fork")


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


def answered(asked: dict[str, str]) -> str:
    folder = Path(asked["folder"])
    try:
        if "truth" in asked:
            start(make.load, (folder, Path(asked["truth"]), 1, 1, free_port()), nprocs=1)
        else:
            tp, pp, _ = make.CASES[asked["case"]]
            start(save_again, (folder, Path(asked["target"]), asked["case"], free_port()), nprocs=tp * pp)
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
        return str(error)[-2000:] or "failed"
    return ""


if __name__ == "__main__":
    make.import_nanotron()
    for name in NEEDED:
        importlib.import_module(name)
    questions.answer(answered)
