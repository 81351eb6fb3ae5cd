"""Digests of expanded plans, piece by piece, for every fixture and target: proof that a change of how plans are made left the plans alone.

    python tests/plan_digests.py record before.json                 # with the old code installed
    python tests/plan_digests.py compare before.json                # with the new code; exit code 1 and a list if anything differs
    python tests/plan_digests.py record before.json SRC vllm tp=16  # of one checkpoint and target, such as a model of full size

A digest covers every source piece and target piece (box, file, byte offset, strides, element type), every range that is filled, and every
file with its framing. Slow: it makes an object per piece.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from output_bytes import FIXTURES, TARGETS, sources


def lines(plan: Any) -> Iterator[str]:
    """Every fact of a plan that decides a byte, as text."""
    for route in plan.routes:
        for side, tensor in (("from", route.source), ("to", route.target)):
            yield f"{side} {tensor.name} {tensor.kind} {tensor.dtype} {tensor.shape}"
            yield from sorted(_piece(piece) for piece in tensor.pieces())
        if parts := getattr(route.source.origin, "parts", ()):
            yield f"scaled by {route.scaled_by} {[part.block_shape for part in parts]}"
    yield from sorted(f"constant {c.path} {c.name} {c.byte_offset} {c.nbytes} {c.expected!r}" for c in plan.target_index.constants)
    for file in plan.layout.files:
        yield f"file {file.path} {file.nbytes} {dict(file.ranks)}"
        yield from (f"framing {offset} {hashlib.sha256(data).hexdigest()}" for offset, data in file.literals)
        for item in file.tensors:
            stored = item.tensor
            yield f"stored {stored.name} {stored.dtype} {stored.shape} {item.byte_offset} {stored.fill!r} {stored.filled}"
    yield f"aliases {dict(plan.layout.aliases)} left out {dict(plan.layout.left_out)} scalars {plan.layout.inlined_scalars}"
    yield f"totals {plan.totals()}"


def _piece(piece: Any) -> str:
    # The stride of an axis of one element is never used.
    strides = [stride if size > 1 else 0 for stride, size in zip(piece.extent.strides, piece.box.sizes, strict=True)]
    return f"{piece.extent.path} {piece.extent.byte_offset} {piece.box} {strides} {piece.extent.dtype}"


def digest(opened: Any, options: dict[str, Any]) -> str:
    """The digest of one plan, or the class of the error that refuses it."""
    import reshard

    try:
        plan = reshard.plan(opened, **options)
    except reshard.ReshardError as error:
        return type(error).__name__
    found = hashlib.sha256()
    for line in lines(plan):
        found.update(line.encode("utf-8", "surrogatepass") + b"\n")
    return found.hexdigest()


def digests(source: Path, model: Path | None, targets: tuple[dict[str, Any], ...] = TARGETS) -> dict[str, str]:
    """Target -> digest of its plan."""
    import reshard

    label = str(source.relative_to(FIXTURES) if source.is_relative_to(FIXTURES) else source)
    try:
        opened = reshard.open(source, model=model)
    except reshard.ReshardError as error:
        return {label: type(error).__name__}
    return {f"{label} -> {options}": digest(opened, options) for options in targets}


def main(verb: str, path: str, *case: str) -> int:
    if case:
        source, target, *sizes = case
        options = {"to": target, **{name: int(value) for name, value in (size.split("=") for size in sizes)}}
        found = digests(Path(source), None, (options,))
    else:
        with ProcessPoolExecutor(2) as pool:
            found = {key: value for part in pool.map(digests, *zip(*sources(), strict=True)) for key, value in part.items()}
    if verb == "record":
        Path(path).write_text(json.dumps(found, indent=1))
        return 0
    before = json.loads(Path(path).read_text())
    changed = [key for key in sorted(before.keys() | found.keys()) if before.get(key) != found.get(key)]
    for key in changed:
        print(f"{key}: {before.get(key)} -> {found.get(key)}"[:300])
    print(f"{len(found)} plans, {sum(len(value) == 64 for value in found.values())} made; {len(changed)} differ")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
