"""`reshard doctor`: good checkpoints are not accused; for each kind of finding, a damaged copy of a real one in which exactly that is
found."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES, UNREADABLE, stored
from helpers.reshard_command import reshard as command

import reshard
from reshard.engine.transfer import Pieces
from reshard.errors import CheckpointError, RequestError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import _TABLE, F32
from reshard.health import elements, structure
from reshard.health.findings import KINDS
from reshard.health.values import Measured
from reshard.index.index import Index, Tensor
from reshard.index.shards import Shards
from reshard.measures.statistics import statistics_of

GOOD = sorted(
    [path for path in FIXTURES.rglob("checkpoint") if path.parent.name not in UNREADABLE]
    + [path.parent for folder in ("hf", "hf_fp8", "hf_packed") for path in (FIXTURES / folder).glob("*/config.json")]
)
assert len(GOOD) > 200
# These hold a tensor of special values, to see that they survive.
SPECIAL = {("error", "nan", "special_values"), ("error", "inf", "special_values")}
# Made by hand, each weight with a global scale of its own.
UNEQUAL = {FIXTURES / "hf_packed" / name for name in ("llama-ct-nvfp4", "llama-modelopt-nvfp4", "qwen3_moe-ct-nvfp4")}


def model_of(checkpoint: Path) -> Path | None:
    folder = checkpoint.parent / "model"
    return folder if folder.exists() else None


@pytest.mark.parametrize("deep", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "deep"])
def test_no_good_checkpoint_is_accused(deep: bool):
    for path in GOOD:
        report = reshard.doctor(path, deep=deep, model=model_of(path))
        named = {(finding.severity, finding.id, finding.tensor) for finding in report.findings if finding.severity != "info"}
        findings = named - {("warning", "missing-tokenizer", None)}  # no fixture has one
        assert any(id == "unequal-scales" for _, id, _ in findings) == (path in UNEQUAL), path
        findings = {finding for finding in findings if finding[1] != "unequal-scales"}
        special = deep and any(tensor.name == "special_values" for tensor in reshard.open(path, model=model_of(path)).index.tensors)
        assert findings == (SPECIAL if special else set()), path
        assert report.tensors and report.format


# Damage.


def copied(case: str, to: Path) -> Path:
    """A copy of a fixture's checkpoint, which can be damaged. Its config is copied beside the weights."""
    source = FIXTURES / case
    folder = shutil.copytree(source / "checkpoint" if (source / "checkpoint").exists() else source, to / "copy")
    if (source / "model").exists():
        shutil.copyfile(source / "model" / "config.json", folder / "config.json")
    return folder


