"""Configs of published models give the numbers of parameters that their publishers state.

tests/declared/published.json holds the sizes that these configs contain, with the keys of the published files: some leave out what
transformers takes anyway. A key that a declaration reads wrongly, or a weight that it lacks, changes the number.
"""

import json
from pathlib import Path

import pytest

from reshard.models.lookup import find_model
from reshard.training.parameter_counts import parameters

PUBLISHED = json.loads((Path(__file__).resolve().parent.parent / "declared" / "published.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_the_published_number_of_parameters(name):
    model = find_model(PUBLISHED[name]["config"])
    assert parameters(model) / 1e9 == pytest.approx(PUBLISHED[name]["billions"], rel=0.01)
