"""A rank's file is not there: in every format that has a file or a folder for each rank, the error names it, and what is there."""

import re
import shutil
from pathlib import Path

import pytest
from helpers.fixture_places import FIXTURES, HF

import reshard
from reshard.errors import CheckpointError

# The case, and a glob of the files or folders of its ranks. The first and the last of them are removed, one at a time.
STORED = [
    ("consolidated/llama2-tp2", "consolidated.*.pth"),
    ("consolidated/llama3-tp2", "consolidated.*.pth"),
    ("dcp/async", "__*_0.distcp"),
    ("dcp/accelerate", "pytorch_model_fsdp_0/__*_0.distcp"),
    ("dcp_safetensors/sharded", "shard-*.safetensors"),
    ("dcp_safetensors/empty", "shard-*.safetensors"),
    ("deepspeed/z1-bf16", "global_step2/bf16_zero_pp_rank_*_optim_states.pt"),
    ("deepspeed/z2-fp16", "global_step2/zero_pp_rank_*_optim_states.pt"),
    ("deepspeed/z3-4", "global_step2/zero_pp_rank_*_model_states.pt"),
    ("deepspeed/z3-4", "global_step2/bf16_zero_pp_rank_*_optim_states.pt"),
    ("deepspeed_parallel/autotp2-z0", "global_step2/mp_rank_*_model_states.pt"),
    ("deepspeed_parallel/autoep2-z2", "global_step2/layer_0_expert_*_model_states.pt"),
    ("deepspeed_parallel/moe-ep1-z1", "global_step2/layer_0_expert_*_model_states.pt"),
    ("deepspeed_parallel/megatron-pp2-tp2", "global_step2/layer_04-model_*-model_states.pt"),
    ("deepspeed_parallel/megatron-pp2-tp2", "global_step2/layer_00-model_*-model_states.pt"),
    ("fsdp/fsdp1-sharded", "pytorch_model_fsdp_0_rank*.bin"),
    ("fsdp/fsdp1-sharded", "optimizer_0_rank*.bin"),
    ("fsdp/tp", "model_rank*.pt"),
    ("fsdp/verl", "model_world_size_5_rank_*.pt"),
    ("fsdp/fsdp1-local", "pytorch_model_fsdp_rank*.bin"),
    ("fsdp/fsdp1-local-orig", "pytorch_model_fsdp_rank*.bin"),
    ("fsdp/fsdp1-local-orig", "optimizer_rank*.bin"),
    ("megatron/llama-tp2-pp2-dp2", "iter_0000002/mp_rank_*"),
    ("megatron/mixtral-tp2-ep2", "iter_0000002/mp_rank_*"),
    ("megatron/qwen3-tp4", "iter_0000002/mp_rank_*"),
    ("megatron/qwen3moe-ep2-pp2", "iter_0000002/mp_rank_*"),
    ("megatron/qwen3-tp4", "iter_0000002/mp_rank_*/distrib_optim.pt"),
    ("megatron/llama-layout", "iter_0000002/mp_rank_*/distrib_optim.pt"),
    ("megatron_derived/te-mixtral", "iter_0000002/mp_rank_*"),
    ("megatron_dist/llama-dp-reshardable", "iter_0000002/__*_0.distcp"),
    ("megatron_fsdp/llama-dp2", "iter_0000002/__*_0.distcp"),
    ("megatron_lora/qwen3-moe-legacy", "iter_0000002/mp_rank_*"),
    ("nanotron/llama-tp2-pp2", "model/model/lm_head/pp_block/*.safetensors"),
    ("nanotron/llama-tp2-pp2", "model/model/decoder/0/pp_block/mlp/down_proj/*.safetensors"),
    ("torch_checkpointing/fsdp2", "model_*.pt"),
    ("torch_checkpointing/fsdp2", "optimizer_*.pt"),
    ("torch_checkpointing/bare", "model_*.pt"),
    ("torch_checkpointing/safetensors", "progress_*.json"),
    ("universal/z3-frozen", "global_step2_universal/zero_pp_rank_*_model_states.pt"),
    ("universal/autotp2-z1", "global_step2_universal/mp_rank_*_model_states.pt"),
]
# Formats of engines, which reshard writes, without its own record of what it wrote.
WRITTEN = [
    ("vllm", {"tp": 2, "pp": 2}), ("vllm", {"tp": 2}), ("vllm", {"tp": 4}), ("vllm", {"tp": 8}),
    ("sglang", {"tp": 4}), ("trtllm", {"tp": 2, "pp": 2}),
]  # fmt: skip


