"""The log: what goes to stderr and to --log-file, in which form; and that the library itself prints nothing."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import subprocess
import sys

import pytest
from helpers.fixture_places import HF
from helpers.reshard_command import command, reshard

import reshard as library

LLAMA = HF / "llama"
UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def names(lines):
    return [line["event"] for line in lines]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def test_without_options_a_conversion_writes_nothing_to_stderr(out):
    result = reshard("convert", LLAMA, out, "--to", "hf")
    assert result.code == 0 and result.err == "" and "model.safetensors" in result.out


def test_quiet_prints_one_line(out):
    for arguments in (("convert", LLAMA, out, "--to", "hf"), ("verify", LLAMA, out), ("verify", LLAMA, HF / "qwen3"), ("doctor", LLAMA)):
        again = ["--overwrite"] if arguments[0] == "convert" else []
        full, quiet = reshard(*arguments), reshard(*arguments, "-q", *again)
        assert quiet.code == full.code and quiet.err == "" and len(quiet.out.splitlines()) == 1
        assert quiet.out.split()[0] == full.out.split()[0]
    assert "fingerprint blake3:" in reshard("convert", LLAMA, out, "--to", "hf", "--overwrite", "--quiet").out


def test_quiet_runs_still_print_errors(tmp_path):
    result = reshard("inspect", tmp_path / "absent", "-q")
    assert result.code == 2 and result.err.startswith("reshard: There is no file or directory")


def test_verbose_says_what_is_read_and_decided_and_how_long_it_took(out):
    shown = reshard("convert", LLAMA, out, "--to", "vllm", "--tp", 2, "--verbose")
    assert shown.code == 0 and all(re.match(r"\[\d+\.\d\d s\] ", line) for line in shown.err.splitlines())
    phases = ("opened", "planned and proved hf -> vllm for TP 2", "copied all blocks in", "of which", "ended with exit code 0")
    for words in (*phases, "hf (model.safetensors)", "reads model.safetensors", "model type llama"):
        assert words in shown.err


def test_json_lines_have_the_same_five_keys(out):
    shown = lines_of(reshard("convert", LLAMA, out, "--to", "hf", "--log-format", "json").err)
    assert names(shown) == ["started", "opened", "planned", "writing", "copied", "converted", "finished"]
    for line in shown:
        assert list(line) == ["time", "level", "event", "message", "fields"]
        assert UTC.fullmatch(line["time"]) and line["level"] == "info"
    by_name = {line["event"]: line["fields"] for line in shown}
    assert by_name["opened"]["format"] == "hf" and by_name["opened"]["tensors"] == 21
    assert by_name["converted"]["fingerprint"] == library.fingerprint(LLAMA).root
    assert by_name["finished"]["exit_code"] == 0
    verbose = names(lines_of(reshard("verify", LLAMA, HF / "qwen3", "--log-format", "json", "-v").err))
    assert {"file", "model", "difference"} <= set(verbose)


def test_errors_are_json_lines_too_and_stderr_holds_nothing_else(tmp_path):
    for arguments, id in (
        (("inspect", tmp_path / "absent"), "not-found"),
        (("inspect", LLAMA, "--nonsense"), "usage"),
        (("convert", LLAMA, HF / "qwen3", "--to", "hf"), "target-exists"),
    ):
        result = reshard(*arguments, "--log-format", "json")
        (error,) = [line for line in lines_of(result.err) if line["level"] == "error"]
        assert error["event"] == "error" and error["fields"]["id"] == id and error["fields"]["exit_code"] == result.code
        assert error["message"].endswith(f"[{id}]") and result.out == ""


def test_the_log_file_gets_everything_and_is_appended_to(out, tmp_path):
    log = tmp_path / "reshard.log"
    for arguments in (("convert", LLAMA, out, "--to", "hf"), ("inspect", tmp_path / "absent"), ("inspect", LLAMA, "--nonsense")):
        reshard(*arguments, "--log-file", log, "-q")
    lines = log.read_text().splitlines()
    assert all(UTC.match(line) for line in lines)
    assert [line.split()[1] for line in lines].count("error") == 2 and sum("ended with exit code" in line for line in lines) == 3
    assert sum("opened" in line for line in lines) == 1
    as_json = tmp_path / "reshard.jsonl"
    reshard("verify", LLAMA, LLAMA, "--log-file", as_json, "--log-format", "json")
    assert names(lines_of(as_json.read_text())) == ["started", "opened", "opened", "compared", "finished"]


def test_a_log_file_that_cannot_be_written_stops_before_the_work(out, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    for place, codes in ((tmp_path / "nowhere" / "log", {2}), (tmp_path, {2}), (LLAMA / "config.json" / "log", {2, 5})):
        for option in ("--log-file", "--metrics-file"):
            result = reshard("convert", LLAMA, out, "--to", "hf", option, place)
            assert result.code in codes and str(place) in result.err and not out.exists()


def test_a_full_disk_under_the_log_file_does_not_stop_the_run(out, tmp_path):
    try:
        os.mknod(tmp_path / "full", stat.S_IFCHR | 0o666, os.makedev(1, 7))
    except PermissionError:
        pytest.skip("a device node can only be made by root")
    result = reshard("convert", LLAMA, out, "--to", "hf", "--log-file", tmp_path / "full")
    assert result.code == 0 and result.err.count("the log file cannot be written any more") == 1 and (out / "reshard.json").exists()


def test_names_from_files_cannot_break_a_line(tmp_path):
    folder = tmp_path / "a\nb\x1b[31m"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((LLAMA / name).read_bytes())
    shown = reshard("inspect", folder, "-v", "--log-file", tmp_path / "log").err
    assert "\x1b" not in shown and all(line.startswith("[") for line in shown.splitlines())
    written = (tmp_path / "log").read_text()
    assert "\x1b" not in written and all(UTC.match(line) for line in written.splitlines())
    assert "opened" in names(lines_of(reshard("inspect", folder, "--log-format", "json").err))


def test_quiet_and_verbose_contradict_each_other():
    result = reshard("inspect", LLAMA, "-q", "-v")
    assert result.code == 2 and "contradict" in result.err


def test_a_defect_has_its_traceback_in_the_log(tmp_path, monkeypatch):
    log = tmp_path / "log"

    def broken(*arguments, **options):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(library, "open", broken, raising=False)
    result = reshard("inspect", LLAMA, "--log-file", log, "--log-format", "json")
    assert result.code == 70
    for text in (log.read_text(), result.err):
        (error,) = [line for line in lines_of(text) if line["level"] == "error"]
        assert "ZeroDivisionError" in error["fields"]["traceback"] and error["fields"]["id"] == "defect"


def test_the_logger_is_afterwards_what_it_was_before(out, tmp_path):
    logger = logging.getLogger("reshard")
    before = (list(logger.handlers), logger.level, logger.propagate)
    reshard("convert", LLAMA, out, "--to", "hf", "-v", "--log-file", tmp_path / "log")
    assert (list(logger.handlers), logger.level, logger.propagate) == before


def test_the_library_prints_nothing_and_installs_no_handler(out):
    """In a process of its own, in which nobody has set up logging."""
    script = (
        "import logging, reshard\n"
        f"reshard.convert(reshard.plan({str(LLAMA)!r}, to='hf'), {str(out)!r})\n"
        "logger = logging.getLogger('reshard')\n"
        "assert not logger.handlers and logger.level == logging.NOTSET and not logging.getLogger().handlers"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


def test_users_of_the_library_get_the_events_from_logging(out, caplog):
    with caplog.at_level(logging.INFO, logger="reshard"):
        library.convert(library.plan(LLAMA, to="hf"), out)
    events = {record.event: record for record in caplog.records}
    assert list(events) == ["opened", "planned", "writing", "copied", "converted"]
    assert events["converted"].fields["target"] == str(out) and all(record.levelno <= logging.INFO for record in caplog.records)


def test_an_interruption_is_logged(tmp_path):
    log = tmp_path / "log"
    code = (
        "import os, signal, sys, importlib\n"
        "main = importlib.import_module('reshard.cli.main')\n"
        "verb = importlib.import_module('reshard.opening.open')\n"
        "verb.open = lambda *a, **k: os.kill(os.getpid(), signal.SIGTERM)\n"
        f"sys.argv = ['reshard', 'inspect', 'x', '--log-file', {str(log)!r}, '--log-format', 'json']\n"
        "main.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 143
    assert names(lines_of(log.read_text())) == ["started", "interrupted", "finished"]
    assert lines_of(log.read_text())[1]["fields"] == {"id": "interrupted", "exit_code": 143}


def test_a_stderr_that_is_gone_does_not_change_the_exit_code(tmp_path):
    arguments = " ".join(command("inspect", tmp_path / "absent"))
    done = subprocess.run(["bash", "-c", f"{arguments} 2>/dev/full"], capture_output=True, text=True)
    assert done.returncode == 2
