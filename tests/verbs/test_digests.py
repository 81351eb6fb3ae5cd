"""The digests of a server's parameters: those of real vLLM ranks, which stand beside the fixtures."""

import json

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES, HF, VLLM, digests_of, read_reference
from helpers.reshard_command import reshard

from reshard.adapter import registry


@pytest.fixture
def answer(tmp_path):
    def written(change):
        held = digests_of(read_reference(VLLM / "llama" / "tp2.json"))
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


def test_an_alias_is_equal_and_what_the_checkpoint_does_not_have_is_unknown(answer):
    key, other = (f"dp0:pp0:pcp0:tp0:{name}" for name in ("model.norm.weight", "model.the_norm.weight"))
    code, result = compared(
        answer(lambda held: {**{k: v for k, v in held.items() if k != key}, other: held[key], "dp0:pp0:pcp0:tp0:x": "1"})
    )
    assert (code, result["equal"], result["unknown"]) == (1, None, ["dp0:pp0:pcp0:tp0:x"]) and result["renamed"] == {other: key}
    scale = "dp0:pp0:pcp0:tp0:model.layers.0.self_attn.attn._k_scale"
    code, result = compared(answer(lambda held: {**{k: v for k, v in held.items() if k != key}, other: held[key], scale: "1"}))
    assert (code, result["equal"], result["unknown"]) == (0, True, []), "the engine makes its scales itself"


def test_what_is_no_answer_and_no_engine_is_said(tmp_path):
    (tmp_path / "page.html").write_text("<h1>404</h1>")
    result = reshard("digests", HF / "llama", "--to", "vllm", "--compare", tmp_path / "page.html")
    assert result.code == 3 and "VLLM_SERVER_DEV_MODE=1" in result.err
    assert "a serving engine's ranks" in reshard("digests", HF / "llama", "--to", "hf").err


SGLANG = sorted((FIXTURES / "sglang").glob("*/*.json"))


def sglang_answer(path):
    """What the weight checker of real SGLang ranks on a CPU answers: of each parameter the first 8 bytes of its SHA-256. Each rank has a
    draft model, too."""
    document = read_reference(path)

    def model(role, rank):
        return {"role": role, "tp_rank": int(rank.removeprefix("rank-")), "pp_rank": 0, "dp_rank": 0}

    ranks = [
        {
            "checksums": {name: tensor["sha256"][:16] for name, tensor in tensors.items()} | {"draft.x": "0" * 16},
            "parallelism_info": [model("target", rank), model("draft", rank)],
        }
        for rank, tensors in document["ranks"].items()
    ]
    return document, {"success": True, "message": "", "ranks": ranks}


@pytest.mark.parametrize("path", SGLANG, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_parameter_of_real_sglang_ranks_has_its_digest(path, tmp_path):
    document, answer = sglang_answer(path)
    (tmp_path / "server.json").write_text(json.dumps(answer))
    sizes = ("--tp", document["tp"], "--ep", document["ep"])
    result = reshard("digests", HF / document["model"], "--to", "sglang", *sizes, "--compare", tmp_path / "server.json", "--json")
    comparison = result.document["comparison"]
    assert result.code == 0 and comparison["matching"] >= 10 and not comparison["missing"], comparison
    checksums = answer["ranks"][-1]["checksums"]
    checksums[next(name for name in checksums if "layers" in name or "transformer.h." in name)] = "1" * 16
    (tmp_path / "server.json").write_text(json.dumps(answer))
    assert reshard("digests", HF / document["model"], "--to", "sglang", *sizes, "--compare", tmp_path / "server.json").code == 1


# What SGLang 0.5.23's own kernel gives for this many bytes, in Triton's interpreter (byte i is i * 2654435761 >> 7, modulo 256).
ON_A_GPU = {
    1: "3d93a6540b54ef2a",
    2: "799f798f2eceeea6",
    3: "2080a47c7e79c366",
    4: "b2dd353a7c0ed360",
    5: "f536406ada7bb683",
    255: "322815ecee223f6f",
    1024: "30635730cb429bba",
    1028: "f5bc1a5bac2fc031",
    32767: "3e0bed46d2b7ea16",
    32768: "dbbe0ffe3ef7bcb0",
    32769: "24ccba8207d22c4e",
    100_001: "a8c9c69d1c7e0ff1",
    1_000_003: "db5a970464c01b1d",
}


@pytest.mark.parametrize("nbytes, digest", ON_A_GPU.items())
@pytest.mark.parametrize("part", [7, 4096, 32768, 100_000])
def test_sglangs_hash_on_a_gpu_is_computed_on_a_cpu(nbytes, digest, part):
    data = ((np.arange(nbytes, dtype=np.uint64) * 2654435761 >> np.uint64(7)) & np.uint64(255)).astype(np.uint8)
    running = registry.named("sglang").weight_checker.hashes[0]()
    for start in range(0, nbytes, part) if nbytes / part < 10_000 else (0,):
        running.update(data[start : start + part if nbytes / part < 10_000 else None].data)
    assert running.hexdigest() == digest


def test_sglangs_own_form_is_printed_and_read_again(tmp_path):
    printed = reshard("digests", HF / "llama", "--to", "sglang", "--tp", 2, "--json")
    ranks = printed.document["ranks"]
    assert [rank["parallelism_info"]["tp_rank"] for rank in ranks] == [0, 1] and len(ranks[0]["checksums"]["lm_head.weight"]) == 16
    (tmp_path / "server.json").write_text(printed.out)
    assert reshard("digests", HF / "llama", "--to", "sglang", "--tp", 2, "--compare", tmp_path / "server.json").code == 0
    assert "no weight checker" not in printed.err


def test_an_engine_without_a_weight_checker_is_refused():
    result = reshard("digests", HF / "llama", "--to", "trtllm")
    assert result.code == 2 and "sglang, vllm" in result.err
