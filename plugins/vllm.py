"""vLLM's load format `reshard`: a training checkpoint is served as it is, and each worker reads its own bytes of it.

    vllm serve CKPT --load-format reshard                                               CKPT holds config.json, too
    vllm serve DIR --load-format reshard --model-loader-extra-config '{"checkpoint": "CKPT"}'

vLLM finds `register` by the entry-point group vllm.general_plugins and calls it in each of its processes. Weights arrive in one of two
ways, and the log says which:

- by rank: the view of this worker's rank, as a conversion would write it, is read straight into the parameters, whose names, shapes and
  element types must be just those of the view;
- whole: where vLLM's layout of the model, or of this version, is not known, whole tensors go to the model's own load_weights, which cuts
  them. Parameters are filled with one NaN beforehand, and whatever still holds it afterwards was not loaded.

Run with vLLM 0.32.0; of older ones the source was read. The decorator that registers load formats is there in 0.10.2, and not in 0.10.0.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

LOAD_FORMAT = "reshard"
_OPTION = "--model-loader-extra-config"


@cache
def register() -> None:
    """Tell vLLM of the load format. Whatever stands in the way is logged, as an error here would stop every start of vLLM."""
    try:
        from vllm.model_executor.model_loader import register_model_loader
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    except ImportError as error:
        _log().warning("reshard: this vLLM takes no load formats of others: %s", error)
        return

    @register_model_loader(LOAD_FORMAT)
    class ReshardLoader(BaseModelLoader):  # type: ignore[misc]
        """What vLLM asks of a loader; the work is done by `load`."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            self._options = Options.of(load_config.model_loader_extra_config)

        def download_model(self, model_config: Any) -> None:
            _config_folder(model_config)

        def load_weights(self, model: Any, model_config: Any) -> None:
            from reshard.errors import ReshardError

            try:
                load(model, model_config, self._options)
            except ReshardError as error:
                error.do = f"{error.do}. Here --model is the model's directory; other options are keys of {_OPTION}" if error.do else None
                raise


@dataclass(frozen=True, slots=True)
class Options:
    """What --model-loader-extra-config may say.

    checkpoint: where it lies, if not in the model's directory. format, architecture, vocab_size, weights, strip_prefix: as on reshard's
    command line. threads: how many read at the same time. whole_tensors: let vLLM cut them, even where its layout is known.
    """

    checkpoint: str = ""
    format: str = ""
    architecture: str = ""
    vocab_size: int = 0
    weights: str = ""
    strip_prefix: str = ""
    threads: int = 4
    whole_tensors: bool = False

    @property
    def reason(self) -> str | None:
        """Why whole tensors are read, if that is said here."""
        if self.whole_tensors:
            return f"{_OPTION} asks for it"
        # What vLLM's class makes of it was not compared: sections could follow each other in another order, which no shape shows.
        return "the architecture is declared by the user" if self.architecture else None

    @classmethod
    def of(cls, given: Any) -> Options:
        """Raises: RequestError for a key that is not known, or a value of another type."""
        from reshard.errors import RequestError

        known = {field.name: type(field.default) for field in fields(cls)}
        said = dict(given) if isinstance(given, Mapping) else {}
        if foreign := sorted(set(map(str, said)) - known.keys()):
            raise RequestError(f"{_OPTION} names {foreign[0]!r}", do=f"Known for --load-format {LOAD_FORMAT} are {', '.join(known)}")
        for name, value in said.items():
            if type(value) is not known[name]:
                raise RequestError(f"{_OPTION}: {name} is {value!r}, a value of type {known[name].__name__} is expected")
        if said.get("threads", 1) < 1:
            raise RequestError(f"{_OPTION}: threads is {said['threads']}, at least 1 is needed")
        return cls(**said)


@dataclass(frozen=True, slots=True)
class Place:
    """Which worker this is: its ranks and how many there are. unusual: why vLLM gives it other experts than its rank tells."""

    rank: int
    tp: int
    pp_rank: int = 0
    pp: int = 1
    ep: int = 1
    unusual: str | None = None

    def __str__(self) -> str:
        stage = f", stage {self.pp_rank} of {self.pp}" if self.pp > 1 else ""
        return f"rank {self.rank} of {self.tp}{stage}"

    @classmethod
    def here(cls, model_config: Any) -> Place:
        """Of this process, from vLLM's parallel state."""
        from vllm import distributed
        from vllm.config import get_current_vllm_config

        parallel = get_current_vllm_config().parallel_config
        tp, pp = distributed.get_tp_group(), distributed.get_pp_group()
        # Versions that do not say whether a model has experts are treated as if it had.
        experts = bool(getattr(model_config, "is_moe", True))
        return cls(
            tp.rank_in_group,
            tp.world_size,
            pp.rank_in_group,
            pp.world_size,
            ep=tp.world_size if experts and parallel.enable_expert_parallel else 1,
            unusual=unusual_experts(parallel) if experts else None,
        )


