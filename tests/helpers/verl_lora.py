"""A LoRA checkpoint as verl saves it: a file of each FSDP rank, and the settings of the adapter in a file of their own."""

from __future__ import annotations

from pathlib import Path

import reshard

from .fixture_places import FIXTURES


def write_verl_lora(folder: Path) -> None:
    """Write the FSDP2 checkpoint of fixtures/peft, base and adapter, in verl's files. Needs torch."""
    plan = reshard.plan(FIXTURES / "peft" / "fsdp2" / "checkpoint", to="fsdp", dp=2, model=FIXTURES / "hf" / "qwen3_moe-sparse")
    reshard.convert(plan, folder)
    (folder / "lora_train_meta.json").write_text('{"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM"}')
    (folder / "reshard.json").unlink()
    (folder / "reshard.digests").unlink()
