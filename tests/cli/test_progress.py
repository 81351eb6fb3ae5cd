"""Progress where stderr is no terminal: one line every 30 seconds, and nothing from a short run."""

from __future__ import annotations

from importlib import import_module

lines = import_module("reshard.cli.progress").lines
logs = import_module("reshard.cli.logs")


def test_one_line_every_30_seconds(capsys):
    times = iter([0.0, 29.0, 31.0, 60.0, 62.0])
    with logs.logging_to_stderr(logs.LogOptions()):
        advance = lines(4_000_000, "convert", clock=lambda: next(times))
        for _ in range(4):
            advance(1_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "convert: 50 %, 2 MB of 4 MB, 64.5 kB/s, 31 s left",
        "convert: 100 %, 4 MB of 4 MB, 64.5 kB/s, 0 s left",
    ]


def test_a_short_run_prints_nothing(capsys):
    with logs.logging_to_stderr(logs.LogOptions()):
        advance = lines(10, "convert", clock=iter([0.0, 5.0, 10.0]).__next__)
        advance(5), advance(5)
    assert capsys.readouterr().err == ""


def test_progress_is_an_event_with_its_numbers(capsys):
    import json

    times = iter([0.0, 40.0])
    with logs.logging_to_stderr(logs.LogOptions(log_format="json")):
        lines(4_000_000, "verify", clock=lambda: next(times))(1_000_000)
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["event"]) == ("info", "progress")
    assert line["fields"] == {"percent": 25, "bytes": 1_000_000, "total": 4_000_000, "bytes_per_second": 25_000, "seconds_left": 120}


def test_quiet_runs_show_no_progress(capsys):
    with logs.logging_to_stderr(logs.LogOptions(quiet=True)):
        lines(4, "convert", clock=iter([0.0, 40.0]).__next__)(1)
    assert capsys.readouterr().err == ""
