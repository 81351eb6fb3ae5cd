"""Whether a save is whole: each weight of the model is there, and each master rounds to its weight.

Optimizers that keep masters as remainders truncate instead of rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.canonical.renaming import adapter_name
from reshard.errors import IncompleteError, MixedSaves
from reshard.index.index import Index, Tensor
from reshard.storage.files import Files

if TYPE_CHECKING:
    from reshard.engine.checks.masters import WrongMaster

from ..layout.tensors import BUFFER_ROLES
from .run_model import RunModel


def check_complete(model: RunModel, tensors: Iterable[Tensor], where: str, *, with_optimizer: bool) -> None:
    """Raises CheckpointError if a weight of the model is in no file.

    with_optimizer: also if a weight has no optimizer state although other weights have.
    """
    names: dict[str, set[str]] = {"weight": set(), "moment1": set()}
    for tensor in tensors:
        names.setdefault(tensor.kind, set()).add(tensor.name)
    if model.adapters:
        of_adapter = {name for name in names["weight"] if adapter_name(name)}
        _check_factors(of_adapter, where)
        if of_adapter == names["weight"]:
            return
        with_optimizer = False  # the base is frozen
    moments = names["moment1"] if with_optimizer else set()
    for name, weight in model.megatron.model.weights.items():
        has_weight = name in names["weight"]
        has_state = not moments or name in moments or weight.role in BUFFER_ROLES
        if not weight.optional and not (has_weight and has_state):
            raise IncompleteError(
                f"{'its optimizer state' if has_weight else 'it'} is in no file",
                where=name,
                why=f"The run's model has it; files of a rank are missing in {where}, or were lost",
                do="Copy all ranks' files from where the checkpoint was written",
            )


def _check_factors(names: Collection[str], where: str) -> None:
    """Raises IncompleteError if an adapter's A or B is in no file."""
    for name in names:
        other = name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")
        if other not in names:
            raise IncompleteError(
                "it is in no file",
                where=other,
                why=f"{name} is there, and an adapter is the product of both; files of a rank are missing in {where}, or were lost",
                do="Copy all ranks' files from where the checkpoint was written",
            )


def check_masters(files: Files, index: Index) -> Index:
    """The index. Raises CheckpointError if a master does not round to its weight."""
    if wrong := _wrong_master(files, index):
        raise MixedSaves(
            f"its master in {wrong.master_path} is not what the weight was rounded from",
            where=f"{wrong.name} in {wrong.weight_path}",
            why="Either the optimizer's file belongs to another save, or its parameters have another order than in this version",
            do="Copy the files of one save again; or take the weights alone: move the optimizer's file away",
        )
    return index


def without_wrong_masters(files: Files, index: Index) -> Index:
    """The index; without its optimizer state and with a note if a master does not round to its weight.

    Megatron-Core 0.16 itself writes shifted values into a fully reshardable checkpoint if a buffer had several buckets (its issue 504).
    """
    wrong = _wrong_master(files, index)
    if wrong is None:
        return index
    note = (
        f"the optimizer's state is left out: {wrong.name} in {wrong.weight_path}: its master in {wrong.master_path} is not what the weight "
        "was rounded from (Megatron-Core 0.16 shifts it if there were several buckets)"
    )
    weights = tuple(tensor for tensor in index.tensors if tensor.kind == "weight")
    return replace(index, tensors=weights, facts=replace(index.facts, notes=(*index.facts.notes, note)), param_groups=tuple)


def _wrong_master(files: Files, index: Index) -> WrongMaster | None:
    """A master that does not round to its weight.

    Where a parameter lies in an optimizer's buffer follows from settings and order alone, so many parameters are compared. A truncated
    master lies at most one representable value from the rounded one.
    """
    from reshard.engine.checks.masters import wrong_master

    return wrong_master(files, index, per_file=2000, tolerance=1)
