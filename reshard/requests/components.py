"""The names of a diffusers component in a training checkpoint: trainers put a word of their own before them, such as `transformer.`.

No model is known here by name. The component's own names are those in the folder that `like=` or `model=` names, if it holds weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from reshard.canonical.content import Selection
from reshard.errors import CheckpointError, ReshardError
from reshard.geometry.quantities import plural
from reshard.models.config_values import component_class
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.open import look


def without_trainer_prefix(source: Checkpoint, selection: Selection, like: str | None) -> tuple[str, tuple[str, ...]]:
    """The prefix to remove from the names of a component, and sentences about it. like: the folder that `like=` names.

    A prefix is removed if it stands before the component's own names. If they are not known, it is kept, and a sentence says so.

    Raises: CheckpointError if some of the component's own weights are missing.
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
    prefix, stored = _prefix(names, own), {*names}
    lacking = sorted(name for name in own if prefix + name not in stored)
    if 2 * len(lacking) > len(own):  # names of another repository, or an adapter
        unlike = f"{plural(len(lacking), 'weight')} of {component} are not there under its names, such as {lacking[0]}: names stay"
        return "", (unlike,) if names else ()
    if lacking and not (selection.include or selection.exclude):
        raise CheckpointError(
            f"the source lacks {plural(len(lacking), 'weight')} of {component}, such as {lacking[0]}",
            where=source.path,
            why="diffusers would load the folder with random values in their place",
            do="Check that the trainer saved all of the model; `include='*'` writes the tensors that are there",
        )
    if not prefix:
        return "", ()
    others = [name for name in names if name.removeprefix(prefix) not in own]
    about = [f"`{prefix}` is removed from the names: those of {component} have no such prefix"]
    if others:
        about.append(f"written, and not of {component}: {plural(len(others), 'tensor')}, such as {others[0]}; `exclude=` leaves them out")
    return prefix, tuple(about)


def _prefix(names: Sequence[str], own: Collection[str]) -> str:
    """What stands before most of the own names; the shortest of several."""
    prefixes: Counter[str] = Counter()
    for name in names:
        places = [0, *(place + 1 for place, letter in enumerate(name) if letter == ".")]
        prefixes.update(name[:place] for place in places if name[place:] in own)
    return min(prefixes, key=lambda prefix: (-prefixes[prefix], len(prefix)), default="")


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
