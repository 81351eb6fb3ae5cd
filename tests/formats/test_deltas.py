"""Deltas: what changed between two checkpoints, written and applied. The oracle of the format is tests/helpers/slime_deltas.py."""

import itertools
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import traceback

import numpy as np
import pytest
import safetensors.numpy
import zstandard
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard as command
from helpers.sampled import sampled
from helpers.slime_deltas import applied, changed, folder_of, load_folder, save, write_delta, write_index
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

import reshard
from reshard.engine.origins import patched
from reshard.engine.pool import Effort
from reshard.engine.transfer import Pieces, SharedPatches, Worker
from reshard.geometry.boxes import Box
from reshard.verbs.verify import verify_written

LLAMA = HF / "llama"
INDEX = "model.safetensors.index.json"


def changed_codes(stored):
    """The tensors with another lowest bit in every seventh byte: numbers stay finite."""
    return {
        name: (dtype, shape, bytes(byte ^ (i % 7 == 0) for i, byte in enumerate(data))) for name, (dtype, shape, data) in stored.items()
    }


@pytest.fixture
def steps(tmp_path):
    """Three steps of a small llama."""
    stored = load_folder(LLAMA)
    for number, share in ((100, 0), (200, 0.01), (300, 0.01)):
        stored = changed(stored, share, number)
        folder_of(tmp_path / f"step-{number}", stored, LLAMA)
    return tmp_path


def odd_tensors(seed):
    """Element types and shapes of all kinds, with names of no known model."""
    random = np.random.default_rng(seed)
    forms = {
        "a.weight": ("BF16", (7, 5), 2), "b.scale": ("F32", (), 4), "c.empty": ("F32", (0, 4), 4), "d.codes": ("F8_E4M3", (9, 3), 1),
        "e.long": ("BF16", (3, 700_000), 2), "f.fixed": ("F32", (6,), 4), "g.wide": ("F32", (2, 300_000), 4),
        "h.three": ("BF16", (2, 3, 5), 2),
    }  # fmt: skip
    return {name: (dtype, shape, random.bytes(int(np.prod(shape)) * size)) for name, (dtype, shape, size) in forms.items()}


def but_fixed(new, old):
    return {**new, "f.fixed": old["f.fixed"]}


# ---- the format: slime applies ours, and ours applies slime's ----


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("share", [0.001, 1])
def test_slime_applies_our_delta(tmp_path, encoding, share):
    old = odd_tensors(1)
    new = but_fixed(changed(old, share, 2) | {"b.scale": ("F32", (), b"\1\2\3\4")}, old)
    folder_of(tmp_path / "old", old), folder_of(tmp_path / "new", new)
    result = reshard.delta(tmp_path / "old", tmp_path / "new", tmp_path / "delta", encoding=encoding)
    assert applied(tmp_path / "delta", old) == new
    changed_names = {name for name in old if old[name] != new[name]}
    assert "f.fixed" not in changed_names and "c.empty" not in changed_names and "b.scale" in changed_names
    assert json.loads((tmp_path / "delta" / INDEX).read_text())["weight_map"].keys() == changed_names
    words = {1: "u1", 2: "u2", 4: "u4"}
    count = sum(
        int((np.frombuffer(a[2], words[size]) != np.frombuffer(b[2], words[size])).sum())
        for a, b, size in ((old[name], new[name], {"BF16": 2, "F32": 4, "F8_E4M3": 1}[old[name][0]]) for name in old)
    )
    assert (result.changed_elements, result.changed_tensors, result.tensors) == (count, len(changed_names), len(old))


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["blake3", "adler32"])
@pytest.mark.parametrize("share", [0.001, 1])
def test_a_delta_of_slime_is_applied(tmp_path, encoding, checksum, share):
    old = odd_tensors(1)
    new = but_fixed(changed(old, share, 2) | {"b.scale": ("F32", (), b"\1\2\3\4")}, old)
    write_delta(tmp_path / "delta", old, new, encoding, checksum, 7, 6)
    base = folder_of(tmp_path / "old", old)
    reshard.apply(base, tmp_path / "delta", tmp_path / "out", to="hf")
    assert load_folder(tmp_path / "out") == new
    view = reshard.open(base, deltas=[tmp_path / "delta"]).tensors()
    for name, (_, _, data) in new.items():
        assert view[name].words().tobytes() == data, name
    # Columns, and rows from back to front.
    _, (rows, columns), data = new["e.long"]
    expected = np.frombuffer(data, np.uint16).reshape(rows, columns)
    for row in reversed(range(rows)):
        assert np.array_equal(view["e.long"][row : row + 1, 5:600_001].words(), expected[row : row + 1, 5:600_001])
    assert np.array_equal(view["e.long"][:, 699_990:].words(), expected[:, 699_990:])
    three = np.frombuffer(new["h.three"][2], np.uint16).reshape(2, 3, 5)
    assert np.array_equal(view["h.three"][1, 1:, 2:4].words(), three[1, 1:, 2:4])


