"""Megatron-Core's model, built from nothing but the settings in a checkpoint that reshard wrote, as Megatron-LM does it with
--use-checkpoint-args.

Its logits have to be those of the Hugging Face folder that reshard read. Then it is saved again by Megatron's own writers, in both forms,
for reshard to read back, and trains one step.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import mapping
import run as harness  # fixtures/megatron/run.py
import safetensors.torch
import settings
import torch
import torch.distributed as dist
from loading import Checkpoint
from transformers import AutoConfig, AutoModelForCausalLM


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
        self.args.rank = self.args.local_rank = dist.get_rank()
        self.kind = self.hf_config.model_type
        self.sizes = mapping.Sizes(0, 0, 0, self.hf_config.vocab_size, self.args.padded_vocab_size, gated=True)

    def answered(self, to: Path) -> dict[str, object]:
        config = settings.transformer_config(self.args, "fp32")
        chunks = self.chunks("fp32", config)
        for tensor in (tensor for chunk in chunks for tensor in chunk.state_dict().values()):
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(0.5)
        self.stored.load(self.args, chunks)
        self.assert_same_logits(chunks, safetensors.torch.load_file(self.hub / "model.safetensors"))
        prepared, optimizer, scheduler = self.prepare(chunks, config)
        for form in ("torch", "torch_dist"):
            harness.WRITERS[form](self, to / form, prepared, optimizer, scheduler)
        return {"loss": self.one_step(prepared, optimizer, config)}

    def one_step(self, chunks: list, optimizer: object, config: object) -> float | None:
        """The loss of one step, which has to change every parameter."""
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
        return losses[-1]

    def larger(self) -> torch.nn.Module:
        config = AutoConfig.from_pretrained(self.hub)
        config.num_hidden_layers += 1
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
