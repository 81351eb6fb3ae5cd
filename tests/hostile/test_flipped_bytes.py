"""Bytes changed anywhere in what describes a checkpoint: it opens, or it is refused in a paragraph. Nothing else ever happens."""

import random
import shutil

import pytest
from helpers.fixture_places import FIXTURES

import reshard
from reshard.errors import ReshardError

DESCRIPTIONS = [
    ("fsdp/tp", "model_rank1.pt"),
    ("fsdp/verl", "optim_world_size_5_rank_0.pt"),
    ("fsdp/fsdp1-sharded", "pytorch_model_fsdp_0_rank1.bin"),
    ("fsdp/fsdp1-local", "pytorch_model_fsdp_rank0.bin"),
    ("fsdp/full-compile", "checkpoint.pt"),
    ("torch_versions/2.2.2/placements", "model_world_size_4_rank_0.pt"),
    ("torch_checkpointing/tp", "metadata.pkl"),
    ("dcp_safetensors/tp", "shard-00002-model-00001-of-00001.safetensors"),
    ("dcp/int-keyed", ".metadata"),
    ("deepspeed/z1-groups", "global_step2/mp_rank_00_model_states.pt"),
    ("deepspeed/z1-groups", "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("deepspeed/z3-4", "global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ("deepspeed/z3-4", "global_step2/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"),
    ("deepspeed/z2-old-container", "global_step2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    ("deepspeed_parallel/autotp3-z1", "global_step2/mp_rank_00_model_states.pt"),
    ("deepspeed_parallel/autoep2-z2", "global_step2/mp_rank_00_model_states.pt"),
    ("deepspeed_parallel/moe-ep2-z0", "global_step2/expp_rank_0_mp_rank_00_optim_states.pt"),
    ("universal/z3-frozen", "global_step2_universal/zero/optimizer_state.pt"),
    ("megatron/llama-tp2", "iter_0000002/mp_rank_00/model_optim_rng.pt"),
    ("megatron/llama-tp2", "iter_0000002/mp_rank_01/model_optim_rng.pt"),
    ("megatron/mixtral-tp2-ep2", "iter_0000002/mp_rank_01_001/distrib_optim.pt"),
    ("megatron_dist/llama-tp2-pp2", "iter_0000002/common.pt"),
    ("megatron_dist/llama-dp-reshardable", "iter_0000002/.metadata"),
    ("megatron_dist/nemo2", "context/model.yaml"),
    ("megatron_dist/torch-dcp", "iter_0000002/.metadata"),
    ("megatron_versions/model-space", "iter_0000002/.metadata"),
    ("megatron_versions/zarr-fp32", "iter_0000002/embedding.word_embeddings.weight/.zarray"),
    ("megatron_derived/nemo-tp2", "model.nemo"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case, name", DESCRIPTIONS)
def test_flipped_bytes_are_refused_or_harmless(case, name, tmp_path):
    folder = shutil.copytree(FIXTURES / case / "checkpoint", tmp_path / "copy")
    model = FIXTURES / case / "model"
    raw, chance, refused = (folder / name).read_bytes(), random.Random(name), 0
    for _ in range(60):
        changed = bytearray(raw)
        for _ in range(chance.choice((1, 1, 2, 4))):
            changed[chance.randrange(min(len(raw), 16_000))] = chance.randrange(256)
        (folder / name).write_bytes(changed)
        try:
            opened = reshard.open(folder, model=model if model.exists() else None)
            opened.index.param_groups()
        except ReshardError as error:
            assert str(error) and "\n" not in str(error)
            refused += 1
    assert refused, "none of the changes was noticed: the test changes what nobody reads"
