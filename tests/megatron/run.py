"""Real megatron-core on CPU ranks, asked line by line: a JSON request on stdin, a JSON answer on stdout. Run in an environment that has it.

    {"hub": "llama", "sizes": {..}, "to": "folder"}     what save_pretrained writes of a model of fixtures/models.py
    {"exchange": "folder"}                              exchanges first moments of two parameters in a rank's file
    {"model": "llama", "layout": {"tp": 2}, ..}         a run of fixtures/megatron/run.py, and one of
        "save": "folder", "truth": "file"                   two steps, saved; then three more
        "load": "folder", "weights": "folder"               in fp32: weights and logits are those of the Hugging Face folder
        "load": "folder", "truth": "file"                   with the optimizer: its state is what the truth tells; then three steps
    {"tiny": "glm4_moe", "to": "folder"}                what save_pretrained writes of a model of tiny_models.py
    {"settled": "folder", "layout": {"tp": 2}, ..}      the model that the settings in a checkpoint describe (settled.py)
        "weights": "folder", "to": "folder"                 its logits are those of the Hugging Face folder; saved again in both forms
        "held": true, ..                                    or: digests of what its ranks hold and of the keys of its own save

An answer is {"losses": [..], "steps": [..]}, or {"failed": "why"}. Runs of all sizes see the same batches.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
FIXTURES = TESTS.parent / "fixtures"
sys.path[:0] = [str(FIXTURES / "megatron"), str(FIXTURES)]
sys.path.append(str(TESTS))

import fused_adam  # noqa: E402
import makers  # noqa: E402
import mapping  # noqa: E402
import models  # noqa: E402
import run as harness  # noqa: E402  fixtures/megatron/run.py
import safetensors.torch  # noqa: E402
import settings  # noqa: E402
import settled  # noqa: E402
import tiny_models  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from helpers import asked_process as questions  # noqa: E402
from loading import Checkpoint  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402

MICROBATCHES, BEFORE, AFTER = 4, harness.STEPS, 3
PATIENCE = datetime.timedelta(minutes=5)
facts = makers.load("dcp")._facts


class Layout(harness.Layout):
    """Of every step's batch a data-parallel rank takes its part."""

    @property
    def microbatches(self) -> int:
        return MICROBATCHES // self.dp


class Ranks(harness._Ranks):
    def saved(self, folder: Path, truth: Path) -> dict[str, object]:
        config = self.config(self.run.precision)
        chunks = self.chunks(self.run.precision, config)
        self.load(chunks, harness._hub_tensors(self.hf))
        chunks, optimizer, scheduler = self.prepare(chunks, config)
        self.losses(chunks, optimizer, scheduler, config, range(BEFORE))
        tensors = self.truth(chunks, optimizer)
        if dist.get_rank() == 0:
            told = {name: {role: facts(value) for role, value in roles.items()} for name, roles in tensors.items()}
            truth.write_text(json.dumps({"tensors": told}))
        harness.WRITERS[self.asked["saved_as"]](self, folder, chunks, optimizer, scheduler)
        return {"losses": self.losses(chunks, optimizer, scheduler, config, range(BEFORE, BEFORE + AFTER))}

    def loaded_weights(self, folder: Path, hub: Path) -> dict[str, object]:
        checkpoint = Checkpoint(folder)
        checkpoint.complete(self.args, self.hf.config)
        chunks = self.blank(self.config("fp32"))
        checkpoint.load(self.args, chunks)
        expected = safetensors.torch.load_file(hub / "model.safetensors")
        self.assert_same_logits(chunks, expected)
        found = mapping.to_hub(self.kind, self.full(harness._assembled(self.weights(chunks)), "weight"), self.sizes)
        assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
        different = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not different, f"{len(different)} tensors are not the Hugging Face folder's, {different[0]} for one"
        return {}

    def loaded(self, folder: Path, truth: Path) -> dict[str, object]:
        checkpoint = Checkpoint(folder)
        checkpoint.complete(self.args, self.hf.config)
        config = self.config(self.run.precision)
        chunks, optimizer, scheduler = self.prepare(self.blank(config), config)
        scheduler.override_opt_param_scheduler = bool(self.asked.get("own_schedule"))
        checkpoint.load(self.args, chunks, optimizer, scheduler)
        assert_truth(self.truth(chunks, optimizer), json.loads(truth.read_text())["tensors"])
        each = getattr(optimizer, "chained_optimizers", [optimizer])
        counted = [state for one in each for state in (*one.optimizer.state.values(), *one.optimizer.param_groups) if "step" in state]
        steps = {float(state["step"]) for state in counted}
        return {"steps": sorted(steps), "losses": self.losses(chunks, optimizer, scheduler, config, range(BEFORE, BEFORE + AFTER))}

    def config(self, precision: str) -> object:
        config = settings.transformer_config(self.args, precision)
        if self.run.layout.vp > 1:
            # Megatron-LM's defaults for interleaved stages: in one batch, what goes to the same rank would be mixed up. Without CUDA's
            # streams, what was posted may be sent later, and has to live until then.
            config.overlap_p2p_comm, config.batch_p2p_comm, config.deallocate_pipeline_outputs = True, False, False
        return config

    def blank(self, config: object) -> list:
        """Chunks in which nothing is what will be loaded."""
        chunks = self.chunks(self.run.precision, config)
        for tensor in (tensor for chunk in chunks for tensor in chunk.state_dict().values()):
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(0.5)
        return chunks

    def states(self, chunks: list, optimizer: object) -> list[tuple]:
        """Told to fixtures/megatron/run.py as torch's AdamW would: with a count of steps for each parameter."""
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            for group in one.optimizer.param_groups if isinstance(one.optimizer, fused_adam.FusedAdam) else ():
                for parameter in group["params"]:
                    one.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))
        found = super().states(chunks, optimizer)
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            for state in one.optimizer.state.values() if isinstance(one.optimizer, fused_adam.FusedAdam) else ():
                del state["step"]
        return found

    def losses(self, chunks: list, optimizer: object, scheduler: object, config: object, steps: range) -> list[str]:
        """Those of every microbatch, exactly."""

        def forward(batches: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
            ids = next(batches)
            losses = model(ids, harness._positions(ids), None, labels=ids.roll(-1, dims=1))
            return losses, lambda output: (output.float().mean(), {"loss": float(output.detach().float().mean()).hex()})

        found, data_rank = [], mpu.get_data_parallel_rank()
        for step in steps:
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            batches = [self.batch(step, micro, data_rank) for micro in range(self.run.layout.microbatches)]
            own = harness._pipelined(forward, chunks, self.run.layout, batches, forward_only=False)
            done, _, _ = optimizer.step()
            assert done
            scheduler.step(increment=self.args.global_batch_size)
            everyone: list = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, (data_rank, [each["loss"] for each in own]))
            by_rank = {rank: losses for rank, losses in everyone if losses}
            found += [loss for rank in sorted(by_rank) for loss in by_rank[rank]]
        return found

    def batch(self, step: int, micro: int, data_rank: int) -> torch.Tensor:
        return super().batch(step, data_rank * self.run.layout.microbatches + micro, 0)


