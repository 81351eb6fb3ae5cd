"""SGLang's plugin `reshard`: a server of SGLang takes updates from trainers.

SGLang finds `register` through the entry-point group sglang.srt.plugins and calls it in each of its processes. An update comes by routes
that SGLang has for its own updates (reshard/live/engines/sglang.py); requests of others go on to SGLang. No option is needed.

Run with SGLang 0.5.23.
"""

from __future__ import annotations

_COMPONENTS = "sglang.srt.managers.scheduler_components"
_STEPS = ("init_weights_update_group", "update_weights_from_distributed", "destroy_weights_update_group")


def register() -> None:
    """Register with SGLang what takes part in updates. SGLang logs what is raised here, and starts all the same."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .weight_transfer import sglang as transfer

    for method in _STEPS:
        HookRegistry.register(f"{_COMPONENTS}.weight_updater.SchedulerWeightUpdaterManager.{method}", transfer.step, HookType.AROUND)
    HookRegistry.register(
        f"{_COMPONENTS}.internal_state.SchedulerInternalStateController.get_internal_state", transfer.tell, HookType.AFTER
    )
    HookRegistry.register("sglang.srt.managers.tokenizer_manager.TokenizerManager.pause_generation", transfer.pause, HookType.AROUND)
