"""From what was gathered to a checkpoint that can be trusted, as a row of steps over one frozen Checkpoint.

    recall -> settle | cover -> check save -> note counts -> classify

The steps up to the bar say what the files describe; those behind it compare tensors and files with each other. Of files with
digests the digests say which values are wrong, so they need no `check_save`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from reshard.adapter import registry
from reshard.canonical.optimizer_state import uncounted
from reshard.canonical.tensor_classes import classified
from reshard.engine.checks.one_save import check_copied_files, check_steps
from reshard.errors import RequestError
from reshard.geometry.quantities import plural
from reshard.index.coverage import check_gathered, check_index
from reshard.models.quantization import with_stored_modules
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.gather import naming_what_is_there


def recall(checkpoint: Checkpoint) -> Checkpoint:
    """Add what reshard recorded when it wrote the files: the step, and how several checkpoints were combined."""
    manifest, index = checkpoint.manifest, checkpoint.index
    if manifest is None or manifest.format != index.format:
        return checkpoint
    facts = index.facts if index.facts.step is not None else replace(index.facts, step=manifest.step)
    return replace(checkpoint, index=replace(index, facts=facts).noting(*filter(None, [manifest.combination])))


def settle(checkpoint: Checkpoint) -> Checkpoint:
    """Complete the config by what the tensors tell: the run's own settings, the modules that are stored quantized, and in the inner config
    of a language model, whether a head that is not stored is tied."""
    model_files, index = checkpoint.model_files, checkpoint.index
    stated = index.facts.config
    if stated is not None and stated != model_files.config:
        model_files = replace(model_files, config=stated, derived=True)
    config = with_stored_modules(model_files.config, (tensor.name for tensor in index.tensors))
    model_files = replace(model_files, config=config)
    if config:
        from reshard.canonical.tied_head import KEY, agreed_config

        model = replace(checkpoint, model_files=model_files).model if config.get(KEY) is True else None
        if model is not None and (agreed := agreed_config(index, model)) is not None:
            inner = model.architecture.text_config
            what = f"the config ties a head that is not stored ({KEY}: true), and {inner} does not"
            changes = (f"{what}; {inner} is changed, as vLLM 0.32 reads it",)
            model_files = replace(model_files, config=agreed, derived=True, changes=changes)
    return replace(checkpoint, model_files=model_files, index=index.noting(*model_files.notes))


def cover(checkpoint: Checkpoint) -> Checkpoint:
    """Check that tensors are whole, and hold values."""
    with naming_what_is_there(checkpoint.files):
        check_index(checkpoint.index)
    check_gathered(checkpoint.index.tensors)
    return checkpoint


def check_save(checkpoint: Checkpoint) -> Checkpoint:
    """Check that the files are of one save; a few elements are read."""
    files, index = checkpoint.files, checkpoint.index
    check_steps(files, index)
    check_copied_files(files, index)
    return replace(checkpoint, index=registry.named(checkpoint.format).check_values(files, index))


def note_counts(checkpoint: Checkpoint) -> Checkpoint:
    """Note moments without a step count."""
    index = checkpoint.index
    names = uncounted(((tensor.kind, tensor.name) for tensor in index.tensors), index.param_groups)
    if not names:
        return checkpoint
    moments = f"the optimizer has moments of {plural(len(names), 'parameter')} such as {names[0]}"
    return replace(checkpoint, index=index.noting(f"{moments}, and no count of the steps that made them"))


def classify(checkpoint: Checkpoint) -> Checkpoint:
    """Give every tensor its class (canonical/tensor_classes.py)."""
    try:
        return replace(checkpoint, index=classified(checkpoint.index, checkpoint.model))
    except RequestError:  # the config does not give the model's sizes, and names alone tell the classes; what needs the sizes says so
        return replace(checkpoint, index=classified(checkpoint.index, None))


Step = Callable[[Checkpoint], Checkpoint]
DESCRIBING: tuple[Step, ...] = (recall, settle)
"""The steps to what the files describe, in order."""
CHECKING: tuple[Step, ...] = (cover, check_save, note_counts, classify)
"""The steps from there to a checkpoint that can be trusted."""
COVERING: tuple[Step, ...] = (cover, classify)
"""The steps from there to tensors that can be compared with their digests."""
