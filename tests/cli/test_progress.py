"""Progress where stderr is no terminal: one line every 30 seconds, and nothing from a short run."""

from __future__ import annotations

from importlib import import_module

lines = import_module("reshard.cli.progress").lines


def test_one_line_every_30_seconds(capsys):
    times = iter([0.0, 29.0, 31.0, 60.0, 62.0])
    advance = lines(4_000_000, "convert", clock=lambda: next(times))
    for _ in range(4):
        advance(1_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "convert: 50 %, 2 MB of 4 MB, 64.5 kB/s, 31 s left",
        "convert: 100 %, 4 MB of 4 MB, 64.5 kB/s, 0 s left",
    ]


def test_a_short_run_prints_nothing(capsys):
    advance = lines(10, "convert", clock=iter([0.0, 5.0, 10.0]).__next__)
    advance(5), advance(5)
    assert capsys.readouterr().err == ""
