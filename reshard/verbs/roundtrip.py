"""TODO."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from reshard.adapter import registry
from reshard.adapter.model_files import find_model_files
from reshard.adapter.protocol import Hints
from reshard.canonical.content import Selection
from reshard.canonical.name_variants import with_canonical_names
from reshard.canonical.optimizer_state import is_master_key
from reshard.engine.compare import Comparison, Side, compare
from reshard.models.lookup import find_model
from reshard.plans.plan import Plan
from reshard.plans.proof import RoundTrip, compose, widens
from reshard.storage.files import VirtualFiles
from reshard.verbs.checkpoint import Checkpoint, PathLike, Progress, open, plan
from reshard.verbs.convert import convert


def roundtrip(made: Plan) -> RoundTrip:
    """Proof, by composing plans, that the way there and back is the identity; no weight is read.

    The target's own reader is given the planned headers, and nothing else, to say where it would find each weight.
    """
    virtual = VirtualFiles(f"the planned {made.layout.format} checkpoint")
    for file in made.layout.files:
        virtual.add(file.path, file.nbytes, file.literals)
    for sidecar in made.layout.sidecars:
        virtual.add(sidecar.path, len(sidecar.content), ((0, sidecar.content),))
    model = made.content.model
    config = find_model_files(virtual).config or (model.config if model else None)
    architecture = model.architecture if model else None
    writer = registry.writer(made.layout.format)
    read_back = writer.read(virtual, Hints(config, architecture=architecture))
    return compose(
        made, read_back if getattr(writer, "keeps_names", False) else with_canonical_names(read_back, find_model(config, architecture))
    )


def materialize(
    made: Plan,
    source: Checkpoint,
    *,
    work: PathLike | None = None,
    workers: int | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Convert there and back for real, below `work`, and compare every bit with the source; returns what was lost, as sentences.

    The way back ends in the source's own format where that can be written, otherwise in whole tensors (hf; with optimizer state,
    which hf has none of, in the target's own format on one rank).
    """
    effort: dict[str, Any] = {"workers": workers, "memory": memory, "progress": progress}
    whole_format = made.layout.format if made.content.states else _WHOLE
    back_format = source.format if registry.can_write(registry.reader(source.format)) else whole_format
    with TemporaryDirectory(prefix="reshard-", dir=work) as folder:
        there, back = Path(folder, "there"), Path(folder, "back")
        convert(made, there, **effort)
        there_opened = open(there, model=source.model_files.path, architecture=source.architecture)
        content, facts = source.content(made.content.selection, model=made.content.model), source.index.facts
        selection = Selection(optimizer=bool(content.states), masters=any(is_master_key(key) for key in content.states))
        sizes: dict[str, Any] = {}
        if back_format == source.format:
            sizes = {name: facts.parallel[name] for name in ("tp", "pp") if name in facts.parallel}
            sizes = {"dp": facts.mesh.ranks} if facts.mesh else sizes
        convert(plan(there_opened, to=back_format, optimizer=selection.optimizer, **sizes), back, **effort)
        left = Side(source.files, source.index, content)
        losses: list[str] = []
        # What was made wider holds the same values; any other cast is a loss, and is found as one.
        casts = [route for route in made.routes if route.is_cast]
        wider = bool(casts) and all(widens(route) for route in casts)
        for name, found in (
            (f"there ({made.layout.format})", there_opened),
            (f"back ({back_format})", open(back, model=source.model_files.path, architecture=source.architecture)),
        ):
            result = Comparison()
            right = Side(found.files, found.index, found.content(selection, model=content.model))
            for nbytes in compare(left, right, result, with_cast=wider, workers=workers, memory=memory):
                if progress:
                    progress(nbytes)
            losses.extend(f"{difference.name}: {name}: {difference.detail}" for difference in result.differences)
        return losses


# The format that holds every tensor whole, under its canonical name.
_WHOLE = "hf"
