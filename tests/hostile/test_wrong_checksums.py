"""Bits flipped in what torch.save has put a CRC-32 on: whatever a conversion reads of it is refused, in every format, and nothing is left.

Flips in bytes that a conversion does not read, such as those of an optimizer, make the same result. No fixture raises a false alarm."""

import os
import random
import shutil
from collections import Counter

import pytest
from engine.test_source_checks import members
from helpers.fixture_places import FIXTURES

import reshard
from reshard.errors import CheckpointError

# One of each reader of torch.save files.
CASES = [
    "dcp/fsdp2", "dcp/empty", "dcp/flat-optim", "fsdp/tp-uneven", "fsdp/hsdp-tp", "fsdp/fsdp1-sharded", "fsdp/fsdp1-local-tied",
    "fsdp/verl", "fsdp/full-compile", "torch_versions/2.2.2/dcp", "torch_versions/2.2.2/placements", "torch_checkpointing/fsdp2",
    "deepspeed/z0-bf16", "deepspeed/z2-frozen", "deepspeed/z3-subgroups", "deepspeed_parallel/autotp2-dp2-z3",
    "deepspeed_parallel/megatron-pp2-tp2-info", "deepspeed_versions/0.14.5-moe-ep2-dp4-z2", "universal/z3-frozen", "universal/z1-groups",
    "megatron/llama-tp2", "megatron/llama-buckets", "megatron/mixtral-tp2-ep2", "megatron/qwen3-tp4", "megatron_dist/llama-tp2-pp2",
    "megatron_dist/mixtral-dp-reshardable", "megatron_versions/model-space",
]  # fmt: skip
FLIPS = int(os.environ.get("FLIPS", "8"))  # of each format where the tests marked as slow run
QUICK = ["dcp/fsdp2", "fsdp/tp-uneven", "deepspeed/z2-frozen", "megatron/llama-buckets", "universal/z1-groups", "torch_checkpointing/fsdp2"]


def converted(folder, case, target):
    """The fingerprint of the conversion to hf, or its refusal. Nothing is left of one that is refused."""
    model = FIXTURES / case / "model"
    shutil.rmtree(target, ignore_errors=True)
    try:
        opened = reshard.open(folder, model=model if model.exists() else None)
        result = reshard.convert(reshard.plan(opened, to="hf"), target)
    except CheckpointError as refusal:
        assert refusal.exit_code == 3 and not target.exists()
        return refusal.id
    assert result.source_checks.partial == 0
    return result.fingerprint.root


def flips(case, count, tmp_path):
    """What `count` flips in payloads and pickles lead to, by kind: "same", or the id of the refusal."""
    folder, chance, results = shutil.copytree(FIXTURES / case / "checkpoint", tmp_path / "copy"), random.Random(case), Counter()
    good = converted(folder, case, tmp_path / "out")
    payloads = [
        (path, "pickle" if name.endswith("data.pkl") else "payload", start, nbytes)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        for name, start, nbytes in members(path.read_bytes())
        if nbytes and (name.endswith("/data.pkl") or "/data/" in name)
    ]
    for _ in range(count):
        path, kind, start, nbytes = chance.choice(payloads)
        raw = path.read_bytes()
        changed = bytearray(raw)
        changed[start + chance.randrange(nbytes)] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        bad = converted(folder, case, tmp_path / "out")
        results[kind, "same" if bad == good else bad] += 1
        path.write_bytes(raw)
    return results


@pytest.mark.parametrize(
    "case, count", [(case, 4) for case in QUICK] + [pytest.param(case, FLIPS, marks=pytest.mark.slow) for case in CASES]
)
def test_a_flipped_bit_is_refused_or_was_not_read(case, count, tmp_path):
    results = flips(case, count, tmp_path)
    # Step counts of optimizers and replicas are compared before the storage that holds them has been read whole.
    assert {outcome for _, outcome in results} <= {"same", "wrong-checksum", "source-mixed", "source-replicas"}, results
    assert {outcome for kind, outcome in results if kind == "pickle"} <= {"same", "wrong-checksum"}
    assert count < 50 or (results["payload", "wrong-checksum"] and results["pickle", "wrong-checksum"])


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(str(path.parent.relative_to(FIXTURES)) for path in FIXTURES.rglob("checkpoint")))
def test_no_fixture_raises_a_false_alarm(case, tmp_path):
    try:
        assert converted(FIXTURES / case / "checkpoint", case, tmp_path / "out") not in ("wrong-checksum", "source-mixed")
    except reshard.errors.RequestError as refusal:
        pytest.skip(f"it is not converted to hf: {refusal.id}")
