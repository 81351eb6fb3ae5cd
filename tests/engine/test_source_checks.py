"""Source checks: bytes that were read whole are compared with the CRC-32 that their zip tells, and a source that is written is noticed.

The damage is made without reshard: zipfile says where the bytes of a member lie."""

import os
import shutil
import zlib

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.zip_checksums import payload, zips

import reshard
from reshard.engine.checks.reading import Reading
from reshard.engine.pool import Effort
from reshard.errors import CheckpointError, TargetError, WrongChecksum
from reshard.storage.files import LocalFiles
from reshard.verbs.convert import Sharing, conversion

# Three blocks of 2^21 elements, and a small tensor.
LONG, SHORT = torch.arange(6000 * 1024, dtype=torch.float32).reshape(6000, 1024), torch.arange(12, dtype=torch.float32)


def members(raw):
    """The members of all zips in a file, one after the other: (name, byte offset, length)."""
    for start, archive in zips(raw):
        for each in archive.infolist():
            yield each.filename, payload(raw, start + each.header_offset), each.file_size


def flip(path, suffix, at=0, bit=0):
    """Flip a bit of the longest member of that name, and keep the file's time."""
    raw, status = bytearray(path.read_bytes()), os.stat(path)
    _, start, _ = max((each for each in members(bytes(raw)) if each[0].endswith(suffix)), key=lambda each: each[2])
    raw[start + at] ^= 1 << bit
    path.write_bytes(raw)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A DCP folder and a .pt file of the same two tensors."""
    folder = tmp_path_factory.mktemp("saved")
    tensors = {"long.weight": LONG, "short.bias": SHORT}
    dcp.save(tensors, checkpoint_id=folder / "dcp", no_dist=True)
    (folder / "pt").mkdir()
    torch.save(tensors, folder / "pt" / "model.pt")
    return folder


@pytest.fixture(params=["dcp", "pt"])
def source(request, saved, tmp_path):
    return shutil.copytree(saved / request.param, tmp_path / "source")


def file_of(source):
    return next(path for path in source.iterdir() if path.suffix in (".distcp", ".pt"))


def checks(result):
    return result.source_checks.checked, result.source_checks.partial, result.source_checks.none


def test_whole_storages_are_checked_and_counted(source, tmp_path):
    result = reshard.convert(reshard.plan(source, to="hf"), tmp_path / "out", workers=3)
    assert checks(result) == (2, 0, 0) and result.to_json()["source_checks"] == {"checked": 2, "partial": 0, "none": 0}
    assert not any("storages" in note for note in result.notes)


@pytest.mark.parametrize("at", [0, LONG.nbytes // 2 + 1, LONG.nbytes - 1])
def test_a_flipped_bit_is_named_and_nothing_is_written(source, tmp_path, at):
    flip(file_of(source), "data/0", at, bit=at % 8)
    with pytest.raises(WrongChecksum) as caught:
        reshard.convert(reshard.plan(source, to="hf"), tmp_path / "out", workers=2)
    error = caught.value
    assert (error.id, error.exit_code) == ("wrong-checksum", 3) and not (tmp_path / "out").exists()
    assert file_of(source).name in error.where and "data/0" in error.where and "long.weight" in error.why and "short.bias" not in error.why
    assert "Copy the file again" in error.do


def test_a_damaged_pickle_is_not_read(source, tmp_path):
    flip(file_of(source), "data.pkl", at=20)
    with pytest.raises(WrongChecksum, match=r"data\.pkl in "):
        reshard.convert(reshard.plan(source, to="hf"), tmp_path / "out")


def verbs(source, other, out):
    yield lambda **effort: reshard.fingerprint(source, **effort)
    yield lambda **effort: reshard.verify(source, other, **effort)
    yield lambda **effort: reshard.verify(other, source, **effort)
    yield lambda **effort: reshard.diff(other, source, **effort)
    yield lambda **effort: reshard.stats(source, **effort)
    yield lambda **effort: reshard.delta(other, source, out / "delta", **effort)
    yield lambda **effort: reshard.delta(source, other, out / "delta", **effort)
    yield lambda **effort: reshard.convert(reshard.plan([source, other], to="hf", average=True), out / "mean", **effort)
    yield lambda **effort: reshard.cache(reshard.plan(source, to="hf"), root=out / "cache", **effort)
    yield lambda **effort: reshard.convert_part(reshard.plan(source, to="hf"), out / "part", "0/1", **effort)


@pytest.mark.parametrize("number", range(10))
def test_every_verb_compares_what_it_reads(saved, tmp_path, number):
    source = shutil.copytree(saved / "dcp", tmp_path / "source")
    flip(file_of(source), "data/0", at=5)
    verb = [*verbs(source, saved / "pt", tmp_path)][number]
    with pytest.raises(WrongChecksum, match=r"long\.weight"):
        verb(workers=1)
    assert not any(path.suffix == ".safetensors" and ".reshard" not in path.parts for path in tmp_path.rglob("*"))
    result = verb(workers=1, source_checksums=False)
    assert not hasattr(result, "source_checks") or checks(result) == (0, 0, 0)


@pytest.mark.parametrize("number", range(10))
def test_every_verb_asks_whether_its_sources_were_written_meanwhile(saved, tmp_path, number):
    source, other = (shutil.copytree(saved / name, tmp_path / name) for name in ("dcp", "pt"))
    verb = [*verbs(source, other, tmp_path)][number]

    def rewrite(nbytes):
        with open(file_of(source), "r+b") as file:
            file.seek(0)
            file.write(b"P")
        os.utime(file_of(source), (1, 1))

    with pytest.raises(CheckpointError, match="the file was written while it was"):
        verb(workers=1, progress=rewrite)
    assert not any(path.suffix == ".safetensors" and ".reshard" not in path.parts for path in tmp_path.rglob("*"))


def test_a_source_that_is_touched_while_a_delta_is_made_is_compared_again(saved, tmp_path):
    source = shutil.copytree(saved / "dcp", tmp_path / "source")
    made = reshard.delta(saved / "pt", source, tmp_path / "delta", progress=lambda nbytes: os.chmod(file_of(source), 0o600))
    assert made.changed_elements == 0

    def exchange(nbytes):
        if nbytes == LONG.nbytes:
            flip(file_of(source), "data/0", at=7)

    with pytest.raises(CheckpointError, match="the file was written while it was"):
        reshard.delta(saved / "pt", source, tmp_path / "other", progress=exchange, workers=1)


def stopped(plan, target, blocks):
    """An interrupted conversion of so many blocks."""
    running = conversion(plan, target, effort=Effort(workers=1)).run()
    for _ in range(blocks):
        next(running)
    running.close()


def test_a_resumed_run_does_not_trust_blocks_of_a_damaged_storage(source, tmp_path):
    flip(file_of(source), "data/0", at=9)
    stopped(reshard.plan(source, to="hf"), tmp_path / "out", 1)
    with pytest.raises(WrongChecksum):
        reshard.convert(reshard.plan(source, to="hf"), tmp_path / "out", resume=True)


def test_a_run_that_is_resumed_checks_the_storage_whole(source, tmp_path):
    stopped(reshard.plan(source, to="hf"), tmp_path / "out", 2)
    result = reshard.convert(reshard.plan(source, to="hf"), tmp_path / "out", resume=True)
    assert checks(result)[1:] == (0, 0) and checks(result)[0] >= 1
    assert reshard.verify(source, tmp_path / "out").equal


def test_a_damaged_part_leaves_its_task_open_until_the_file_is_copied_again(source, tmp_path):
    shutil.copytree(source, tmp_path / "good")
    flip(file_of(source), "data/0", at=LONG.nbytes - 3)

    def plan():
        return reshard.plan(source, to="hf", max_shard_size=20_000_000)

    for _ in range(2):
        with pytest.raises(WrongChecksum):
            for number in ("0/2", "1/2"):
                reshard.convert_part(plan(), tmp_path / "out", number)
    with pytest.raises(TargetError, match="are missing"):
        conversion(plan(), tmp_path / "out", sharing=Sharing(finish=True))
    shutil.copy2(file_of(tmp_path / "good"), file_of(source))
    results = [reshard.convert_part(plan(), tmp_path / "out", number) for number in ("0/2", "1/2")]
    assert results[-1].complete and reshard.verify(tmp_path / "good", tmp_path / "out").equal


def test_storages_without_checksums_are_no_error(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a.weight": SHORT, "b.weight": SHORT + 1}, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert checks(reshard.convert(reshard.plan(tmp_path / "model.pt", to="hf"), tmp_path / "out")) == (0, 0, 2)
    torch.save({"a.weight": SHORT}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert checks(reshard.convert(reshard.plan(tmp_path / "old.pt", to="hf"), tmp_path / "old")) == (0, 0, 1)
    assert checks(reshard.fingerprint(tmp_path / "out")) == (0, 0, 1)


def test_what_is_read_in_part_is_counted(tmp_path):
    whole = torch.arange(1 << 16, dtype=torch.float32)
    torch.save({"a.weight": whole[: 1 << 14].reshape(128, 128), "b.weight": SHORT}, tmp_path / "model.pt")
    result = reshard.convert(reshard.plan(tmp_path / "model.pt", to="hf"), tmp_path / "out")
    assert checks(result) == (1, 1, 0)
    assert any(note.startswith("1 of 2 storages checked") for note in result.notes)


def test_padding_is_read_so_that_the_storage_is_checked(tmp_path):
    torch.save({"a.weight": torch.arange(1 << 16, dtype=torch.float32)[: (1 << 16) - 4096].reshape(-1, 1024)}, tmp_path / "model.pt")
    assert checks(reshard.convert(reshard.plan(tmp_path / "model.pt", to="hf"), tmp_path / "out")) == (1, 0, 0)
    flip(tmp_path / "model.pt", "data/0", at=100)
    with pytest.raises(WrongChecksum):
        reshard.convert(reshard.plan(tmp_path / "model.pt", to="hf"), tmp_path / "damaged")


@pytest.mark.parametrize("damaged", [False, True])
def test_a_transposed_tensor_is_checked(tmp_path, damaged):
    torch.save({"a.weight": torch.arange(700 * 900, dtype=torch.float32).reshape(700, 900).t()}, tmp_path / "model.pt")
    if damaged:
        flip(tmp_path / "model.pt", "data/0", at=1_000_000)
        with pytest.raises(WrongChecksum):
            reshard.convert(reshard.plan(tmp_path / "model.pt", to="hf"), tmp_path / "out")
    else:
        assert checks(reshard.convert(reshard.plan(tmp_path / "model.pt", to="hf"), tmp_path / "out")) == (1, 0, 0)


def test_bytes_that_are_read_again_and_in_any_order_count_once(tmp_path):
    torch.save({"a": torch.arange(100_000, dtype=torch.int32)}, tmp_path / "model.pt")
    files = LocalFiles(tmp_path)
    reshard.open(tmp_path / "model.pt")
    raw = (tmp_path / "model.pt").read_bytes()
    _, start, nbytes = next(each for each in members(raw) if each[0].endswith("data/0"))
    files.claims("model.pt").add(start, start - 64, (nbytes, zlib.crc32(raw[start : start + nbytes])))
    reading, random = Reading(), np.random.default_rng(1)
    seen, covered = reading.of(files, tuple), np.zeros(nbytes, bool)
    while not covered.all():
        at, length = int(random.integers(-100, nbytes)), int(random.integers(1, 90_000))
        first, last = max(at, 0), min(at + length, nbytes)
        assert reading.checks.checked == 0
        buffer = bytearray(last - first)
        seen.read_into("model.pt", start + first, memoryview(buffer))
        covered[first:last] = True
        assert buffer == raw[start + first : start + last]
    assert (reading.checks.checked, reading.checks.partial) == (1, 0)


@pytest.mark.parametrize("delta", [False, True])
def test_a_watch_tells_of_a_damaged_step_and_goes_on_with_the_next(saved, tmp_path, delta):
    for step in (10, 20, 30):
        shutil.copytree(saved / "dcp", tmp_path / "run" / f"step-{step}")
    flip(file_of(tmp_path / "run" / "step-20"), "data/0", at=11)
    into = str(tmp_path / "out" / "step-{step}")
    events = [*reshard.watch(tmp_path / "run", to="hf", into=into, once=True, delta=delta)]
    assert [(each.step, "CRC-32" in each.detail) for each in events if each.event == "failed"] == [(20, True)]
    assert [each.step for each in events if each.event == "finished"] == [10, 30]


def test_a_step_that_is_written_while_it_is_kept_is_not_kept(saved, tmp_path, monkeypatch):
    for step in (10, 20):
        shutil.copytree(saved / "dcp", tmp_path / "run" / f"step-{step}")
    made_frames = reshard.verbs.delta.made_frames

    def slowly(*arguments):
        for frame in made_frames(*arguments):
            os.utime(file_of(tmp_path / "run" / "step-20"), (1, 1))
            yield frame

    monkeypatch.setattr(reshard.verbs.delta, "made_frames", slowly)
    events = [*reshard.watch(tmp_path / "run", to="hf", into=str(tmp_path / "kept" / "step-{step}"), once=True, delta=True)]
    assert [each.step for each in events if each.event == "finished"] == [10]
    assert ["the file was written while it was read" in each.detail for each in events if each.event == "failed"] == [True]
    assert not (tmp_path / "kept" / "step-20").exists()


def test_a_part_whose_damage_is_seen_at_its_end_leaves_its_task_open(tmp_path):
    torch.save({"a.weight": torch.arange(1 << 16, dtype=torch.float32)[: (1 << 16) - 4096].reshape(-1, 1024)}, tmp_path / "model.pt")
    flip(tmp_path / "model.pt", "data/0", at=100)  # the last 16 KiB of the storage are read when all blocks are copied
    for _ in range(2):
        with pytest.raises(WrongChecksum):
            reshard.convert_part(reshard.plan(tmp_path / "model.pt", to="hf"), tmp_path / "out", "0/1")
        with pytest.raises(TargetError, match="are missing"):
            conversion(reshard.plan(tmp_path / "model.pt", to="hf"), tmp_path / "out", sharing=Sharing(finish=True))


@pytest.mark.parametrize("damaged", [False, True])
def test_many_short_runs_are_counted_and_then_read_from_front_to_back(tmp_path, damaged):
    content = np.random.default_rng(2).bytes(400 * 1000)
    (tmp_path / "file").write_bytes(content)
    files, reading = LocalFiles(tmp_path), Reading()
    files.claims("file").add(0, 0, (len(content), zlib.crc32(content) ^ damaged))
    seen, columns = reading.of(files, tuple), bytearray(200 * 1000)
    seen.read_runs("file", [400 * row for row in range(1000)], memoryview(columns))
    assert (reading.checks.checked, reading.checks.partial) == (0, 1)
    if damaged:
        with pytest.raises(WrongChecksum):
            seen.read_runs("file", [400 * row + 200 for row in range(1000)], memoryview(columns))
    else:
        seen.read_runs("file", [400 * row + 200 for row in range(1000)], memoryview(columns))
        assert (reading.checks.checked, reading.checks.partial) == (1, 0)
