"""The laws of reshard.testing, run on every serving engine, with what its own ranks hold."""

import pytest
from helpers.fixture_places import FIXTURES, HF, read_reference

from reshard.testing import EngineCase, EngineLaws

SIZES = ({"tp": 1}, {"tp": 2}, {"tp": 8})
# Engine -> model, sizes, the fixture with what its ranks hold at the last of the sizes, and the file of a rank.
ENGINES = {
    "sglang": ("mixtral-narrow", (*SIZES, {"tp": 2, "ep": 2}), "tp2-ep2", "model-{}-part-0.safetensors"),
    "trtllm": ("llama", (*SIZES, {"tp": 2, "pp": 2}), "tp2-pp2", "{}.safetensors"),
    "vllm": ("llama", (*SIZES, {"tp": 2, "pp": 2}), "tp2-pp2", "model-{}-part-0.safetensors"),
}


class TestEngine(EngineLaws):
    @pytest.fixture(params=ENGINES)
    def case(self, request):
        model, legal, reference, file = ENGINES[request.param]
        expected = read_reference(FIXTURES / request.param / model / f"{reference}.json")["ranks"]
        held = {file.format(rank): tensors for rank, tensors in expected.items()}
        return EngineCase(request.param, HF / model, legal, [{"tp": 3}, {"tp": 16}, {"dp": 2}], [(legal[-1], held)])
