"""`reshard log RUN`: one row a step, what reshard recorded of it, and how the weights changed."""

import math
import shutil

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard as run

import reshard
from reshard.verbs.look.log import RunLog

RUN = FIXTURES / "delta"


def norms(step):
    """The L2 norms of the weights of a step by tensor, by numpy alone."""
    view = reshard.open(RUN, step=step).tensors()
    return {name: view[name].numpy().astype(np.float64) for name in view}


def test_norms_and_changes_are_those_of_numpy():
    log = reshard.log(RUN, stats=True)
    assert [row.of.number for row in log.steps] == [100, 200, 300] and log.steps[0].change is None and not log.steps[0].layers
    weights = {row.of.number: norms(row.of.number) for row in log.steps}
    for before, after in ((100, 200), (200, 300)):
        row = next(row for row in log.steps if row.of.number == after)
        old, new = weights[before], weights[after]
        length = math.sqrt(sum(float((each**2).sum()) for each in new.values()))
        moved = math.sqrt(sum(float(((new[name] - old[name]) ** 2).sum()) for name in new))
        assert row.norm == pytest.approx(length, rel=1e-6)
        assert row.change == pytest.approx(moved / math.sqrt(sum(float((each**2).sum()) for each in old.values())), rel=1e-3)
        assert [layer.name for layer in row.layers] == ["layer 0", "no layer"]


def test_a_kept_run_has_the_recorded_fingerprints_and_the_same_changes(tmp_path):
    assert run("delta", "--of", RUN, tmp_path / "kept").code == 0
    kept, whole = reshard.log(tmp_path / "kept", stats=True), reshard.log(RUN, stats=True)
    assert [row.of.format for row in kept.steps] == ["hf", "delta", "delta"]
    assert [row.fingerprint for row in kept.steps] == [reshard.fingerprint(reshard.open(RUN, step=n)).root for n in (100, 200, 300)]
    assert [row.change for row in kept.steps] == [row.change for row in whole.steps]
    assert [row.fingerprint for row in whole.steps] == [None] * 3


def test_one_step_that_cannot_be_compared_hides_no_other(tmp_path):
    shutil.copytree(RUN, tmp_path / "run", ignore=shutil.ignore_patterns("make.py"))
    shutil.rmtree(tmp_path / "run" / "step-200")
    shutil.copytree(HF / "gpt2", tmp_path / "run" / "step-200")
    (tmp_path / "run" / "step-200" / "reshard.json").unlink(missing_ok=True)
    shown = run("log", tmp_path / "run", "--stats")
    assert shown.code == 0 and "step 200 and the one before: " in shown.out and "could not be compared" in shown.out
    assert [row.change for row in reshard.log(tmp_path / "run", stats=True).steps] == [None, None, None]


def test_an_incomplete_step_and_a_gap_are_named(tmp_path):
    for number in (100, 200, 300, 600):
        shutil.copytree(RUN / "step-100", tmp_path / "run" / f"step-{number}")
    (tmp_path / "run" / "step-300" / ".metadata").unlink()
    shown = run("log", tmp_path / "run").out
    assert "steps are 100 apart, and more between 300 to 600" in shown
    assert "3 complete" in shown.splitlines()[0] and "step 300: " in shown


def test_what_is_no_run_is_refused():
    for path in (HF / "llama", FIXTURES / "hf"):
        refused = run("log", path)
        assert refused.code == 2 and "is not the folder of a run" in refused.err


def test_the_page_and_the_table(tmp_path):
    assert run("log", RUN, "--stats", "--html", tmp_path / "run.html").code == 0
    page = (tmp_path / "run.html").read_text()
    assert "layer 0 changed most" in page and "4.19e-06" in page and "<script" not in page
    log = reshard.log(RUN)
    assert isinstance(log, RunLog) and len(log.table().rows) == 3 and log.table().columns[0] == "step"
