"""One conversion of each format: what `make quick` runs beside the laws and the house."""

import pytest
from helpers.fixture_places import FIXTURES, HF, described, open_case, truth
from helpers.reshard_command import reshard as command

import reshard
from reshard.adapter import registry

# A fixture with a truth, written by the framework itself.
READ = {
    "dcp": "dcp/fsdp2",
    "dcp-safetensors": "dcp_safetensors/tp",
    "deepspeed": "deepspeed/z1-bf16",
    "fsdp": "fsdp/fsdp1-sharded",
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
# peft holds an adapter and no model, a delta what changed in one.
assert {*READ, *WRITTEN, "peft", "delta"} == {*registry.formats()}, "a new format belongs into one of these tables"


@pytest.mark.parametrize("name", READ)
def test_a_checkpoint_of_the_framework_reads_bit_exactly(name):
    opened, expected = open_case(FIXTURES / READ[name]), truth(FIXTURES / READ[name])
    assert opened.format == name
    weights = {(tensor.name, tensor.kind): tensor for tensor in opened.index.tensors if (tensor.name, tensor.kind) in expected}
    assert weights and {key: described(tensor, opened.files) for key, tensor in weights.items()} == {key: expected[key] for key in weights}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_conversion_loses_nothing(name, tmp_path):
    source = SOURCES.get(name, HF / "llama")
    opened = open_case(source) if (source / "checkpoint").exists() else reshard.open(source)
    reshard.convert(reshard.plan(opened, to=name, **WRITTEN[name]), tmp_path / "out")
    assert reshard.open(tmp_path / "out").format == name
    reshard.verify(opened, tmp_path / "out").raise_if_different()


def test_the_command_line_converts_verifies_and_tells(tmp_path):
    source, out = FIXTURES / "dcp" / "fsdp2", tmp_path / "out"
    planned = command(
        "convert", source / "checkpoint", out, "--to", "vllm", "--tp", "2", "--model", source / "model", "--dry-run", "--json"
    )
    assert planned.code == 0 and planned.document["target"]["format"] == "vllm" and not out.exists()
    done = command("convert", source / "checkpoint", out, "--to", "vllm", "--tp", "2", "--model", source / "model", "--json")
    assert done.code == 0 and {file["path"] for file in done.document["files"]} == {path.name for path in out.glob("*.safetensors")}
    assert command("verify", source / "checkpoint", out, "--model", source / "model").code == 0
    assert command("fingerprint", out, "-v").out.split()[0] == done.document["fingerprint"]
    again = command("convert", source / "checkpoint", out, "--to", "vllm", "--tp", "2", "--model", source / "model")
    assert again.code == 4 and "--overwrite" in again.err and again.out == ""