def test_a_chain_is_verified_by_the_record_of_its_last_delta(tmp_path):
    old = odd_tensors(1)
    new = but_fixed(changed(old, 0.1, 2), old)
    base = folder_of(tmp_path / "old", old)
    folder_of(tmp_path / "new", new)
    made = reshard.delta(base, tmp_path / "new", tmp_path / "ours")
    result = verify_written(f"{base}+{tmp_path}/ours", Effort())
    assert result.equal and result.tensors == made.tensors and result.nbytes == sum(len(data) for _, _, data in new.values())
    write_delta(tmp_path / "theirs", old, new, "xor", "blake3", 7, 6)
    with pytest.raises(reshard.RequestError, match=r"another program wrote the delta .*theirs, so nothing tells what the checkpoint"):
        verify_written(f"{base}+{tmp_path}/theirs", Effort())
    # A tensor that the delta does not change has a digest in its record, and no checksum of its own.
    other = folder_of(tmp_path / "other", old | {"f.fixed": ("F32", old["f.fixed"][1], bytes(len(old["f.fixed"][2])))})
    (difference,) = verify_written(f"{other}+{tmp_path}/ours", Effort()).differences
    assert difference.name == "f.fixed" and "it is not what the delta" in difference.detail


def test_a_delta_with_xxh3_names_the_package_that_it_needs(tmp_path, monkeypatch):
    old = odd_tensors(1)
    write_delta(tmp_path / "delta", old, changed(old, 0.1, 2), "xor", "blake3", 7, 6)
    text = (tmp_path / "delta" / INDEX).read_text()
    (tmp_path / "delta" / INDEX).write_text(text.replace("blake3", "xxh3-128"))
    base = folder_of(tmp_path / "old", old)
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(reshard.RequestError, match=r"xxhash is not installed.*reshard\[delta\]"):
        reshard.apply(base, tmp_path / "delta", tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()


# ---- any formats ----

BASES = {
    "dcp": ("dcp/fsdp2/checkpoint", "dcp/fsdp2/model"),
    "fsdp": ("fsdp/fsdp1-sharded/checkpoint", "fsdp/fsdp1-sharded/model"),
    "deepspeed": ("deepspeed/z3-bf16/checkpoint", "deepspeed/z3-bf16/model"),
    "megatron": ("megatron/llama-tp2/checkpoint", "megatron/llama-tp2/model"),
}
TARGETS = {"hf": {}, "vllm": {"tp": 2}, "dcp": {"dp": 2}, "megatron": {"tp": 2}}


@pytest.mark.parametrize("name", BASES)
def test_delta_then_apply_is_the_identity_in_every_format(name, tmp_path):
    """The base is what a trainer wrote, the new checkpoint is a Hugging Face folder, and the delta is applied to both forms of the base."""
    path, model = (FIXTURES / each for each in BASES[name])
    options = {"model": model} if model.is_dir() else {}
    base = reshard.open(path, **options)
    reshard.convert(reshard.plan(base, to="hf"), tmp_path / "same")
    folder_of(tmp_path / "new", changed(load_folder(tmp_path / "same"), 0.02, 5), tmp_path / "same")
    new = reshard.open(tmp_path / "new")
    result = reshard.delta(base, new, tmp_path / "delta")
    assert applied(tmp_path / "delta", load_folder(tmp_path / "same")) == load_folder(tmp_path / "new")
    assert result.result.root == reshard.fingerprint(tmp_path / "new").root
    for to, sizes in TARGETS.items():
        written = reshard.apply(path, tmp_path / "delta", tmp_path / to, to=to, **sizes, **options)
        reshard.verify(tmp_path / to, new).raise_if_different()
        assert to == "dcp" or written.fingerprint.root == result.result.root
    reshard.verify(reshard.open(path, deltas=tmp_path / "delta", **options), new).raise_if_different()
    again = reshard.delta(tmp_path / "vllm", path, tmp_path / "back", **options)
    assert again.changed_elements == result.changed_elements and again.result == result.base
    reshard.verify(f"{tmp_path}/vllm+{tmp_path}/back", tmp_path / "same").raise_if_different()
    none = reshard.delta(base, tmp_path / "same", tmp_path / "none", **options)
    assert none.changed_elements == none.changed_tensors == 0 and os.listdir(tmp_path / "none") == [INDEX]
    reshard.verify(f"{tmp_path}/same+{tmp_path}/none", tmp_path / "same").raise_if_different()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_cast_comes_after_the_delta(steps, dtype):
    reshard.delta(steps / "step-100", steps / "step-200", steps / "delta")
    cast = {"to": "vllm", "tp": 2, "dtype": dtype, "allow_overflow": True}  # the steps are random codes, and some are beyond float16
    reshard.apply(steps / "step-100", steps / "delta", steps / "out", **cast)
    reshard.convert(reshard.plan(steps / "step-200", **cast), steps / "expected")
    assert load_folder(steps / "out") == load_folder(steps / "expected")


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("hf_fp8/llama-fp8-block", {"dequantize": True}),
        ("hf_fp8/llama-fp8-block", {}),
        ("hf/llama", {"merge_adapter": FIXTURES / "peft/dora/adapter"}),
    ],
    ids=["dequantize", "fp8", "merge"],
)
def test_values_are_computed_of_what_the_delta_makes(source, options, tmp_path):
    base = FIXTURES / source
    folder_of(tmp_path / "new", changed_codes(load_folder(base)), base)
    reshard.delta(base, tmp_path / "new", tmp_path / "delta")
    for to in ({"to": "hf"}, {"to": "vllm", "tp": 2}):
        reshard.apply(base, tmp_path / "delta", tmp_path / to["to"], **to, **options)
        reshard.convert(reshard.plan(tmp_path / "new", **to, **options), tmp_path / "expected" / to["to"])
        assert load_folder(tmp_path / to["to"]) == load_folder(tmp_path / "expected" / to["to"])


