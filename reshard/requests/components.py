"""The names of a diffusers component in a training checkpoint: trainers put a word of their own before them, such as `transformer.`.

No model is known here by name. The component's own names are those in the folder that `like=` or `model=` names, if it holds weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from reshard.canonical.content import Selection
from reshard.errors import ReshardError
from reshard.geometry.quantities import plural
from reshard.models.config_values import component_class
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.open import look


def without_trainer_prefix(source: Checkpoint, selection: Selection, like: str | None) -> tuple[str, tuple[str, ...]]:
    """The prefix to remove from the names of a component, and sentences about it. like: the folder that `like=` names.

    A prefix is removed if all own names of the component follow it. If they are not known, it is kept, and a sentence says so.
    """
    component = component_class(source.model_files.config)
    if component is None or selection.strip_prefix:
        return selection.strip_prefix, ()
    names = [tensor.name for tensor in source.of_model(selection).tensors if tensor.kind in ("weight", "buffer", "master")]
    own = _own_names(source, like)
    if own is None:
        words = {name.partition(".")[0] for name in names}
        if len(words) > 1 or len(names) < 2:
            return "", ()
        word = min(words)
        why = "nothing here tells the component's own names"
        return "", (
            f"all names of {component} begin with `{word}.`, and {why}: `strip_prefix={word}.` removes it, if the trainer added it",
        )
    prefix = next((prefix for prefix in _prefixes(names, min(own)) if {prefix + name for name in own} <= {*names}), "")
    if not prefix:
        return "", ()
    others = [name for name in names if name.removeprefix(prefix) not in own]
    about = [f"`{prefix}` is removed from the names: those of {component} have no such prefix"]
    if others:
        about.append(f"written, and not of {component}: {plural(len(others), 'tensor')}, such as {others[0]}; `exclude=` leaves them out")
    return prefix, tuple(about)


def _prefixes(names: Sequence[str], own: str) -> Iterator[str]:
    """What stands before an own name, the shortest first."""
    return iter(sorted((name.removesuffix(own) for name in names if name == own or name.endswith(f".{own}")), key=len))


def _own_names(source: Checkpoint, like: str | None) -> Collection[str] | None:
    """The names of the weights in the component's own folder; None if it is the source itself, or holds none."""
    folder = like or source.model_files.path
    if folder is None or folder.rstrip("/") == source.path.rstrip("/"):
        return None
    try:
        names = {tensor.name for tensor in look(folder, {}).index.tensors}
    except ReshardError:  # a folder with a config alone
        return None
    return names or None
