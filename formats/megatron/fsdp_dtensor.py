"""Checkpoints of Megatron-FSDP (--use-megatron-fsdp --ckpt-format fsdp_dtensor): a plain folder of torch.distributed.checkpoint.

    iter_0000010/.metadata, __{rank}_0.distcp
    model.module.decoder.layers.0.mlp.linear_fc1.weight_w               whole tensors, in rows that ranks share unevenly
    optimizer.state.module.module.module.decoder....weight_w.exp_avg
    optimizer.param_to_group_meta.module.module.module.decoder....weight.lr
    args, iteration, opt_param_scheduler.*                              objects

Read like the other distributed checkpoints. Measured on megatron-core 0.19.2 (fixtures/megatron_fsdp).
"""

from __future__ import annotations

from typing import ClassVar

from reshard.adapter.format import Option
from reshard.storage.files import Files

from . import Megatron
from .layout.save_folders import DCP_METADATA, TRACKER, find_fsdp
from .options import OPTIONS

_OPTIONS = ("transformer_impl", "experts", "vocab_multiple")


class FsdpDtensor(Megatron):
    name = "fsdp-dtensor"
    other_names = ("fsdp_dtensor", "megatron-fsdp")
    summary = "Megatron-FSDP (fsdp_dtensor): iter_*/.metadata, *.distcp with a tensor per parameter"
    owns = (DCP_METADATA, "*.distcp", TRACKER)
    refines = ("megatron-dist", "dcp", "pt")
    keeps_masters = False
    options: ClassVar[tuple[Option, ...]] = (
        *(option for option in OPTIONS if option.name in _OPTIONS),
        Option("wrappers", "number", "Set how many times `module.` precedes the optimizer's names (default: 3, as in bf16 runs)."),
    )
    reader, writer = "read.fsdp_dtensor", "write.fsdp_dtensor"

    def detect(self, files: Files) -> str | None:
        return find_fsdp(files)


FORMAT = FsdpDtensor()
