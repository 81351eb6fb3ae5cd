"""Plans account for every byte; a plan that is changed in any way is refused."""

import gc
import json
from dataclasses import replace

import pytest
from helpers.fixture_places import FIXTURES, HF, open_case

import reshard
from reshard.adapter import registry
from reshard.errors import RequestError
from reshard.geometry.boxes import Box
from reshard.geometry.dtypes import BF16
from reshard.geometry.extents import Extent, Piece
from reshard.geometry.sections import Section, Sections, whole
from reshard.index.shards import Shards
from reshard.plans.layout import AlikeTensors, PlacedTensor, unframed
from reshard.plans.layout_index import index_of_layout
from reshard.plans.proof import ProofFailed, compose, prove


@pytest.fixture(scope="module")
def plan():
    return reshard.plan(HF / "llama", to="vllm", tp=4, pp=2)


@pytest.mark.parametrize("path", ["../model.safetensors", "/model.safetensors", "a/../../b", ""])
@pytest.mark.parametrize("kind", ["files", "sidecars"])
def test_a_format_cannot_write_outside_of_the_target(kind, path, monkeypatch):
    """A third party's format may make file names from an option or from the names of tensors."""
    target = registry.named("hf")
    real = type(target).lay_out

    def escaping(self, *arguments):
        layout = real(self, *arguments)
        first, *others = getattr(layout, kind)
        return replace(layout, **{kind: (replace(first, path=path), *others)})

    monkeypatch.setattr(type(target), "lay_out", escaping)
    with pytest.raises(RequestError, match="outside of it"):
        reshard.plan(HF / "llama", to="hf")


def test_the_totals_add_up(plan):
    totals = plan.totals()
    assert totals.read == sum(tensor.nbytes for tensor in plan.source.tensors) and totals.compared == 0
    assert totals.written == totals.copied + totals.filled + totals.framing == sum(file.nbytes for file in plan.layout.files)
    assert totals.tensors == len(plan.source.tensors) and totals.dropped == 0


def test_copies_hold_every_byte_that_is_copied(plan):
    itemsize = 2
    assert sum(copy.box.volume for copy in plan.copies()) * itemsize == plan.totals().copied


def test_tasks_share_no_tensor_and_cover_the_plan(plan):
    tasks = plan.to_json()["tasks"]
    assert len(tasks) == len(plan.tasks()) > 2
    assert [name for task in tasks for name in task["tensors"]] == [route.name for route in plan.routes]
    assert {path for task in tasks for path in task["files"]} == {file.path for file in plan.layout.files}


@pytest.mark.parametrize("case", ["fsdp2-tp", FIXTURES / "fsdp/verl", FIXTURES / "megatron/llama-tp2-pp2-dp2"])
def test_routes_follow_the_source_files(case):
    """So that a conversion reads each file from its start to its end."""

    def first_piece(route):
        shards = route.source.shards
        first = min(range(len(shards)), key=lambda i: shards.files[i])
        return shards.path(first), int(shards.positions[first])

    places = [first_piece(route) for route in reshard.plan(open_case(case), to="hf").routes]
    assert len(places) > 10 and places == sorted(places)


def test_planning_leaves_the_garbage_collector_as_it_was(tmp_path):
    assert gc.isenabled()
    with pytest.raises(reshard.ReshardError):
        reshard.plan(HF / "llama", to="vllm", tp=5)
    reshard.plan(HF / "llama", to="vllm", tp=4)
    assert gc.isenabled()


def test_the_plan_is_data(plan):
    document = json.loads(json.dumps(plan.to_json(copies=True)))
    assert list(document) == [
        "source",
        "adapter",
        "combined",
        "deltas",
        "target",
        "totals",
        "files",
        "sidecars",
        "left",
        "notes",
        "tensors",
        "dropped",
        "left_files",
        "tasks",
        "copies",
    ]
    assert document == json.loads(json.dumps(reshard.plan(HF / "llama", to="vllm", tp=4, pp=2).to_json(copies=True)))


