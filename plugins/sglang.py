"""SGLang's plugin `reshard`: the load format `reshard`, and updates of a running server.

    python -m sglang.launch_server --model-path CKPT --load-format reshard              CKPT also holds config.json
    python -m sglang.launch_server --model-path DIR --load-format reshard --model-loader-extra-config '{"checkpoint": "CKPT"}'

SGLang finds `register` through the entry-point group sglang.srt.plugins and calls it in each of its processes. Each rank reads whole
tensors of a checkpoint of any format, one at a time, which the model's own load_weights splits. Updates come by routes that SGLang has for
its own (reshard/live/engines/sglang.py) and need no option; requests of others go on to SGLang.

Run with SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from .vllm import LOAD_FORMAT, Options

_COMPONENTS = "sglang.srt.managers.scheduler_components"
_STEPS = ("init_weights_update_group", "update_weights_from_distributed", "destroy_weights_update_group")
_BY_RANK = ("layout", "threads", "whole_tensors")
"""Options of loading by rank, which this load format does not do."""


def register() -> None:
    """Register with SGLang the load format, and what takes part in updates. SGLang logs what is raised here, and starts all the same."""
    from sglang.srt.arg_groups.choices import add_load_format_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .weight_transfer import sglang as transfer

    add_load_format_choices([LOAD_FORMAT])
    HookRegistry.register("sglang.srt.configs.load_config.LoadConfig._verify_load_format", verify_load_format, HookType.AROUND)
    for method in _STEPS:
        HookRegistry.register(f"{_COMPONENTS}.weight_updater.SchedulerWeightUpdaterManager.{method}", transfer.step, HookType.AROUND)
    HookRegistry.register(
        f"{_COMPONENTS}.internal_state.SchedulerInternalStateController.get_internal_state", transfer.tell, HookType.AFTER
    )
    HookRegistry.register("sglang.srt.managers.tokenizer_manager.TokenizerManager.pause_generation", transfer.pause, HookType.AROUND)


def verify_load_format(original: Callable[[Any], None], config: Any) -> None:
    """Replace the name of the load format, which SGLang does not know, by its class."""
    if config.load_format == LOAD_FORMAT:
        config.load_format = loader_class()
    original(config)


def loader_options(given: Any) -> Options:
    """The options of the load format. Raises RequestError for those that it does not have."""
    from reshard.errors import RequestError

    if name := next((name for name in _BY_RANK if name in (given or {})), None):
        raise RequestError(f"--model-loader-extra-config names {name!r}", why="Here SGLang itself splits whole tensors", do="Leave it out")
    return Options.of(given)


def whole_tensors(options: Options, model: str) -> Iterator[tuple[str, Any]]:
    """Each weight of the checkpoint under its Hugging Face name, as a tensor of torch."""
    view = options.opened(options.checkpoint or model, model).view(to="hf", **options.selection)
    for name in view:
        yield name, view[name].torch()


@cache
def loader_class() -> type:
    """SGLang's interface of a loader."""
    from sglang.srt.model_loader.loader import BaseModelLoader, DefaultModelLoader

    class ReshardLoader(DefaultModelLoader):  # type: ignore[misc]
        """SGLang's own loader, with weights that come from a checkpoint of any format."""

        def __init__(self, load_config: Any) -> None:
            BaseModelLoader.__init__(self, load_config)
            self._options = loader_options(load_config.model_loader_extra_config)

        def download_model(self, model_config: Any) -> None:
            """Nothing: the checkpoint is read where it is."""

        def _get_weights_iterator(self, source: Any, **_: Any) -> Iterator[tuple[str, Any]]:
            return ((source.prefix + name, tensor) for name, tensor in whole_tensors(self._options, source.model_or_path))

    return ReshardLoader
