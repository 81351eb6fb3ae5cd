"""vLLM's load format `reshard`: vLLM serves a training checkpoint without a conversion, and each worker reads only its own bytes.

    vllm serve CKPT --load-format reshard                                               CKPT also holds config.json
    vllm serve DIR --load-format reshard --model-loader-extra-config '{"checkpoint": "CKPT"}'
    vllm serve run/global_step_300/actor/huggingface --load-format reshard              verl's: the checkpoint lies around this folder

vLLM finds `register` through the entry-point group vllm.general_plugins and calls it in each of its processes. Weights are loaded in one of
these ways, and the log says in which:

- by rank: what a conversion would write for this worker's rank is read straight into the parameters. Names, shapes and element types of the
  parameters must be exactly those of the conversion.
- by rank by a learned layout: for a model that is not declared, by a file that `reshard learn` has written: the key `layout`, or
  reshard.layout.json beside the checkpoint or the model.
- whole: where vLLM's layout of the model or of this version is not known, whole tensors go to the model's own load_weights, which splits
  them. The parameters are filled with a marker NaN first; a parameter that still holds this NaN afterwards was not loaded completely.

Run with vLLM 0.32.0; for older versions the source was read. The decorator that registers load formats exists in 0.10.2, not in 0.10.0.
"""

from __future__ import annotations

import os
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
_VERL_FOLDER = "huggingface"


@cache
def register() -> None:
    """Register the load format and the weight-transfer backend with vLLM. A failure is only logged, since an error here would stop every
    start of vLLM."""
    _register_transfer()
    try:
        from vllm.model_executor.model_loader import register_model_loader
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    except ImportError as error:
        _log().warning("reshard: this vLLM does not accept load formats of plugins: %s", error)
        return

    @register_model_loader(LOAD_FORMAT)
    class ReshardLoader(BaseModelLoader):  # type: ignore[misc]
        """vLLM's interface of a loader; `load` does the work."""

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
                error.do = f"{error.do}. Here `model=` is the model's directory; other options are keys of {_OPTION}" if error.do else None
                raise


