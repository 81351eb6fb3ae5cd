"""Plan files: what is read back runs as the plan does; and whatever a plan file holds, it is refused in one paragraph or harmless."""

import json
import os
import random
import shutil
import struct
import zlib

import numpy as np
import pytest
from blake3 import blake3
from command import reshard as run
from command import result_tree
from places import DCP, FIXTURES, HF

import reshard
from reshard.errors import CheckpointError, ReshardError, UnsupportedError

PLANS = {
    "columns and rows": (HF / "llama", None, {"to": "vllm", "tp": 4}),
    "padded vocabulary": (FIXTURES / "dcp" / "fsdp2" / "checkpoint", DCP / "fsdp2" / "model", {"to": "vllm", "tp": 2}),
    "cast and sharded": (HF / "qwen2", None, {"to": "hf", "dtype": "fp16", "max_shard_size": 100_000}),
    "tied, optimizer, lazy framing": (FIXTURES / "dcp" / "fsdp2" / "checkpoint", None, {"to": "fsdp", "dp": 2, "optimizer": True}),
}


@pytest.fixture(params=PLANS)
def case(request):
    source, model, options = PLANS[request.param]
    return source, reshard.plan(reshard.open(source, model=model), **options)


def test_a_plan_file_runs_as_the_plan(case, tmp_path):
    source, plan = case
    reshard.save_plan(plan, tmp_path / "plan")
    found = reshard.load_plan(tmp_path / "plan", source)
    assert found.identity() == plan.identity() and found.totals() == plan.totals() and found.drops == plan.drops
    assert found.bands() == plan.bands()
    reshard.convert(plan, tmp_path / "one")
    for part in ("0/2", "1/2"):
        reshard.convert_part(found, tmp_path / "two", part)
    assert result_tree(tmp_path / "one") == result_tree(tmp_path / "two")
    one, two = (json.loads((tmp_path / name / "reshard.json").read_text()) for name in ("one", "two"))
    assert {key for key in one if one[key] != two[key]} <= {"time", "digest"}


