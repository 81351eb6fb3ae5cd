"""Every public value prints on one short line, however large the checkpoint is."""

from collections.abc import Iterator

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES

import reshard
from reshard.containers import dcp_metadata, pickle_writer, safetensors, torch_frame, torch_zip, zip_directory
from reshard.containers.distributed_tensors import Decoder
from reshard.engine.compare import Comparison, Side
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import BF16
from reshard.geometry.mosaics import Mosaic, stacked
from reshard.index.index import ParamGroup
from reshard.index.origin import EncodedPart
from reshard.models.stored_forms import Component
from reshard.storage.files import LocalFiles

LLAMA = FIXTURES / "hf" / "llama"
FSDP = FIXTURES / "fsdp" / "tp" / "checkpoint"


def of_a_plan(plan) -> Iterator[object]:
    """The plan and all values inside it."""
    yield from (plan, plan.source, plan.source.facts, plan.content, plan.target, plan.layout, plan.target_index, plan.totals())
    yield from plan.tasks()
    yield from plan.layout.sidecars
    for file in plan.layout.files:
        yield file
        for item in file.tensors:
            yield from (item, item.tensor, *item.tensor.sections)
    for route in plan.routes:
        yield from (route, route.source, route.target, route.source.shards, *route.source.pieces(), *route.target.pieces())


def of_files() -> Iterator[object]:
    """What the containers read and write."""
    dcp = LocalFiles(FIXTURES / "dcp" / "fsdp2" / "checkpoint")
    metadata = dcp_metadata.parse((dcp.folder / ".metadata").read_bytes(), where=".metadata")
    yield from (metadata, *metadata.tensors.values(), *metadata.objects.values(), *(item.chunks for item in metadata.tensors.values()))
    hf = LocalFiles(LLAMA)
    for path in hf.list():
        if path.endswith(".safetensors"):
            header = safetensors.read_header(hf, path)
            yield from (header, *header.entries)
    yield safetensors.frame([(f"w{i}", BF16, (2,)) for i in range(1000)], {})
    tensors = torch_frame.Tensors()
    pickle = pickle_writer.dumps({i: tensors.add(torch_frame.Plain(BF16, (4,))) for i in range(1000)})
    yield torch_frame.frame("model", pickle, tensors.storages)
    rank = LocalFiles(FSDP)
    path = next(path for path in rank.list() if path.startswith("model_"))
    yield zip_directory.read_directory(zip_directory.Range(rank, path))
    decoder = Decoder(path)
    for name, value in torch_zip.read(rank, path).items():
        yield decoder.decode(name, value)


def others() -> Iterator[object]:
    checkpoint = reshard.open(LLAMA)
    view = checkpoint.view(to="vllm", tp=2, rank=1)
    yield from (checkpoint, view, *view.values(), *checkpoint.tensors().values())
    plan = reshard.plan(checkpoint, to="dcp", dp=2)
    yield from (reshard.roundtrip(plan), reshard.fingerprint(LLAMA), reshard.verify(LLAMA, LLAMA), Comparison())
    yield Side(checkpoint.files, checkpoint.index, checkpoint.content())
    yield stacked([Mosaic.of(f"w{i}", Box.whole((4,))) for i in range(1000)])
    yield ParamGroup(tuple(f"w{i}" for i in range(1000)), {"lr": 0.1})
    tensor = checkpoint.index.tensors[0]
    yield EncodedPart(tensor, Component("weight_scale", "scale", (128, 128)), (128, 128), (0, 1))


@pytest.mark.parametrize(
    "source, to, options",
    [
        (LLAMA, "vllm", {"tp": 2}),
        (LLAMA, "dcp", {"dp": 2}),
        (FSDP, "deepspeed", {"dp": 2}),
    ],
)
def test_a_plan_and_its_parts_print_on_one_line(source, to, options):
    check(of_a_plan(reshard.plan(source, to=to, **options)))


def test_what_files_hold_prints_on_one_line():
    check(of_files())


def test_all_other_values_print_on_one_line():
    check(others())


def check(values: Iterator[object]) -> None:
    kinds = set()
    for value in values:
        text = repr(value)
        kinds.add(type(value))
        assert len(text) <= 200 and "\n" not in text and "array(" not in text, (type(value), len(text), text[:300])
    assert len(kinds) > 5 and np.ndarray not in kinds


def test_a_plan_says_what_it_makes():
    assert repr(reshard.plan(LLAMA, to="vllm", tp=2)) == "Plan(hf -> vllm, TP 2, 21 tensors, 2 files)"
