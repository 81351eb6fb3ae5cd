"""Fields and files that no reader can use: each is refused in one paragraph, soon, and nothing waits or ends in a traceback."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import Result, reshard
from hostile.limits import ON_LINUX, limited
from safetensors.numpy import save_file

pytestmark = pytest.mark.skipif(not ON_LINUX, reason="limits of a process are set as on Linux")


def refused(*arguments: object, naming: str = "") -> None:
    """The command ends with one paragraph that holds `naming`, within 10 s of processor time and 1 GB."""

    def work() -> str:
        result: Result = reshard(*arguments)
        return f"{result.code} {result.err}"

    answer = limited(work)
    code, _, message = answer.partition(" ")
    assert code in "23456" and message.startswith("reshard: ") and message.count("\n") == 1 and naming in message, answer
    assert len(message) < 12_000


def commands(source: Path, target: Path) -> list[tuple[object, ...]]:
    return [
        ("inspect", source),
        ("plan", source, "--to", "vllm"),
        ("degrees", source, "--to", "vllm"),
        ("estimate", source, "--gpus", 8),
        ("convert", source, target, "--to", "vllm"),
    ]


# ---------------------------------------------------------------- numbers of a config

NUMBERS = [
    ("llama", "num_hidden_layers"),
    ("llama", "num_attention_heads"),
    ("llama", "vocab_size"),
    ("gpt2", "n_layer"),
    ("mixtral", "num_local_experts"),
    ("mixtral", "num_hidden_layers"),
]


@pytest.mark.parametrize("case, key", NUMBERS)
@pytest.mark.parametrize("number", range(5))
def test_a_billion_of_anything_is_refused(tmp_path: Path, case: str, key: str, number: int) -> None:
    source = shutil.copytree(HF / case, tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    assert key in config
    (source / "config.json").write_text(json.dumps({**config, key: 10**9}))
    naming = "1,000,000,000" if key != "num_attention_heads" else ""
    name, *rest = commands(source, tmp_path / "t")[number]
    if name == "inspect":
        # It shows what is stored, and why the rest is not known.
        answer = limited(lambda: reshard(name, *rest).out)
        assert "parameters as stored" in answer and naming in answer and "needed    a config" in answer, answer
        return
    refused(name, *rest, naming=naming)


def test_layers_times_experts_are_bounded(tmp_path: Path) -> None:
    source = shutil.copytree(HF / "mixtral", tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4000, "num_local_experts": 4000}))
    refused("plan", source, "--to", "vllm", naming="16,000,000 experts in all layers")


# ---------------------------------------------------------------- nesting, digits, long names

NESTED = [f'"x": {"[" * depth}{"]" * depth}' for depth in (150, 300, 900, 50_000)]
LONG = [f'"rope_theta": 1{"0" * digits}' for digits in (150, 400, 5000)]


@pytest.mark.parametrize("setting", [*NESTED, *LONG], ids=lambda setting: f"{setting[:18]}-{len(setting)}")
def test_a_config_nested_too_deep_or_with_too_many_digits(tmp_path: Path, setting: str) -> None:
    source = shutil.copytree(HF / "llama", tmp_path / "m")
    config = (source / "config.json").read_text().rstrip().removesuffix("}")
    (source / "config.json").write_text(f"{config}, {setting}}}")
    target = tmp_path / "t"
    others = [("convert", source, target, "--to", to) for to in ("consolidated", "dcp")]
    for line in (*commands(source, target), *others, ("convert", source, target, "--to", "hf", "--quantize", "mxfp4")):
        refused(*line, naming="config.json: it cannot be read as JSON")


def test_a_config_may_be_nested_and_have_long_numbers(tmp_path: Path) -> None:
    source = shutil.copytree(HF / "llama", tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    extra = {"model_max_length": int(1e30), "time_step_limit": [0.0, float("inf")], "x": json.loads("[" * 90 + "]" * 90)}
    (source / "config.json").write_text(json.dumps({**config, **extra}))
    assert reshard("inspect", source).code == reshard("convert", source, tmp_path / "t", "--to", "hf").code == 0


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rotary_settings_that_are_a_list(tmp_path: Path, key: str) -> None:
    source = shutil.copytree(HF / "llama", tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, key: [1, 2]}))
    refused("convert", source, tmp_path / "t", "--to", "consolidated", naming=key)


def test_an_alpha_of_400_digits(tmp_path: Path) -> None:
    source = shutil.copytree(FIXTURES / "peft" / "plain" / "adapter", tmp_path / "m")
    config = json.loads((source / "adapter_config.json").read_text())
    (source / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 10**400}))
    refused("inspect", source, naming="has 401 digits")


def test_a_message_stays_short_whatever_a_file_says(tmp_path: Path) -> None:
    source = shutil.copytree(HF / "llama", tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "x" * 100_000}))
    refused("plan", source, "--to", "vllm", naming="xxx ... xxx")
    refused("convert", source, tmp_path / "t", "--to", "trtllm", naming="is not declared")


@pytest.mark.parametrize("name", [".".join("a" * 100_000), ".".join("1" * 101), "x" * 5000], ids=len)
def test_a_tensors_name_is_limited(tmp_path: Path, name: str) -> None:
    save_file({name: np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    for line in (("inspect", tmp_path), ("stats", tmp_path), ("convert", tmp_path, tmp_path / "t", "--to", "dcp")):
        refused(*line, naming=f"has {len(name):,} characters")
    report = reshard("doctor", tmp_path)
    assert report.code == 1 and "Traceback" not in report.err


# ---------------------------------------------------------------- files that are no files


def a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket has at most 107 bytes
    socket.socket(socket.AF_UNIX).bind(path.name)
    os.chdir(here)


INSTEAD: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "socket": a_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "long name": lambda path: path.symlink_to("x" * 300 + "/y"),
}


@pytest.mark.parametrize("kind", INSTEAD)
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json", "model-00001-of-00003.safetensors"])
def test_a_file_that_cannot_be_read_as_one_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    source = shutil.copytree(HF / "llama-sharded", tmp_path / "m")
    (source / name).unlink(missing_ok=True)
    INSTEAD[kind](source / name)
    refused("convert", source, tmp_path / "t", "--to", "vllm", naming=name)
    refused("fingerprint", source, naming=name)


@pytest.mark.parametrize("kind", INSTEAD)
def test_a_path_that_is_not_a_file_or_folder_is_refused(tmp_path: Path, kind: str) -> None:
    INSTEAD[kind](tmp_path / "model.safetensors")
    refused("inspect", tmp_path / "model.safetensors")


def test_a_file_replaced_by_a_fifo_after_it_was_seen_does_not_block(tmp_path: Path) -> None:
    from reshard.errors import ReshardError
    from reshard.storage.files import LocalFiles

    os.mkfifo(tmp_path / "a")

    def work() -> str:
        with pytest.raises(ReshardError):
            LocalFiles(tmp_path).read_into("a", 0, memoryview(bytearray(4)))
        return "refused"

    assert limited(work) == "refused"


def test_an_index_that_names_a_file_of_5000_characters(tmp_path: Path) -> None:
    source = shutil.copytree(HF / "llama-sharded", tmp_path / "m")
    path = source / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    document["weight_map"]["model.norm.weight"] = "x" * 5000
    path.write_text(json.dumps(document))
    refused("inspect", source)


# ---------------------------------------------------------------- fields of one format

QUANTIZATION: list[dict[str, Any]] = [
    {"quant_method": "fp8", "weight_block_size": value} for value in ([], [128], 5, "ab", {"a": 1}, [0, 0], [-1, 128], ["a", "b"])
]
QUANTIZATION += [{"quant_method": "fp8", "ignored_layers": value} for value in (5, True, {"a": 1})]
QUANTIZATION += [
    {"quant_method": "compressed-tensors", "config_groups": {"group_0": value}}
    for value in (
        5,
        [],
        {"weights": 5, "targets": ["Linear"]},
        {"targets": 5},
        {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": 5}},
        {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "tensor"}, "input_activations": 5},
    )
]


@pytest.mark.parametrize("settings", QUANTIZATION, ids=str)
def test_a_quantization_config_of_other_types(tmp_path: Path, settings: dict[str, Any]) -> None:
    source = shutil.copytree(FIXTURES / "hf_fp8" / "llama-fp8-block", tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    refused("convert", source, tmp_path / "t", "--to", "vllm", "--tp", 2)


def test_a_universal_folder_without_one_file_of_a_parameter(tmp_path: Path) -> None:
    source = shutil.copytree(FIXTURES / "universal" / "z2-tied" / "checkpoint", tmp_path / "u")
    lost = sorted(source.rglob("exp_avg_sq.pt"))[3]
    lost.unlink()
    refused(
        "convert", source, tmp_path / "t", "--to", "deepspeed", "--model", FIXTURES / "universal" / "z2-tied" / "model", naming="exp_avg_sq"
    )


def test_a_stray_rank_file_beside_those_of_autotp(tmp_path: Path) -> None:
    case = FIXTURES / "deepspeed_parallel" / "autotp2-z1"
    source = shutil.copytree(case / "checkpoint", tmp_path / "d")
    stray = next(path for path in sorted(source.rglob("*optim_states.pt")) if "pp_rank_0" in path.name)
    shutil.copy(stray, stray.with_name(stray.name.replace("pp_rank_0", "pp_rank_71")))
    refused("convert", source, tmp_path / "t", "--to", "hf", "--model", case / "model", naming="_rank_71_")


@pytest.mark.parametrize("change", ["key", "boxes", "rank"])
def test_torch_checkpointing_metadata_of_other_types(tmp_path: Path, change: str) -> None:
    source = shutil.copytree(FIXTURES / "torch_checkpointing" / "tp" / "checkpoint", tmp_path / "c")
    path = source / "metadata.pkl"
    raw = path.read_bytes()
    path.write_bytes(raw)
    document = pickle.loads(raw)
    for item in document["metadata"].values():
        if change == "key":
            item["rank_to_layout_info"] = dict.fromkeys(["zero"], next(iter(item["rank_to_layout_info"].values())))
    path.write_bytes(pickle.dumps(document))
    if change == "key":
        refused("inspect", source, naming="metadata.pkl")


@pytest.mark.parametrize("word", ["9" * 5000, "0x" + "f" * 5000, "1" * 5000 + ".5", "2001-99-99", "!!float x", "1e999999"])
def test_a_number_of_nemo_that_python_refuses(tmp_path: Path, word: str) -> None:
    source = shutil.copytree(FIXTURES / "megatron_dist" / "nemo2" / "checkpoint", tmp_path / "n")
    path = source / "context" / "model.yaml"
    text = path.read_text()
    assert "num_layers: 1" in text
    path.write_text(text.replace("num_layers: 1", f"num_layers: {word}"))
    refused("convert", source, tmp_path / "t", "--to", "hf")


# ---------------------------------------------------------------- names


def test_a_file_whose_name_is_not_utf8_is_read(tmp_path: Path) -> None:
    """Linux allows any bytes in a name; the plan's identity, which names the files, has to encode them."""
    source = shutil.copytree(HF / "llama", tmp_path / "m")
    (source / "model.safetensors").rename(source / "\udcffmodel.safetensors")
    assert reshard("convert", source, tmp_path / "t", "--to", "vllm").code == 0


def test_a_tensor_whose_name_is_not_text_is_refused(tmp_path: Path) -> None:
    import torch

    (tmp_path / "m").mkdir()
    torch.save({"a\ud800": torch.ones(2)}, tmp_path / "m" / "pytorch_model.bin")
    for to in ("hf", "dcp"):
        refused("convert", tmp_path / "m", tmp_path / "t", "--to", to, naming="not Unicode text")


# ---------------------------------------------------------------- the rest


def test_values_that_no_reader_checks_are_a_paragraph_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard.adapter import registry

    format = type(registry.named("hf"))

    def read(*_: object) -> None:
        {}["nothing"]

    monkeypatch.setattr(format, "read", read)
    result = reshard("inspect", HF / "llama")
    assert result.code == 3 and result.err.count("\n") == 1
    for part in ("KeyError: 'nothing'", "in read of test_hostile_fields.py", "--debug"):
        assert part in result.err
    assert "Traceback" in reshard("--debug", "inspect", HF / "llama").err
