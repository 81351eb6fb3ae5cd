"""Plans of live updates of large models: processor time and peak memory of a whole process, and the largest plan that a rank gets.

python benchmarks/transfer_plans.py

The memory of the training run is computed from the model's config. Every row is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import numpy as np
from measuring import measured
from shapes import LLAMA_405B
from sparse import DEEPSEEK

STAGES = [8, 8, 8, 8, 8, 7, 7, 7]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "405B Llama, FSDP2 on 512 ranks -> 8 x vLLM TP 8": (LLAMA_405B, {"of": "fsdp", "degrees": {"dp": 512}, "tp": 8, "replicas": 8}),
    "DeepSeek-V3, Megatron TP 2 x PP 8 x EP 16 -> vLLM TP 16 x EP 16": (
        DEEPSEEK,
        {"of": "megatron", "degrees": {"tp": 2, "pp": 8, "ep": 16, "stage_layers": STAGES}, "tp": 16, "ep": 16},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="plan it in this process, and print the bytes of the largest plan of a rank")
    parser.add_argument("--ranks", action="store_true", help="with --case: make the plans of the ranks with the most boxes")
    given = parser.parse_args()
    if given.case:
        print(largest(given.case, of_ranks=given.ranks))
        return
    for case in CASES:
        command = [sys.executable, __file__, "--case", case]
        run = measured(command)
        most = json.loads(subprocess.run([*command, "--ranks"], check=True, capture_output=True, text=True).stdout)
        print(f"{case}: {run.processor:.2f} s, {run.megabytes:.0f} MB, the plan of a rank {most / 1e6:.2f} MB", flush=True)


def largest(case: str, *, of_ranks: bool) -> int:
    """The bytes of the largest plan of a rank; 0 if they are not asked for."""
    import reshard

    config, options = CASES[case]
    plan = reshard.transfers(config, to="vllm", **options)
    if not of_ranks:
        return 0
    source, target = (int(np.bincount(ranks).argmax()) for ranks in (plan.source_rank, plan.target_rank))
    return max(len(schedule.to_bytes()) for schedule in (plan.sends(source), plan.receives(target)))


if __name__ == "__main__":
    main()
