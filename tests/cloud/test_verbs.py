"""Every command takes URLs, and prints of a checkpoint in a store what it prints of the same checkpoint on the disk."""

import re

import pytest
from cloud.models import converted, write_hf
from helpers.reshard_command import reshard as run

NAME = "model.layers.0.self_attn.q_proj.weight"
COMMANDS = {
    "inspect": ("inspect", "{hf}"),
    "inspect a tensor": ("inspect", "{hf}", "--tensor", "*q_proj*"),
    "inspect as JSON": ("inspect", "{hf}", "--json"),
    "verify a folder": ("verify", "{vllm}"),
    "verify two": ("verify", "{hf}", "{vllm}"),
    "doctor": ("doctor", "{hf}"),
    "doctor of what reshard wrote": ("doctor", "{vllm}"),
    "fingerprint": ("fingerprint", "{hf}"),
    "fingerprint of what reshard wrote": ("fingerprint", "{vllm}"),
    "diff": ("diff", "{hf}", "{vllm}"),
    "stats": ("stats", "{hf}"),
    "digests": ("digests", "{hf}", "--to", "vllm", "--tp", 2),
    "explain": ("explain", "{vllm}", "{hf}"),
    "cat": ("cat", "{hf}", NAME),
    "export": ("export", "{hf}", NAME, "-o", "{out}"),
    "degrees": ("degrees", "{hf}", "--to", "vllm", "--tp", "1,2"),
    "degrees of a config": ("degrees", "{hf}/config.json", "--to", "vllm", "--tp", "1,2"),
    "estimate": ("estimate", "{hf}", "--tp", 2),
    "estimate of a config": ("estimate", "{hf}/config.json", "--tp", 2),
    "plan": ("plan", "{hf}", "--to", "vllm", "--tp", 2),
    "roundtrip": ("roundtrip", "{hf}", "--to", "vllm", "--tp", 2),
    "convert": ("convert", "{hf}", "{out}", "--to", "vllm", "--dry-run"),
}


@pytest.fixture
def places(tmp_path, s3):
    """Where the same two checkpoints lie: on the disk, and in a store."""
    hf = write_hf(tmp_path / "hf")
    vllm = converted(hf, tmp_path / "vllm", to="vllm", tp=2)
    for folder in (hf, vllm):
        s3.put_tree("bucket", folder.name, folder)
    return str(tmp_path), "s3://bucket"


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_command_prints_of_a_store_what_it_prints_of_the_disk(words, places, tmp_path, s3):
    printed = []
    for number, root in enumerate(places):
        paths = {name: f"{root}/{name}" for name in ("hf", "vllm")} | {"out": tmp_path / f"out-{number}.safetensors"}
        done = run(*(str(word).format(**paths) for word in words))
        lines = [line for line in done.out.splitlines() if not re.match(r"\s+store ", line)]
        printed.append((done.code, "\n".join(lines).replace(root, "ROOT").replace(str(tmp_path), "ROOT").replace(f"out-{number}", "OUT")))
        if number:
            assert s3.requests["GET"] and done.code == 0, done.err
    assert without_times(printed[1]) == without_times(printed[0])
    if "-o" in words:
        assert (tmp_path / "out-0.safetensors").read_bytes() == (tmp_path / "out-1.safetensors").read_bytes()


def without_times(printed):
    return re.sub(r"\b[\d.]+ (m?s|min)\b|\s+", " ", printed[1])
