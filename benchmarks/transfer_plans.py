"""Plans of live updates of large models: processor time and peak memory of a whole process; the plans that all ranks get, as source rank 0
makes them: the largest one, and the processor time of all.

python benchmarks/transfer_plans.py

The memory of the training run is computed from the model's config. Every row is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from itertools import chain
from typing import Any

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
    parser.add_argument("--case", choices=CASES, help="plan it in this process")
    parser.add_argument(
        "--ranks",
        action="store_true",
        help="with --case: also the plans of all ranks",
    )
    given = parser.parse_args()
    if given.case:
        print(json.dumps(planned(given.case, of_ranks=given.ranks)))
        return
    for case in CASES:
        command = [sys.executable, __file__, "--case", case]
        run = measured(command)
        most, seconds = json.loads(subprocess.run([*command, "--ranks"], check=True, capture_output=True, text=True).stdout)
        ranks = f"the plan of a rank at most {most / 1e6:.2f} MB, of all ranks {seconds:.1f} s"
        print(f"{case}: {run.processor:.2f} s, {run.megabytes:.0f} MB, {ranks}", flush=True)


def planned(case: str, *, of_ranks: bool) -> tuple[int, float]:
    """The bytes of the largest plan of a rank, and the processor seconds of the plans of all; zeros if they are not asked for."""
    import reshard

    config, options = CASES[case]
    plan = reshard.transfers(config, to="vllm", **options)
    if not of_ranks:
        return 0, 0.0
    began = time.process_time()
    sends = (plan.sends(rank) for rank in range(len(plan.sources)))
    receives = (plan.receives(rank, named=False) for rank in range(len(plan.memories) * plan.replicas))
    most = max(len(schedule.to_bytes()) for schedule in chain(sends, receives))
    return most, time.process_time() - began


if __name__ == "__main__":
    main()