def test_every_command_takes_a_base_and_its_deltas(steps):
    reshard.delta(steps / "step-100", steps / "step-200", steps / "d1")
    first = f"{steps}/step-100+{steps}/d1"
    second = reshard.delta(first, steps / "step-300", steps / "d2", encoding="overwrite")
    chain = f"{first}+{steps}/d2"
    assert (second.version, second.base_version) == ("000300", "000200")
    assert command("verify", chain, steps / "step-300").out.startswith("equal")
    assert command("diff", chain, steps / "step-300").code == 0 and command("diff", first, chain).code == 1
    assert command("fingerprint", chain, "-v").out.startswith(second.result.root)
    assert "complete" in command("inspect", chain).out
    assert command("convert", chain, steps / "out", "--to", "hf").code == 0
    assert load_folder(steps / "out") == load_folder(steps / "step-300")
    deltas = steps / "d1", steps / "d2"
    assert command("apply", steps / "step-100", *deltas, steps / "applied", "--to", "vllm", "--tp", "2").code == 0
    reshard.verify(steps / "applied", steps / "step-300").raise_if_different()
    written = json.loads((steps / "applied" / "reshard.json").read_text())
    assert [each["version"] for each in written["deltas"]] == ["000200", "000300"] and "apply" in written["command"]
    assert written["source"]["fingerprint"] == written["fingerprint"] == second.result.root
    expected = reshard.open(steps / "step-300").view(to="vllm", tp=2, rank=1)
    found = reshard.open(chain).view(to="vllm", tp=2, rank=1)
    assert {name: each.words().tobytes() for name, each in found.items()} == {
        name: each.words().tobytes() for name, each in expected.items()
    }
    shown = command("inspect", steps / "d2").out
    assert "version 000300 of the version 000200" in shown and "layers (0-1)" in shown and second.base.root in shown


def test_parts_and_plan_files_convert_a_base_with_deltas(steps):
    reshard.delta(steps / "step-100", steps / "step-200", steps / "d1")
    chain = f"{steps}/step-100+{steps}/d1"
    plan = reshard.plan(chain, to="vllm", tp=2)
    reshard.save_plan(plan, steps / "plan")
    for part in ("0/2", "1/2"):
        reshard.convert_part(reshard.load_plan(steps / "plan", chain), steps / "out", part)
    reshard.verify(steps / "out", steps / "step-200").raise_if_different()
    (steps / "d1" / "model-00000-of-00001.safetensors").touch()
    with pytest.raises(reshard.CheckpointError, match="was written since"):
        reshard.load_plan(steps / "plan", chain)


