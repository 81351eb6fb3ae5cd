"""The drift alarm names every difference between two releases, and has facts of every framework to compare with."""

import copy
import json

import pytest
from drift import check


def recorded(framework):
    return json.loads((check.HERE / "recorded" / f"{framework}.json").read_text())


@pytest.mark.parametrize("framework", check.FRAMEWORKS)
def test_facts_are_recorded_of_a_known_release(framework):
    facts = recorded(framework)
    assert facts["version"] != "unknown" and len(facts["facts"]) > 4 and list(check.changes(facts["facts"], facts["facts"])) == []


def test_what_came_went_and_changed_is_named():
    known = recorded("transformers")["facts"]
    found = copy.deepcopy(known)
    del found["llama"]["model.norm.weight"]
    found["llama"]["model.norm.scale"] = [20, [64]]
    found["qwen2"]["lm_head.weight"][1] = [1, 2]
    found["of_tomorrow"] = found.pop("gpt2")
    assert [line.split()[0:2] for line in check.changes(known, found)] == [
        ["gone", "gpt2"],
        ["new", "llama:"],
        ["gone", "llama:"],
        ["new", "of_tomorrow"],
        ["changed", "qwen2:"],
    ]
