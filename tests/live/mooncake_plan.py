"""What Mooncake's own reader and planner make of two placements.

    python mooncake_plan.py SOURCE TARGET     prints, as JSON, the bytes in all, each copy, and each fragment of the target

Run with an interpreter that has mooncake-transfer-engine.
"""

import json
import sys
from pathlib import Path

from mooncake.reshard.weight import plan_placement_transfer, weight_placement_from_json


def fragment(held):
    return [held.tensor_id, held.rank.tp, held.global_offset, held.local_shape]


if __name__ == "__main__":
    source, target = (weight_placement_from_json(Path(path).read_text()) for path in sys.argv[1:])
    plan = plan_placement_transfer(source, target)
    copies = [
        {
            "source": fragment(each.source),
            "target": fragment(each.target),
            "starts": [each.source_base_offset, each.target_base_offset],
            "bytes": each.inner_bytes,
            "counts": each.outer_loop_counts,
            "strides": [each.source_strides, each.target_strides],
        }
        for each in plan.operations
    ]
    print(json.dumps({"bytes": plan.total_bytes, "copies": copies, "targets": [fragment(each) for each in target.fragments]}))