@pytest.mark.parametrize("remote", ["base", "d1", "base d1 d2"])
def test_base_deltas_and_result_may_lie_in_stores(remote, steps):
    import fsspec

    memory, root = fsspec.filesystem("memory"), f"deltas-{steps.name}-{remote.replace(' ', '-')}"
    reshard.delta(steps / "step-100", steps / "step-200", steps / "d1")
    reshard.delta(f"{steps}/step-100+{steps}/d1", steps / "step-300", steps / "d2", encoding="overwrite")
    places = {"base": steps / "step-100", "d1": steps / "d1", "d2": steps / "d2"}
    for name in remote.split():
        for path in places[name].iterdir():
            memory.pipe_file(f"/{root}/{name}/{path.name}", path.read_bytes())
        places[name] = f"memory://{root}/{name}"
    chain = "+".join(map(str, places.values()))
    for out in (steps / "out", f"memory://{root}/out"):
        reshard.convert(reshard.plan(chain, to="vllm", tp=2), out)
        reshard.verify(out, steps / "step-300").raise_if_different()
    for part in ("0/2", "1/2"):
        reshard.convert_part(reshard.plan(chain, to="vllm", tp=2), f"memory://{root}/parts", part)
    reshard.verify(f"memory://{root}/parts", steps / "step-300").raise_if_different()
    with pytest.raises(reshard.CheckpointError, match="is not what the delta"):
        reshard.apply(places["base"], places["d2"], f"memory://{root}/wrong", to="hf")
    assert not memory.find(f"/{root}/wrong")


@pytest.fixture
def long_chain(tmp_path):
    """A base and four deltas, xor, xor, overwrite and xor, of tensors with 5 and 3 blocks; and what they make."""
    random = np.random.default_rng(1)
    forms = {"a.weight": ("BF16", (4100, 2050), 2), "b.weight": ("F32", (1500, 3000), 4)}
    stored = {name: (dtype, shape, random.bytes(int(np.prod(shape)) * size)) for name, (dtype, shape, size) in forms.items()}
    paths = [folder_of(tmp_path / "base", stored)]
    for version, (encoding, share) in enumerate([("xor", 0.01), ("xor", 0.01), ("overwrite", 0.2), ("xor", 0.01)]):
        old, stored = stored, changed(stored, share, version)
        write_delta(tmp_path / f"d{version}", old, stored, encoding, "adler32", version + 1, version)
        paths.append(tmp_path / f"d{version}")
    return paths, stored


def test_workers_decode_each_frame_once_together(long_chain, tmp_path, monkeypatch):
    (base, *deltas), stored = long_chain
    opened = []
    monkeypatch.setattr(patched, "_frames_of", lambda tensor, *rest, of=patched._frames_of: opened.append(tensor.name) or of(tensor, *rest))
    plan = reshard.plan("+".join(map(str, [base, *deltas])), to="hf")
    reshard.convert(plan, tmp_path / "out", workers=4)
    assert load_folder(tmp_path / "out") == stored
    # The checksums of another program's delta are compared by a pass of their own before.
    assert len(opened) == 2 * len(stored)


@pytest.mark.parametrize("kept", sampled([0, 1 << 20, 1 << 26], 3))
def test_workers_may_read_in_any_order(long_chain, kept, monkeypatch):
    """As for files that are written from front to back. kept: bytes for other workers; with few, frames are decoded again."""
    paths, stored = long_chain
    monkeypatch.setattr(patched, "_MOST_KEPT", kept)
    checkpoint = reshard.open(paths[0], deltas=paths[1:])
    random = np.random.default_rng(2)
    for tensor in checkpoint.index.tensors:
        assert len(patched.OpenPatches(checkpoint.files).steps(tensor)) == 3  # two xor deltas in a row are one step
        shared, whole = (
            SharedPatches(checkpoint.files, 3),
            np.frombuffer(stored[tensor.name][2], tensor.dtype.word).reshape(tensor.shape),
        )
        workers = [Worker(checkpoint.files, tensor.dtype.itemsize, shared=shared) for _ in range(3)]
        rows = list(range(0, tensor.shape[0], 50))
        for turn, start in enumerate([*rows, *random.permutation(rows).tolist()]):
            rows_left = min(50, tensor.shape[0] - start)
            for first, width in ((0, tensor.shape[1]), (100, 300)) if turn % 7 == 0 else ((0, tensor.shape[1]),):
                box = Box((start, first), (rows_left, width))
                found = workers[turn % 3].gather(Pieces(tensor), box)
                assert (found == whole[box.index]).all(), (tensor.name, start)


def test_a_plus_in_a_name_stays(tmp_path):
    shutil.copytree(LLAMA, tmp_path / "a+b")
    assert reshard.open(tmp_path / "a+b").path == f"{tmp_path}/a+b"
    reshard.delta(tmp_path / "a+b", LLAMA, tmp_path / "d+1")
    assert len(reshard.open(f"{tmp_path}/a+b+{tmp_path}/d+1").deltas) == 1
    with pytest.raises(reshard.RequestError, match=f"no file or directory.*{tmp_path}/a[+]b is there, and {tmp_path}/nothing is not"):
        reshard.open(f"{tmp_path}/a+b+{tmp_path}/nothing")


