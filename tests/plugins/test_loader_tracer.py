"""The tracer's arithmetic without an engine: what is recorded on tensors without elements, against what the same code does to real ones."""

import json
import os
import signal
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
assert find_spec("reshard.plugins.loader_tracer")
origins, recorder, strided = (import_module(f"reshard.plugins.loader_tracer.{name}") for name in ("origins", "recorder", "strided"))
SHAPES = {"a": (8, 6), "b": (8, 6), "c": (4, 4, 6), "d": (12,)}
UNSET, FILL = -7.0, -1.0


def halves(target, a, b, **_):
    target[:8].copy_(a)
    target[8:].copy_(b)


def transposed(target, a, c, **_):
    target[:6, :].copy_(a.t()[:, :6])
    target[6:10].copy_(c[1])


def stacked_and_cut(target, a, b, **_):
    both = torch.stack([a, b])
    target[:8].copy_(both[1].narrow(0, 2, 4).repeat_interleave(1, 0).expand(4, 6).new_empty(8, 6).copy_(a))
    target[8:12].copy_(torch.cat([a[:1], b[:3]]))


def overwritten(target, a, b, **_):
    target.zero_().fill_(FILL)
    target[:8].copy_(a)
    target[4:12].copy_(b)
    target[15:].fill_(FILL)


def filled_afterwards(target, a, **_):
    target[:8].copy_(a)
    target[2:5].fill_(FILL)


def every_second_row(target, a, b, **_):
    target[0:16:2].copy_(a)
    target[1:16:2].copy_(b)


def through_interleaved(target, a, b, **_):
    mixed = torch.empty(16, 6, dtype=a.dtype, device=a.device)
    mixed[0::2].copy_(a)
    mixed[1::2].copy_(b)
    target[:10].copy_(mixed[3:13])


def heads_permuted(target, a, **_):
    target[:8].copy_(a.view(2, 2, 2, 6).transpose(1, 2).reshape(8, 6))


def flattened(target, d, **_):
    target[3:5].copy_(d.view(2, 6))
    target.view(-1)[60:72].copy_(d)


def source_changed_first(target, a, **_):
    a[:3].zero_().fill_(FILL)
    target[:8].copy_(a)


PROGRAMS = (
    *(
        halves,
        transposed,
        stacked_and_cut,
        overwritten,
        filled_afterwards,
        every_second_row,
        through_interleaved,
        heads_permuted,
        flattened,
    ),
    source_changed_first,
)


def real(program):
    """What the program leaves in the target, where every element of a source is its own number."""
    start, sources = 0, {}
    for name, shape in SHAPES.items():
        count = int(torch.tensor(shape).prod())
        sources[name] = torch.arange(start, start + count, dtype=torch.float64).reshape(shape)
        start += 100
    target = torch.full((16, 6), UNSET, dtype=torch.float64)
    program(target, **sources)
    return target


def recorded(program):
    """The same from what was recorded on meta tensors."""
    recording = recorder.Recorder()
    sources = {name: torch.empty(shape, dtype=torch.float64, device="meta") for name, shape in SHAPES.items()}
    for name, tensor in sources.items():
        recording.root(tensor, name)
    with recording:
        target = torch.empty(16, 6, dtype=torch.float64, device="meta")
        program(target, **sources)
    whole = origins.whole_section((16, 6), 0, (6, 1))
    pieces = origins.pieces_of(recording.arrays, recorder.number_of(target), whole)
    return played([*origins.settled(pieces, (16, 6), SHAPES)])


def played(pieces):
    target, written = torch.full((16, 6), UNSET, dtype=torch.float64), torch.zeros(16, 6)
    for each in pieces:
        sizes = [axis.size for axis in each.placed.axes]
        for index in torch.cartesian_prod(*map(torch.arange, sizes)).reshape(-1, len(sizes)) if sizes else torch.zeros(1, 0).long():
            at, start = list(each.placed.at), list(each.placed.start)
            for i, axis in zip(index.tolist(), each.placed.axes, strict=True):
                at[axis.target_axis] += i * axis.target_step
                start[axis.source_axis] += i * axis.source_step
            written[tuple(at)] += 1
            if each.piece.kind == "weight":
                flat = sum(s * step for s, step in zip(start, strided.row_major(SHAPES[each.piece.name]), strict=True))
                target[tuple(at)] = 100 * list(SHAPES).index(each.piece.name) + flat
            elif each.piece.kind == "fill":
                target[tuple(at)] = each.piece.value
    assert bool((written == 1).all()), "every element is accounted for once"
    return target


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_is_recorded_is_what_happens_to_elements(program):
    assert recorded(program).equal(real(program))


