"""One checkpoint that each format reads, and one conversion that it writes, as cases for the laws of reshard.testing."""

from helpers.fixture_places import FIXTURES, HF, truth
from reshard.adapter import registry
from reshard.testing import FormatCase

# A fixture with a truth, written by the framework itself.
READ = {
    "dcp": "dcp/fsdp2",
    "dcp-safetensors": "dcp_safetensors/tp",
    "deepspeed": "deepspeed/z1-bf16",
    "fsdp": "fsdp/fsdp1-sharded",
    "fsdp-dtensor": "megatron_fsdp/llama-dp2",
    "fsdp-local": "fsdp/fsdp1-local",
    "hf": "dcp_safetensors/full",
    "megatron": "megatron/gpt2-tp2",
    "megatron-dist": "megatron_dist/gpt2",
    "pt": "fsdp/full-ddp",
    "torch-checkpointing": "torch_checkpointing/fsdp2",
    "universal": "universal/z1-groups",
}
# Sizes that split something.
WRITTEN = {
    "consolidated": {"tp": 2, "embedding_cut": "rows"},
    "dcp": {"dp": 2},
    "deepspeed": {"dp": 2},
    "fsdp": {"dp": 2},
    "fsdp-dtensor": {"dp": 2},
    "hf": {"max_shard_size": 100_000},
    "megatron": {"tp": 2, "pp": 2},
    "megatron-dist": {"tp": 2},
    "nanotron": {"tp": 2},
    "sglang": {"tp": 2},
    "trtllm": {"tp": 2},
    "universal": {},
    "vllm": {"tp": 2, "pp": 2},
}
# Formats that always write optimizer state, and one whose model needs heads of the usual size.
SOURCES = {
    "deepspeed": FIXTURES / "deepspeed/z3-fp32",
    "universal": FIXTURES / "deepspeed/z3-fp32",
    "nanotron": FIXTURES / "nanotron/llama-tp2-pp2",
}
# Files whose names no other file tells, and how the error names them.
_SHARDS = {f"shard-0000{rank}-model-00001-of-00001.safetensors": f"shard-0000{rank}-model-*" for rank in (1, 2, 3)}
_ZERO = {f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": f"of 2 data-parallel ranks, {rank} has no file" for rank in (0, 1)}
_STATES = {"mp_rank_00_model_states.pt": "no file of model states"}
NAMED = {
    "dcp-safetensors": {**_SHARDS, "shard-00004-model-00001-of-00001.safetensors": "the file of the last rank may be lost"},
    "deepspeed": {**_ZERO, **_STATES},
    "pt": {"model.pth": "torch.save has written none of these files"},
    "universal": {"optimizer_state.pt": None, **_STATES},
}
# peft holds an adapter and no model, a delta what changed in one.
assert {*READ, *WRITTEN, "peft", "delta"} == {*registry.formats()}, "a new format belongs into one of these tables"


def read_case(name):
    """The fixture that a format reads."""
    folder = FIXTURES / READ[name]
    model = folder / "model"
    # The framework had the optimizer's state in memory also where it saved weights alone.
    expected = {key: content for key, content in truth(folder).items() if name != "hf" or key[1] in ("weight", "buffer")}
    return FormatCase(name, folder / "checkpoint", expected, model if model.exists() else None, named=NAMED.get(name, {}))


def written_case(name):
    """The conversion that a format writes."""
    source = SOURCES.get(name, HF / "llama")
    checkpoint, model = source / "checkpoint", source / "model"
    if not checkpoint.exists():
        checkpoint = source
    return FormatCase(name, checkpoint, model=model if model.exists() else None, options=WRITTEN[name])
