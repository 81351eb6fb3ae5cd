"""Checksums of sources in a store, and of sources that are converted into one."""

import shutil

import pytest
from engine.test_source_checks import checks, flip
from helpers.fixture_places import FIXTURES

import reshard
from reshard.errors import WrongChecksum

# A folder of zips end to end, a file that is one zip, and entries that are compressed.
CASES = {"dcp/fsdp2": "__0_0.distcp", "fsdp/full-compile": "checkpoint.pt", "dcp/zstd": None}


@pytest.mark.parametrize("case", CASES)
def test_a_source_in_a_store_is_checked(case, s3, tmp_path):
    source = FIXTURES / case / "checkpoint"
    s3.put_tree("bucket", "good", source)
    here = reshard.convert(reshard.plan(source, to="hf"), tmp_path / "here")
    there = reshard.convert(reshard.plan("s3://bucket/good", to="hf"), tmp_path / "there")
    assert checks(here) == checks(there) and checks(here)[0] >= 12 and checks(here)[1:] == (0, 0)


@pytest.mark.parametrize("case", [case for case, path in CASES.items() if path])
def test_damage_in_a_store_is_named(case, s3, tmp_path):
    folder = shutil.copytree(FIXTURES / case / "checkpoint", tmp_path / "damaged")
    flip(folder / CASES[case], "data/0", at=3)
    s3.put_tree("bucket", "damaged", folder)
    with pytest.raises(WrongChecksum, match=CASES[case]):
        reshard.convert(reshard.plan("s3://bucket/damaged", to="hf"), tmp_path / "out")
    with pytest.raises(WrongChecksum):
        reshard.fingerprint("s3://bucket/damaged")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", [None, "0/1"])
def test_nothing_damaged_is_completed_in_a_store(part, s3, tmp_path):
    folder = shutil.copytree(FIXTURES / "dcp" / "fsdp2" / "checkpoint", tmp_path / "damaged")
    flip(folder / "__0_0.distcp", "data/0", at=3)

    def run(source):
        plan = reshard.plan(source, to="hf", max_shard_size=20_000)
        target = "s3://bucket/out"
        return reshard.convert_part(plan, target, part) if part else reshard.convert(plan, target)

    for _ in range(2):
        with pytest.raises(WrongChecksum):
            run(folder)
    assert not [path for path in s3.keys("bucket") if path.startswith("out/") and path.endswith(("reshard.json", "index.json"))]