@st.composite
def strided_pieces(draw, shape=(9, 7)):
    at, axes = [], []
    for axis, size in enumerate(shape):
        at.append(draw(st.integers(0, size - 1)))
        step = draw(st.sampled_from((1, 1, 2, 3)))
        count = draw(st.integers(1, (size - 1 - at[axis]) // step + 1))
        axes += [strided.Axis(count, axis, step, axis, step)] if count > 1 else []
    placed = strided.Placed(tuple(at), tuple(at), tuple(draw(st.permutations(axes))))
    return origins.PlacedPiece(origins.HeldPiece("fill", strided.StridedCopy(0, 0, ())), placed)


def elements(piece):
    rows = [{at} for at in piece.placed.at]
    for axis in piece.placed.axes:
        rows[axis.target_axis] = {piece.placed.at[axis.target_axis] + turn * axis.target_step for turn in range(axis.size)}
    return set(product(*rows))


@given(strided_pieces(), st.lists(strided_pieces(), max_size=3))
def test_what_lies_outside_of_others_is_exactly_that(piece, others):
    outside = [elements(part) for part in origins._outside(piece, others)]
    expected = elements(piece) - set().union(*map(elements, others))
    assert set().union(*outside) == expected and sum(map(len, outside)) == len(expected), "every element once"


def kinds(program):
    recording = recorder.Recorder()
    source = torch.empty(8, 6, dtype=torch.bfloat16, device="meta")
    recording.root(source, "a")
    with recording:
        target = torch.empty(8, 6, dtype=torch.float32, device="meta")
        program(target, source)
    pieces = origins.pieces_of(recording.arrays, recorder.number_of(target), origins.whole_section((8, 6), 0, (6, 1)))
    return [each.piece for each in origins.settled(pieces, (8, 6), {"a": (8, 6)})]


def test_a_function_of_each_element_is_named():
    (piece,) = kinds(lambda target, a: target.copy_(-torch.exp(a.float())))
    assert piece.functions == ("exp(x) in float32", "neg(x) in float32")


def test_a_function_is_named_with_the_type_in_which_it_is_computed():
    (piece,) = kinds(lambda target, a: target.copy_(-torch.exp(a)))
    assert piece.functions == ("exp(x) in bfloat16", "neg(x) in bfloat16")


def test_an_operation_in_place_is_named():
    (piece,) = kinds(lambda target, a: target.copy_(a).mul_(2))
    assert (piece.kind, piece.name) == ("operation", "mul_")


def test_two_casts_are_only_one_if_the_first_loses_nothing():
    (piece,) = kinds(lambda target, a: target.copy_(a.float()))
    assert origins.one_cast((*piece.dtypes, "float32"), "float32")
    (piece,) = kinds(lambda target, a: target.copy_(a.to(torch.float16)))
    assert not origins.one_cast((*piece.dtypes, "float32"), "float32")


def test_elements_that_nobody_set_are_unset():
    assert [piece.kind for piece in kinds(lambda target, a: target[:3].copy_(a[:3]))] == ["weight", "unset"]


def test_the_tracer_imports_nothing_of_reshard():
    for path in (find_spec("reshard.plugins.loader_tracer").submodule_search_locations or [""])[:1]:
        for file in sorted(__import__("pathlib").Path(path).glob("*.py")):
            assert "import reshard" not in file.read_text() and "from reshard" not in file.read_text()
    assert not {"vllm", "sglang"} & sys.modules.keys()


def test_ranks_are_answered_in_their_order_whatever_becomes_of_their_processes(tmp_path):
    trace, ranks = (import_module(f"reshard.plugins.loader_tracer.{name}") for name in ("trace", "ranks"))

    def work(rank):
        if rank == 0:
            time.sleep(0.2)
        if rank == 1:
            raise ValueError("no such rank")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"tensors": rank}

    path = tmp_path / "answer.jsonl"
    with path.open("w") as answer:
        trace._in_forks(answer, ranks.Case(tp=5), range(5), work)
    lines = list(map(json.loads, path.read_text().splitlines()))
    assert [line["rank"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line.get("tensors") for line in lines] == [0, None, None, 3, 4]
    assert lines[1]["failed"].startswith("ValueError: no such rank") and lines[2]["failed"] == "its process ended with status 9"
    assert [each.name for each in tmp_path.iterdir()] == ["answer.jsonl"]


class Model:
    """A model of an engine with one module, which is of a class in that Python module and has that method for its weights."""

    def __init__(self, module_name, method=None):
        self._module = type("Module", (), {"__module__": module_name})()
        self._module.quant_method = method

    def named_modules(self):
        return [("layers.0.attn", self._module)]


def test_what_depends_on_the_platform_is_marked():
    vllm, sglang = (import_module(f"reshard.plugins.loader_tracer.{name}_ranks") for name in ("vllm", "sglang"))
    for engine in (vllm, sglang):
        assert list(engine.kernel_choices(Model("engine.models.nvidia.model"))) == []
        assert list(engine.kernel_choices(Model("engine.layers.linear", type("UnquantizedLinearMethod", (), {})()))) == []
        (module, reason), *_ = engine.kernel_choices(Model("engine.layers.linear", type("Fp8LinearMethod", (), {})()))
        assert module == "layers.0.attn" and "Fp8LinearMethod" in reason
    # vLLM's DeepSeek-V4 pads the sinks on GPUs.
    assert list(vllm.kernel_choices(Model("vllm.models.deepseek_v4.cpu.model")))
    assert list(sglang.kernel_choices(Model("sglang.layers.moe", type("UnquantizedFusedMoEMethod", (), {})())))


def test_packages_that_are_missing_are_stood_in_for(monkeypatch):
    stand_ins = import_module("reshard.plugins.loader_tracer.stand_ins")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    stand_ins.stand_in(("no_such_package", "json"))
    from no_such_package.inner import Kernel, jit  # type: ignore[import-not-found]

    @jit
    def function(x: Kernel | None, y: Kernel[int]) -> None: ...

    @jit(option=1)
    def other() -> int:
        return 1

    class Own(Kernel): ...

    assert function.__name__ == "function" and other() == 1
    assert isinstance(Own(), Kernel) and not hasattr(Kernel, "__wrapped__")
    assert json.loads("1") == 1
