"""The verb `roundtrip`: proof that a conversion and its way back lose nothing, from the plan alone or with files on disk."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from reshard.adapter import registry
from reshard.adapter.format import Hints
from reshard.adapter.model_files import find_model_files
from reshard.canonical.content import Selection
from reshard.canonical.name_variants import with_canonical_names
from reshard.canonical.optimizer_state import is_master_key
from reshard.engine.compare import Comparison, Side, compare
from reshard.engine.pool import Effort
from reshard.models.lookup import find_model
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import EffortOptions, PathLike, checked_keywords
from reshard.opening.open import open
from reshard.plans.plan import Plan
from reshard.plans.proof import RoundTrip, compose, widens
from reshard.storage.files import VirtualFiles
from reshard.verbs.convert import convert
from reshard.verbs.plan import plan as plan_of

# The format that holds every tensor whole, under its canonical name.
_WHOLE = "hf"


def roundtrip(plan: Plan) -> RoundTrip:
    """Proof, by composing plans, that the way there and back is the identity. No weight is read.

    The target's own reader gets the planned headers, and nothing else, and says where it would find each weight.
    """
    virtual = VirtualFiles(f"the planned {plan.layout.format} checkpoint")
    for file in plan.layout.files:
        virtual.add(file.path, file.nbytes, tuple(file.literals))
    for sidecar in plan.layout.sidecars:
        virtual.add(sidecar.path, len(sidecar.content), ((0, sidecar.content),))
    model = plan.content.model
    config = find_model_files(virtual).config or (model.config if model else None)
    architecture = model.architecture if model else None
    format = registry.target(plan.layout.format)
    read_back = format.read(virtual, Hints(config, architecture=architecture))
    if not format.keeps_names:
        read_back = with_canonical_names(read_back, find_model(config, architecture))
    return compose(plan, read_back)


@checked_keywords
def materialize(plan: Plan, source: Checkpoint, *, work: PathLike | None = None, **options: Unpack[EffortOptions]) -> list[str]:
    """Convert there and back in a temporary folder below `work`, and compare every bit with the source; returns a sentence for each loss.

    The way back writes the source's own format, if reshard can write it. Otherwise it writes whole tensors: in hf, or, because hf holds no
    optimizer state, in the target's own format on one rank.
    """
    effort = Effort.of(options)
    whole_format = plan.layout.format if plan.content.states else _WHOLE
    back_format = source.format if registry.named(source.format).can_write else whole_format
    about_model = {"model": source.model_files.path, "architecture": source.architecture}
    with TemporaryDirectory(prefix="reshard-", dir=work) as folder:
        there, back = Path(folder, "there"), Path(folder, "back")
        convert(plan, there, **options)
        there_opened = open(there, **about_model)  # type: ignore[arg-type]
        content = source.content(plan.content.selection, model=plan.content.model)
        selection = Selection(
            optimizer=bool(content.states),
            masters=any(is_master_key(key) for key in content.states),
            keep_unknown=plan.content.selection.keep_unknown,
            keep_adapter=plan.content.selection.keep_adapter,
        )
        sizes = _own_sizes(source) if back_format == source.format else {}
        way_back = plan_of(there_opened, to=back_format, optimizer=selection.optimizer, keep_unknown=selection.keep_unknown, **sizes)
        convert(way_back, back, **options)
        left = Side(source.files, source.index, content)
        # A cast that widens keeps every value. Any other cast is a loss, and the comparison reports it.
        casts = [route for route in plan.routes if route.is_cast]
        wider = bool(casts) and all(widens(route) for route in casts)
        losses: list[str] = []
        for name, checkpoint in (
            (f"there ({plan.layout.format})", there_opened),
            (f"back ({back_format})", open(back, **about_model)),  # type: ignore[arg-type]
        ):
            result = Comparison()
            right = Side(checkpoint.files, checkpoint.index, checkpoint.content(selection, model=content.model))
            compare(left, right, result, with_cast=wider, effort=effort)
            losses.extend(f"{difference.name}: {name}: {difference.detail}" for difference in result.differences)
        return losses


def _own_sizes(source: Checkpoint) -> dict[str, Any]:
    """The parallel sizes that the source itself has."""
    facts = source.index.facts
    if facts.mesh:
        return {"dp": facts.mesh.ranks}
    return {name: facts.parallel[name] for name in ("tp", "pp") if name in facts.parallel}