def model_of(case: str) -> dict[str, Path]:
    folder = FIXTURES / case / "model"
    return {"model": folder} if folder.exists() else {}


def without(folder: Path, entry: Path) -> None:
    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def check(folder: Path, gone: str, others: list[str], **options: object) -> None:
    """The error names `gone`, as a file or as a rank, and one of the others."""
    with pytest.raises(CheckpointError) as caught:
        reshard.open(folder, **options)
    text = str(caught.value).replace(str(folder), "")
    numbers = re.findall(r"\d+", gone.replace("iter_0000002", ""))
    by_rank = [rf"rank {int(number)}( of stage \d+)?\b" for number in numbers] + [rf"\b{int(number)} (has|does)\b" for number in numbers]
    names = {
        gone,
        re.sub(r"-model-\d.*", "", gone) if "shard-" in gone else gone,
        re.sub(r"^.*layer_\d_(.*mp_rank_)\d\d", r"layer_*_\1*", gone),
    }
    assert any(name in text for name in names) or any(re.search(pattern, text) for pattern in by_rank), text
    assert any(other in text for other in others) or re.search(r"rank 0 to \d+ have", text), text


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize(("case", "ranks"), STORED, ids=[f"{case}-{ranks}" for case, ranks in STORED])
def test_a_missing_rank_is_named_with_those_that_are_there(case: str, ranks: str, which: int, tmp_path: Path):
    source = FIXTURES / case
    folder = shutil.copytree(source / "checkpoint" if (source / "checkpoint").exists() else source, tmp_path / "copy")
    entries = sorted(folder.glob(ranks))
    assert len(entries) > 1
    gone = entries.pop(which)
    without(folder, gone)
    check(folder, str(gone.relative_to(folder)), [str(entry.relative_to(folder)) for entry in entries], **model_of(case))


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize(("target", "sizes"), WRITTEN, ids=[f"{target}-{sizes}" for target, sizes in WRITTEN])
def test_a_missing_rank_of_an_engine(target: str, sizes: dict[str, int], which: int, tmp_path: Path):
    folder = tmp_path / "ranks"
    reshard.convert(reshard.plan(HF / "llama", to=target, **sizes), folder)
    (folder / "reshard.json").unlink()
    entries = sorted(path for path in folder.glob("*.safetensors"))
    gone = entries.pop(which)
    gone.unlink()
    check(folder, gone.name, [entry.name for entry in entries], **({"format": target} if target == "sglang" else {}))


def test_ranks_that_hold_copies_are_named_in_a_note(tmp_path: Path):
    folder = shutil.copytree(FIXTURES / "fsdp" / "fsdp1-hsdp" / "checkpoint", tmp_path / "copy")
    (folder / "pytorch_model_fsdp_rank0.bin").unlink()
    notes = reshard.open(folder, model=FIXTURES / "fsdp" / "fsdp1-hsdp" / "model").index.facts.notes
    assert any("rank 0 of 4 has no file" in note and "hold copies" in note for note in notes)


def test_files_that_say_nothing_about_ranks_are_not_listed(tmp_path: Path):
    folder = shutil.copytree(HF / "llama-sharded", tmp_path / "copy")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        reshard.open(folder)
    assert "model-00002-of-00003.safetensors" in str(caught.value) and "There is no" not in str(caught.value)
