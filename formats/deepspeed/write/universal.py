"""The files of a universal checkpoint.

ZeRO-1, 2 and 3 all load it: there are model states for ZeRO-1 and 2 and others for ZeRO-3, and optimizer_state.pt holds what each of them
looks for. ZeRO-1 and 2 take the step count from each parameter's folder, ZeRO-3 from optimizer_state.pt. In both it is a tensor: DeepSpeed
hands it to the optimizer as it is, and torch's Adam refuses a number (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.adapter.model_files import ModelFiles
from reshard.adapter.torch_writer import TorchFile
from reshard.canonical.content import Content
from reshard.canonical.optimizer_state import STEP
from reshard.errors import RequestError
from reshard.geometry.sections import step_count
from reshard.index.index import Tensor
from reshard.plans.layout import Layout, Sidecar, Target, TargetFile

from ..layout.tag import FP32, LATEST_UNIVERSAL, ZERO
from ..layout.tensor_parallel import is_listed
from .training_state import TrainingState, stored_dtype, training_state, zero_stage


def lay_out(content: Content, target: Target, companions: ModelFiles) -> Layout:
    """The files of a universal checkpoint, and `latest_universal`.

    Raises: RequestError if the source lacks optimizer state, or a parameter's name cannot be a folder's.
    """
    target.parallel.allow(what="a universal checkpoint, which any number of ranks can load")
    training = training_state(content, target, "a universal checkpoint")
    tag = f"global_step{training.step}_universal"
    files = [
        _model_file(f"{tag}/mp_rank_00_model_states.pt", training, training.untrained),
        _model_file(f"{tag}/zero_pp_rank_0_mp_rank_00_model_states.pt", training, {}),
        _optimizer_file(f"{tag}/{ZERO}optimizer_state.pt", training),
    ]
    for name in (name for group in training.groups for name in group.names):
        if "/" in name:
            raise RequestError("its name has a slash, and so cannot be the name of a folder", where=name, do="Rename it, or write `to=hf`")
        files.extend(_parameter_files(f"{tag}/{ZERO}{name}", training, name))
    tracker = Sidecar(LATEST_UNIVERSAL, tag.encode())
    return training.layout(files, target, companions, tracker, _note(training), training.aliases)


def _note(training: TrainingState) -> str:
    # deepspeed/runtime/zero/stage3.py, 0.19.8.
    if len({repr(sorted(group.settings.items())) for group in training.groups}) == 1:
        return ""
    return (
        "the param groups' settings differ, and ZeRO-3 loads universal checkpoints with the settings of the first group for all: "
        "for ZeRO-3, use `to=deepspeed`"
    )


def _model_file(path: str, training: TrainingState, module: Mapping[str, Tensor]) -> TargetFile:
    """Model states whose module holds these tensors."""
    file = TorchFile(path)
    tensors = {name: file.whole(name, tensor) for name, tensor in module.items()}
    return file.close(training.model_states(tensors, list(module), [group.names for group in training.groups], 1, {}))


def _optimizer_file(path: str, training: TrainingState) -> TargetFile:
    """optimizer_state.pt: ZeRO-1 and 2 look for groups at the root, ZeRO-3 below optimizer_state_dict."""
    file = TorchFile(path)
    first = training.groups[0].names[0]
    state: dict[str, Any] = {}
    if key := training.states[first].get(STEP):
        state[STEP] = file.whole(key, training.content.tensors[key])
    elif first in training.content.step_counts:
        state[STEP] = file.tensor(step_count(STEP, training.content.step_counts[first]))
    groups = [training.settings(group, [number]) for number, group in enumerate(training.groups)]
    return file.close(
        {
            "zero_stage": zero_stage(2),
            **training.loss_scaler_keys(),
            "param_groups": groups,
            "optimizer_state_dict": {"state": {0: state}, "param_groups": groups},
            "ds_version": training.version,
        }
    )


def _parameter_files(folder: str, training: TrainingState, name: str) -> Iterator[TargetFile]:
    """The files of a parameter: its master, and each kind of its state."""
    elementwise = {FP32, *training.elementwise_states(name)} - {STEP}
    for state, key in {FP32: name, **training.states[name]}.items():
        file, tensor = TorchFile(f"{folder}/{state}.pt"), training.content.tensors[key]
        stored = file.whole(key, tensor, stored_dtype(tensor))
        yield file.close({"param": stored, **_split_keys(training, name)} if state in elementwise else stored)
    if name in training.content.step_counts:
        file = TorchFile(f"{folder}/{STEP}.pt")
        yield file.close(file.tensor(step_count(STEP, training.content.step_counts[name])))


def _split_keys(training: TrainingState, name: str) -> dict[str, Any]:
    """How tensor-parallel ranks split a parameter when they load it: as the source's run split it, otherwise along axis 0."""
    info = training.content.facts.state.get("universal_checkpoint_info") or {}
    if is_listed(info, "tp_replicated_parameter_patterns", name) or is_listed(info, "parameter_to_average_patterns", name):
        return {}
    vocabulary = {"vocab_tensor": True} if is_listed(info, "vocabulary_parameter_patterns", name) else {}
    if is_listed(info, "parameter_with_2_sub_params_cat_dim_0", name):
        return {"cat_dim": 0, "param_n_sub_params": 2, **vocabulary}
    return {"cat_dim": 1 if is_listed(info, "parameter_with_row_parallelism_patterns", name) else 0, **vocabulary}