# ---- chains of random changes ----


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=some.lists(some.lists(some.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4)
    # All of the shape [0] is what ZeRO-3 leaves without gathering, and is refused.
    .filter(lambda made: {*made} != {(0,)}),
    sizes=some.sampled_from([("BF16", 2), ("F32", 4), ("F8_E4M3", 1)]),
    chain=some.lists(
        some.tuples(some.sampled_from([0, 0.01, 0.3, 1]), some.sampled_from(["xor", "overwrite"]), some.booleans()), min_size=1, max_size=5
    ),
    seed=some.integers(0, 1000),
)
def test_a_chain_restores_every_step(tmp_path_factory, shapes, sizes, chain, seed):
    root, (dtype, size), random = tmp_path_factory.mktemp("chain"), sizes, np.random.default_rng(seed)
    stored = {f"w{i}.weight": (dtype, shape, random.bytes(int(np.prod(shape)) * size)) for i, shape in enumerate(shapes)}
    path = folder_of(root / "base", stored)
    versions, text = [stored], str(path)
    for i, (share, encoding, is_ours) in enumerate(chain):
        new = changed(stored, share, seed + i)
        if is_ours:
            reshard.delta(text, folder_of(root / f"new{i}", new), root / f"delta{i}", encoding=encoding)
        else:
            write_delta(root / f"delta{i}", stored, new, encoding, "adler32", i + 1, i)
        stored, text = new, f"{text}+{root}/delta{i}"
        versions.append(new)
    for i, expected in enumerate(versions):
        opened = reshard.open(path, deltas=[root / f"delta{j}" for j in range(i)])
        assert {name: each.words().tobytes() for name, each in opened.tensors().items()} == {
            name: data for name, (_, _, data) in expected.items()
        }
    if stored != versions[0] or chain:
        reshard.convert(reshard.plan(text, to="hf"), root / "out")
        assert load_folder(root / "out") == stored


# ---- refusals ----


def refused(message, error, base, deltas, out, **options):
    for to in ({"to": "hf"}, {"to": "vllm", "tp": 2}):
        with pytest.raises(error, match=message):
            reshard.apply(base, deltas, out, **to, **options)
        assert not out.exists()


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_another_base_or_order_is_refused(steps, encoding):
    out = steps / "out"
    for old, new in ((100, 200), (200, 300)):
        reshard.delta(steps / f"step-{old}", steps / f"step-{new}", steps / f"d{new}", encoding=encoding)
    first, second = steps / "d200", steps / "d300"
    refused("is not what the delta .*d300 makes", reshard.CheckpointError, steps / "step-100", second, out)
    refused(
        r"changes the version 000100 \(blake3:.*\), and the delta before it makes 000300",
        reshard.RequestError,
        steps / "step-100",
        [second, first],
        out,
    )
    refused(
        r"changes the version 000100 \(blake3:.*\), and the delta before it makes 000200",
        reshard.RequestError,
        steps / "step-100",
        [first, first],
        out,
    )
    refused("it is no delta, but a checkpoint", reshard.RequestError, steps / "step-100", steps / "step-200", out)
    refused("the base is a delta itself", reshard.RequestError, first, second, out)
    refused("does not say the weights of its base", reshard.RequestError, first, [], out)
    if encoding == "xor":
        refused("is not what the delta .*d200 makes", reshard.CheckpointError, steps / "step-200", first, out)
        with pytest.raises(reshard.CheckpointError, match="has the new values of the delta already"):
            reshard.open(steps / "step-200", deltas=[first]).tensors()["lm_head.weight"].numpy()
        refused("has the new values of the delta already", reshard.CheckpointError, steps / "step-200", first, out, dtype="fp32")
    else:
        reshard.apply(steps / "step-200", first, steps / "twice", to="hf")
        assert load_folder(steps / "twice") == load_folder(steps / "step-200")


def test_deltas_whose_versions_were_counted_follow_each_other_by_their_fingerprints(steps):
    for number, name in ((100, "a"), (200, "b"), (300, "c")):
        (steps / f"step-{number}").rename(steps / name)
    assert reshard.delta(steps / "a", steps / "b", steps / "ab").version == "000001"
    assert reshard.delta(steps / "b", steps / "c", steps / "bc").base_version == "000000"
    reshard.verify(f"{steps}/a+{steps}/ab+{steps}/bc", steps / "c").raise_if_different()


