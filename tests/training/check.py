"""The slow check: real DeepSpeed goes on training from what reshard wrote, and its losses are those of the run that was never stopped.

    python tests/training/check.py [--reshard PATH] [--python PATH]

Makes the DeepSpeed environment (.venv-deepspeed) where there is none. A run of real DeepSpeed saves and goes on; reshard converts what it
saved; another run, at another world size or stage, loads that and goes on. All losses of both must be equal, bit by bit, and the optimizer
must have counted as many steps. A moment exchanged on the way changes the losses: the check can fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))

from helpers.asked_process import Ask, asking  # noqa: E402
from helpers.framework_environments import Environment, run_checks  # noqa: E402

DEEPSPEED = Environment("DeepSpeed", HERE / "requirements.txt", variables={"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"})

# What is saved by (world, stage, more), and what loads it: format, its options, (world, stage, more).
Z2 = {"world": 2, "stage": 2}
Z3 = {"world": 4, "stage": 3}
GROUPS = {"world": 2, "stage": 1, "groups": True}
TIED = {"world": 2, "stage": 3, "model": "llama-tied", "zero": {"sub_group_size": 500}}
CASES = [
    (Z2, "universal", (), {"world": 4, "stage": 1}),
    (Z2, "deepspeed", ("--dp", "4"), {"world": 4, "stage": 3}),
    (Z3, "universal", (), {"world": 2, "stage": 3}),
    (Z3, "universal", (), {"world": 2, "stage": 2}),
    (Z3, "deepspeed", ("--dp", "2"), {"world": 2, "stage": 3}),
    (GROUPS, "universal", (), {"world": 1, "stage": 2, "groups": True}),
    (GROUPS, "deepspeed", ("--dp", "2"), {"world": 2, "stage": 3, "groups": True}),
    (TIED, "deepspeed", ("--dp", "4"), TIED | {"world": 4}),
]
# Checkpoints of other trainers: the fixture, the steps that they made, and what the run that loads them needs. FSDP2's has bf16 weights and
# a count per parameter. Megatron's has masters, and its distributed optimizer counts once, as a setting.
OTHERS = {"FSDP2": ("dcp/fsdp2", 2.0, {}), "Megatron": ("megatron/llama-tp2-pp2-dp2", 2.0, {"groups": True})}


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Each check as (what, passed, detail)."""
    # DeepSpeed compiles an extension when it starts, and waits for ever for the lock that a compilation leaves that was killed.
    extensions = {**os.environ, "TORCH_EXTENSIONS_DIR": str(work / "extensions")}
    with asking([python, "-W", "ignore", HERE / "run.py"], extensions) as ask:
        yield from goes_on(reshard, ask, work)


def goes_on(reshard: Path, ask: Ask, work: Path) -> Iterator[tuple[str, bool, str]]:
    saved: dict[str, tuple[Path, list[str]]] = {}
    for number, (source, to, options, target) in enumerate(CASES):
        key = json.dumps(source)
        if key not in saved:
            folder = work / f"saved-{len(saved)}"
            saved[key] = folder, went_on(ask, source | {"save": str(folder)})
        folder, expected = saved[key]
        made = work / f"made-{number}"
        converted(reshard, folder, made, "--to", to, *options)
        found = went_on(ask, target | {"load": str(made), "universal": to == "universal"})
        yield f"{told(source)} -> {to} -> {told(target)}: the same losses and counts", found == expected, f"{found} and {expected}"
        if number == 0:
            exchange_a_moment(made)
            found = went_on(ask, target | {"load": str(made), "universal": True})
            yield "with another parameter's moment the losses differ", found.losses != expected.losses, str(found)
    for name, (case, count, more) in OTHERS.items():
        universal, universal3, zero3 = from_another_trainer(reshard, ask, ROOT / "fixtures" / case, work / case.replace("/", "-"), more)
        # ZeRO-3 loads universal checkpoints with the settings of the first group for all.
        passed = universal == zero3 and universal3.counts == [count] and (universal == universal3 or "groups" in more)
        what = f"{name}'s checkpoint -> universal, deepspeed: ZeRO-2 and 3 go on alike, after {count:g} steps"
        yield what, passed and universal.counts == [count], f"{universal}, {universal3} and {zero3}"


def from_another_trainer(reshard: Path, ask: Ask, case: Path, made: Path, more: dict) -> Iterator[WentOn]:
    """How DeepSpeed goes on from another trainer's checkpoint: from a universal one with ZeRO-2 and 3, from shards of ZeRO-3."""
    forms = [("universal", (), 1, 2), ("universal", (), 2, 3), ("deepspeed", ("--dp", "2"), 2, 3)]
    for number, (to, options, world, stage) in enumerate(forms):
        folder = made.with_name(f"{made.name}-{number}")
        converted(reshard, case / "checkpoint", folder, "--to", to, *options, "--model", str(case / "model"))
        target = {"world": world, "stage": stage, "load": str(folder), "universal": to == "universal", **more}
        yield went_on(ask, target | {"config": str(case / "model"), "schedule": False})


def told(asked: dict) -> str:
    return (
        f"ZeRO-{asked['stage']} on {asked['world']}{' with groups' if asked.get('groups') else ''}{' tied' if asked.get('model') else ''}"
    )


class WentOn(NamedTuple):
    """How a run went on."""

    losses: list[str]
    """The losses of its last steps."""
    counts: list[float]
    """The different counts of steps that the optimizer had before them."""


def went_on(ask: Ask, asked: dict) -> WentOn:
    """How the run went on, which is the same on all ranks."""
    found = ask(asked)
    if "failed" in found:
        raise SystemExit(f"DeepSpeed failed on {asked}:\n{found['failed']}")
    ranks = [WentOn(*each) for each in zip(found["losses"], found["counts"], strict=True)]
    assert all(each == ranks[0] for each in ranks), ranks
    return ranks[0]


def converted(reshard: Path, source: Path, target: Path, *options: str) -> None:
    subprocess.run([reshard, "convert", source, target, *options], check=True, capture_output=True, text=True)


def exchange_a_moment(checkpoint: Path) -> None:
    """gate_proj and up_proj have the same shape, and no name inside."""
    tag = (checkpoint / "latest_universal").read_text()
    gate, up = (checkpoint / tag / "zero" / f"model.layers.0.mlp.{part}_proj.weight" / "exp_avg.pt" for part in ("gate", "up"))
    content = gate.read_bytes()
    gate.write_bytes(up.read_bytes())
    up.write_bytes(content)


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, DEEPSPEED, __doc__))
