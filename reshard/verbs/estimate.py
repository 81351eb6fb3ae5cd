"""TODO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reshard.canonical.dequantization import without_quantization
from reshard.errors import RequestError
from reshard.geometry.parallel import Parallel
from reshard.models.architecture import Architecture
from reshard.models.model import Model
from reshard.training import memory
from reshard.training.activations import Batch
from reshard.training.memory import BytesPer, Estimate, Training
from reshard.training.schedules import Schedule
from reshard.verbs.degrees import PathLike, find_described


def estimate(
    source: PathLike | Model | int,
    *,
    zero: int | Sequence[int] = memory.ZERO_STAGES,
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
    bytes_per: BytesPer = memory.ADAM,
    link: int | None = None,
    architecture: Architecture | PathLike | None = None,
) -> Estimate:
    """What each rank of a training run holds: of the model whose config (or checkpoint) lies at `source`, or of so many parameters.

    zero: stages of ZeRO, 0 to 3; FSDP is 3. gpus or dp: how many ranks there are, or how many of them are data-parallel. Without seq_len
    activations are not counted. architecture: a declared model type, or a file that declares one.

    Raises: RequestError if the model does not divide by the sizes.
    """
    sizes = Parallel(tp, pp, ep, _data_parallel(gpus, dp, tp, pp))
    batch = None
    if seq_len is not None:
        batch = Batch(seq_len, micro_batch, tp, sequence_parallel, recompute, scores=not flash_attention)
    training = Training(sizes, Schedule(schedule, pp, microbatches, vp), batch, activations, bytes_per, stage_layers, vocab_multiple, link)
    subject = source if isinstance(source, int) else _trained(source, architecture)
    return memory.estimate(subject, training, (zero,) if isinstance(zero, int) else tuple(zero))


def _trained(source: PathLike | Model, architecture: Architecture | PathLike | None) -> Model:
    """The model as it is trained: not quantised."""
    model = source if isinstance(source, Model) else find_described(source, architecture)
    return Model(model.architecture, without_quantization(model.config))


def _data_parallel(gpus: int | None, dp: int | None, tp: int, pp: int) -> int:
    """How many data-parallel ranks there are. Raises RequestError if the numbers contradict each other."""
    if gpus is None:
        return dp or 1
    if gpus % (tp * pp) or (dp is not None and dp * tp * pp != gpus):
        product = " x ".join(f"{name} {size}" for name, size in (("DP", dp), ("TP", tp), ("PP", pp)) if size)
        raise RequestError(f"{gpus} GPUs are not {product}", do="Leave out --dp, or change one of the sizes")
    return gpus // (tp * pp)
