"""The digests of a server's parameters: those of real vLLM ranks, which stand beside the fixtures."""

import json

import pytest
from command import reshard
from places import HF, REFERENCES, served

import reshard as library
from reshard.errors import RequestError
from reshard.verbs.digests import compare_with_server


def reference(path):
    """What the weight checker of these real ranks answers, as far as the fixture tells: every parameter and its SHA-256."""
    document = json.loads(path.read_text())

    def ranks(name):
        numbers = [int(word) for word in name.split("-") if word.isdecimal()]
        return numbers if len(numbers) == 2 else divmod(numbers[0], document["tp"])

    return document, {
        f"dp0:pp{ranks(rank)[0]}:pcp0:tp{ranks(rank)[1]}:{name}": tensor["sha256"]
        for rank, tensors in document["ranks"].items()
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_parameter_of_real_ranks_has_its_digest(path):
    document, held = reference(path)
    options = {name: document[name] for name in ("tp", "pp", "ep") if document.get(name)}
    try:
        expected = library.digests(served(path.parent.name), to="vllm", **options)
    except RequestError:
        pytest.skip("other tests say why this reference is not laid out with these options alone")
    result = compare_with_server(expected, held)
    assert result.is_equal and result.equal == len(expected), result
    # The rest is made by the engine: scales and zero points of the KV cache.
    others = [key for key in result.not_comparable if not key.endswith(("_scale", "_zero_point"))]
    assert not others, others[:3]


@pytest.fixture
def answer(tmp_path):
    def written(change):
        _, held = reference(served("llama").parent.parent / "vllm" / "llama" / "tp2.json")
        path = tmp_path / "server.json"
        path.write_text(json.dumps({"checksums": change(dict(held))}))
        return path

    return written


def compared(path, *more):
    result = reshard("digests", HF / "llama", "--to", "vllm", "--tp", 2, "--compare", path, "--json", *more)
    return result.code, result.document["comparison"]


def test_a_right_server_and_a_server_of_other_weights_are_told_apart(answer):
    key = "dp0:pp0:pcp0:tp1:model.layers.0.self_attn.qkv_proj.weight"
    assert compared(answer(lambda held: held))[0] == 0
    code, result = compared(answer(lambda held: {**held, key: "0" * 64}))
    assert (code, result["different"]) == (1, [key])
    code, result = compared(answer(lambda held: {k: v for k, v in held.items() if k != key}))
    assert (code, result["missing"]) == (1, [key])


def test_two_ranks_that_are_exchanged_are_different(answer):
    def exchanged(held):
        swap = {"tp0:": "tp1:", "tp1:": "tp0:"}
        return {key.replace(word, swap[word]): digest for key, digest in held.items() for word in swap if word in key}

    code, result = compared(answer(exchanged))
    assert code == 1 and len(result["different"]) > 10


def test_an_alias_is_equal_and_what_the_engine_made_is_not_comparable(answer):
    key, other = (f"dp0:pp0:pcp0:tp0:{name}" for name in ("model.norm.weight", "model.the_norm.weight"))
    code, result = compared(
        answer(lambda held: {**{k: v for k, v in held.items() if k != key}, other: held[key], "dp0:pp0:pcp0:tp0:x": "1"})
    )
    assert code == 0 and result["renamed"] == {other: key} and result["not_comparable"][-1] == "dp0:pp0:pcp0:tp0:x"


def test_what_is_no_answer_and_no_engine_is_said(tmp_path):
    (tmp_path / "page.html").write_text("<h1>404</h1>")
    result = reshard("digests", HF / "llama", "--to", "vllm", "--compare", tmp_path / "page.html")
    assert result.code == 3 and "VLLM_SERVER_DEV_MODE=1" in result.err
    assert "a serving engine's ranks" in reshard("digests", HF / "llama", "--to", "hf").err