def overwrite(folder: Path, name: str, element: bytes, *, kind: str = "weight", box: Box | None = None, copies: bool = True) -> None:
    """Write one element's bytes to all elements of a box, into every copy of them, or only into the last one."""
    opened = reshard.open(folder)
    tensor = next(tensor for tensor in opened.named().tensors if (tensor.name, tensor.kind) == (name, kind))
    assert len(element) == tensor.dtype.itemsize
    shared = list(Pieces(tensor).meeting(box or Box.whole(tensor.shape)))
    for piece, inner, _ in shared if copies else shared[-1:]:
        data = bytearray((folder / piece.extent.path).read_bytes())
        for at in np.ndindex(*inner.sizes):
            start = piece.byte_offset_of(Box(tuple(a + b for a, b in zip(inner.offsets, at, strict=True)), (1,) * len(at)))
            data[start : start + len(element)] = element
        (folder / piece.extent.path).write_bytes(data)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a safetensors file again, with other tensors: name -> (dtype, shape, bytes)."""
    tensors = stored(path)
    change(tensors)
    header, start = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + len(data)]}
        start += len(data)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


NAN, INF, HUGE, ONE, ZERO = b"\xc0\x7f", b"\x80\x7f", b"\x00\x7f", b"\x80\x3f", b"\0\0"
UP = "model.layers.1.mlp.up_proj.weight"
ELEMENT = Box((3, 5), (1, 1))
ROW = Box((3, 0), (1, 32))


def llama(to: Path, name: str, element: bytes, box: Box | None = None) -> Path:
    folder = copied("hf/llama", to)
    overwrite(folder, name, element, box=box)
    return folder


def rewritten(to: Path, change: Callable[[dict[str, Any]], None], case: str = "hf/llama") -> Path:
    folder = copied(case, to)
    rewrite(folder / "model.safetensors", change)
    return folder


def without(to: Path, case: str, path: str) -> Path:
    folder = copied(case, to)
    (folder / path).unlink()
    return folder


def truncated(to: Path) -> Path:
    folder = copied("hf/llama", to)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    return folder


def damaged_beside(to: Path) -> Path:
    folder = copied("hf/llama", to)
    data = bytearray((FIXTURES / "fsdp/full-ddp/checkpoint/model.pth").read_bytes())
    at = data.rindex(b"PK\1\2")
    data[at : at + 4] = b"PK\7\7"
    (folder / "optimizer.pt").write_bytes(data)
    return folder


def changed_since_written(to: Path) -> Path:
    """The lowest bit of the last weight of a file by reshard: only the digests can see it."""
    reshard.convert(reshard.plan(FIXTURES / "hf" / "llama", to="hf"), to / "checkpoint")
    path = to / "checkpoint" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    return to / "checkpoint"


def flipped(to: Path) -> Path:
    """The lowest bit of a weight: no other check can see it."""
    folder = copied("dcp/fsdp2", to)
    opened = reshard.open(folder)
    piece = next(next(tensor.pieces()) for tensor in opened.index.tensors if tensor.name == "model.norm.weight" and tensor.kind == "weight")
    data = bytearray((folder / piece.extent.path).read_bytes())
    data[piece.extent.byte_offset] ^= 1
    (folder / piece.extent.path).write_bytes(data)
    return folder


def without_checksums(to: Path) -> Path:
    folder = copied("fsdp/full-ddp", to)
    data, at = bytearray((folder / "model.pth").read_bytes()), -1
    while (at := data.find(b"PK\1\2", at + 1)) >= 0:
        data[at + 16 : at + 20] = bytes(4)
    (folder / "model.pth").write_bytes(data)
    return folder


def unused(to: Path) -> Path:
    folder = copied("hf/llama-sharded", to)
    shutil.copyfile(folder / "model-00003-of-00003.safetensors", folder / "model-00004-of-00004.safetensors")
    return folder


def contradicting(to: Path) -> Path:
    folder = copied("hf/llama-sharded", to)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def stale(to: Path) -> Path:
    folder = copied("fsdp/verl", to)
    step = next(tensor for tensor in reshard.open(folder).index.tensors if tensor.kind == "step")
    overwrite(folder, step.name, np.float32(77).tobytes(), kind="step", copies=False)
    return folder


def uneven(to: Path) -> Path:
    folder = copied("dcp/fsdp2", to)
    overwrite(folder, "model.norm.weight", np.float32(77).tobytes(), kind="step")
    return folder


def gone_layer(to: Path) -> Path:
    def change(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            if ".layers.1." in name:
                for layer in (2, 3, 4):
                    tensors[name.replace(".1.", f".{layer}.")] = tensors[name]
                del tensors[name]

    folder = rewritten(to, change)
    (folder / "config.json").unlink()
    return folder


def with_shape(tensors: dict[str, Any]) -> None:
    dtype, shape, data = tensors[UP]
    tensors[UP] = dtype, shape[::-1], data


def as_float32(tensors: dict[str, Any]) -> None:
    _, shape, data = tensors[UP]
    tensors[UP] = "F32", shape, (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).tobytes()


def other_head(tensors: dict[str, Any]) -> None:
    dtype, shape, data = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = dtype, shape, data[:-2] + bytes(2)


def replica(to: Path) -> Path:
    folder = copied("fsdp/hsdp", to)
    overwrite(folder, "model.norm.weight", b"\x56\x3f", box=Box((0,), (1,)), copies=False)
    return folder


def padding(to: Path) -> Path:
    reshard.convert(reshard.plan(reshard.open(FIXTURES / "hf" / "llama"), to="vllm", tp=2), to / "copy")
    opened = reshard.open(to / "copy")
    constant = opened.index.constants[0]
    data = bytearray((to / "copy" / constant.path).read_bytes())
    data[constant.byte_offset] ^= 1
    (to / "copy" / constant.path).write_bytes(data)
    return to / "copy"


def negative(to: Path) -> Path:
    folder = copied("dcp/fsdp2", to)
    overwrite(folder, "model.norm.weight", b"\x80\xbf", kind="moment2", box=Box((2,), (1,)))
    return folder


def outlier(to: Path) -> Path:
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"

    def change(tensors: dict[str, Any]) -> None:
        dtype, shape, data = tensors[name]
        # Seven more in the exponent: 128 times as large.
        tensors[name] = dtype, shape, (np.frombuffer(data, np.uint16) + (7 << 7)).astype(np.uint16).tobytes()

    return rewritten(to, change, "hf/mixtral")


def large(to: Path, fresh: int) -> Path:
    """A model of large matrices, of which some are as initialized."""
    random = np.random.default_rng(0)

    def change(tensors: dict[str, Any]) -> None:
        tensors.clear()
        for i in range(4):
            values = random.normal(0, 0.02, (256, 256)) if i < fresh else random.standard_t(3, (256, 256)) * 0.013
            tensors[f"model.layers.{i}.proj.weight"] = "F32", [256, 256], values.astype(np.float32).tobytes()

    folder = rewritten(to, change)
    (folder / "config.json").unlink()
    return folder


def dead_expert(to: Path) -> Path:
    folder = copied("hf/mixtral", to)
    for part in ("w1", "w2", "w3"):
        overwrite(folder, f"model.layers.1.block_sparse_moe.experts.2.{part}.weight", ZERO)
    return folder


def scale_of_zero(to: Path) -> Path:
    folder = copied("hf_fp8/llama-fp8-block", to)
    overwrite(folder, "model.layers.0.mlp.up_proj.weight_scale_inv", bytes(4), box=Box((0, 0), (1, 1)))
    return folder


def group_of_zeros(to: Path) -> Path:
    folder = copied("hf_packed/llama-ct-mxfp4", to)
    overwrite(folder, "model.layers.0.mlp.up_proj.weight_packed", bytes(1), box=Box((3, 16), (1, 16)))
    return folder


def other_global_scale(to: Path) -> Path:
    folder = copied("hf_packed/llama-modelopt-nvfp4-weights", to)
    overwrite(folder, "model.layers.0.self_attn.k_proj.weight_scale_2", np.float32(0.25).tobytes())
    return folder


def no_scale(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]


def test_exponents_of_nan_are_found(tmp_path: Path):
    folder = copied("hf_packed/gpt_oss-mxfp4", tmp_path)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    overwrite(folder, name, b"\xff", box=Box((1, 5, 0), (1, 1, 1)))
    report = reshard.doctor(folder, deep=True)
    assert [(finding.id, finding.tensor) for finding in report.findings if finding.id == "bad-scale"] == [("bad-scale", name)]


# By id: the damage to a copy of a real checkpoint, and whether values must be read to see it.
DAMAGES: dict[str, Callable[[Path], Path]] = {
    "missing-file": lambda to: without(to, "hf/llama-sharded", "model-00002-of-00003.safetensors"),
    "truncated-file": truncated,
    "damaged-file": damaged_beside,
    "wrong-checksum": flipped,
    "changed": changed_since_written,
    "no-checksums": without_checksums,
    "unused-file": unused,
    "inconsistent": contradicting,
    "stale-rank": stale,
    "uneven-steps": uneven,
    "missing-layer": gone_layer,
    "missing-weight": lambda to: rewritten(to, lambda tensors: tensors.pop(UP)),
    "wrong-shape": lambda to: rewritten(to, with_shape),
    "unknown-weight": lambda to: rewritten(to, lambda tensors: tensors.update({"extra.weight": tensors["model.norm.weight"]})),
    "config-not-checked": lambda to: without(to, "hf/llama", "config.json"),
    "mixed-dtypes": lambda to: rewritten(to, as_float32),
    "tied-mismatch": lambda to: rewritten(to, other_head, "hf/llama-tied"),
    "replicas-differ": replica,
    "wrong-padding": padding,
    "no-moments": lambda to: copied("universal/z3-frozen", to),
    "negative-moment": negative,
    "nan": lambda to: llama(to, UP, NAN, ELEMENT),
    "inf": lambda to: llama(to, UP, INF, ELEMENT),
    "huge-value": lambda to: llama(to, UP, HUGE, ELEMENT),
    "zero-tensor": lambda to: llama(to, UP, ZERO),
    "constant-tensor": lambda to: llama(to, UP, ONE),
    "zero-rows": lambda to: llama(to, UP, ZERO, ROW),
    "constant-rows": lambda to: llama(to, UP, ONE, ROW),
    "unused-rows": lambda to: llama(to, "model.embed_tokens.weight", ZERO, ROW),
    "constant-vectors": lambda to: llama(to, "model.norm.weight", ONE),
    "norm-outlier": outlier,
    "fresh-tensor": lambda to: large(to, 1),
    "fresh-model": lambda to: large(to, 4),
    "dead-expert": dead_expert,
    "missing-scale": lambda to: rewritten(to, no_scale, "hf_fp8/llama-fp8-block"),
    "bad-scale": scale_of_zero,
    "unequal-scales": other_global_scale,
    "zero-groups": group_of_zeros,
}
# What is true of these copies besides.
ALSO = {
    "missing-layer": {"config-not-checked"},
    "fresh-tensor": {"config-not-checked"},
    "fresh-model": {"config-not-checked"},
    "no-checksums": {"config-not-checked"},
    "no-moments": {"config-not-checked"},
    "wrong-padding": {"changed"},  # in a file by reshard
    # Whoever changes bytes in a zip and not its checksum.
    "stale-rank": {"wrong-checksum", "replicas-differ"},
    "uneven-steps": {"wrong-checksum"},
    "replicas-differ": {"wrong-checksum"},
    "negative-moment": {"wrong-checksum"},
}
# The fixtures' matrices are fresh, and some are large enough to tell; none has a tokenizer, and some have no config.
FRESH = {"fresh-model", "missing-tokenizer", "missing-config"}
DEEP = {id for id, kind in KINDS.items() if kind.needs == "deep"} | {"tied-mismatch"}


@pytest.mark.distinct
@pytest.mark.parametrize("id", DAMAGES)
def test_damage_is_found_and_nothing_else(id: str, tmp_path: Path):
    folder = DAMAGES[id](tmp_path)
    report = reshard.doctor(folder, deep=True)
    found = {finding.id for finding in report.findings} - FRESH
    found |= {id} & {finding.id for finding in report.findings}
    assert id in found and found - {id} <= ALSO.get(id, set()), report.findings
    assert report.healthy is all(KINDS[each].severity != "error" for each in found) and report.fails([id])
    finding = next(finding for finding in report.findings if finding.id == id)
    assert finding.severity == KINDS[id].severity and finding.detail
    if id not in DEEP:
        assert any(finding.id == id for finding in reshard.doctor(folder).findings)


@pytest.mark.parametrize("target", ["hf", "vllm"])
def test_experts_whose_gate_and_up_have_unequal_global_scales(target: str, tmp_path: Path):
    subprocess.run([sys.executable, FIXTURES / "hf_packed" / "seeded_models.py", "qwen3_moe", tmp_path / "model"], check=True)
    sizes = {"tp": 2} if target == "vllm" else {}
    reshard.convert(reshard.plan(tmp_path / "model", to=target, quantize="nvfp4", **sizes), tmp_path / "good")

    def unequal(folder: Path) -> list[tuple[str | None, str]]:
        findings = reshard.doctor(folder).findings
        return [(finding.tensor, finding.detail) for finding in findings if finding.id == "unequal-scales"]

    assert not unequal(tmp_path / "good")
    name = "model.layers.0.mlp.experts.1.up_proj.weight_global_scale"
    overwrite(tmp_path / "good", name, np.float32(3.5).tobytes())
    ((tensor, detail),) = unequal(tmp_path / "good")
    assert tensor == name and "up_proj 3.5" in detail and "1 of 2 such sets differ" in detail


@pytest.mark.parametrize("target", ["hf", "dcp", "vllm"])
def test_a_folder_by_reshard_is_read_once(target: str, tmp_path: Path):
    reshard.convert(reshard.plan(FIXTURES / "hf" / "llama", to=target, **({"tp": 2} if target == "vllm" else {})), tmp_path / "out")
    stored = sum(tensor.nbytes for tensor in reshard.open(tmp_path / "out").named().tensors)
    report = reshard.doctor(tmp_path / "out", deep=True)
    assert report.nbytes == stored
    assert not any(finding.id == "changed" for finding in report.findings)


def test_a_bad_element_is_found_where_it_is(tmp_path: Path):
    folder = copied("fsdp/verl", tmp_path)
    tensor = next(tensor for tensor in reshard.open(folder).named().tensors if tensor.kind == "weight" and len(tensor.shards) > 2)
    shards = tensor.shards
    row = len(shards) - 1
    element = Box(shards.box(row).offsets, (1,) * len(tensor.shape))
    overwrite(folder, tensor.name, bytes(tensor.dtype.itemsize - 2) + NAN, box=element)
    (finding,) = (finding for finding in reshard.doctor(folder, deep=True).findings if finding.id == "nan")
    assert (finding.tensor, finding.file) == (tensor.name, shards.path(row))
    assert finding.rank == int(shards.ranks[row]) and str(list(element.offsets)) in finding.detail


# An index from which a part was taken: no file can be damaged so that it still opens.


def index_of(case: str) -> Index:
    return reshard.open(FIXTURES / case / "checkpoint", model=FIXTURES / case / "model").named()


def changed(index: Index, name: str, kind: str, **changes: Any) -> Index:
    return replace(index, tensors=tuple(replace(t, **changes) if (t.name, t.kind) == (name, kind) else t for t in index.tensors))


def without_tensor(index: Index, name: str, kind: str) -> Index:
    return replace(index, tensors=tuple(t for t in index.tensors if (t.name, t.kind) != (name, kind)))


def test_optimizer_state_that_does_not_fit_the_weights():
    index, name = index_of("dcp/fsdp2"), "model.norm.weight"
    assert list(structure.optimizer_state(index)) == []
    for damaged, id in (
        (without_tensor(index, name, "moment2"), "missing-moment"),
        (changed(index, name, "moment1", shape=(7,)), "moment-shape"),
        (without_tensor(index, name, "weight"), "lone-moment"),
        (without_tensor(without_tensor(index, name, "moment1"), name, "moment2"), "no-moments"),
    ):
        assert {finding.id for finding in structure.optimizer_state(damaged)} == {id}


def test_weights_with_momentum_alone_are_trained():
    """Muon keeps a momentum_buffer for matrices, beside AdamW's moments for all else."""
    index, name = index_of("dcp/fsdp2"), "model.layers.0.self_attn.q_proj.weight"
    moments = {"moment1": {"kind": "state", "name": f"{name}.momentum_buffer"}, "moment2": None}
    with_muon = tuple(
        replace(tensor, **changes) if tensor.name == name and (changes := moments.get(tensor.kind)) else tensor
        for tensor in index.tensors
        if tensor.name != name or moments.get(tensor.kind, {}) is not None
    )
    assert list(structure.optimizer_state(replace(index, tensors=with_muon))) == []