def _register_transfer() -> None:
    """The weight-transfer backend; its module is imported when an engine uses it. The registry came with vLLM 0.12."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory

        WeightTransferEngineFactory.register_engine(LOAD_FORMAT, "reshard.plugins.weight_transfer.vllm", "ReshardTransfer")
    except (ImportError, ValueError) as error:
        _log().warning("reshard: this vLLM does not accept weight-transfer backends of plugins: %s", error)


@dataclass(frozen=True, slots=True)
class Options:
    """The keys of --model-loader-extra-config."""

    checkpoint: str = ""
    """The checkpoint's path; empty: the model's directory."""

    format: str = ""
    """The checkpoint's format, as --format; empty: detected."""

    architecture: str = ""
    """An architecture's name or declaration, as --architecture."""

    vocab_size: int = 0
    """Vocabulary size without padding, as --vocab-size; 0: not given."""

    weights: str = ""
    """Which copy of the weights, as --weights: model or master."""

    strip_prefix: str = ""
    """A prefix to remove from tensor names, as --strip-prefix."""

    drop_unknown: bool = False
    """Whether to leave out weights that the declared architecture lacks, as --drop-unknown."""

    layout: str = ""
    """The path of a layout file that `reshard learn` has written; empty: reshard.layout.json, if there is one."""

    threads: int = 4
    """Number of threads that read."""

    whole_tensors: bool = False
    """Whether vLLM splits whole tensors, even where its layout is known."""

    def reason_for_whole_tensors(self, checkpoint: Any) -> str | None:
        """Why whole tensors of a checkpoint are needed; None if they are not."""
        if self.whole_tensors:
            return f"{_OPTION} asks for it"
        # vLLM's class of it was not compared with the declaration. It could join weights in another order, which no shape would show.
        return "the architecture is declared by the user" if checkpoint.architecture else None

    @property
    def selection(self) -> dict[str, Any]:
        """The keywords of `view` that select weights."""
        return {"weights": self.weights or None, "strip_prefix": self.strip_prefix, "drop_unknown": self.drop_unknown}

    def opened(self, path: str, model: str) -> Any:
        """The opened checkpoint at a path, or around it: verl puts the model's files into a folder in the checkpoint. model: the
        directory of the model's config."""
        import reshard
        from reshard.opening.models import is_bare

        if os.path.basename(os.path.abspath(path)) == _VERL_FOLDER and is_bare(path):
            path = os.path.dirname(os.path.abspath(path))
        about: dict[str, Any] = {"format": self.format or None, "vocab_size": self.vocab_size or None}
        return reshard.open(path, model=model, architecture=self.architecture or None, **about)

    @classmethod
    def of(cls, given: Any) -> Options:
        """The options in a mapping from the engine. Raises RequestError for an unknown key or a value of another type."""
        from reshard.errors import RequestError

        types = {field.name: type(field.default) for field in fields(cls)}
        values = dict(given) if isinstance(given, Mapping) else {}
        if unknown := sorted(set(map(str, values)) - types.keys()):
            raise RequestError(f"{_OPTION} names {unknown[0]!r}", do=f"The keys for --load-format {LOAD_FORMAT} are {', '.join(types)}")
        for name, value in values.items():
            if type(value) is not types[name]:
                raise RequestError(f"{_OPTION}: {name} is {value!r}, a value of type {types[name].__name__} is expected")
        if values.get("threads", 1) < 1:
            raise RequestError(f"{_OPTION}: threads is {values['threads']}, at least 1 is needed")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class WorkerRank:
    """The ranks of one vLLM worker, and the parallel sizes of the run."""

    tp_rank: int
    """Tensor-parallel rank."""

    tp: int
    """Tensor-parallel size."""

    pp_rank: int = 0
    """Pipeline stage."""

    pp: int = 1
    """Pipeline-parallel size."""

    ep: int = 1
    """Expert-parallel size: 1 or tp."""

    unusual_experts: str | None = None
    """Why vLLM gives this rank other experts than a conversion would; None if it does not."""

    def __str__(self) -> str:
        stage = f", stage {self.pp_rank} of {self.pp}" if self.pp > 1 else ""
        return f"rank {self.tp_rank} of {self.tp}{stage}"

    @classmethod
    def of_this_process(cls, model_config: Any) -> WorkerRank:
        """This process's ranks, from vLLM's parallel state."""
        from vllm import distributed
        from vllm.config import get_current_vllm_config

        parallel = get_current_vllm_config().parallel_config
        tp, pp = distributed.get_tp_group(), distributed.get_pp_group()
        # Where a version of vLLM does not tell whether a model has experts, it is treated as if it had.
        has_experts = bool(getattr(model_config, "is_moe", True))
        return cls(
            tp.rank_in_group,
            tp.world_size,
            pp.rank_in_group,
            pp.world_size,
            ep=tp.world_size if has_experts and parallel.enable_expert_parallel else 1,
            unusual_experts=unusual_experts(parallel) if has_experts else None,
        )


def unusual_experts(parallel: Any) -> str | None:
    """Why vLLM does not give each tensor-parallel rank consecutive experts, as a conversion does; None if it does.

    Source: vLLM 0.32, FusedMoEParallelConfig.make, expert_map_manager.py.
    """
    if getattr(parallel, "data_parallel_size", 1) * getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "experts are distributed over data-parallel ranks, too"
    if getattr(parallel, "enable_eplb", False):
        return "expert load balancing holds some experts more than once"
    placement = getattr(parallel, "expert_placement_strategy", "linear")
    return None if placement == "linear" else f"experts are placed by {placement}"


