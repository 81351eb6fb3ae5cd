"""Work in forked processes: in order, with its errors, and only where it pays."""

import os
import subprocess
import sys
import threading

import pytest

from reshard.adapter.processes import in_processes
from reshard.errors import CheckpointError


def test_runs_come_back_in_order(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    found = in_processes(range(300), lambda run: (list(run), os.getpid()))
    assert [job for run, _ in found for job in run] == list(range(300))
    if threading.active_count() == 1:
        assert len({pid for _, pid in found}) == 4


def test_few_jobs_stay_here():
    assert in_processes([1, 2], lambda run: os.getpid()) == [os.getpid()]


def test_an_error_keeps_all_its_words(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)

    def fail_late(run):
        if run[-1] == 199:
            raise CheckpointError("what", where="where", why="why", do="do")

    with pytest.raises(CheckpointError, match=r"where: what\. Why\. Do\."):
        in_processes(range(200), fail_late)


def test_a_process_that_dies_is_told():
    """In an interpreter of its own: other tests leave threads behind, and then nothing is forked."""
    script = """
import os
os.cpu_count = lambda: 2
from reshard.adapter.processes import in_processes
here = os.getpid()
in_processes(range(200), lambda run: None if os.getpid() == here else os._exit(9))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.returncode == 1 and "a process that read a part of the files died" in found.stderr
