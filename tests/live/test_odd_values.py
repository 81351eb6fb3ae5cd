"""Values of servers and ranks that are no sizes, no configs and no documents: one clear refusal each."""

import pytest

from reshard.errors import CheckpointError, ReshardError
from reshard.live.from_files import running_server as module
from reshard.live.from_files.running_server import running_server
from reshard.live.hello import Hello

NO_SIZES = (10**30, 1 << 16, 0, -1, 1.5, float("inf"), float("nan"), "8", "x" * 1000, None, True, [], {}, [[[]]])


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "data", "prefill_context"])
@pytest.mark.parametrize("size", NO_SIZES, ids=lambda size: repr(size)[:20])
def test_a_size_that_is_none_is_refused(axis, size, monkeypatch):
    sizes = {f"{each}_parallel_size": 1 for each in ("tensor", "pipeline", "data", "prefill_context")} | {f"{axis}_parallel_size": size}
    about = {"vllm_config": {"parallel_config": {**sizes, "enable_expert_parallel": False}, "model_config": {"dtype": "torch.bfloat16"}}}
    sglang = {"tp_size": 1, "pp_size": 1, "dp_size": size, "ep_size": size}
    for answer in (about, sglang):
        monkeypatch.setattr(module.Server, "ask", lambda self, path, answer=answer: answer)
        with pytest.raises(CheckpointError, match="does not say how it splits"):
            running_server("http://127.0.0.1:9")


@pytest.mark.parametrize(
    "answer", [[], [1], 5, "text", True, {"vllm_config": []}, {"vllm_config": {"parallel_config": 5}}, {"vllm_config": "x"}]
)
def test_an_answer_of_another_kind_is_refused(answer, monkeypatch):
    monkeypatch.setattr(module.Server, "ask", lambda self, path: answer)
    with pytest.raises(CheckpointError, match="does not say how it splits"):
        running_server("http://127.0.0.1:9")


GOOD = {
    "engine": "vllm 0.32.0", "rank": 0, "degrees": {"tp": 1, "tp_rank": 0}, "config": {"model_type": "llama"}, "model": "/m",
    "tensors": [[["a"], "BF16", [2]]], "others": [], "is_open": False, "holds": "", "number": 0, "before": "",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(GOOD))
@pytest.mark.parametrize("value", [None, [], [1], 5, 10**30, "text", {"tp": 10**30}, {"tp": "x"}, 1.5], ids=repr)
def test_a_hello_of_another_kind_is_refused_or_means_what_it_says(name, value):
    assert Hello.of(GOOD).degrees == {"tp": 1, "tp_rank": 0}
    try:
        hello = Hello.of({**GOOD, name: value})
    except ReshardError as error:
        assert "does not understand" in str(error)
    else:
        assert type(getattr(hello, name)) in (type(value), frozenset, tuple) and (name, value) != ("degrees", {"tp": 10**30})