def test_the_identity_changes_with_options_and_with_the_source(tmp_path):
    import os
    import shutil

    copy = shutil.copytree(HF / "llama", tmp_path / "m")
    first = reshard.plan(copy, to="vllm", tp=2).identity()
    assert reshard.plan(copy, to="vllm", tp=2).identity() == first
    assert reshard.plan(copy, to="vllm", tp=4).identity() != first
    assert reshard.plan(copy, to="vllm", tp=2, dtype="fp16").identity() != first
    os.utime(copy / "model.safetensors", (1, 1))
    assert reshard.plan(copy, to="vllm", tp=2).identity() != first


def with_file(plan, number, **changes):
    files = list(plan.layout.files)
    files[number] = replace(files[number], **changes)
    return replace(plan, layout=replace(plan.layout, files=tuple(files)))


def with_stored(plan, number, **changes):
    """The plan with one stored tensor of its first file changed."""
    file = plan.layout.files[0]
    tensors = list(file.tensors)
    tensors[number] = PlacedTensor(replace(tensors[number].tensor, **changes), tensors[number].byte_offset)
    return with_file(plan, 0, tensors=tuple(tensors))


def test_a_hole_in_a_file_is_refused(plan):
    file = plan.layout.files[0]
    with pytest.raises(ProofFailed, match="no origins"):
        prove(with_file(plan, 0, tensors=file.tensors[:3] + file.tensors[4:]))
    with pytest.raises(ProofFailed):
        prove(with_file(plan, 0, nbytes=file.nbytes + 1))


def test_two_tensors_in_one_place_are_refused(plan):
    file = plan.layout.files[0]
    moved = PlacedTensor(file.tensors[-1].tensor, file.tensors[-1].byte_offset - 2)
    with pytest.raises(ProofFailed, match="two origins"):
        prove(with_file(plan, 0, tensors=(*file.tensors[:-1], moved)))


def test_two_sections_in_one_place_are_refused(plan):
    number, stored = next((i, item.tensor) for i, item in enumerate(plan.layout.files[0].tensors) if len(item.tensor.sections) == 3)
    first, second, third = stored.sections
    with pytest.raises(ProofFailed, match="same bytes"):
        prove(with_stored(plan, number, sections=Sections.of([first, replace(second, start=second.start - 32), third])))


def test_a_weight_without_a_place_is_refused(plan):
    with pytest.raises(ProofFailed, match="neither writes this weight"):
        prove(replace(plan, routes=plan.routes[1:]))


def test_a_source_tensor_that_is_neither_used_nor_dropped_is_refused():
    plan = reshard.plan(open_case("fsdp2"), to="hf")
    prove(plan)
    with pytest.raises(ProofFailed, match="neither reads this tensor nor names it") as refused:
        prove(replace(plan, content=replace(plan.content, drops=plan.content.drops[1:])))
    assert refused.value.where == plan.content.drops[0].name


def test_a_tensor_that_is_lost_is_named_though_another_one_is_read_twice(plan):
    """As many tensors are read as the source has."""
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
    kept, lost = (plan.content.tensors[name] for name in names)
    twice = {**plan.content.tensors, lost.name: replace(kept, name=lost.name)}
    with pytest.raises(ProofFailed, match="neither reads this tensor") as refused:
        prove(replace(plan, content=replace(plan.content, tensors=twice)))
    assert refused.value.where == lost.name


def test_a_tensor_that_the_source_does_not_have_is_refused(plan):
    name, tensor = next(iter(plan.content.tensors.items()))
    invented = replace(tensor, name="invented", shards=Shards.of(list(tensor.pieces())))
    with pytest.raises(ProofFailed, match="which the source does not have"):
        prove(replace(plan, content=replace(plan.content, tensors={**plan.content.tensors, name: invented})))


