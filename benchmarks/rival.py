"""The emulated rival (rival.c): compiled here, and given the ranges of a plan, so that it neither reads metadata nor checks anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np

import reshard
from reshard.geometry.boxes import contiguous_runs
from reshard.index.shards import meetings


def compiled(work: Path) -> Path:
    program = work / "rival"
    subprocess.run(["cc", "-O2", "-o", program, Path(__file__).with_name("rival.c")], check=True)
    return program


def write_ranges(source: Path, options: dict[str, object], path: Path) -> None:
    """The list of ranges of a conversion. Target files consist of pieces that are row-major and follow each other (safetensors)."""
    plan = reshard.plan(reshard.open(str(source)), **options)
    of_target: dict[str, list[tuple[int, str]]] = {file.path: [] for file in plan.layout.files}
    for route in plan.routes:
        for i, j, box in meetings(route.source.shards, route.target.shards):
            read, written = route.source.shards.piece(i), route.target.shards.piece(j)
            order, elements, starts = contiguous_runs(box.sizes, read.extent.strides)
            assert order == tuple(range(len(box.sizes))), "transposed pieces are not emulated"
            steps = np.unique(np.diff(starts)) if len(starts) > 1 else np.array([elements])
            assert len(steps) == 1, "runs at uneven distances are not emulated"
            size = read.extent.dtype.itemsize
            numbers = read.byte_offset_of(box), elements * size, len(starts), int(steps[0]) * size
            line = f"copy {' '.join(map(str, numbers))} {source.resolve() / read.extent.path}\n"
            of_target[written.extent.path].append((written.byte_offset_of(box), line))
    with open(path, "w") as file:
        for target, lines in of_target.items():
            file.write(f"target {target}\n")
            file.writelines(line for _, line in sorted(lines))