def load(model: Any, model_config: Any, options: Options) -> None:
    """Fill a model's parameters with the checkpoint's weights.

    Raises: ReshardError if the checkpoint is incomplete, is another model's, or leaves a parameter unset.
    """
    import vllm

    from reshard.errors import RequestError

    began, worker = time.monotonic(), WorkerRank.of_this_process(model_config)
    path = options.checkpoint or model_config.model
    opened = options.opened(path, _config_folder(model_config))
    files = _CountingFiles(opened.files)
    checkpoint = replace(opened, files=files)
    selection = options.selection
    reason = options.reason_for_whole_tensors(checkpoint) or worker.unusual_experts
    layout = options.layout or _layout_beside(path, _config_folder(model_config))
    # The shapes of the parameters are compared with it, so a platform that allocates other ones is noticed.
    by_layout: dict[str, Any] = {"layout": layout, "accept_platform": True} if layout else {}
    if reason is None:
        try:
            view = checkpoint.view(
                to="vllm",
                rank=worker.tp_rank,
                tp=worker.tp,
                pp_rank=worker.pp_rank,
                pp=worker.pp,
                ep=worker.ep,
                engine_version=vllm.__version__,
                **selection,
                **by_layout,
            )
        except RequestError as error:
            reason = str(error)
    tied = checkpoint.model.architecture.tied if checkpoint.model and checkpoint.model.is_tied else None
    if reason is None:
        way = "read by rank by a learned layout" if layout else "read by rank"
        _make_bias(model, view)
        fill(_parameters(model), view, options.threads, tied)
    else:
        way = "read whole"
        _log().warning("reshard: every worker reads whole tensors, which vLLM splits: %s", reason)
        untied = getattr(model_config, "word_embeddings_untied_by_checkpoint", False)
        load_whole(
            model, checkpoint.view(to="hf", **selection), tied if untied else None, is_quantized=model_config.quantization is not None
        )
    seconds = time.monotonic() - began
    nbytes = f"{files.nbytes:,}"
    _log().info("reshard: %s: %s from %s (%s), %s bytes in %.1f s", worker, way, checkpoint.path, checkpoint.format, nbytes, seconds)


def _layout_beside(*folders: str | Path | None) -> str:
    """The layout file in one of these folders; empty if there is none."""
    from reshard.serving.learned.document import LAYOUT_FILE

    paths = (Path(folder) / LAYOUT_FILE for folder in folders if folder)
    return next((str(path) for path in paths if path.is_file()), "")


def fill(parameters: Mapping[str, Any], view: Mapping[str, Any], threads: int, tied: tuple[str, str] | None = None) -> None:
    """Read a rank's view into the parameters of the same names. Floating-point elements are cast to the parameter's type.

    Raises: RequestError, before anything is read, unless names, shapes and other element types are the same.
    """
    sources = match(parameters, view, tied)
    with ThreadPoolExecutor(threads, thread_name_prefix="reshard") as pool:
        running = [pool.submit(view[sources[name]].read_into, parameter) for name, parameter in parameters.items()]
        try:
            for future in running:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def match(parameters: Mapping[str, Any], view: Mapping[str, Any], tied: tuple[str, str] | None = None) -> dict[str, str]:
    """Parameter -> name of the tensor in the view that fills it: the same name, or that of the tied weight.

    tied: the names of the tied head and embedding. vLLM unties them if a checkpoint's files hold both, and ties them again once
    both are loaded.

    Raises: RequestError if a parameter is not in the view, the view has another tensor, or a shape or element type differs.
    """
    from reshard.geometry.dtypes import from_torch

    sources = {name: name for name in parameters if name in view}
    if tied and set(tied) <= parameters.keys():
        stored = next((name for name in tied if name in view), None)
        sources |= {name: stored for name in tied if stored and name not in sources}
    if missing := sorted(parameters.keys() - sources.keys()):
        raise _layout_differs(missing[0], f"vLLM has this parameter, and {len(missing) - 1} more, that the layout does not have")
    if surplus := sorted(set(view) - set(sources.values())):
        raise _layout_differs(surplus[0], f"the layout has this tensor, and {len(surplus) - 1} more, that vLLM does not have")
    for name, parameter in parameters.items():
        tensor, dtype = view[sources[name]], from_torch(str(parameter.dtype), where=name)
        if tensor.shape != tuple(parameter.shape) or parameter.is_meta:
            theirs = "is not in memory yet" if parameter.is_meta else f"is {list(parameter.shape)}"
            raise _layout_differs(name, f"the layout has it as {list(tensor.shape)}, vLLM's {theirs}")
        if not tensor.fits(dtype):
            raise _layout_differs(name, f"the layout has it as {tensor.dtype}, vLLM as {dtype}")
    return sources


