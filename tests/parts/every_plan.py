"""Every conversion of every fixture, by one process and by two parts that read a plan file: all bytes and all records are equal.

    python tests/parts/every_plan.py [FIXTURE]...

FIXTURE is a part of a path; without one, all are taken, which takes minutes.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from helpers.reshard_command import result_tree
from output_bytes import TARGETS, sources

import reshard

_WHEN = ("time", "command", "digest")


def compared(source, options, work):
    """What one conversion shows: "equal", or the refusal of one process."""
    try:
        plan = reshard.plan(source, **options)
        reshard.convert(plan, work / "one", workers=1)
    except reshard.ReshardError as error:
        return type(error).__name__
    try:
        reshard.save_plan(plan, work / "plan")
    except reshard.ReshardError as error:
        return f"no plan file: {error}"
    for part in ("1/2", "0/2"):
        reshard.convert_part(reshard.load_plan(work / "plan", source.path), work / "parts", part, workers=1)
    assert result_tree(work / "one") == result_tree(work / "parts"), f"{source.path} -> {options}"
    one, parts = (json.loads((work / name / "reshard.json").read_text()) for name in ("one", "parts"))
    assert {**one, **dict.fromkeys(_WHEN)} == {**parts, **dict.fromkeys(_WHEN)}, f"{source.path} -> {options}"
    return "equal"


def main(wanted):
    seen = Counter()
    for path, model in sources():
        if wanted and not any(word in str(path) for word in wanted):
            continue
        try:
            source = reshard.open(path, model=model)
        except reshard.ReshardError:
            continue
        for options in TARGETS:
            work = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
            try:
                result = compared(source, options, work)
            finally:
                shutil.rmtree(work)
            seen[result if len(result) < 40 else result[:200]] += 1
    print(dict(seen))


if __name__ == "__main__":
    main(sys.argv[1:])
