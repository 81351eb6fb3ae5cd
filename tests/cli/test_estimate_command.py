"""`reshard estimate`: the published numbers as a table and as a document, everything assumed said beside them."""

import json
import re

import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard


def test_the_table_of_seven_billion_on_eight_gpus():
    out = reshard("estimate", "--parameters", "7B", "--gpus", 8, "--link", "50GB").out
    rows = [line for line in out.splitlines() if line.startswith(("  ddp", "  zero"))]
    expected = {"ddp": "112 GB", "zero1": "38.5 GB", "zero2": "26.25 GB", "zero3, fsdp": "14 GB"}
    assert len(rows) == 4
    for row, (name, states) in zip(rows, expected.items(), strict=True):
        cells = [cell.strip() for cell in row.split("  ") if cell.strip()]
        assert (cells[0], cells[4]) == (name, states)
    for words in ("2 weight + 2 gradient + 4 master + 2 x 4 moments = 16", "24.5 GB per rank and step in 0.49 s", "36.75 GB"):
        assert words in out


@pytest.mark.parametrize("arguments, zero", [(("--zero", 2), 2), (("--strategy", "fsdp"), 3), (("--strategy", "ddp"), 0)])
def test_one_strategy_by_stage_or_by_name(arguments, zero):
    document = reshard("estimate", "--parameters", "10B", "--gpus", 8, *arguments, "--json").document
    (strategy,) = document["strategies"]
    assert strategy["zero"] == zero and strategy["fullest"]["states"] == [160, 55, 37.5, 20][zero] * 10**9


def test_the_document_has_stable_keys():
    document = reshard("estimate", HF / "llama", "--tp", 2, "--pp", 2, "--dp", 2, "--seq-len", 64, "--microbatches", 6, "--json").document
    assert list(document) == ["schema_version", "parameters", "gpus", "parallel", "pipeline", "batch", "strategies", "assumptions",
                              "by_gpus", "fits", "bubbles", "fewest_microbatches"]  # fmt: skip
    assert list(document["pipeline"]) == ["schedule", "stages", "microbatches", "chunks_per_stage", "bubble", "microbatches_in_flight"]
    assert list(document["batch"]) == ["seq_len", "micro_batch", "recompute", "sequence_parallel", "flash_attention", "layer_activations"]
    assert document["gpus"] == 8 and document["pipeline"]["bubble"] == 1 / 7 and document["pipeline"]["microbatches_in_flight"] == [2, 1]
    assert [each["strategy"] for each in document["strategies"]] == ["ddp", "zero1", "zero2", "zero3"]
    for strategy in document["strategies"]:
        assert list(strategy) == ["strategy", "zero", "fullest", "stages", "data_parallel_traffic"]
        assert list(strategy["data_parallel_traffic"]) == ["gradients", "weights", "total", "seconds"]
        for stage in strategy["stages"]:
            assert list(stage) == [
                "stage", "layers", "parameters", "weights", "gradients", "optimizer", "states", "activations", "transient", "total",
            ]  # fmt: skip
            assert stage["states"] == stage["weights"] + stage["gradients"] + stage["optimizer"]
            assert stage["total"] == stage["states"] + stage["activations"] + stage["transient"]


def test_stages_and_the_bubble_are_shown():
    out = reshard("estimate", HF / "llama", "--pp", 2, "--microbatches", 7, "--schedule", "gpipe", "--seq-len", 64, "--zero", 0).out
    assert "12.5% of the time: gpipe, 2 stages, 7 microbatches" in out and "0: layers 0..0" in out and "1: layers 1..1" in out


def test_a_folder_with_nothing_but_a_config_will_do(tmp_path):
    (tmp_path / "config.json").write_bytes((HF / "llama" / "config.json").read_bytes())
    alone, whole = (reshard("estimate", folder, "--json").out for folder in (tmp_path, HF / "llama"))
    assert alone == whole and json.loads(alone)["parameters"] > 0


