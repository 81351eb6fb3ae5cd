"""Virtual folders: every byte of every file is that of the file that `convert` writes, whatever range is read and by whom."""

import multiprocessing
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from output_bytes import FIXTURES, sources
from safetensors.numpy import save_file

import reshard
from reshard.doors.places import boxes_between
from reshard.geometry.boxes import Box

HF = FIXTURES / "hf"
RECORDS = {"reshard.json", "reshard.digests"}
TARGETS = ({"to": "hf"}, {"to": "vllm", "tp": 2}, {"to": "sglang", "tp": 2}, {"to": "dcp", "dp": 2})


def written(plan, out):
    """Path -> bytes of the files of a conversion."""
    reshard.convert(plan, out)
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def some_ranges(nbytes, number, seed=0):
    chosen = random.Random(seed)
    for _ in range(number):
        start = chosen.randrange(nbytes + 1)
        yield start, min(nbytes, start + chosen.choice([0, 1, 3, 8, 100, 5000, 70_000, 3 << 20]))


@pytest.mark.parametrize(("source", "model"), list(sources()), ids=lambda path: path and str(path.relative_to(FIXTURES)))
def test_every_file_has_the_bytes_that_convert_writes(source, model, tmp_path):
    for number, options in enumerate(TARGETS):
        try:
            opened = reshard.open(source, model=model)
            files = written(reshard.plan(opened, **options), tmp_path / str(number))
        except reshard.ReshardError:
            continue
        folder = reshard.folder(opened, **options)
        assert files.keys() - folder.keys() == {"reshard.digests"} and folder.keys() <= files.keys()
        for path in files.keys() - RECORDS:
            assert folder[path].size == len(files[path])
            assert folder[path].read() == files[path], path
            for start, stop in some_ranges(len(files[path]), 5):
                assert folder[path].read(start, stop) == files[path][start:stop], (path, start, stop)


