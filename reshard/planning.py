"""What one asks before anything runs: `estimate`, what training needs. It reads a config, or a checkpoint's metadata; no weight."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from reshard import estimates, verbs
from reshard.activations import Batch
from reshard.architecture import Model, find_model, known_model_types
from reshard.archives import open_tree
from reshard.errors import RequestError
from reshard.estimates import BytesPer, Estimate, Training
from reshard.model_files import CONFIG, find_model_files
from reshard.parallel import Parallel
from reshard.schedules import Schedule

PathLike = str | os.PathLike[str]


def estimate(
    source: PathLike | Model | int,
    *,
    zero: int | Sequence[int] = estimates.ZERO_STAGES,
    gpus: int | None = None,
    dp: int | None = None,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    vp: int = 1,
    schedule: str = "1f1b",
    microbatches: int = 1,
    seq_len: int | None = None,
    micro_batch: int = 1,
    recompute: Any = "none",
    sequence_parallel: bool = False,
    flash_attention: bool = False,
    activations: str = "published",
    stage_layers: tuple[int, ...] | None = None,
    vocab_multiple: int = 1,
    bytes_per: BytesPer = estimates.ADAM,
    link: int | None = None,
) -> Estimate:
    """What each rank of a training run holds: of the model whose config (or checkpoint) lies at `source`, or of so many parameters.

    zero: stages of ZeRO, 0 to 3; FSDP is 3. gpus or dp: how many ranks there are, or how many of them are data-parallel. Without seq_len
    activations are not counted.

    Raises: RequestError if the model does not divide by the sizes.
    """
    sizes = Parallel(tp, pp, ep, _data_parallel(gpus, dp, tp, pp))
    batch = None
    if seq_len is not None:
        batch = Batch(seq_len, micro_batch, tp, sequence_parallel, recompute, scores=not flash_attention)
    training = Training(sizes, Schedule(schedule, pp, microbatches, vp), batch, activations, bytes_per, stage_layers, vocab_multiple, link)
    subject = source if isinstance(source, (int, Model)) else find_described(source)
    return estimates.estimate(subject, training, (zero,) if isinstance(zero, int) else tuple(zero))


def find_described(path: PathLike) -> Model:
    """The model whose config.json lies in a folder, with weights or without; or that a checkpoint's own settings describe.

    Raises: RequestError if neither does, or the architecture is not declared.
    """
    config = find_model_files(open_tree(path)).config
    if config is None:
        config = verbs.open(path).model_files.config
    if config is None:
        raise RequestError(f"there is no {CONFIG} in {os.fspath(path)!r}", do="Give the directory of the model's config")
    found = find_model(config)
    if found is None:
        raise RequestError(
            f"the architecture {config.get('model_type')!r} is not declared",
            why="What its weights are is not known, and is not guessed",
            do=f"Known are {', '.join(known_model_types())}; or say how many parameters it has",
        )
    return found


def _data_parallel(gpus: int | None, dp: int | None, tp: int, pp: int) -> int:
    """How many data-parallel ranks there are. Raises RequestError if the numbers contradict each other."""
    if gpus is None:
        return dp or 1
    if gpus % (tp * pp) or (dp is not None and dp * tp * pp != gpus):
        product = " x ".join(f"{name} {size}" for name, size in (("DP", dp), ("TP", tp), ("PP", pp)) if size)
        raise RequestError(f"{gpus} GPUs are not {product}", do="Leave out --dp, or change one of the sizes")
    return gpus // (tp * pp)