def assert_truth(found: dict, truth: dict) -> None:
    """All weights, moments and full-precision copies that there are have the bits of the truth, or those that its type can tell."""
    assert found.keys() == truth.keys(), sorted(found.keys() ^ truth.keys())
    different = []
    for name, roles in truth.items():
        for role, told in roles.items():
            if role == "step":
                continue
            value = found[name][role]
            narrow = value.to(getattr(torch, {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[told["dtype"]]))
            if facts(narrow) != told or not torch.equal(narrow.to(value.dtype), value):
                different.append(f"{role} of {name}")
        if "master" in found[name] and "master" not in roles and not torch.equal(found[name]["master"], found[name]["weight"].float()):
            different.append(f"master of {name}, which the source does not have")
    assert not different, f"{len(different)} tensors are not the source's, {different[0]} for one"


def of_rank(rank: int, asked: dict, scratch: str) -> None:
    layout = Layout(**asked["layout"])
    if layout.world > 1:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/meeting", rank=rank, world_size=layout.world, timeout=PATIENCE)
    if asked.get("adam") == "fused":
        fused_adam.install()
    if "settled" in asked:
        of_settings = settled.Ranks(Path(asked["settled"]), Path(asked["weights"]), layout)
        answer = (of_settings.held if asked.get("held") else of_settings.answered)(Path(asked["to"]))
        if rank == 0:
            (Path(scratch) / "answer.json").write_text(json.dumps(answer))
        dist.barrier()
        return
    ranks = Ranks(harness.Run(asked["model"], layout, asked["precision"], asked["sizes"], asked["args"]))
    ranks.asked = asked
    if "save" in asked:
        answer = ranks.saved(Path(asked["save"]), Path(asked["truth"]))
    elif "weights" in asked:
        answer = ranks.loaded_weights(Path(asked["load"]), Path(asked["weights"]))
    else:
        answer = ranks.loaded(Path(asked["load"]), Path(asked["truth"]))
    if rank == 0:
        (Path(scratch) / "answer.json").write_text(json.dumps(answer))
    dist.barrier()


def answered(asked: dict) -> dict[str, object]:
    if "hub" in asked:
        models.build(asked["hub"], dtype=torch.float32, **asked["sizes"]).save_pretrained(asked["to"])
        return {}
    if "tiny" in asked:
        tiny_models.write(asked["tiny"], Path(asked["to"]))
        return {}
    if "exchange" in asked:
        exchange_moments(Checkpoint(Path(asked["exchange"])).folder)
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            # Ranks are forked: importing megatron and transformers takes longer than what they do.
            torch.multiprocessing.start_processes(of_rank, (asked, scratch), nprocs=Layout(**asked["layout"]).world, start_method="fork")
        except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
            return {"failed": str(error).strip()[-1500:]}
        return json.loads((Path(scratch) / "answer.json").read_text())


def exchange_moments(folder: Path) -> None:
    path = min(folder.glob("mp_rank_*/model_optim_rng.pt"))
    content = torch.load(path, weights_only=True)
    states = content["optimizer"]["optimizer"]["state"].values()
    alike = [(one, other) for one in states for other in states if one["exp_avg"].shape == other["exp_avg"].shape and one is not other]
    one, other = alike[0]
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]
    torch.save(content, path)


def main() -> None:
    torch.set_num_threads(1)
    questions.answer(answered)


if __name__ == "__main__":
    main()