def test_every_incomplete_tensor_is_found_not_only_the_first():
    index = index_of("dcp/fsdp2")
    assert list(structure.incomplete_tensors(index)) == []

    def halved(tensor: Any) -> Any:
        shards = tensor.shards
        return replace(tensor, shards=shards.taken(np.arange(1, len(shards))))

    damaged = replace(index, tensors=tuple(halved(t) if t.kind == "weight" and len(t.shards) > 1 else t for t in index.tensors))
    findings = list(structure.incomplete_tensors(damaged))
    assert {finding.id for finding in findings} == {"incomplete-tensor"} and len(findings) > 10
    for number, tensor in enumerate(index.tensors):
        if len(tensor.shards) > 1:
            damaged = replace(index, tensors=(*index.tensors[:number], halved(tensor), *index.tensors[number + 1 :]))
            assert [finding.tensor for finding in structure.incomplete_tensors(damaged)] == [tensor.name]


def measured(name: str, kind: str, values: Any) -> Measured:
    """A tensor with these values."""
    words = np.asarray(values, np.float32)
    tensor = Tensor(name, F32, words.shape, kind, Shards.of([]))  # type: ignore[arg-type]
    box = Box.whole(words.shape)
    return Measured(tensor, statistics_of(words.view(np.uint32), F32, box, words.shape, values=kind == "weight", signs=True))