def unusual_experts(parallel: Any) -> str | None:
    """Why ranks hold other experts, or other parts of them, than they do along the tensor-parallel ranks alone; None if they do not.

    Source: vLLM 0.32, FusedMoEParallelConfig.make, expert_map_manager.py.
    """
    if getattr(parallel, "data_parallel_size", 1) * getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "experts are shared out over data-parallel ranks, too"
    if getattr(parallel, "enable_eplb", False):
        return "expert load balancing keeps some experts more than once"
    placement = getattr(parallel, "expert_placement_strategy", "linear")
    return None if placement == "linear" else f"experts are placed by {placement}"


def load(model: Any, model_config: Any, options: Options) -> None:
    """Fill a model's parameters with the checkpoint's weights.

    Raises: ReshardError if the checkpoint is not whole, is another model's, or leaves a parameter unset.
    """
    import vllm

    import reshard
    from reshard.errors import RequestError

    began, place = time.monotonic(), Place.here(model_config)
    path = options.checkpoint or model_config.model
    opened = reshard.open(
        path,
        format=options.format or None,
        model=_config_folder(model_config),
        vocab_size=options.vocab_size or None,
        architecture=options.architecture or None,
    )
    counted = _Counted(opened.files)
    checkpoint = replace(opened, files=counted)
    chosen: dict[str, Any] = {"weights": options.weights or None, "strip_prefix": options.strip_prefix}
    reason = options.reason or place.unusual
    if reason is None:
        try:
            view = checkpoint.view(
                to="vllm",
                rank=place.rank,
                tp=place.tp,
                pp_rank=place.pp_rank,
                pp=place.pp,
                ep=place.ep,
                engine_version=vllm.__version__,
                **chosen,
            )
        except RequestError as error:
            reason = str(error)
    tied = checkpoint.model.architecture.tied if checkpoint.model and checkpoint.model.is_tied else None
    if reason is None:
        way = "read by rank"
        fill(_parameters(model), view, options.threads, tied)
    else:
        way = "read whole"
        _log().warning("reshard: every worker reads whole tensors, which vLLM cuts: %s", reason)
        untied = getattr(model_config, "word_embeddings_untied_by_checkpoint", False)
        load_whole(model, checkpoint.view(to="hf", **chosen), tied if untied else None, is_quantized=model_config.quantization is not None)
    took = time.monotonic() - began
    _log().info("reshard: %s: %s from %s (%s), %s bytes in %.1f s", place, way, path, checkpoint.format, f"{counted.nbytes:,}", took)


def fill(parameters: Mapping[str, Any], view: Mapping[str, Any], threads: int, tied: tuple[str, str] | None = None) -> None:
    """Read a rank's view into the parameters of the same names.

    Raises: RequestError unless names, shapes and element types are the same, floats of other widths aside, which are cast.
    """
    matched = match(parameters, view, tied)
    with ThreadPoolExecutor(threads, thread_name_prefix="reshard") as pool:
        running = [pool.submit(view[matched[name]].read_into, parameter) for name, parameter in parameters.items()]
        try:
            for future in running:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def match(parameters: Mapping[str, Any], view: Mapping[str, Any], tied: tuple[str, str] | None = None) -> dict[str, str]:
    """Parameter -> the name in the view that it is filled from: its own, or that of the table that it is tied to.

    tied: the two names of that table. vLLM unties them where a checkpoint's files hold both, and ties them again once both are loaded.

    Raises: RequestError if a parameter has nothing to be filled from, something is left, or a shape or element type is another.
    """
    from reshard.geometry.dtypes import from_torch

    found = {name: name for name in parameters if name in view}
    if tied and set(tied) <= parameters.keys():
        one = next((name for name in tied if name in view), None)
        found |= {name: one for name in tied if one and name not in found}
    if missing := sorted(parameters.keys() - found.keys()):
        raise _other_layout(missing[0], f"vLLM has this parameter, and {len(missing) - 1} more, that the layout has not")
    if surplus := sorted(set(view) - set(found.values())):
        raise _other_layout(surplus[0], f"the layout has this tensor, and {len(surplus) - 1} more, that vLLM has not")
    for name, parameter in parameters.items():
        held, dtype = view[found[name]], from_torch(str(parameter.dtype), where=name)
        if held.shape != tuple(parameter.shape) or parameter.is_meta:
            where = "is not in memory yet" if parameter.is_meta else f"is {list(parameter.shape)}"
            raise _other_layout(name, f"the layout has it as {list(held.shape)}, vLLM's {where}")
        if not held.fits(dtype):
            raise _other_layout(name, f"the layout has it as {held.dtype}, vLLM as {dtype}")
    return found