def read_back(plan, change):
    """The target's index, as a reader would make it, with the first piece of one tensor changed."""
    index = index_of_layout(plan.layout, plan.content.shapes)
    tensors = []
    for tensor in index.tensors:
        if tensor.name.endswith("layers.0.self_attn.k_proj.weight"):
            pieces = list(tensor.pieces())
            tensor = replace(tensor, shards=Shards.of(change(pieces)))
        tensors.append(tensor)
    return replace(index, tensors=tuple(tensors))


def shifted(pieces):
    first = pieces[0]
    extent = first.extent
    return [Piece(first.box, Extent(extent.path, extent.byte_offset + 2, extent.strides, extent.dtype)), *pieces[1:]]


def exchanged(pieces):
    """Heads exchanged between two ranks: the mistake that nobody sees."""
    boxes = [piece.box for piece in pieces]
    return [Piece(box, piece.extent) for box, piece in zip(reversed(boxes), pieces, strict=True)]


def transposed(pieces):
    return [Piece(piece.box, replace(piece.extent, strides=tuple(reversed(piece.extent.strides)))) for piece in pieces]


def elsewhere(pieces):
    """A piece at the right place of another file."""
    return [Piece(pieces[0].box, replace(pieces[0].extent, path="other.safetensors")), *pieces[1:]]


def halved(pieces):
    """The same bytes, cut in two along the rows."""
    return [Piece(box, replace(piece.extent, byte_offset=piece.byte_offset_of(box))) for piece in pieces for box in piece.box.split(0, 2)]


@pytest.mark.parametrize("change", [list, halved])
def test_the_composition_with_the_own_reader_is_the_identity(plan, change):
    composed = compose(plan, read_back(plan, change))
    whole = compose(plan, read_back(plan, list))
    assert composed.losses == ()
    assert composed.nbytes == whole.nbytes == plan.totals().copied
    assert composed.boxes - whole.boxes == (len(route_of_k_proj(plan).target.shards) if change is halved else 0)


def route_of_k_proj(plan):
    return next(route for route in plan.routes if route.name.endswith("layers.0.self_attn.k_proj.weight"))


@pytest.mark.parametrize("change", [shifted, exchanged, transposed, elsewhere])
def test_a_reader_that_understands_otherwise_is_found(plan, change):
    losses = compose(plan, read_back(plan, change)).losses
    assert losses and all("k_proj" in loss for loss in losses)


def test_a_narrowing_cast_is_no_round_trip_and_a_widening_one_is():
    assert reshard.roundtrip(reshard.plan(HF / "llama", to="hf", dtype="fp32")).losses == ()
    narrowed = reshard.roundtrip(reshard.plan(HF / "llama", to="hf", dtype="fp16"))
    assert len(narrowed.losses) == 21 and "does not come back" in narrowed.losses[0]


def test_a_section_is_a_box_of_its_weight():
    plan = reshard.plan(HF / "qwen2", to="vllm", tp=8)
    sections = [section for file in plan.layout.files for item in file.tensors for section in item.tensor.sections]
    assert all(isinstance(section, Section) for section in sections)
    assert all(Box.whole(plan.content.tensors[section.name].shape).contains(section.box) for section in sections)


def test_a_rank_that_is_alike_holds_other_experts_in_the_same_places():
    first = unframed("rank 0", [whole(name, BF16, (3,)) for name in ("expert.0", "norm", "expert.1")], {"ep": 0})
    second = AlikeTensors(first.form, 0, {"expert.0": "expert.2", "expert.1": "expert.3"})
    assert first.nbytes == 3 * 64 and [item.byte_offset for item in second] == [0, 64, 128]
    names = [name for item in second for name in item.tensor.sections.names]
    assert names == ["expert.2", "norm", "expert.3"] == [name for found in second.sections() for name in found.names]
    assert [item.tensor.name for item in second] == ["expert.0", "norm", "expert.1"]