def test_a_base_of_reshard_is_known_before_anything_is_read(steps):
    """Its reshard.json has the fingerprint, so an overwrite that is applied twice is refused, too."""
    for step in (100, 200, 300):
        reshard.convert(reshard.plan(steps / f"step-{step}", to="hf"), steps / f"hf-{step}")
    reshard.delta(steps / "hf-100", steps / "hf-200", steps / "delta", encoding="overwrite")
    with pytest.raises(reshard.CheckpointError, match="has the values of this delta already"):
        reshard.open(steps / "hf-200", deltas=[steps / "delta"])
    with pytest.raises(reshard.CheckpointError, match=r"was made of the checkpoint .*hf-100 with the fingerprint blake3:"):
        reshard.open(steps / "hf-300", deltas=[steps / "delta"])
    assert reshard.open(steps / "hf-100", deltas=[steps / "delta"]).deltas
    assert reshard.open(steps / "step-100", deltas=[steps / "delta"]).deltas


def test_an_unchanged_tensor_of_another_base_is_noticed(steps):
    """The delta changes one tensor, and the base differs in another one."""
    stored = load_folder(steps / "step-100")
    one = {**stored, "lm_head.weight": changed(stored, 0.1, 1)["lm_head.weight"]}
    folder_of(steps / "one", one, LLAMA)
    folder_of(steps / "other", {**stored, "model.norm.weight": changed(stored, 0.5, 1)["model.norm.weight"]}, LLAMA)
    reshard.delta(steps / "step-100", steps / "one", steps / "delta")
    refused("model.norm.weight: it is not what the delta", reshard.CheckpointError, steps / "other", steps / "delta", steps / "out")


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_flipped_bit_anywhere_is_refused_or_harmless(steps, encoding):
    reshard.delta(steps / "step-100", steps / "step-200", steps / "delta", encoding=encoding)
    file = steps / "delta" / "model-00000-of-00001.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    random, refusals = np.random.default_rng(3), 0
    for at in [*random.integers(0, 8 + length, 10), *random.integers(8 + length, len(content), 30)]:
        damaged = bytearray(content)
        damaged[at] ^= 1 << int(random.integers(8))
        file.write_bytes(damaged)
        for options in ({"to": "hf"}, {"to": "hf", "dtype": "fp32"}):
            out = steps / f"out-{len(options)}"
            try:
                reshard.apply(steps / "step-100", steps / "delta", out, **options)
            except reshard.ReshardError:
                refusals += 1
                assert not out.exists()
                continue
            if "dtype" not in options:
                assert load_folder(out) == load_folder(steps / "step-200")
            shutil.rmtree(out)
    assert refusals > 60


def rewritten(folder, change):
    """Change the frames of a delta, and its checksums."""
    from helpers.slime_deltas import load

    path = folder / "model-00000-of-00001.safetensors"
    frames, sums = load(path)
    change(frames, sums)
    save(path, frames, sums)


def test_what_is_missing_from_a_delta_is_named(steps):
    base = steps / "step-100"
    reshard.delta(base, steps / "step-200", steps / "delta")
    shutil.copytree(steps / "delta", steps / "kept")

    def again(change):
        shutil.rmtree(steps / "delta")
        shutil.copytree(steps / "kept", steps / "delta")
        change(steps / "delta")
        with pytest.raises(reshard.ReshardError) as caught:
            reshard.open(base, deltas=[steps / "delta"])
        return str(caught.value)

    def index_without_norm(folder):
        index = json.loads((folder / INDEX).read_text())
        del index["weight_map"]["lm_head.weight"]
        (folder / INDEX).write_text(json.dumps(index))

    def without_norm(folder):
        rewritten(folder, lambda frames, sums: (frames.pop("lm_head.weight"), sums.pop("lm_head.weight")))

    def both(folder):
        index_without_norm(folder), without_norm(folder)

    assert "lm_head.weight" in again(index_without_norm)
    assert "lm_head.weight" in again(without_norm)
    assert "were written" in again(both)
    assert "which is not there" in again(lambda folder: (folder / "model-00000-of-00001.safetensors").unlink())
    assert "no checksum" in again(lambda folder: rewritten(folder, lambda frames, sums: sums.pop("lm_head.weight")))


def test_other_names_shapes_and_types_are_refused(tmp_path):
    stored = load_folder(LLAMA)
    base = folder_of(tmp_path / "base", stored)
    norm = stored["model.norm.weight"]
    cases = {
        "names": ({name: each for name, each in stored.items() if name != "model.norm.weight"}, "model.norm.weight: it is in"),
        "more": ({**stored, "extra.weight": norm}, "extra.weight: it is in"),
        "shapes": ({**stored, "model.norm.weight": ("BF16", (16,), norm[2][:32])}, r"model.norm.weight: its shape is"),
        "types": (
            {**stored, "model.norm.weight": ("F16", *norm[1:])},
            "model.norm.weight: it is BF16 on the left, F16 on the right[.]",
        ),
    }
    for name, (other, message) in cases.items():
        with pytest.raises(reshard.RequestError, match=message):
            reshard.delta(base, folder_of(tmp_path / name, other), tmp_path / "delta")
        assert not (tmp_path / "delta").exists()
    reshard.delta(base, base, tmp_path / "delta")
    with pytest.raises(reshard.RequestError, match="the target exists"):
        reshard.delta(base, base, tmp_path / "delta")


