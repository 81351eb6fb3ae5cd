"""Work in forked processes: in order, with its errors, and only where it pays."""

import os
import threading

import pytest

from reshard.errors import CheckpointError
from reshard.processes import in_processes


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


@pytest.mark.skipif(threading.active_count() > 1, reason="other threads run, so nothing is forked")
def test_a_process_that_dies_is_told(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    here = os.getpid()
    with pytest.raises(RuntimeError, match="died"):
        in_processes(range(200), lambda run: None if os.getpid() == here else os._exit(9))
