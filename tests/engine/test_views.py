"""One rank's part of a checkpoint, without a file: which rank is meant, and that nothing else is laid out or read."""

import numpy as np
import pytest
from helpers.fixture_places import DCP, FIXTURES, HF, open_case

import reshard
from reshard.engine import transfer
from reshard.errors import RequestError
from reshard.storage.files import LocalFiles

EXPERTS = FIXTURES / "megatron" / "mixtral-tp2-ep2"


@pytest.mark.parametrize(
    "source, tp",
    [
        (HF / "llama", 8),
        (FIXTURES / "megatron" / "llama-tp2-pp2-dp2" / "checkpoint", 2),
        (FIXTURES / "deepspeed" / "z3-bf16" / "checkpoint", 2),
    ],
    ids=["hf", "megatron", "zero-3"],
)
def test_a_rank_reads_its_own_bytes_and_little_else(source, tp, monkeypatch):
    """Besides its own bytes it reads headers, and short gaps between parts of rows; those of the fixtures are all short."""
    monkeypatch.setattr(transfer, "_CLOSE", 0)
    model = source.parent / "model"
    opened = reshard.open(source, model=model if model.exists() else None)
    whole = sum(tensor.nbytes for tensor in opened.content().tensors.values())
    read = []
    for name in ("read_into", "read_runs"):
        monkeypatch.setattr(LocalFiles, name, counted(getattr(LocalFiles, name), read))
    for rank in range(tp):
        view = opened.view(to="vllm", tp=tp, rank=rank)
        read.clear()
        for held in view.values():
            held.words()
        own = sum(section.box.volume * stored.dtype.itemsize for stored in view._stored.values() for section in stored.sections)
        assert own <= sum(read) < 1.5 * own and own < 0.6 * whole


def counted(real, read):
    """The same method of Files, which also notes how many bytes it was asked for."""
    return lambda self, path, at, buffer: (read.append(len(buffer)), real(self, path, at, buffer))[1]


def test_one_rank_is_laid_out_and_not_the_others():
    opened = reshard.open(HF / "llama")
    plan = reshard.plan(opened, to="vllm", tp=8, only={"tp": 3, "pp": 0})
    assert [file.path for file in plan.layout.files] == ["model-rank-3-part-0.safetensors"]


def test_a_plan_of_one_rank_is_not_run(tmp_path):
    plan = reshard.plan(reshard.open(HF / "llama"), to="vllm", tp=8, only={"tp": 3})
    with pytest.raises(RequestError, match="alone"):
        reshard.convert(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_stages_are_told_apart():
    opened = reshard.open(HF / "llama")
    first, last = (opened.view(to="vllm", tp=2, rank=1, pp=2, pp_rank=stage) for stage in (0, 1))
    assert "model.embed_tokens.weight" in first and "lm_head.weight" in last and not set(first) & set(last)


@pytest.mark.parametrize("rank, ep_rank", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_expert_ranks_are_told_apart(rank, ep_rank):
    """4 experts on 2 ranks: the first one that a rank holds is number 0 or 2, and tensor-parallel ranks hold halves of its columns."""
    opened = open_case(EXPERTS)
    whole = opened.tensors()[f"model.layers.0.block_sparse_moe.experts.{2 * ep_rank}.w2.weight"].words()
    view = opened.view(to="megatron", tp=2, rank=rank, ep=2, ep_rank=ep_rank)
    held = view["decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight"].words()
    assert np.array_equal(held, np.split(whole, 2, axis=1)[rank])


@pytest.mark.parametrize("dp_rank, rows", [(0, slice(0, 84)), (1, slice(84, 168)), (2, slice(168, 250))])
def test_data_parallel_ranks_are_told_apart(dp_rank, rows):
    opened = open_case(DCP / "fsdp2")
    held = opened.view(to="fsdp", dp=3, dp_rank=dp_rank)["model.embed_tokens.weight"].words()
    assert np.array_equal(held, opened.tensors()["model.embed_tokens.weight"].words()[rows])


@pytest.mark.parametrize("ranks", [{"rank": 2}, {"pp_rank": 1}, {"ep_rank": 1}, {"dp_rank": 1}])
def test_a_rank_that_there_is_not_is_refused(ranks):
    with pytest.raises(RequestError, match=r"he target has no [a-z]+ rank"):
        reshard.open(HF / "llama").view(to="vllm", tp=2, **ranks)