def test_optimizer_state_does_not_survive_a_delta(tmp_path):
    """A delta says nothing about it, so what the base has would be of another step."""
    source = FIXTURES / "dcp/fsdp2"
    opened = reshard.open(source / "checkpoint", model=source / "model")
    assert any(tensor.kind == "moment1" for tensor in opened.index.tensors)
    reshard.delta(opened, opened, tmp_path / "delta")
    patched = reshard.open(source / "checkpoint", model=source / "model", deltas=tmp_path / "delta")
    assert {tensor.kind for tensor in patched.index.tensors} == {"weight"}


# ---- hostile deltas ----


def frame_of(data, **settings):
    return zstandard.ZstdCompressor(level=1, **settings).compress(data)


def overwriting(count, positions, values):
    return struct.pack("<I", count) + np.array(positions, "<u4").tobytes() + bytes(values)


# The tensor has 64 bytes.
HOSTILE = {
    "no frame": ("xor", b"nonsense", "no zstd frame"),
    "empty": ("xor", b"", "no zstd frame"),
    "short": ("xor", frame_of(bytes(63)), "holds 63 bytes, the tensor has 64"),
    "bomb": ("xor", frame_of(bytes(1 << 30)), "holds 1,073,741,824 bytes, the tensor has 64"),
    "no size": ("xor", frame_of(bytes(64), write_content_size=False), "does not tell its size"),
    "cut": ("xor", frame_of(np.random.default_rng(0).bytes(64))[:-9], "ends after|cannot be decoded"),
    "count too large": ("overwrite", frame_of(overwriting(9, [1, 2], [3, 4])), "count 9"),
    "count of a bomb": ("overwrite", frame_of(struct.pack("<I", (1 << 32) - 1) + bytes(60)), "count 4,294,967,295"),
    "more than the tensor": ("overwrite", frame_of(overwriting(65, range(65), [0] * 65)), "count 65"),
    "beyond the end": ("overwrite", frame_of(overwriting(2, [1, 64], [3, 4])), "beyond the 64 bytes"),
    "twice": ("overwrite", frame_of(overwriting(2, [5, 5], [3, 4])), "do not ascend"),
    "descending": ("overwrite", frame_of(overwriting(2, [6, 5], [3, 4])), "do not ascend"),
    "no count": ("overwrite", frame_of(b"ab"), "has 2 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_frame_is_refused_by_name(case, tmp_path):
    encoding, frame, message = HOSTILE[case]
    base = folder_of(tmp_path / "base", {"a.weight": ("BF16", (4, 8), bytes(range(64))), "b": ("F32", (1,), b"0000")})
    delta = tmp_path / "delta"
    delta.mkdir()
    save(delta / "m.safetensors", {"a.weight": ("U8", (len(frame),), frame)}, {"a.weight": "00"})
    write_index(delta, {"a.weight": "m.safetensors"}, delta_encoding=encoding, checksum_format="adler32", version=2, base_version=1)
    with pytest.raises(reshard.CheckpointError, match=message) as caught:
        reshard.apply(base, delta, tmp_path / "out", to="hf")
    assert caught.value.where.startswith("a.weight in ") and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("metadata", "weight_map", "message"),
    [
        ({}, {"a.weight": "../base/model.safetensors"}, "outside of the checkpoint"),
        ({}, {"a.weight": "/etc/passwd"}, "outside of the checkpoint"),
        ({}, {"a.weight": 3}, "no weight_map"),
        ({"version": "7/../8"}, {"a.weight": "m.safetensors"}, "digits are expected"),
        ({"version": "000001"}, {"a.weight": "m.safetensors"}, "is that of its base"),
        ({"delta_encoding": "xor2"}, {"a.weight": "m.safetensors"}, "delta_encoding is 'xor2'"),
        ({"compression_format": "lz4"}, {"a.weight": "m.safetensors"}, "compression_format is 'lz4'"),
        ({"checksum_format": "md5"}, {"a.weight": "m.safetensors"}, "checksum_format is 'md5'"),
        ({}, {"z.weight": "z.safetensors"}, "no tensor of that name"),
    ],
)
def test_a_hostile_index_is_refused(metadata, weight_map, message, tmp_path):
    base = folder_of(tmp_path / "base", {"a.weight": ("BF16", (4, 8), bytes(range(64)))})
    delta, frame = tmp_path / "delta", frame_of(bytes(64))
    delta.mkdir()
    for name in ("a", "z"):
        save(
            delta / f"{'m' if name == 'a' else 'z'}.safetensors", {f"{name}.weight": ("U8", (len(frame),), frame)}, {f"{name}.weight": "00"}
        )
    about = {
        "version": "000002",
        "base_version": "000001",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    (delta / INDEX).write_text(json.dumps({"metadata": {**about, **metadata}, "weight_map": weight_map}))
    with pytest.raises(reshard.ReshardError, match=message) as caught:
        reshard.open(base, deltas=[delta])
    assert caught.value.id != "defect"


# ---- kills, and memory ----


def ended(work, number):
    """The exit code of a forked process that does some work, and is killed at a write, sync, rename or removal: its `number`th."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = itertools.count(1)

    def dying(real):
        def call(*arguments, **keywords):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **keywords)

        return call

    os.replace, os.fsync, os.pwrite, os.unlink, os.rmdir = map(dying, (os.replace, os.fsync, os.pwrite, os.unlink, os.rmdir))
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def test_a_kill_leaves_no_half_delta(steps):
    """At every write, sync, rename and removal. What is left is refused, or whole; and the next run completes it."""
    old, new, out = steps / "step-100", steps / "step-200", steps / "delta"
    expected, outcomes = load_folder(new), []
    for number in range(1, 100):
        code = ended(lambda: reshard.delta(old, new, out), number)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        try:
            opened = reshard.open(old, deltas=[out])
        except reshard.ReshardError:
            outcomes.append("refused")
            reshard.delta(old, new, out)
            assert sorted(os.listdir(out)) == ["model-00000-of-00001.safetensors", INDEX]
            opened = reshard.open(old, deltas=[out])
        else:
            outcomes.append("whole")
        assert {name: each.words().tobytes() for name, each in opened.tensors().items()} == {
            name: each[2] for name, each in expected.items()
        }
        shutil.rmtree(out)
    assert outcomes.count("refused") >= 5 and "whole" in outcomes


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the system does not tell a process's peak")
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_memory_does_not_grow_with_the_tensor(encoding, tmp_path):
    """One tensor of 400 MB, of which a percent changes."""
    shape, nbytes = (20_000, 10_000), 400_000_000
    text = json.dumps({"a.weight": {"dtype": "BF16", "shape": shape, "data_offsets": [0, nbytes]}}).encode().ljust(128)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + nbytes)
    values = np.memmap(tmp_path / "new" / "model.safetensors", np.uint16, "r+", 8 + len(text), shape)
    random = np.random.default_rng(1)
    values.reshape(-1)[random.integers(0, values.size, 2_000_000)] = 77
    values.flush()
    script = "import sys, reshard\n{}\nprint(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    delta = f"reshard.delta(sys.argv[1] + '/old', sys.argv[1] + '/new', sys.argv[1] + '/delta', encoding={encoding!r})"
    apply = "reshard.apply(sys.argv[1] + '/old', sys.argv[1] + '/delta', sys.argv[1] + '/out', to='hf')"
    for work in (delta, apply):
        found = subprocess.run([sys.executable, "-c", script.format(work), tmp_path], capture_output=True, text=True, check=True)
        assert int(found.stdout.splitlines()[-1]) < 150_000  # kB
    written = np.memmap(tmp_path / "out" / "model.safetensors", np.uint16, "r")[-values.size :]
    assert np.array_equal(written, values.reshape(-1))
    shutil.rmtree(tmp_path)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the system does not tell a process's memory")
def test_memory_does_not_grow_with_the_verbs_that_a_process_runs(tmp_path):
    """Keep ten steps of a run in one process. The unused parts of a worker's buffers must take no memory."""
    random, values = np.random.default_rng(1), np.ones(8_000_000, np.float32)
    for step in range(10):
        values[random.integers(0, values.size, 80_000)] += 1
        (tmp_path / "run" / f"step-{step}").mkdir(parents=True)
        safetensors.numpy.save_file(
            {"a.weight": values.reshape(2_000, 4_000)}, tmp_path / "run" / f"step-{step}" / "model.safetensors", {"format": "pt"}
        )
    script = """
import sys, reshard
root = sys.argv[1]
def memory():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
for event in reshard.watch(root + "/run", into=root + "/kept/step-{step}", delta=True, once=True, quiet=0, to="hf"):
    if event.event == "delta":
        print(memory())
"""
    found = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    first, *_, last = map(int, found.stdout.split())
    assert last < first + 40_000, found.stdout  # kB; each delta of the chain takes 3 MB
