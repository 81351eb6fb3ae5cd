"""--metrics-file: complete, in the form that Prometheus reads, replaced as a whole, and written whatever happens."""

from __future__ import annotations

import os
import re
import time
from importlib import import_module

import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard

LLAMA = HF / "llama"
_SAMPLE = re.compile(r'(reshard_last_run_\w+)\{((?:\w+="(?:[^"\\\n]|\\["\\n])*",?)+)\} (\S+)')


def samples(path):
    """{name: value}, {label: value}; every line is a sample or describes the next one."""
    found, labels, described = {}, {}, set()
    for line in path.read_text().splitlines():
        if line.startswith("# "):
            described.add(line.split()[2])
            continue
        name, pairs, value = _SAMPLE.fullmatch(line).groups()
        labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', pairs))
        assert name in described
        found[name.removeprefix("reshard_last_run_") + (f":{labels.pop('severity')}" if "severity" in labels else "")] = float(value)
    return found, labels


@pytest.fixture
def metrics(tmp_path):
    return tmp_path / "reshard.prom"


def test_a_conversion(tmp_path, metrics):
    case = FIXTURES / "dcp" / "fsdp2"
    arguments = ("convert", case / "checkpoint", tmp_path / "out", "--to", "hf", "--model", case / "model", "--metrics-file", metrics)
    assert reshard(*arguments).code == 0
    found, labels = samples(metrics)
    assert labels == {"command": "convert", "format": "hf", "target": str(tmp_path / "out")}
    assert found["success"] == 1 and found["exit_code"] == 0 and abs(found["timestamp_seconds"] - time.time()) < 60
    assert found["bytes_written"] == (tmp_path / "out" / "model.safetensors").stat().st_size and found["bytes_read"] == 123_456
    assert found["tensors"] == 21 and found["dropped"] == 63 and found["unchanged"] == 0 and found["seconds"] > 0
    assert reshard(*arguments).code == 4
    found, again = samples(metrics)
    assert again == labels and found["success"] == 0 and found["exit_code"] == 4 and "bytes_written" not in found
    assert os.listdir(tmp_path).count("reshard.prom") == 1 and not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_verify_and_doctor(metrics):
    assert reshard("verify", LLAMA, HF / "qwen3", "--metrics-file", metrics).code == 1
    found, labels = samples(metrics)
    assert (
        found["success"] == 0 and found["differences"] > 0 and labels == {"command": "verify", "format": "hf", "target": str(HF / "qwen3")}
    )
    assert reshard("doctor", LLAMA, "--deep", "--metrics-file", metrics).code == 0
    found, labels = samples(metrics)
    assert (
        found["success"] == 1 and {"findings:error", "findings:warning", "findings:info"} <= found.keys() and found["findings:error"] == 0
    )
    assert found["bytes_read"] > 0 and labels["command"] == "doctor" and labels["format"] == "hf"


def test_a_usage_error_is_a_failed_run_too(metrics):
    assert reshard("convert", LLAMA, "--nonsense", "--metrics-file", metrics).code == 2
    found, labels = samples(metrics)
    assert (found["success"], found["exit_code"]) == (0, 2) and labels["command"] == "convert"


def test_commands_without_metrics_refuse_the_option(metrics):
    result = reshard("inspect", LLAMA, "--metrics-file", metrics)
    assert result.code == 2 and "--metrics-file" in result.err and not metrics.exists()


def test_label_values_are_escaped(metrics):
    target = 'a"b\\c\nd'
    reshard("convert", LLAMA / "absent", target, "--to", "hf", "--metrics-file", metrics)
    _, labels = samples(metrics)
    assert labels["target"] == 'a\\"b\\\\c\\nd'


def test_a_name_that_is_not_utf_8_is_escaped_too(tmp_path, metrics):
    target = tmp_path / os.fsdecode(b"caf\xe9")
    result = reshard("convert", LLAMA, target, "--to", "hf", "--metrics-file", metrics)
    _, labels = samples(metrics)
    assert result.code == 0 and (target / "reshard.json").exists() and labels["target"].endswith(r"caf\\udce9")


def test_others_may_read_the_file(metrics):
    reshard("doctor", LLAMA, "--metrics-file", metrics)
    umask = os.umask(0)
    os.umask(umask)
    assert metrics.stat().st_mode & 0o777 == 0o666 & ~umask


def test_the_old_file_stays_whole_until_the_new_one_is(metrics, monkeypatch):
    module = import_module("reshard.storage.output_file")
    metrics.write_text("old")

    def refuse(source, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(module.os, "replace", refuse)
    result = reshard("doctor", LLAMA, "--metrics-file", metrics)
    assert result.code == 0 and "the metrics were not written" in result.err and metrics.read_text() == "old"
    assert [path.name for path in metrics.parent.iterdir()] == [metrics.name]