def load_whole(model: Any, view: Mapping[str, Any], untied: tuple[str, str] | None, *, is_quantized: bool) -> None:
    """Hand whole tensors, one at a time, to the model's own load_weights, leaving out those of other stages.

    untied: the two names of one table that this vLLM wants to have under both.

    Raises: CheckpointError if a parameter was not loaded, or not all of it. Of quantised models, some of whose parameters may stay as they
    are, they are logged.
    """
    from vllm.model_executor.models.utils import is_pp_missing_parameter

    parameters = dict(model.named_parameters())
    if not is_quantized:
        poison(parameters.values())
    names = {name: name for name in view}
    if untied:
        names |= {name: one for one in untied if one in view for name in untied}
    loaded = model.load_weights((name, view[names[name]].torch()) for name in names if not is_pp_missing_parameter(name, model))
    if not is_quantized:
        check_loaded(parameters)
    elif left := sorted(parameters.keys() - (loaded or parameters.keys())):
        _log().warning("reshard: %d parameters were not loaded, the first is %s", len(left), left[0])


# A NaN that no computation makes, in float16, bfloat16 and float32 alike: word by word.
_POISON = {2: 0x7FA5, 4: 0x7FA57FA5, 8: 0x7FF57FA57FA57FA5}
# Elements that are looked at together.
_STRIP = 1 << 24


def poison(parameters: Any) -> None:
    """Fill floating-point parameters with a NaN by which they are known again."""
    for words, value in map(_words, parameters):
        words.fill_(value)


def check_loaded(parameters: Mapping[str, Any]) -> None:
    """Raises CheckpointError if a parameter still holds what `poison` wrote."""
    from reshard.errors import CheckpointError

    left = [name for name, parameter in parameters.items() if _is_poisoned(parameter)]
    if left:
        raise CheckpointError(
            f"it was not loaded, or not all of it, nor were {len(left) - 1} more",
            where=left[0],
            why="vLLM would serve what happened to be in memory",
            do="Check that the checkpoint is of the model that the config describes",
        )


def _is_poisoned(parameter: Any) -> bool:
    words, value = _words(parameter)
    return any(bool((strip == value).any()) for strip in words.reshape(-1).split(_STRIP))


def _words(parameter: Any) -> tuple[Any, int]:
    """A parameter's bits as integers, sharing its memory, and the poison for them; nothing of what is no float, or not in memory."""
    import torch

    size = parameter.element_size()
    if not parameter.is_floating_point() or parameter.is_meta or size not in _POISON:
        return torch.empty(0, dtype=torch.int16), 0
    return parameter.data.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size]), _POISON[size]


class _Counted:
    """Files that count the bytes that are read from them."""

    def __init__(self, files: Any) -> None:
        self._files, self._lock, self.nbytes = files, Lock(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        self._count(buffer)
        self._files.read_into(path, byte_offset, buffer)

    def read_runs(self, path: str, byte_offsets: Any, buffer: memoryview) -> None:
        self._count(buffer)
        self._files.read_runs(path, byte_offsets, buffer)

    def _count(self, buffer: memoryview) -> None:
        with self._lock:
            self.nbytes += len(buffer)


def _parameters(model: Any) -> dict[str, Any]:
    """The names that vLLM's own sharded_state would have: parameters and buffers, of names for one memory the first."""
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    found: dict[str, Any] = ShardedStateLoader._filter_subtensors(model.state_dict())
    return found


def _config_folder(model_config: Any) -> str:
    """The directory of the model's config.json; of a model that is named as on the hub, where its client keeps it."""
    named = getattr(model_config, "hf_config_path", None) or model_config.model
    if Path(named).is_dir():
        return str(named)
    from huggingface_hub import hf_hub_download

    return str(Path(hf_hub_download(named, "config.json", revision=model_config.revision)).parent)


def _other_layout(name: str, what: str) -> Exception:
    from reshard.errors import RequestError

    return RequestError(
        what,
        where=name,
        why="This vLLM, or an option that it was started with, lays the model out in another way than reshard knows",
        do=f"""Let vLLM cut whole tensors, with {_OPTION} '{{"whole_tensors": true}}'""",
    )


def _log() -> Any:
    """vLLM shows what its own loggers say."""
    import logging

    return logging.getLogger("vllm.reshard")