def test_a_checkpoint_of_training_says_its_model_itself():
    found = reshard("estimate", FIXTURES / "megatron" / "llama-tp2" / "checkpoint", "--tp", 2, "--json")
    assert found.code == 0 and found.document["strategies"][0]["fullest"]["parameters"] == 1064


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "--parameters 7B"),
        (("--parameters", "7B", HF / "llama"), "--parameters 7B"),
        (("--parameters", "7B", "--seq-len", 8), "how large activations are"),
        (("--parameters", "7B", "--ep", 2), "experts"),
        (("--parameters", "7B", "--zero", 1, "--strategy", "fsdp"), "contradict"),
        (("--parameters", "seven"), "7B"),
        ((HF / "llama", "--tp", 3), "3 ranks do not divide"),
        ((HF,), "none is chosen"),
        ((HF / "llama", "--gpus", 6, "--tp", 4), "6 GPUs are not"),
    ],
)
def test_what_cannot_be_answered_is_bad_usage(arguments, words):
    result = reshard("estimate", *arguments)
    assert result.code == 2 and result.out == "" and words in result.err


def test_several_pipelines_are_one_table_and_their_bubbles():
    result = reshard("estimate", "--parameters", "7B", "--gpus", "16,32", "--pp", "2,4", "--max-bubble", "10%")
    assert result.code == 0 and "16, PP 2  16, PP 4  32, PP 2  32, PP 4" in result.out
    # (P - 1) / (M + P - 1) <= 0.1: M >= 9 (P - 1)
    assert "at least 9 microbatches at PP 2" in result.out and "at least 27 microbatches at PP 4" in result.out
    document = reshard("estimate", "--parameters", "7B", "--gpus", "16,32", "--pp", "2,4", "--max-bubble", "10%", "--json").document
    assert [(each["gpus"], each["pp"], each["fewest_microbatches"]) for each in document["by_gpus"]] == [
        (16, 2, 9), (16, 4, 27), (32, 2, 9), (32, 4, 27)
    ]  # fmt: skip
    bubbles = {(each["stages"], each["microbatches"]): each["bubble"] for each in document["bubbles"]}
    assert bubbles[2, 8] == 1 / 9 and bubbles[4, 4] == 3 / 7 and {stages for stages, _ in bubbles} == {2, 4}


def test_every_pipeline_has_its_curve_on_the_page(tmp_path):
    page = tmp_path / "page.html"
    assert reshard("estimate", "--parameters", "7B", "--gpus", 16, "--pp", "2,4,8", "--html", page).code == 0
    text = page.read_text()
    assert text.count('class="curve"') == 3 and all(f">PP {pp}</text>" in text for pp in (2, 4, 8))


def test_python_takes_words_and_a_bubble():
    import reshard as library

    found = library.estimate(parameters="7B", gpus=8, pp=4, max_bubble=0.1)
    assert found.parameters == 7_000_000_000 and found.fewest_microbatches == 27
    assert library.estimate(parameters=7_000_000_000, gpus=8).fewest_microbatches is None
    for wrong in ({}, {"source": 7, "parameters": "7B"}):
        with pytest.raises(library.RequestError, match="either a model or a number"):
            library.estimate(**wrong)


@pytest.mark.parametrize(("memory", "gigabytes", "verdict"), [("80GB", 80, "fits with ZeRO-1"), ("30GB", 30, "does not fit")])
def test_the_page_has_a_line_at_the_memory_of_the_gpu(memory, gigabytes, verdict, tmp_path):
    """DDP takes 16 bytes of each of 7 billion parameters: the longest bar is 112 GB long."""
    page = tmp_path / "page.html"
    assert reshard("estimate", "--parameters", "7B", "--gpus", 2, "--gpu-memory", memory, "--html", page).code == 0
    text = page.read_text()
    line = float(re.search(r'class="limit" d="M([\d.]+) 0v', text)[1])
    spans = [tuple(map(float, found)) for found in re.findall(r'class="[a-e]" d="M([\d.]+) [\d.]+h([\d.]+)v', text)]
    start, end = min(x for x, _ in spans), max(x + width for x, width in spans)
    assert abs((line - start) / (end - start) - gigabytes / 112) < 1e-4
    assert text.count(", does not fit</span>") == sum(each > gigabytes for each in (112, 70, 63, 56)) and f">{verdict}<" in text
    reshard("estimate", "--parameters", "7B", "--gpus", 2, "--html", page)
    assert 'class="limit"' not in page.read_text()