def test_the_source_is_checked_with_what_reshard_recorded_about_it(tmp_path):
    """A plan file carries the digests of a source that reshard wrote, so that a changed source is found as without one."""
    reshard.convert(reshard.plan(HF / "llama", to="vllm", tp=2), tmp_path / "source")
    reshard.save_plan(reshard.plan(tmp_path / "source", to="hf"), tmp_path / "plan")
    path = tmp_path / "source" / "model-rank-0-part-0.safetensors"
    stamps, content = os.stat(path), bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
    with pytest.raises(CheckpointError, match=r"does not match reshard\.json"):
        reshard.convert(reshard.load_plan(tmp_path / "plan", tmp_path / "source"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_line_plans_once(tmp_path):
    assert run("plan", HF / "llama", "--to", "vllm", "--tp", 2, "--plan-out", tmp_path / "plan").code == 0
    assert run("convert", HF / "llama", tmp_path / "one", "--to", "vllm", "--tp", 2).code == 0
    for part in ("0/2", "1/2"):
        assert run("convert", HF / "llama", tmp_path / "two", "--plan", tmp_path / "plan", "--part", part).code == 0
    assert result_tree(tmp_path / "one") == result_tree(tmp_path / "two")
    assert run("convert", HF / "llama", tmp_path / "one", "--plan", tmp_path / "plan", "--if-changed").out.count("unchanged")
    for wrong in (["--to", "vllm"], ["--tp", "2"], ["--include", "*"], ["--dry-run"]):
        found = run("convert", HF / "llama", tmp_path / "three", "--plan", tmp_path / "plan", *wrong)
        assert found.code == 2 and wrong[0] in found.err and not (tmp_path / "three").exists()
    assert run("convert", HF / "llama", tmp_path / "three", "--plan", tmp_path / "nothing").code != 0


def test_another_source_and_a_changed_one_are_refused(tmp_path):
    source = shutil.copytree(HF / "llama", tmp_path / "m")
    reshard.save_plan(reshard.plan(source, to="hf"), tmp_path / "plan")
    with pytest.raises(CheckpointError, match="were planned"):
        reshard.load_plan(tmp_path / "plan", HF / "qwen2")
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match="was written since"):
        reshard.load_plan(tmp_path / "plan", source)
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        reshard.load_plan(tmp_path / "plan", source)


# ---- hostile plan files ----


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A plan file of a plan with framing, constants, sidecars, several files and tensors of one and two axes; and its source."""
    path = tmp_path_factory.mktemp("plan") / "plan"
    source, model = FIXTURES / "dcp" / "fsdp2" / "checkpoint", DCP / "fsdp2" / "model"
    reshard.save_plan(reshard.plan(reshard.open(source, model=model), to="vllm", tp=2), path)
    return path.read_bytes(), source


def decoded(content):
    """The header and the columns of a plan file, decompressed."""
    (length,) = struct.unpack("<Q", content[16:24])
    header, at, columns = json.loads(content[24 : 24 + length]), 24 + length, {}
    for name, (_, _, nbytes) in header["columns"].items():
        columns[name] = zlib.decompress(content[at : at + nbytes])
        at += nbytes
    return header, columns


def encoded(header, columns):
    """A plan file with a right digest, as somebody who means harm writes it."""
    stored = {name: zlib.compress(data, 1) for name, data in columns.items()}
    for name, data in columns.items():
        code = header["columns"][name][0]
        header["columns"][name] = [code, len(data) // (int(code[1]) if code[0] == "i" else 1), len(stored[name])]
    text = json.dumps(header).encode()
    content = b"reshard columns\n" + struct.pack("<Q", len(text)) + text + b"".join(stored.values())
    return content + blake3(content).digest()


def attempt(content, source, tmp_path):
    """Load and run a plan file; returns the error or None. Anything but an error of reshard, and any file outside of the target, fails."""
    path, target = tmp_path / "plan", tmp_path / "room" / "out"
    path.write_bytes(content)
    target.parent.mkdir(exist_ok=True)
    try:
        reshard.convert(reshard.load_plan(path, source), target, workers=1)
    except ReshardError as error:
        assert "\n" not in str(error) and error.id != "defect"
        return error
    finally:
        outside = sorted(found.name for found in (*tmp_path.iterdir(), *target.parent.iterdir()))
        shutil.rmtree(target, ignore_errors=True)
        assert set(outside) <= {"plan", "room", "out"}, outside
    return None


def test_the_forgery_of_the_tests_is_accepted_when_nothing_is_changed(written, tmp_path):
    content, source = written
    assert attempt(encoded(*decoded(content)), source, tmp_path) is None


def test_every_flipped_byte_is_found(written, tmp_path):
    content, source = written
    for at in [*range(60), *range(60, len(content), 97), len(content) - 1]:
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        (tmp_path / "plan").write_bytes(damaged)
        with pytest.raises(CheckpointError):
            reshard.load_plan(tmp_path / "plan", source)


def test_every_truncation_is_found(written, tmp_path):
    content, source = written
    for length in [*range(0, 80, 7), *range(80, len(content), 501), len(content) - 1]:
        (tmp_path / "plan").write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            reshard.load_plan(tmp_path / "plan", source)
    (tmp_path / "plan").write_bytes(content + b"\0")
    with pytest.raises(CheckpointError):
        reshard.load_plan(tmp_path / "plan", source)


def test_another_version_is_refused_as_such(written, tmp_path):
    content, source = written
    header, columns = decoded(content)
    for version in (0, 2, "1", None):
        error = attempt(encoded({**header, "version": version}, columns), source, tmp_path)
        assert isinstance(error, UnsupportedError) and "version" in str(error)


PATHS = [
    "../x",
    "/tmp/reshard-x",
    "a/../../x",
    "..\\x",
    "C:x",
    "",
    "a\0b",
    ".reshard/journal.jsonl",
    "a//b",
    "./a",
    "a/",
    7,
    None,
    ["x"],
    {},
]


@pytest.mark.parametrize("column", ["target.files", "source.files"])
def test_a_path_that_escapes_is_refused(written, tmp_path, column):
    content, source = written
    for path in PATHS:
        header, columns = decoded(content)
        files = json.loads(columns[column])
        files[0][0] = path
        columns[column] = json.dumps(files).encode()
        assert attempt(encoded(header, columns), source, tmp_path) is not None, path


def test_a_small_file_that_escapes_is_refused(written, tmp_path):
    content, source = written
    for path in [*PATHS, "model-rank-0-part-0.safetensors"]:
        header, columns = decoded(content)
        columns["sidecars"] = json.dumps([path, *json.loads(columns["sidecars"])[1:]]).encode()
        assert attempt(encoded(header, columns), source, tmp_path) is not None, path


WRONG = [None, True, -1, 1 << 70, 1.5, "", "x", [], [[]], {}, {"": None}, [None], "\ud800", float("nan")]


def spots(value, path=()):
    """The paths of all values inside a JSON value, at most two of each list."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from spots(inner, (*path, key))


def with_value(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = with_value(value[path[0]], path[1:], new)
    return copy


def test_values_of_wrong_types_are_refused_or_harmless(written, tmp_path):
    """Each value of each JSON column in turn becomes something else. What only describes may be accepted; nothing raises anything else."""
    content, source = written
    header, columns = decoded(content)
    names = [name for name, (code, _, _) in header["columns"].items() if code == "json"]
    assert len(names) >= 9
    refused = tried = 0
    random_ = random.Random(0)
    for name in names:
        document = json.loads(columns[name])
        for path in spots(document):
            for wrong in random_.sample(WRONG, 4):
                forged = encoded(json.loads(json.dumps(header)), {**columns, name: json.dumps(with_value(document, path, wrong)).encode()})
                tried += 1
                refused += attempt(forged, source, tmp_path) is not None
    assert tried > 200 and refused > 0.8 * tried


def test_numbers_that_lie_are_refused_or_harmless(written, tmp_path):
    """Each column of integers in turn gets another number at a random place, or another length."""
    content, source = written
    header, columns = decoded(content)
    names = [name for name, (code, _, _) in header["columns"].items() if code.startswith("i")]
    assert len(names) >= 20
    random_ = random.Random(0)
    for name in names:
        values = np.frombuffer(columns[name], f"<{header['columns'][name][0]}").astype(np.int64)
        for _ in range(8):
            forged = values.copy()
            kind = random_.randrange(4)
            if kind == 3 or not len(forged):
                forged = np.append(forged, random_.choice([0, 1, 1 << 40])) if random_.random() < 0.5 else forged[:-1]
            else:
                forged[random_.randrange(len(forged))] = random_.choice([-1, 0, 1, 2, 77, 1 << 31, 1 << 49, 1 << 62, -(1 << 62)])
            other = json.loads(json.dumps(header))
            other["columns"][name][0] = "i8"
            attempt(encoded(other, {**columns, name: forged.astype("<i8").tobytes()}), source, tmp_path)


def test_a_piece_beyond_its_file_or_its_tensor_is_refused(written, tmp_path):
    content, source = written
    for column, number in (
        ("target.2.starts", 1 << 40),
        ("source.2.starts", 1 << 40),
        ("target.2.strides", 1 << 40),
        ("source.2.sizes", 1 << 20),
        ("target.2.offsets", 1 << 20),
        ("source.2.files", 99),
        ("target.2.dtypes", 99),
        ("target.stored.nbytes", 1 << 40),
        ("framing.0.starts", 1 << 40),
        ("source.axes", 1 << 10),
    ):
        header, columns = decoded(content)
        values = np.frombuffer(columns[column], f"<{header['columns'][column][0]}").astype("<i8").copy()
        values[-1] = number
        header["columns"][column][0] = "i8"
        error = attempt(encoded(header, {**columns, column: values.tobytes()}), source, tmp_path)
        assert isinstance(error, CheckpointError), column


def test_a_header_that_lies_is_refused(written, tmp_path):
    content, source = written
    for change in (
        lambda header: header.update(columns=[]),
        lambda header: header.update(kind="weights"),
        lambda header: header["columns"].pop("plan"),
        lambda header: header["columns"].update(plan=["json", 1 << 39, 10]),
        lambda header: header["columns"].update(plan=["f8", 1, 10]),
        lambda header: header["columns"].update(plan=None),
    ):
        header, columns = decoded(content)
        whole = encoded(header, columns)
        change(header)
        text, (length,) = json.dumps(header).encode(), struct.unpack("<Q", whole[16:24])
        forged = whole[:16] + struct.pack("<Q", len(text)) + text + whole[24 + length : -32]
        assert isinstance(attempt(forged + blake3(forged).digest(), source, tmp_path), CheckpointError)


def test_a_column_that_unpacks_to_more_than_it_claims_takes_no_memory(written, tmp_path):
    content, source = written
    header, columns = decoded(content)
    whole = encoded(header, columns)
    bomb = zlib.compress(b"[" + b"0," * (1 << 26), 9)
    header["columns"] = {"plan": ["json", 100, len(bomb)]}
    text = json.dumps(header).encode()
    forged = whole[:16] + struct.pack("<Q", len(text)) + text + bomb
    import tracemalloc

    tracemalloc.start()
    assert isinstance(attempt(forged + blake3(forged).digest(), source, tmp_path), CheckpointError)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