def test_an_expert_without_gradients_or_in_a_stack_is_dead():
    alive, zero = np.ones((4, 16)), np.zeros((4, 16))
    moments = [measured(f"model.layers.0.mlp.experts.{i}.up_proj.weight", "moment2", zero if i == 1 else alive) for i in range(3)]
    assert [finding.tensor for finding in elements.dead_experts(moments)] == ["model.layers.0.mlp.experts.1"]
    assert list(elements.dead_experts(moments[1:2])) == []  # a frozen group
    stack = measured("model.layers.0.mlp.experts.gate_up_proj", "weight", [alive, alive, zero])
    assert ["expert 2 of 3" in finding.detail for finding in elements.dead_experts([stack])] == [True]


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F64"])
def test_statistics_are_those_of_torch(dtype: str):
    """Random words of each type, NaN and infinity among them, in rows of odd lengths and in a flat piece."""
    torch = pytest.importorskip("torch")
    kind = next(each for each in _TABLE if each.name == dtype)
    random = np.random.default_rng(1)
    for shape in ((300, 777), (1001,), (70_001,), (3, 5, 40)):
        words = random.integers(0, 1 << 8, (*shape, kind.itemsize), np.uint8).view(kind.word).reshape(shape)
        values = torch.from_numpy(words.view(np.uint8).reshape(-1)).view(getattr(torch, kind.torch)).double().numpy().reshape(shape)
        found = statistics_of(words, kind, Box.whole(shape), shape, values=True, signs=True)
        nan, inf = np.isnan(values), np.isinf(values)
        assert (found.nan, found.inf, found.elements) == (nan.sum(), inf.sum(), values.size)
        assert found.first_nan == (tuple(np.argwhere(nan)[0]) if nan.any() else None)
        assert found.first_inf == (tuple(np.argwhere(inf)[0]) if inf.any() else None)
        finite = words[~(nan | inf)][: values.size // 2]
        values = values[~(nan | inf)][: values.size // 2]
        found = statistics_of(finite, kind, Box.whole(finite.shape), finite.shape, values=True, signs=True)
        assert found.largest == np.abs(values).max() and (found.zeros, found.negatives) == ((values == 0).sum(), (values < 0).sum())
        if kind.itemsize == 2 and np.abs(values).max() < 1e15:  # squares of larger numbers leave float32
            assert found.root_mean_square == pytest.approx(np.sqrt((values**2).mean()), rel=1e-4)


# Two saves.


def moved(to: Path, case: str, still: Callable[[str], bool]) -> tuple[Path, Path]:
    """A checkpoint, and a later save in which every weight moved except some."""

    def change(tensors: dict[str, Any]) -> None:
        for name, (dtype, shape, data) in tensors.items():
            if not still(name):
                tensors[name] = dtype, shape, bytes([data[0] ^ 1]) + data[1:]

    return FIXTURES / case, rewritten(to, change, case)


def since(to: Path, case: str, still: Callable[[str], bool]) -> set[tuple[str, str | None]]:
    before, now = moved(to, case, still)
    findings = reshard.doctor(now, since=before).findings
    assert {finding.id for finding in reshard.doctor(now).findings} <= FRESH
    return {(finding.id, finding.tensor) for finding in findings if finding.id not in FRESH}


def test_what_never_moved(tmp_path: Path):
    expert = "model.layers.1.block_sparse_moe.experts.2"
    assert since(tmp_path / "a", "hf/mixtral", lambda name: name.startswith(expert + ".")) == {("dead-expert", expert)}
    assert since(tmp_path / "b", "hf/llama", lambda name: name == UP) == {("never-moved", UP)}
    assert since(tmp_path / "c", "hf/llama", lambda name: name == "model.norm.weight") == {("frozen", None)}
    assert since(tmp_path / "d", "hf/llama", lambda name: True) == {("nothing-moved", None)}
    assert since(tmp_path / "e", "hf/llama", lambda name: False) == set()


def test_a_weight_that_only_one_save_has(tmp_path: Path):
    now = rewritten(tmp_path, as_float32)
    report = reshard.doctor(now, since=FIXTURES / "hf" / "llama")
    assert ("other-weights", UP) in {(finding.id, finding.tensor) for finding in report.findings}


def test_every_kind_of_finding_has_a_test():
    tested = {"missing-moment", "moment-shape", "lone-moment", "incomplete-tensor"}
    tested |= {"missing-tokenizer", "missing-config"}  # in test_hf.py
    tested |= {"wrong-digest", "unlisted-file", "integrity-not-checked"}  # in test_recorded_digests.py
    tested |= {"unread-weight", "unread-state"}  # in test_arrays.py
    tested |= {"unlike-pipeline"}  # in test_components.py
    two_saves = {"never-moved", "frozen", "nothing-moved", "other-weights"}
    of_engines = {kind.id for kind in KINDS.values() if kind.needs == "serve-check"}  # in tests/cli/test_serve_check.py
    assert DAMAGES.keys() | tested | two_saves | of_engines == KINDS.keys()


# The command, and the report.


def test_the_exit_code_follows_the_findings(tmp_path: Path):
    folder = llama(tmp_path, UP, ZERO, ROW)
    assert command("doctor", folder).code == 0
    assert command("doctor", folder, "--deep").code == 0
    assert command("doctor", folder, "--deep", "--fail-on", "zero-rows,nan").code == 1
    assert command("doctor", folder, "--deep", "--fail-on", "warning").code == 1
    assert command("doctor", folder, "--deep", "--fail-on", "nan").code == 0
    assert command("doctor", folder, "--fail-on", "no-such-id").code == 2
    assert command("doctor").code == 2


def test_an_error_ends_with_1_and_is_in_the_document(tmp_path: Path):
    result = command("doctor", without(tmp_path, "hf/llama-sharded", "model-00002-of-00003.safetensors"), "--json")
    (finding,) = result.document["findings"]
    assert result.code == 1 and finding["id"] == "missing-file" and result.document["healthy"] is False


def test_the_list_names_every_kind():
    assert {row["id"] for row in command("doctor", "--list", "--json").document["findings"]} == KINDS.keys()


def test_a_checkpoint_that_cannot_be_opened_is_checked_as_far_as_possible(tmp_path: Path):
    """Opening stops at the first damaged file; every one is reported."""
    folder = copied("fsdp/verl", tmp_path)
    names = sorted(path.name for path in folder.glob("model_*.pt"))[:3]
    for name in names:
        (folder / name).write_bytes((folder / name).read_bytes()[:-40])
    report = reshard.doctor(folder)
    assert {finding.file for finding in report.findings if finding.severity == "error"} == set(names)
    assert repr(report).startswith("Report(") and "\n" not in repr(report)
    with pytest.raises(CheckpointError, match=names[0]):
        report.raise_if_unhealthy()


def test_no_checkpoint_is_a_usage_error(tmp_path: Path):
    with pytest.raises(RequestError):
        reshard.doctor(tmp_path / "nothing")
