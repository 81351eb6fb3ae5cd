"""Every storage that we write in a zip has its CRC-32: zipfile and unzip agree, torch loads it, and a flipped byte is named."""

import io
import pickle
import subprocess
import zipfile
from pathlib import Path

import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import result_tree

import reshard
from reshard.engine.pool import Effort
from reshard.storage.checksums import FileChecksums, StoredChecksum
from reshard.verbs.convert import conversion

torch = pytest.importorskip("torch", reason="torch writes and loads the files")
dcp = pytest.importorskip("torch.distributed.checkpoint", reason="torch writes and loads the files")

TARGETS = (
    ("hf/llama", {"to": "dcp"}),
    ("dcp/fsdp2/checkpoint", {"to": "dcp", "dp": 3, "optimizer": True}),
    ("dcp/fsdp2/checkpoint", {"to": "fsdp", "dp": 3, "optimizer": True}),
    ("dcp/fsdp2/checkpoint", {"to": "deepspeed", "dp": 2}),
    ("dcp/fsdp2/checkpoint", {"to": "universal"}),
    ("dcp/fsdp2/checkpoint", {"to": "megatron", "tp": 2, "optimizer": True}),
    ("hf/gpt2", {"to": "megatron", "tp": 2, "pp": 2}),  # transposed: runs of a few bytes
    ("hf/llama-tied", {"to": "megatron-dist", "tp": 2, "pp": 2}),
    ("hf/qwen3_moe", {"to": "megatron-dist", "ep": 2, "experts": "te-grouped"}),
)
every_target = pytest.mark.parametrize(("source", "options"), TARGETS, ids=lambda value: str(value).replace("/", "-"))


def plan_of(source, options):
    model = FIXTURES / source.removesuffix("/checkpoint") / "model"
    return reshard.plan(reshard.open(FIXTURES / source, model=model if model.exists() else None), **options)


def zips(folder):
    """Every zip below a folder, as (file, where it starts, its bytes): files of torch.save, and the entries of .distcp files."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".pt" and zipfile.is_zipfile(path):
            yield path, 0, path.read_bytes()
        if path.name == ".metadata":
            for entry in dcp.FileSystemReader(path.parent).read_metadata().storage_data.values():
                file = path.parent / entry.relative_path
                yield file, entry.offset, file.read_bytes()[entry.offset : entry.offset + entry.length]


def check(folder):
    """Every member of every zip has the checksum of its bytes, and none is left out. Returns the number of storages."""
    storages = 0
    for path, start, data in zips(folder):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None, f"{path} at {start}"
            for info in archive.infolist():
                content = archive.read(info)
                assert zipfile.crc32(content) == info.CRC, f"{path} at {start}, {info.filename}"
                if info.flag_bits & 8:
                    # zipfile asks the directory alone; the descriptor behind the payload says the same.
                    header = info.header_offset
                    payload = header + 30 + sum(int.from_bytes(data[header + at : header + at + 2], "little") for at in (26, 28))
                    descriptor = data[payload + info.file_size : payload + info.file_size + 16]
                    assert data[header + 14 : header + 26] == bytes(12) and descriptor[:4] == b"PK\7\x08"
                    assert [int.from_bytes(descriptor[at : at + 4], "little") for at in (4, 8, 12)] == [info.CRC, *[info.file_size] * 2]
                storages += "/data/" in info.filename
        torch.load(io.BytesIO(data), weights_only=False)
        if path.suffix == ".pt":
            torch.load(path, weights_only=False, mmap=True)
    return storages


@pytest.fixture(autouse=True)
def frameworks_stand_aside(monkeypatch):
    """torch.load looks for megatron's and deepspeed's classes, which are not installed. Only their storages matter here."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            try:
                return super().find_class(module, name)
            except ModuleNotFoundError:
                return type(name, (), {"__init__": lambda self, *args: None, "__setstate__": lambda self, state: None})

    real = torch.load

    def load(*args, **options):
        stand_in = type("pickle", (), {"Unpickler": Unpickler, "load": pickle.load, "UnpicklingError": pickle.UnpicklingError})
        return real(*args, pickle_module=stand_in, **options)

    monkeypatch.setattr(torch, "load", load)


@every_target
def test_every_storage_has_its_checksum_whoever_writes_it(source, options, tmp_path):
    plan = plan_of(source, options)
    reshard.convert(plan, tmp_path / "one", workers=1)
    assert check(tmp_path / "one") > 10
    reshard.convert(plan, tmp_path / "three", workers=3)
    assert result_tree(tmp_path / "three") == result_tree(tmp_path / "one")
    assert reshard.verify(tmp_path / "one").equal
    assert "no-checksums" not in {finding.id for finding in reshard.doctor(tmp_path / "one", deep=True).findings}


