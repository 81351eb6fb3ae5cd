"""Megatron-LM's legacy checkpoints (--ckpt-format torch): one torch.save file per model-parallel rank.

    layout/            names, fusions and splits of Megatron's tensors, its settings, its folders
    read/              from the files of both Megatron formats to an Index
    write/             from a model and parallel sizes to the files of both formats
    megatron_dist.py   the other format: distributed checkpoints

Measured on megatron-core 0.16.1 and 0.12.3 (fixtures/megatron, megatron_dist, megatron_versions).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from reshard.adapter.format import Format, Hints, Option
from reshard.storage.files import Files

from .layout.save_folders import DISTRIBUTED_OPTIMIZER, LEGACY_WEIGHTS, TRACKER, find_legacy, folder_of_save

if TYPE_CHECKING:
    from reshard.adapter.model_files import ModelFiles
    from reshard.canonical.content import Content
    from reshard.index.index import Index
    from reshard.plans.layout import Layout, Target


class Megatron(Format):
    name = "megatron"
    other_names: ClassVar[tuple[str, ...]] = ("megatron-lm",)
    summary = "Megatron-LM legacy: mp_rank_*/model_optim_rng.pt of tensor-, pipeline- and expert-parallel ranks"
    owns: ClassVar[tuple[str, ...]] = (LEGACY_WEIGHTS, DISTRIBUTED_OPTIMIZER, TRACKER)
    refines: ClassVar[tuple[str, ...]] = ("pt",)
    needs_vocabulary = True
    keeps_masters = True
    # Choices that change the files, besides --tp, --pp and --ep.
    options = (
        Option("vp", "number", "Set the chunks of layers per pipeline stage (virtual pipeline)."),
        Option("etp", "number", "Set the tensor-parallel size of experts (default: `tp=`)."),
        Option("stage_layers", "numbers", "Set the layers of every chunk (default: equal)."),
        Option("transformer_impl", "choice", "Set the layer implementation of the run.", choices=("local", "transformer_engine")),
        Option("experts", "choice", "Set the expert layout of the run.", choices=("sequential", "grouped", "te-grouped")),
        Option("extra_state", "switch", "Also write the empty FP8 states of attention and norms that Transformer Engine asks for."),
        Option("vocab_multiple", "number", "Set the run's --make-vocab-size-divisible-by."),
        Option(
            "distributed_optimizer",
            "switch",
            "Set the optimizer whose state is written (default: as in the source).",
            opposite="plain_optimizer",
        ),
    )

    def detect(self, files: Files) -> str | None:
        return find_legacy(files)

    def read(self, files: Files, hints: Hints) -> Index:
        from .read.legacy import read_legacy

        return read_legacy(files, folder_of_save(files, "rank folder such as mp_rank_00"), hints)

    def check_values(self, files: Files, index: Index) -> Index:
        from .read.run_model import check_masters

        return check_masters(files, index)

    def lay_out(self, content: Content, target: Target, companions: ModelFiles) -> Layout:
        from .write.legacy import lay_out_legacy

        return lay_out_legacy(content, target, companions)

    def lay_out_memory(self, content: Content, target: Target) -> Layout:
        from .write.memory import lay_out_memory

        return lay_out_memory(content, target)


FORMAT = Megatron()