COMPUTED = {
    "cast": (HF / "llama", {"to": "hf", "dtype": "fp16"}),
    "cast in rank files": (HF / "mixtral", {"to": "vllm", "tp": 2, "dtype": "fp32"}),
    "quantized": (HF / "llama", {"to": "hf", "quantize": "fp8-block"}),
    "quantized to 4 bits": (HF / "mixtral", {"to": "hf", "quantize": "nvfp4"}),
    "dequantized": (FIXTURES / "hf_fp8" / "llama-fp8-block", {"to": "hf", "dequantize": True}),
    "merged": (HF / "llama", {"to": "hf", "merge_adapter": FIXTURES / "peft" / "plain" / "adapter"}),
    "averaged": ([HF / "llama-tied", HF / "llama-tied"], {"to": "hf", "average": True, "dtype": "fp32"}),
    "transposed": (HF / "gpt2", {"to": "vllm", "tp": 2}),
    "columns of experts": (HF / "mixtral-fused", {"to": "hf", "max_shard_size": 100_000}),
    "pickles of ranks": (HF / "llama", {"to": "fsdp", "dp": 3}),
    "zips": (HF / "llama", {"to": "megatron", "tp": 2}),
    "padded": (HF / "llama", {"to": "megatron-dist", "tp": 2}),
    "zero": (FIXTURES / "deepspeed" / "z0-bf16" / "checkpoint", {"to": "deepspeed", "dp": 3, "optimizer": True}),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_random_ranges_from_several_threads_are_slices(name, tmp_path):
    source, options = COMPUTED[name]
    files = written(reshard.plan(source, **options), tmp_path / "out")
    folder = reshard.folder(source, **options)
    asked = [(path, *span) for path in files.keys() - RECORDS for span in some_ranges(len(files[path]), 400 // len(files), seed=len(path))]
    random.Random(1).shuffle(asked)
    with ThreadPoolExecutor(8) as threads:
        for (path, start, stop), read in zip(asked, threads.map(lambda each: folder[each[0]].read(*each[1:]), asked), strict=True):
            assert read == files[path][start:stop], (path, start, stop)


def test_a_chain_of_deltas_is_read_as_its_result(tmp_path):
    base, new = tmp_path / "base", tmp_path / "new"
    shutil.copytree(HF / "llama", base)
    shutil.copytree(HF / "llama", new)
    changed = bytearray((new / "model.safetensors").read_bytes())
    changed[-5000:-4000] = bytes(1000)
    (new / "model.safetensors").write_bytes(changed)
    reshard.delta(base, new, tmp_path / "delta")
    files = written(reshard.plan(f"{base}+{tmp_path / 'delta'}", to="hf"), tmp_path / "out")
    folder = reshard.folder(f"{base}+{tmp_path / 'delta'}", to="hf")
    path = "model.safetensors"
    assert folder[path].read() == files[path] != (base / path).read_bytes()
    for start, stop in some_ranges(len(files[path]), 200):
        assert folder[path].read(start, stop) == files[path][start:stop]


def big(folder, rows=1536, columns=1024):
    """A checkpoint whose weight has more than one chunk and more than one block."""
    folder.mkdir()
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    save_file({"a.weight": values, "b.weight": values[:7] + 1}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}], ids=["stored", "cast"])
def test_ranges_across_chunks_are_joined(options, tmp_path):
    source = big(tmp_path / "source")
    files = written(reshard.plan(source, to="hf", **options), tmp_path / "out")
    folder, path = reshard.folder(source, to="hf", **options), "model.safetensors"
    assert folder[path].read() == files[path]
    for edge in range(1 << 20, len(files[path]), 1 << 20):
        assert folder[path].read(edge - 3, edge + 5) == files[path][edge - 3 : edge + 5]
    assert b"".join(folder[path].chunks(5, 3_000_000, 65536)) == files[path][5:3_000_000]


def test_a_range_costs_what_its_bytes_cost(tmp_path, monkeypatch):
    """Eight bytes of a cast weight of 6 MB read 16 bytes of the source, and not the weight."""
    from reshard.storage.files import LocalFiles

    folder, read, seen = reshard.folder(big(tmp_path / "source"), to="hf", dtype="bf16"), LocalFiles.read_into, []
    folder["model.safetensors"].read(0, 8)
    monkeypatch.setattr(LocalFiles, "read_into", lambda self, path, at, into: (seen.append(len(into)), read(self, path, at, into))[1])
    assert len(folder["model.safetensors"].read(2_000_000, 2_000_008)) == 8
    assert sum(seen) <= 20


def test_neighbours_share_what_was_computed(tmp_path, monkeypatch):
    from reshard.engine.origins.mixed import Combiner

    source = big(tmp_path / "source", rows=512)
    folder, computed, read = reshard.folder([source, source], to="hf", average=True), [], Combiner.read
    monkeypatch.setattr(Combiner, "read", lambda self, *given, **named: (computed.append(1), read(self, *given, **named))[1])
    for start in range(500_000, 500_800, 8):
        folder["model.safetensors"].read(start, start + 8)
    assert 0 < len(computed) <= 4


def test_a_source_that_changes_is_an_error_and_never_a_mixture(tmp_path):
    source = big(tmp_path / "source")
    folder = reshard.folder(source, to="hf")
    before = folder["model.safetensors"].read(1000, 2000)
    changed = bytearray((source / "model.safetensors").read_bytes())
    changed[2500:3000] = bytes(500)
    (source / "model.safetensors").write_bytes(changed)
    for start in (2400, 1000):
        with pytest.raises(reshard.CheckpointError, match="after the checkpoint was opened") as refusal:
            folder["model.safetensors"].read(start, start + 1000)
        assert "model.safetensors" in str(refusal.value) and refusal.value.id == "source-mixed"
    assert len(before) == 1000


def test_an_overflow_is_an_error_unless_it_is_allowed(tmp_path):
    (tmp_path / "source").mkdir()
    save_file({"w": np.full((4, 4), 1e6, np.float32)}, tmp_path / "source" / "model.safetensors")
    with pytest.raises(reshard.ReshardError, match="beyond"):
        reshard.folder(tmp_path / "source", to="hf", dtype="fp16")["model.safetensors"].read()
    allowed = reshard.folder(tmp_path / "source", to="hf", dtype="fp16", allow_overflow=True)
    assert allowed["model.safetensors"].read().endswith(b"\x00\x7c" * 16)


def test_ranges_outside_of_a_file_are_refused():
    folder = reshard.folder(HF / "llama", to="hf")
    for start, stop in ((-1, 5), (5, 4), (0, 1 << 40)):
        with pytest.raises(reshard.RequestError, match="bytes"):
            folder["config.json"].read(start, stop)
    with pytest.raises(reshard.RequestError, match="no such file"):
        folder.file("../config.json")


def test_etags_are_of_the_content(tmp_path):
    """Equal for the same files; other for each other request, and after each other content, even of the same length and time."""
    source = big(tmp_path / "source")
    path = "model.safetensors"
    etag = reshard.folder(source, to="hf")[path].etag
    assert reshard.folder(source, to="hf")[path].etag == etag
    assert reshard.folder(source, to="hf", dtype="bf16")[path].etag != etag
    status = (source / path).stat()
    content = bytearray((source / path).read_bytes())
    content[-1] ^= 1
    (source / path).write_bytes(content)
    os.utime(source / path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert reshard.folder(source, to="hf")[path].etag != etag
    files = [reshard.folder(HF / "llama", to="vllm", tp=2)[f"model-rank-{rank}-part-0.safetensors"].etag for rank in (0, 1)]
    assert files[0] != files[1]


def test_etags_are_equal_on_other_machines_where_the_source_carries_digests(tmp_path):
    reshard.convert(reshard.plan(big(tmp_path / "source"), to="hf"), tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    one, two = (reshard.folder(tmp_path / name, to="hf", dtype="bf16") for name in ("one", "two"))
    assert one.revision != "" and one["model.safetensors"].etag == two["model.safetensors"].etag
    with (tmp_path / "two" / "model.safetensors").open("r+b") as file:  # written after its digest: the digest says nothing any more
        file.seek(100_000)
        file.write(b"x")
    later = (tmp_path / "two" / "reshard.json").stat().st_mtime + 100
    os.utime(tmp_path / "two" / "model.safetensors", (later, later))
    assert reshard.folder(tmp_path / "two", to="hf", dtype="bf16")["model.safetensors"].etag != one["model.safetensors"].etag


def test_record_adds_the_digests_that_convert_writes(tmp_path):
    source = big(tmp_path / "source")
    for to in ("hf", "dcp"):
        files = written(reshard.plan(source, to=to), tmp_path / to)
        folder = reshard.folder(source, to=to)
        assert "reshard.digests" not in folder and b'"fingerprint": null' in folder["reshard.json"].read()
        folder.record()
        assert folder["reshard.digests"].read() == files["reshard.digests"]
        assert b'"time": null' in folder["reshard.json"].read() and b'"command": null' in folder["reshard.json"].read()


def test_a_directory_of_a_zip_that_needs_too_much_is_refused_by_name(monkeypatch):
    from reshard.doors import planned_bytes

    monkeypatch.setattr(planned_bytes, "_MOST_FOR_FRAMING", 20_000)
    with pytest.raises(reshard.ReshardError, match="checksums of") as refusal:
        reshard.folder(HF / "llama", to="megatron")
    assert refusal.value.where.endswith(".pt") and refusal.value.id == "unsupported"
    reshard.folder(HF / "llama", to="hf")


def test_a_forked_process_reads_on(tmp_path):
    """Workers of torch's DataLoader are copies of a process without its threads."""
    folder = reshard.folder(big(tmp_path / "source"), to="hf")
    expected = folder["model.safetensors"].read(0, 2_000_000)
    FORKED["folder"] = folder
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(read_forked).get(30) == expected


FORKED = {}


def read_forked():
    return FORKED["folder"]["model.safetensors"].read(0, 2_000_000)


def test_boxes_between_are_the_elements_at_these_positions():
    """Against the positions of all elements, for row-major, transposed, spread and interleaved arrays."""
    chosen = random.Random(0)
    for _ in range(300):
        sizes = tuple(chosen.randrange(1, 5) for _ in range(chosen.randrange(4)))
        order, step, strides = chosen.sample(range(len(sizes)), len(sizes)), chosen.choice([1, 1, 2]), [0] * len(sizes)
        for axis in order:
            strides[axis], step = step, step * sizes[axis] + chosen.choice([0, 0, 3])
        positions = {index: sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*sizes)}
        start = chosen.randrange(-2, max(positions.values()) + 2)
        stop = start + chosen.randrange(0, max(positions.values()) + 3)
        boxes = list(boxes_between(sizes, tuple(strides), start, stop))
        held = [tuple(np.add(index, box.offsets).tolist()) for box in boxes for index in np.ndindex(*box.sizes)]
        assert sorted(held) == sorted(index for index, at in positions.items() if start <= at < stop)
        assert all(isinstance(box, Box) for box in boxes)