def load_whole(model: Any, view: Mapping[str, Any], untied: tuple[str, str] | None, *, is_quantized: bool) -> None:
    """Pass whole tensors, one at a time, to the model's own load_weights; tensors of other stages are left out.

    untied: the names of the tied head and embedding, if this vLLM wants both.

    Raises: CheckpointError if a parameter was not loaded completely. In a quantized model some parameters may stay as they are, so those
    that were not loaded are only logged.
    """
    from vllm.model_executor.models.utils import is_pp_missing_parameter

    parameters = dict(model.named_parameters())
    if not is_quantized:
        poison(parameters.values())
    names = {name: name for name in view}
    if untied:
        names |= {name: stored for stored in untied if stored in view for name in untied}
    loaded = model.load_weights((name, view[names[name]].torch()) for name in names if not is_pp_missing_parameter(name, model))
    if not is_quantized:
        check_loaded(parameters)
    elif not_loaded := sorted(parameters.keys() - (loaded or parameters.keys())):
        _log().warning("reshard: %d parameters were not loaded, the first is %s", len(not_loaded), not_loaded[0])


# By element size: a NaN that no computation makes, in float16 and bfloat16, in float32 and in float64.
_POISON = {2: 0x7FA5, 4: 0x7FA57FA5, 8: 0x7FF57FA57FA57FA5}
# Elements that are compared at a time.
_STRIP = 1 << 24


def poison(parameters: Any) -> None:
    """Fill floating-point parameters with a NaN that shows later which elements were not loaded."""
    for words, value in map(_words, parameters):
        words.fill_(value)


def check_loaded(parameters: Mapping[str, Any]) -> None:
    """Raises CheckpointError if a parameter still holds what `poison` wrote."""
    from reshard.errors import CheckpointError

    not_loaded = [name for name, parameter in parameters.items() if _is_poisoned(parameter)]
    if not_loaded:
        raise CheckpointError(
            f"it was not loaded, or not all of it, nor were {len(not_loaded) - 1} more",
            where=not_loaded[0],
            why="vLLM would serve what happened to be in memory",
            do="Check that the checkpoint is of the model that the config describes",
        )


def _is_poisoned(parameter: Any) -> bool:
    words, value = _words(parameter)
    return any(bool((strip == value).any()) for strip in words.reshape(-1).split(_STRIP))


def _words(parameter: Any) -> tuple[Any, int]:
    """A parameter's bits as integers that share its memory, and the NaN for them; no integers without a floating-point type or memory."""
    import torch

    size = parameter.element_size()
    if not parameter.is_floating_point() or parameter.is_meta or size not in _POISON:
        return torch.empty(0, dtype=torch.int16), 0
    return parameter.data.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size]), _POISON[size]


class _CountingFiles:
    """Files that count the bytes that are read."""

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
    """The parameters and buffers that vLLM's own sharded_state would store: if several names share memory, only the first."""
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

    parameters: dict[str, Any] = ShardedStateLoader._filter_subtensors(model.state_dict())
    return parameters


def _make_bias(model: Any, view: Mapping[str, Any]) -> None:
    """Give the head of a classifier the bias that the checkpoint has, as vLLM does while its own loader meets one (0.32,
    models/adapters.py, auto_set_score_bias)."""
    import torch

    head: Any = getattr(model, "score", None)
    if "score.bias" in view and getattr(head, "bias", "") is None:
        made = torch.empty(view["score.bias"].shape, dtype=head.weight.dtype, device=head.weight.device)
        head.bias, head.skip_bias_add = torch.nn.Parameter(made, requires_grad=False), False


def _config_folder(model_config: Any) -> str:
    """The directory of the model's config.json. For a model name on the Hugging Face Hub, it is in the Hub's local cache."""
    named = getattr(model_config, "hf_config_path", None) or model_config.model
    if Path(named).is_dir():
        return str(named)
    from huggingface_hub import hf_hub_download

    return str(Path(hf_hub_download(named, "config.json", revision=model_config.revision)).parent)


def _layout_differs(name: str, what: str) -> Exception:
    from reshard.errors import RequestError

    return RequestError(
        what,
        where=name,
        why="This vLLM, or an option that it was started with, lays the model out differently from what reshard knows",
        do=f"""Let vLLM split whole tensors, with {_OPTION} '{{"whole_tensors": true}}'""",
    )


def _log() -> Any:
    """A logger below vLLM's own, since vLLM shows the messages of its own loggers only."""
    import logging

    return logging.getLogger("vllm.reshard")
