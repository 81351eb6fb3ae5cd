"""The keywords of the verbs that calculate: `degrees` and `estimate` (opening/keywords.py says how they are declared)."""

from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

from reshard.opening.keywords import Keyword, ModelOptions, PathLike, Weights

if TYPE_CHECKING:
    from reshard.models.architecture import Architecture
    from reshard.training.memory import BytesPer


class DegreeOptions(ModelOptions, total=False):
    """Keywords of `degrees`."""

    gpu_memory: Annotated[int | str | None, Keyword("Memory of one GPU, e.g. 80GiB; reports how many tokens fit.", "SIZE")]
    max_model_len: Annotated[int | None, Keyword("Tokens of the longest sequence; reports how many fit.", "N")]
    gpu_memory_utilization: Annotated[float | None, Keyword("Fraction of GPU memory the engine may use (default: 0.9).", "FRACTION")]
    reserve: Annotated[int | str | None, Keyword("Memory for activations and CUDA graphs (default: 3 % of the GPU's).", "SIZE")]
    dtype: Annotated[str | None, Keyword("Cast floating-point weights: bf16, fp16 ... Needed if a bare config does not name one.", "DTYPE")]
    keep_dtype: Annotated[str | tuple[str, ...], Keyword("Do not cast tensors whose names match.", "GLOB")]
    dequantize: Annotated[bool, Keyword("Dequantize weights to `dtype=` (default: bf16).")]
    kv_dtype: Annotated[str | None, Keyword("Element type of the KV cache: fp8 ... (default: the model's).", "DTYPE")]
    engine_version: Annotated[str | None, Keyword("Version of the serving engine (default: the newest known).", "V")]
    layout: Annotated[PathLike | None, Keyword("A layout file that `reshard learn` has written, for a model that is not declared.", "FILE")]
    weights: Annotated[Weights | None, Keyword("Which copy of the weights: the model's, or the optimizer's.")]


class EstimateOptions(TypedDict, total=False):
    """Keywords of `estimate`."""

    parameters: Annotated[int | str | None, Keyword("Number of parameters, e.g. 7B, instead of SOURCE.", "COUNT")]
    gpus: Annotated[int | None, Keyword("Ranks in all (default: as many as the sizes need).")]
    max_bubble: Annotated[float | None, Keyword("Name the fewest microbatches for this bubble, e.g. 10%.", "SHARE")]
    dp: Annotated[int | None, Keyword("Data-parallel ranks.", "N")]
    tp: Annotated[int, Keyword("Tensor-parallel size.", "N", 1)]
    pp: Annotated[int, Keyword("Pipeline-parallel size.", default=1)]
    ep: Annotated[int, Keyword("Expert-parallel size.", "N", 1)]
    seq_len: Annotated[int | None, Keyword("Tokens per sequence; without it activations are not counted.", "N")]
    micro_batch: Annotated[int, Keyword("Sequences per microbatch.", "N", 1)]
    microbatches: Annotated[int, Keyword("Microbatches per step and data-parallel rank.", "M", 1)]
    schedule: Annotated[Literal["gpipe", "1f1b", "interleaved"], Keyword("The pipeline's schedule.", default="1f1b")]
    vp: Annotated[int, Keyword("Chunks of layers per stage (interleaved schedule).", "N", 1)]
    stage_layers: Annotated[tuple[int, ...] | None, Keyword("Layers of every stage (default: equal).", "N,N,..")]
    recompute: Annotated[Literal["none", "selective", "full"], Keyword("Activation recomputation.", default="none")]
    sequence_parallel: Annotated[
        bool | None, Keyword("Split activations between linear layers over TP ranks (default: yes, if TP is above 1).")
    ]
    flash_attention: Annotated[bool | None, Keyword("Store no attention scores, as FlashAttention does (default: yes).")]
    activations: Annotated[
        Literal["published", "itemised"],
        Keyword("Count activations with the model's own widths, or by the paper's formula for a GPT.", default="itemised"),
    ]
    vocab_multiple: Annotated[int, Keyword("Pad the vocabulary to a multiple of N x TP.", "N", 1)]
    link: Annotated[int | str | None, Keyword("Bytes per second that a rank can send, e.g. 50GB.", "SIZE")]
    bytes_per: Annotated["BytesPer", Keyword("Bytes per parameter of weights, gradients and optimizer state.")]
    architecture: Annotated["Architecture | PathLike | None", Keyword("A declared model type, or a file that declares one.")]
