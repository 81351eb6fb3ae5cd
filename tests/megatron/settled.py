"""Megatron-Core's model, built from nothing but the settings in a checkpoint that reshard wrote, as Megatron-LM does it with
--use-checkpoint-args.

Its logits have to be those of the Hugging Face folder that reshard read. Then it is saved again by Megatron's own writers, in both forms,
for reshard to read back, and trains one step.
"""

from __future__ import annotations

import hashlib
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import bridge_models
import gpu_layers
import mapping
import run as harness  # fixtures/megatron/run.py
import safetensors.torch
import settings
import torch
import torch.distributed as dist
from loading import Checkpoint
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import moe_module_specs
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoConfig, AutoModelForCausalLM


def digest_of_state(state: dict[str, object]) -> str:
    """Of names, shapes and values of what a rank holds, in its order; values as fp32, in which every value of bf16 is exact."""
    return digest(
        f"{name} {list(value.shape)} {hashlib.sha256(value.detach().float().contiguous().numpy().tobytes()).hexdigest()}\n"
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    )


def digest_of_keys(folder: Path) -> str:
    """Of keys and shapes of the tensors of a distributed save."""
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    return digest(f"{key} {list(stored[key].size)}\n" for key in sorted(stored) if isinstance(stored[key], TensorStorageMetadata))


def digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


class Ranks(harness._Ranks):
    """One rank of the model that a checkpoint's settings describe."""

    def __init__(self, checkpoint: Path, hub: Path, layout: harness.Layout) -> None:
        self.run = harness.Run("", layout, "fp32")
        harness.begin(layout)
        self.hub, self.stored = hub, Checkpoint(checkpoint)
        self.hf_config = AutoConfig.from_pretrained(hub)
        self.hf = AutoModelForCausalLM.from_config(self.hf_config, dtype=torch.float32)
        found = vars(self.stored.common()["args"])
        own = {"no_save_optim": True, "no_save_rng": True, "use_distributed_optimizer": False, "consumed_train_samples": 0}
        own["sequence_parallel"] = layout.tp > 1 and bool(found["num_experts"])  # Megatron wants it there
        self.args = Namespace(**settings.defaults(layout, "fp32", self.hf_config.vocab_size) | found | own)
        if self.args.transformer_impl != "local":
            gpu_layers.install()
        self.args.use_mamba_mem_eff_path = False
        self.args.rank = self.args.local_rank = dist.get_rank()
        self.kind = self.hf_config.model_type
        self.sizes = mapping.Sizes(0, 0, 0, self.hf_config.vocab_size, self.args.padded_vocab_size, gated=True)

    def chunks(self, precision: str, config: object = None) -> list:
        if self.kind in bridge_models.MODELS:
            config = config or settings.transformer_config(self.args, precision)
            bridge_models.configure(config, self.args)
            chunks = super().chunks(precision, config)
            for chunk in chunks:
                bridge_models.extend(self.kind, chunk)
            return chunks
        if not getattr(self.args, "is_hybrid_model", False):
            return super().chunks(precision, config)
        from megatron.core.models.mamba import MambaModel, mamba_layer_specs

        spec = mamba_layer_specs.mamba_stack_spec
        # Not grouped: the kernels of grouped experts are Transformer Engine's.
        spec.submodules.moe_layer.submodules.mlp = moe_module_specs.get_moe_module_spec(True, self.args.num_experts, moe_grouped_gemm=False)
        return [
            MambaModel(
                config or settings.transformer_config(self.args, precision),
                spec,
                self.args.padded_vocab_size,
                self.args.max_position_embeddings,
                mpu.is_pipeline_first_stage(),
                hybrid_override_pattern=self.args.hybrid_override_pattern,
                post_process=mpu.is_pipeline_last_stage(),
                share_embeddings_and_output_weights=not self.args.untie_embeddings_and_output_weights,
                position_embedding_type=self.args.position_embedding_type,
            )
        ]

    def spec(self, config: object, vp_stage: int | None) -> object:
        if self.args.transformer_impl == "local":
            return super().spec(config, vp_stage)
        if self.kind in bridge_models.MODELS:
            return bridge_models.spec(self.kind, config)
        return get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)

    def loaded(self, config: object) -> list:
        """The chunks with what the checkpoint holds, and nothing else."""
        chunks = self.chunks("fp32", config)
        for tensor in (tensor for chunk in chunks for tensor in chunk.state_dict().values()):
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(0.5)
        self.stored.load(self.args, chunks)
        return chunks

    def held(self, to: Path) -> dict[str, object]:
        """What every rank holds by its number, and the tensors of Megatron's own distributed save, as digests."""
        config = settings.transformer_config(self.args, "fp32")
        prepared, optimizer, scheduler = self.prepare(self.loaded(config), config)
        harness.WRITERS["torch_dist"](self, to, prepared, optimizer, scheduler)
        state = {
            f"{i}.{name}": value for i, chunk in enumerate(harness.unwrap_model(prepared)) for name, value in chunk.state_dict().items()
        }
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (self.stored._of_rank().parent.name, digest_of_state(state)))
        return {"ranks": dict(sorted(everyone)), "keys": digest_of_keys(next(to.glob("iter_*")))}

    def answered(self, to: Path) -> dict[str, object]:
        config = settings.transformer_config(self.args, "fp32")
        chunks = self.loaded(config)
        self.assert_same_logits(chunks, safetensors.torch.load_file(self.hub / "model.safetensors"))
        prepared, optimizer, scheduler = self.prepare(chunks, config)
        for form in ("torch", "torch_dist"):
            harness.WRITERS[form](self, to / form, prepared, optimizer, scheduler)
        self.one_step(prepared, optimizer, config)
        return {}

    def one_step(self, chunks: list, optimizer: object, config: object) -> None:
        """One step, which has to change every parameter."""
        losses: list[float] = []

        def forward(batches: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
            ids = next(batches)
            loss = model(ids, harness._positions(ids), None, labels=ids.roll(-1, dims=1))
            losses.append(float(loss.detach().float().mean()))
            return loss, lambda output: (output.float().mean(), {})

        before = {name: value.detach().clone() for chunk in chunks for name, value in chunk.named_parameters()}
        batches = [self.batch(0, micro, 0) for micro in range(self.run.layout.microbatches)]
        harness._pipelined(forward, chunks, self.run.layout, batches, forward_only=False)
        done, _, _ = optimizer.step()
        assert done and all(map(math.isfinite, losses)), losses
        after = {name: value for chunk in chunks for name, value in chunk.named_parameters()}
        still = [name for name, value in after.items() if torch.equal(value, before[name]) and ".experts." not in name]
        assert not still, f"{len(still)} parameters do not train, {still[0]} for one"

    def larger(self) -> torch.nn.Module:
        config = AutoConfig.from_pretrained(self.hub)
        config.num_hidden_layers += 1
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
