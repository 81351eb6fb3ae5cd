"""Loads a checkpoint as Megatron-LM's load_checkpoint does, which itself wants CUDA and the whole of megatron.training.

The same files by the same names, the same calls of megatron.core in the same order; stricter where it would forgive: nothing may be missing
or left over. Source: megatron/training/checkpointing.py of core_r0.16 and of main in 2026 (load_checkpoint, load_args_from_checkpoint,
check_checkpoint_args, get_checkpoint_name).
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import settings
import torch
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model

# What --use-checkpoint-args takes from the checkpoint.
TAKEN = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "group_query_attention",
    "kv_channels",
    "max_position_embeddings",
    "position_embedding_type",
    "add_position_embedding",
    "use_rotary_position_embeddings",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "add_bias_linear",
    "add_qkv_bias",
    "squared_relu",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "apply_layernorm_1p",
    "normalization",
    "attention_dropout",
    "hidden_dropout",
    "mtp_num_layers",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_grouped_gemm",
    "moe_shared_expert_intermediate_size",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor",
    "virtual_pipeline_model_parallel_size",
)
# What must be the same in the checkpoint and the run.
COMPARED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "add_position_embedding",
    "max_position_embeddings",
    "make_vocab_size_divisible_by",
)
COMPARED_OF_RANKS = ("padded_vocab_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")


class Checkpoint:
    """The save that a folder's tracker names."""

    def __init__(self, folder: Path) -> None:
        told = (folder / "latest_checkpointed_iteration.txt").read_text().strip()
        self.is_release = told == "release"
        self.folder = folder / ("release" if self.is_release else f"iter_{int(told):07d}")
        self.is_distributed = dist_checkpointing.check_is_distributed_checkpoint(str(self.folder))

    def common(self) -> dict[str, object]:
        """What tells of the run, before there are ranks."""
        if self.is_distributed:
            return dist_checkpointing.load_common_state_dict(str(self.folder))
        places = (self.folder / f"mp_rank_00{suffix}" / "model_optim_rng.pt" for suffix in ("", "_000", "_000_000"))
        return _read(next(place for place in places if place.is_file()))

    def complete(self, args: Namespace, config: object) -> None:
        """--use-checkpoint-args, and what else describes the model."""
        found = vars(self.common()["args"])
        for name in (*TAKEN, *settings.of_model(config)):
            if found.get(name) is not None:
                setattr(args, name, found[name])
        for name in COMPARED + (() if self.is_distributed else COMPARED_OF_RANKS):
            assert found[name] == getattr(args, name), f"{name} is {found[name]} in the checkpoint, {getattr(args, name)} in the run"

    def load(self, args: Namespace, chunks: list, optimizer: object = None, scheduler: object = None) -> None:
        """With --no-load-rng; without an optimizer only the model."""
        state = self._entries(args, unwrap_model(chunks), optimizer, scheduler) if self.is_distributed else _read(self._of_rank())
        assert state["checkpoint_version"] == 3.0
        for number, chunk in enumerate(chunks):
            chunk.load_state_dict(state["model" if len(chunks) == 1 else f"model{number}"], strict=True)
        if optimizer is None:
            return
        if self.is_release:
            optimizer.reload_model_params()
            return
        optimizer.load_state_dict(state["optimizer"])
        if args.use_distributed_optimizer and not self.is_distributed:
            optimizer.load_parameter_state(str(self._of_rank().parent / "distrib_optim.pt"))
        scheduler.load_state_dict(state["opt_param_scheduler"])

    def _of_rank(self) -> Path:
        name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            name += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
        if mpu.get_expert_model_parallel_world_size() > 1:
            name += f"_{mpu.get_expert_model_parallel_rank():03d}"
        return self.folder / name / "model_optim_rng.pt"

    def _entries(self, args: Namespace, chunks: list, optimizer: object, scheduler: object) -> dict[str, object]:
        folder, common = str(self.folder), self.common()
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
        if optimizer is not None and not self.is_release and args.use_distributed_optimizer:
            sizes = "tensor_model_parallel_size", "pipeline_model_parallel_size"
            is_same = all(getattr(common["args"], size) == getattr(args, size) for size in sizes)
            kind = metadata["distrib_optim_sharding_type"]
            assert is_same or kind in DistributedOptimizer.checkpoint_fully_reshardable_formats, f"{kind} at other sizes"
        metadata["dp_cp_group"] = mpu.get_data_parallel_group(with_context_parallel=True)
        wanted: dict[str, object] = {"args": args, "checkpoint_version": 3.0}
        for number, chunk in enumerate(chunks):
            wanted["model" if len(chunks) == 1 else f"model{number}"] = chunk.sharded_state_dict(metadata=metadata)
        if optimizer is not None and not self.is_release:
            wanted["optimizer"] = optimizer.sharded_state_dict(wanted, is_loading=True, metadata=metadata)
            wanted["opt_param_scheduler"] = scheduler.state_dict()
        # Megatron-LM's default is assume_ok_unexpected: what is asked for must be there. This asks for all that is there, too.
        return dist_checkpointing.load(wanted, folder, get_default_load_sharded_strategy(folder), strict="raise_all")


def _read(path: Path) -> dict[str, object]:
    """Main no longer says weights_only=False: only what megatron.core declares safe may be in it."""
    return torch.load(path, map_location="cpu", weights_only=True)
