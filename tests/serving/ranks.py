"""What each rank of real vLLM holds after a load format has filled it: digests of its state dict.

As many processes as there are ranks form a gloo group; vLLM's own plugins, model class and loader do all else.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures"))

import makers
from engine_ranks import State

vllm_make = makers.load("vllm")


def poison(model) -> None:
    """What is not loaded must not look as if it were because memory was handed out again. Placeholders of FP8 scales, which have no axes,
    may stay as they are."""
    import torch

    for parameter in model.parameters():
        if parameter.ndim:
            parameter.data.view(torch.uint8 if parameter.element_size() == 1 else torch.int16).fill_(0x5A)


def answer(**options: object) -> dict[str, State]:
    """The state of every rank, by the rank's part of its file name. options: of vLLM's EngineArgs.

    Raises:
        RankFailed: a rank failed; its traceback is the text.
    """
    from vllm.plugins import load_general_plugins

    vllm_make.arrange()
    load_general_plugins()
    return vllm_make.all_ranks(options, poison)
