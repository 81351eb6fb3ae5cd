"""The options of Megatron's formats."""

from __future__ import annotations

from reshard.adapter.format import EXPERTS, Option

# Choices that change the files, besides --tp, --pp and --ep.
OPTIONS = (
    Option("vp", "number", "Set the chunks of layers per pipeline stage (virtual pipeline)."),
    Option("etp", "number", "Set the tensor-parallel size of experts (default: `tp=`)."),
    Option("stage_layers", "numbers", "Set the layers of every chunk (default: equal)."),
    Option("transformer_impl", "choice", "Set the layer implementation of the run.", choices=("local", "transformer_engine")),
    EXPERTS,
    Option("extra_state", "switch", "Also write the empty FP8 states of attention and norms that Transformer Engine asks for."),
    Option("vocab_multiple", "number", "Set the run's --make-vocab-size-divisible-by."),
    Option(
        "distributed_optimizer",
        "switch",
        "Set the optimizer whose state is written (default: as in the source).",
        opposite="plain_optimizer",
    ),
)
