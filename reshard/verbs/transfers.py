"""The verb `transfers`: what would travel from the memory of a run's ranks into the memory of an engine's ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from reshard.errors import RequestError
from reshard.live.memory.computed import computed_memory
from reshard.live.memory.description import RankDescription
from reshard.live.memory.index import checkpoint_of, memories_of
from reshard.live.plan.transfer_plan import RankMemory, TransferPlan, memory_of_files, transfer_plan
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import PathLike, PlanOptions, checked_keywords
from reshard.opening.open import opened
from reshard.requests.planning import plan_conversion
from reshard.requests.request import ConversionRequest
from reshard.storage.system_calls import gc_paused

Source = Sequence[RankDescription] | Checkpoint | PathLike | Mapping[str, Any]
"""The descriptions of all ranks of a run; an opened checkpoint or its path; or the config of a model whose run is computed."""


@gc_paused()
@checked_keywords
def transfers(
    source: Source,
    *,
    to: str,
    of: str | None = None,
    degrees: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    replicas: int = 1,
    **options: Unpack[PlanOptions],
) -> TransferPlan:
    """The proven plan of a transfer from the memory of a run's ranks to the ranks of an engine. Nothing is sent, and torch is not needed.

    source: a list of what each rank says of itself (`reshard.live.describe`), a checkpoint, whose files are the ranks, or a model's config
    with `of` and `degrees`: the framework ("fsdp" or "megatron") and the sizes of the run, such as {"dp": 512}. config: the model's Hugging
    Face config, if the descriptions do not tell it. replicas: how many engines of these sizes receive the weights. Other keywords are those
    of `plan`.

    Raises: RequestError if the model or the sizes do not allow it, CheckpointError if the ranks do not hold the whole model,
    UnsupportedError if values would have to be computed that a transfer cannot compute.
    """
    if (of is None) != (degrees is None):
        raise RequestError("`of=` and `degrees=` belong together", do="Give both to compute a run, and none if its ranks are described")
    checkpoint, memories = _memory(source, of, degrees, config)
    plan = plan_conversion(checkpoint, ConversionRequest.of(to, options))
    return transfer_plan(plan, replicas=replicas, sources=memories)


def _memory(
    source: Source, of: str | None, degrees: Mapping[str, Any] | None, config: Mapping[str, Any] | None
) -> tuple[Checkpoint, Sequence[RankMemory]]:
    if of is not None:
        stated = source if isinstance(source, Mapping) else opened(source).model_files.config if not isinstance(source, Sequence) else None
        if stated is None:
            raise RequestError("a computed run needs the model's config", do="Give the config, or a folder that holds one, as the source")
        return computed_memory(stated, of, degrees or {})
    if isinstance(source, Sequence) and not isinstance(source, str):
        return checkpoint_of(source, config=config), memories_of(source)
    if isinstance(source, Mapping):
        raise RequestError("a config alone does not say how the run's ranks hold the model", do="Add `of=` and `degrees=`")
    checkpoint = opened(source)
    return checkpoint, memory_of_files(checkpoint.index)