@every_target
def test_parts_write_the_checksums_of_storages_that_they_share(source, options, tmp_path):
    plan = plan_of(source, options)
    reshard.convert(plan, tmp_path / "one")
    for i in (2, 0, 1):
        reshard.convert_part(plan, tmp_path / "out", f"{i}/3")
    assert result_tree(tmp_path / "out") == result_tree(tmp_path / "one")


def stopped(plan, target, after):
    running = conversion(plan, target, effort=Effort(workers=1)).run()
    for _ in range(after):
        next(running)
    running.close()


@every_target
@pytest.mark.parametrize("changed", [False, True], ids=["as it was", "with the checksums changed"])
def test_a_resumed_run_writes_the_same_checksums(source, options, changed, tmp_path):
    plan = plan_of(source, options)
    reshard.convert(plan, tmp_path / "one")
    for after in (1, len(plan.routes) // 2, len(plan.routes)):
        target = tmp_path / f"after-{after}"
        stopped(plan, target, after)
        for file in plan.layout.files if changed else ():
            with open(target / ".reshard" / file.path, "r+b") as staged:
                for place in (place for checksum in file.checksums for place in checksum.places):
                    staged.seek(place)
                    staged.write(b"bad!")
        reshard.convert(plan, target, resume=True)
        assert result_tree(target) == result_tree(tmp_path / "one")


def test_parts_finish_what_one_process_has_begun_and_the_other_way_round(tmp_path):
    plan = plan_of("dcp/fsdp2/checkpoint", {"to": "deepspeed", "dp": 2})
    reshard.convert(plan, tmp_path / "one")
    stopped(plan, tmp_path / "parts", len(plan.routes) // 2)
    for i in range(2):
        reshard.convert_part(plan, tmp_path / "parts", f"{i}/2")
    reshard.convert_part(plan, tmp_path / "alone", "0/2")
    reshard.convert(plan, tmp_path / "alone", resume=True)
    assert result_tree(tmp_path / "parts") == result_tree(tmp_path / "alone") == result_tree(tmp_path / "one")


@pytest.mark.parametrize("options", [{"to": "megatron", "tp": 2}, {"to": "dcp"}], ids=["pt", "dcp"])
def test_zipfile_and_doctor_name_the_storage_with_a_flipped_byte(options, tmp_path):
    reshard.convert(reshard.plan(HF / "llama", **options), tmp_path / "out")
    path, start, data = next(zips(tmp_path / "out"))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        info = next(info for info in archive.infolist() if "/data/" in info.filename)
        with archive.open(info) as member:
            payload = member._orig_compress_start
    with open(path, "r+b") as file:
        file.seek(start + payload + 5)
        file.write(bytes([data[payload + 5] ^ 4]))
    damaged = path.read_bytes()[start : start + len(data)]
    assert zipfile.ZipFile(io.BytesIO(damaged)).testzip() == info.filename
    (finding,) = [each for each in reshard.doctor(tmp_path / "out", deep=True).findings if each.id == "wrong-checksum"]
    assert info.filename in finding.detail


@pytest.mark.skipif(not any((Path(folder) / "unzip").exists() for folder in ("/usr/bin", "/bin")), reason="unzip is not installed")
def test_unzip_agrees(tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="megatron", tp=2), tmp_path / "out")
    for path in (tmp_path / "out").rglob("*.pt"):
        said = subprocess.run(["unzip", "-t", path], capture_output=True, text=True, check=False)
        assert said.returncode == 0 and "No errors detected" in said.stdout and not said.stderr, said


def test_bytes_come_in_any_order_twice_and_across_checksums():
    content = bytes(range(256)) * 4
    checksums = [StoredChecksum(10, 300, (300, 1000)), StoredChecksum(310, 311, (311, 1004)), StoredChecksum(320, 900, (900, 1008))]
    file = FileChecksums(checksums)
    assert file.add(305, content[305:700]) == [1]
    assert file.add(100, content[100:305]) == []
    assert file.add(100, content[100:305]) == []
    assert file.add(700, content[700:]) == [2]
    assert file.add(0, content[:100]) == [0] and file.add(0, content) == []
    expected = [zipfile.crc32(content[each.start : each.stop]) for each in checksums]
    assert file.known == expected
    # In framing that is cut anywhere, they stand at their places.
    framing = bytes(1024)
    for cut in range(998, 1014):
        filled = file.filled_in(0, framing[:cut]) + file.filled_in(cut, framing[cut:])
        assert [int.from_bytes(filled[place : place + 4], "little") for each in checksums for place in each.places] == [
            crc for crc in expected for _ in range(2)
        ]
        assert len(filled) == 1024 and sum(map(bool, filled)) <= 24
