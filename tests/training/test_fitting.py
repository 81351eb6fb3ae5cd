"""What fits: each answer is the edge of what fits, found again by asking the estimate itself."""

import json

import pytest
from helpers.fixture_places import HF
from helpers.reshard_command import reshard

import reshard as library
from reshard.errors import RequestError
from reshard.training.memory import fits
from reshard.training.schedules import PipelineSchedule, bubbles, fewest_microbatches
from reshard.verbs.look.estimate import estimates


@pytest.mark.parametrize("stages", [2, 4, 7])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("most", [0.5, 0.25, 0.1, 0.01])
def test_one_microbatch_fewer_waits_longer(stages, chunks, most):
    name = "interleaved" if chunks > 1 else "1f1b"
    step = stages if chunks > 1 else 1
    count = fewest_microbatches(PipelineSchedule(name, stages, stages, chunks), most)
    assert float(PipelineSchedule(name, stages, count, chunks).bubble) <= most + 1e-12
    if count > step:
        assert float(PipelineSchedule(name, stages, count - step, chunks).bubble) > most


def test_a_bubble_is_a_share():
    for most in (0, 1, -0.1, 10):
        with pytest.raises(RequestError, match="is not between 0 and 1"):
            fewest_microbatches(PipelineSchedule("1f1b", 4, 4), most)
    assert "is not a share" in reshard("estimate", "--parameters", "7B", "--pp", 2, "--max-bubble", "much").err
    assert "27 microbatches" in reshard("estimate", "--parameters", "7B", "--pp", 4, "--max-bubble", "10%").out


def test_the_bubble_falls_with_more_microbatches():
    found = bubbles(PipelineSchedule("1f1b", 4, 6))
    assert (6, 1 / 3) in found and [bubble for _, bubble in found] == sorted((bubble for _, bubble in found), reverse=True)


@pytest.mark.parametrize("nbytes", [24 * 10**9, 80 * 10**9])
def test_the_named_numbers_are_the_edge(nbytes):
    counts = (1, 2, 4, 8, 16, 64)
    found = estimates(7 * 10**9, counts)

    def of_parameters(parameters, zero):
        return library.estimate(parameters, zero=zero, gpus=64)

    for number, fit in enumerate(fits(found, nbytes, of_parameters)):
        for count, each in zip(counts, found, strict=True):
            fitting = each.strategies[number].fullest.total <= nbytes
            assert fitting == (fit.gpus is not None and count >= fit.gpus)
        assert of_parameters(fit.parameters, fit.zero).strategies[0].fullest.total <= nbytes
        assert of_parameters(int(fit.parameters * 1.01), fit.zero).strategies[0].fullest.total > nbytes


def test_a_list_of_gpus_is_a_table_of_the_single_estimates():
    document = reshard("estimate", HF / "llama", "--gpus", "1,2,4", "--gpu-memory", "1MB", "--json").document
    for row in document["by_gpus"]:
        single = reshard("estimate", HF / "llama", "--gpus", row["gpus"], "--json").document
        assert row["totals"] == {each["strategy"]: each["fullest"]["total"] for each in single["strategies"]}
    assert [fit["strategy"] for fit in document["fits"]] == list(document["by_gpus"][0]["totals"])
    shown = reshard("estimate", HF / "llama", "--gpus", "1,2,4", "--gpu-memory", "1MB").out
    assert "zero3, fsdp" in shown and "fits from" in shown


def test_degrees_name_the_fewest_gpus_that_fit(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
    }))  # fmt: skip
    shown = reshard("degrees", tmp_path, "--gpu-memory", "80GiB", "--tp", "1,2,4,8", "--pp", 1).out
    assert "fits       TP 2: the fewest GPUs" in shown
    assert "fits  " not in reshard("degrees", tmp_path, "--tp", "1,2").out
