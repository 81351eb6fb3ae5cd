"""Configs of published models give the numbers of parameters that their publishers state.

tests/declared/published.json holds the sizes that these configs contain, with the keys of the published files: some leave out what
transformers takes anyway. A key that a declaration reads wrongly, or a weight that it lacks, changes the number.
"""

import json
from pathlib import Path

import pytest

from reshard.models.lookup import find_model
from reshard.plans.summary import experts
from reshard.training.parameter_counts import parameters

PUBLISHED = json.loads((Path(__file__).resolve().parent.parent / "declared" / "published.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_the_published_number_of_parameters(name):
    model = find_model(PUBLISHED[name]["config"])
    assert parameters(model) / 1e9 == pytest.approx(PUBLISHED[name]["billions"], rel=0.01)


# What the publishers state of parameters that work on one token, in billions, as they round it.
ACTIVE = {
    "Llama-4-Scout": 17,
    "Llama-4-Maverick": 17,
    "ERNIE-4.5-21B-A3B": 3,
    "Hunyuan-A13B": 13,
    "granite-3.1-3b-a800m": 0.8,
    "LFM2-8B-A1B": 1.5,
    "Phi-3.5-MoE": 6.6,
    "AI21-Jamba-Mini-1.6": 12,
    "Moonlight-16B-A3B": 3,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_a_published_config_gives_the_published_number_of_active_parameters(name):
    model = find_model(PUBLISHED[name]["config"])
    assert (parameters(model) - experts(model).idle_parameters) / 1e9 == pytest.approx(ACTIVE[name], rel=0.13)


def test_a_dense_model_has_no_experts():
    assert experts(find_model(PUBLISHED["Nemotron-H-8B"]["config"])) is None
