"""Learned layouts: numbers as rules, folds that lose nothing, the file, and the sizes that it covers."""

import json
from dataclasses import replace

import pytest
from helpers.fixture_places import FIXTURES
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import RequestError, ReshardError, UnsupportedError
from reshard.geometry.dtypes import F32
from reshard.geometry.meshes import Parallel
from reshard.serving.learned.document import layout_of, text_of
from reshard.serving.learned.fit import check_known, size_problem
from reshard.serving.learned.fold import folded_stage, unfolded
from reshard.serving.learned.layers import products
from reshard.serving.learned.learn import learned_layout, traced_rank
from reshard.serving.learned.numbers import NoRule, Rule, fitted, listed, values
from reshard.serving.learned.trace import traced_tensor

ABOUT = {"engine": "vllm", "version": "0.32.0", "platform": "cpu"}
CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 2, "model_type": "made_up", "transformers_version": "5"}


def points(rule, sizes):
    return {(tp, rank): values([rule], (tp, rank))[0] for tp in sizes for rank in range(tp)}


@pytest.mark.parametrize(
    "rule",
    [
        7,
        Rule("share", (96,)),
        Rule("start", (96, 0)),
        Rule("start", (96, 32)),
        Rule("share", (64, 2)),
        Rule("start", (64, 0, 2)),
        Rule("rest", (250, 256)),
        Rule("sum", (Rule("share", (64,)), Rule("share", (32, 2)))),
        Rule("first", (64,)),
    ],
    ids=str,
)
def test_a_rule_is_found_from_three_sizes_and_holds_at_a_fourth(rule):
    assert points(fitted(points(rule, (1, 2, 4))), (8,)) == points(rule, (8,))


def test_numbers_without_a_rule_are_kept_for_the_traced_sizes_only():
    numbers = {(2, 0): 5, (2, 1): 3}
    assert fitted({(2, 0): 3, (2, 1): 5, (4, 0): 1, (4, 1): 9, (4, 2): 2, (4, 3): 8}) is None
    kept = listed(numbers)
    assert points(kept, (2,)) == numbers
    with pytest.raises(NoRule, match="traced at TP 2"):
        kept.at(4, 0)


def test_three_ranks_do_not_share_two_heads():
    with pytest.raises(NoRule, match="do not share 2 heads"):
        Rule("start", (64, 0, 2)).at(3, 1)


@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 2)), max_size=30))
def test_products_are_exactly_the_rows(rows):
    from itertools import product

    found = [row for ranges in products(rows) for row in product(*ranges)]
    assert sorted(found) == sorted(rows)


def box(source, start, at, sizes, functions=()):
    """A part as the tracer says it: a box whose axes lie along the same axes of the tensor."""
    return [source, start, at, [[size, axis, 1, axis, 1] for axis, size in enumerate(sizes) if size > 1], list(functions)]


def whole(source, *sizes):
    return {"dtype": "bfloat16", "shape": list(sizes), "parts": [box(source, [0] * len(sizes), [0] * len(sizes), sizes)], "rest": []}


def rank(tp, number, layers=3, experts=4, **changes):
    """What a tracer says about one rank: q, k, v with two KV heads, stacked experts, a padded table, a constant."""
    tensors = {}
    kv = 16 // min(tp, 2)
    for layer in range(layers):
        name = f"model.layers.{layer}."
        q, k = 64 // tp, number * min(tp, 2) // tp * kv
        parts = [
            box(f"{name}q.weight", [number * q, 0], [0, 0], [q, 8]),
            box(f"{name}k.weight", [k, 0], [q, 0], [kv, 8]),
            box(f"{name}v.weight", [k, 0], [q + kv, 0], [kv, 8]),
        ]
        tensors[f"{name}qkv.weight"] = {"dtype": "bfloat16", "shape": [q + 2 * kv, 8], "parts": parts, "rest": []}
        width = 32 // tp
        stacked = [
            [f"{name}experts.{e}.up.weight", [number * width, 0], [e, 0, 0], [[width, 1, 1, 0, 1], [8, 2, 1, 1, 1]], []]
            for e in range(experts)
        ]
        tensors[f"{name}experts.w13"] = {"dtype": "bfloat16", "shape": [experts, width, 8], "parts": stacked, "rest": []}
        tensors[f"{name}scale"] = {"dtype": "float32", "shape": [], "parts": [], "rest": [["real", 1, ""]], "values": [1.0]}
        tensors[f"{name}norm.weight"] = whole(f"{name}norm.weight", 8)
    rows = 64 // tp
    kept = max(0, min(rows, 50 - number * rows))
    parts = [box("embed.weight", [number * rows, 0], [0, 0], [kept, 8])] if kept else []
    rest = [["fill", (rows - kept) * 8, 0.0]] if kept < rows else []
    tensors["embed.weight"] = {"dtype": "bfloat16", "shape": [rows, 8], "parts": parts, "rest": rest}
    about = {"case": {"tp": tp, "pp": 1, "ep": 1}, "rank": number, "class": "MadeUp", "dtype": "bfloat16", "softened": []}
    return {**about, "tensors": tensors, **changes}


def sources(layers=3, experts=4):
    found = {"embed.weight": ["BF16", [50, 8]]}
    for layer in range(layers):
        name = f"model.layers.{layer}."
        found |= {f"{name}q.weight": ["BF16", [64, 8]], f"{name}norm.weight": ["BF16", [8]]}
        found |= {f"{name}{which}.weight": ["BF16", [16, 8]] for which in "kv"}
        found |= {f"{name}experts.{e}.up.weight": ["BF16", [32, 8]] for e in range(experts)}
    return found


def learned(*sizes, **names):
    ranks = [traced_rank(rank(tp, number, **names)) for tp in sizes for number in range(tp)]
    return learned_layout({**ABOUT, "sources": sources(**names)}, ranks, CONFIG)


def test_layers_experts_and_ranks_fold_and_unfold_to_what_was_traced():
    layout = learned(1, 2, 4)
    (stage,) = layout.stages.values()
    assert len(stage) == 5, "qkv, experts, scale, norm, table"
    for tp in (1, 2, 4):
        for number in range(tp):
            here = (tp, number)
            found = {name: unfolded(each.template, n, here) for each in stage for name, n in each.names()}
            assert found == {name: unfolded(traced_tensor(each), (), here) for name, each in rank(*here)["tensors"].items()}


def test_the_file_does_not_grow_with_layers_and_experts():
    small, large = text_of(learned(2)), text_of(learned(2, layers=40, experts=64))
    assert len(large) < len(small) + 60 and len(small) < 4000


def test_a_layout_is_the_same_after_it_was_written_and_read():
    layout = learned(1, 2, 4)
    assert layout_of(text_of(layout), "layout.json") == layout


def test_a_size_that_was_not_traced_is_covered_once_a_traced_one_was_predicted():
    layout = learned(1, 2, 4)
    assert layout.sizes[0].withheld is not None and size_problem(layout, Parallel(8)) is None
    expected = learned(8)
    for number in range(8):
        found, traced = layout.rank_tensors(Parallel(8), number, 0, {}), expected.rank_tensors(Parallel(8), number, 0, {})
        assert sorted(map(str, found)) == sorted(map(str, traced))
        by_name = {tensor.name: set(tensor.sections) for tensor in traced}
        assert all(set(tensor.sections) == by_name[tensor.name] for tensor in found)


def test_two_sizes_predict_nothing():
    layout = learned(1, 2)
    assert size_problem(layout, Parallel(2)) is None
    assert "TP 4 was not traced" in size_problem(layout, Parallel(4))


def test_heads_that_no_traced_size_had_to_replicate_are_not_extrapolated():
    """With 4 KV heads TP 1, 2 and 4 only cut them: at TP 8 ranks would get halves."""
    layout = replace(learned(1, 2, 4), counts={"num_attention_heads": 8, "num_key_value_heads": 4})
    assert "num_key_value_heads = 4" in size_problem(layout, Parallel(8))


def test_heads_that_the_config_does_not_state_are_an_accident():
    ranks = [traced_rank(rank(tp, number)) for tp in (1, 2, 4) for number in range(tp)]
    layout = learned_layout({**ABOUT, "sources": sources()}, ranks, {**CONFIG, "num_key_value_heads": 8})
    assert layout.sizes[0].withheld is None


def test_a_tensor_that_is_another_on_one_rank_is_kept_apart_and_no_other_size_is_covered():
    documents = [rank(tp, number) for tp in (1, 2, 4) for number in range(tp)]
    documents[-1]["tensors"]["model.layers.1.norm.weight"] = whole("model.layers.0.norm.weight", 8)
    layout = learned_layout({**ABOUT, "sources": sources()}, map(traced_rank, documents), CONFIG)
    assert layout.sizes[0].withheld is None
    found = {tensor.name: tensor for tensor in layout.rank_tensors(Parallel(4), 3, 0, {})}
    assert found["model.layers.1.norm.weight"].sections[0].name == "model.layers.0.norm.weight"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"parts": [box("model.layers.0.norm.weight", [0], [0], [8], ["exp(x)", "neg(x)"])]}, "applies exp.x., then neg.x."),
        ({"parts": [], "rest": [["operation", 8, "mul_"]]}, "computes it .mul_."),
        ({"parts": [box("model.layers.0.norm.weight", [0], [0], [4])], "rest": [["unset", 4, ""]]}, "leaves 4 of its elements unset"),
        ({"unknown": "a step of 3"}, "could not be followed .a step of 3."),
    ],
)
def test_what_is_no_copy_is_named_and_not_converted(change, words):
    document = rank(1, 0)
    name = "model.layers.0.norm.weight"
    document["tensors"][name] |= change
    layout = learned_layout({**ABOUT, "sources": sources()}, [traced_rank(document)], CONFIG)
    templates = {each: template for each, _, template in layout.rank_templates(Parallel(), 0, 0)}
    with pytest.raises(UnsupportedError, match=f"{name}.*{words}"):
        check_known(layout, templates, accept_platform=True)


def test_a_rank_that_was_not_traced_is_an_error_with_the_engines_words():
    with pytest.raises(UnsupportedError, match=r"at TP 4, rank 1: ZeroDivisionError"):
        traced_rank({"case": {"tp": 4, "pp": 1, "ep": 1}, "rank": 1, "failed": "ZeroDivisionError: modulo by zero"})


def test_a_fold_that_loses_something_is_a_defect(monkeypatch):
    import reshard.serving.learned.learn as learn

    monkeypatch.setattr(learn, "folded_stage", lambda ranks: folded_stage({(1, 0): ranks[1, 0]}))
    with pytest.raises(ReshardError, match="Folding the layout changed it"):
        learned(1, 2)


def damaged(text):
    document = json.loads(text)
    yield "no JSON", "{"
    yield "another version", json.dumps({**document, "schema_version": 9})
    for key in ("sources", "templates", "stages", "sizes", "dtype"):
        yield f"without {key}", json.dumps({name: value for name, value in document.items() if name != key})
    yield "a negative number", text.replace('["start", 64, 0]', '["start", -64, 0]')
    yield "an unknown rule", text.replace('["start", 64, 0]', '["begin", 64, 0]')
    yield "endless ranges", text.replace('"0-2"', '"0-99999999999"')
    yield "a template that is not there", json.dumps({**document, "templates": document["templates"][:1]})
    yield "a list", "[]"


@pytest.mark.distinct
@pytest.mark.parametrize("name, text", list(damaged(text_of(learned(1, 2)))), ids=lambda value: value[:30])
def test_a_damaged_file_is_refused_by_name(name, text):
    with pytest.raises(RequestError, match=r"my\.json"):
        layout_of(text, "my.json")


def test_a_box_outside_of_its_tensors_is_refused():
    document = json.loads(text_of(learned(1, 2)).replace('["share", 64]', '["share", 128]'))
    text = json.dumps({key: each for key, each in document.items() if key != "digest"})
    with pytest.raises(RequestError, match=r"outside of one of the two"):
        layout_of(text, "my.json").rank_tensors(Parallel(2), 1, 0, {})


def test_the_layouts_in_the_fixtures_are_written_as_this_version_writes_them():
    paths = sorted((FIXTURES / "learned").glob("*/layout.json"))
    assert len(paths) >= 4
    for path in paths:
        assert text_of(layout_of(path.read_text(), path.name)) == path.read_text() and path.stat().st_size < 13_000


def test_a_function_that_a_conversion_computes_is_part_of_the_type():
    document, name = rank(1, 0), "model.layers.0.norm.weight"
    functions = ["exp(x) in float32", "neg(x) in float32"]
    document["tensors"][name] |= {"dtype": "float32", "parts": [box(name, [0], [0], [8], functions)]}
    layout = layout_of(text_of(learned_layout({**ABOUT, "sources": sources()}, [traced_rank(document)], CONFIG)), "layout.json")
    found = {tensor.name: tensor.dtype for tensor in layout.rank_tensors(Parallel(), 0, 0, {})}
    assert found[name] == F32.of("-exp")
    assert not any(dtype.function for other, dtype in found.items() if other != name)


@pytest.mark.parametrize(
    "functions", [["exp(x) in bfloat16", "neg(x) in float32"], ["neg(x) in float32", "exp(x) in float32"], ["exp(x) in float32"]]
)
def test_other_functions_are_no_known_one(functions):
    document, name = rank(1, 0), "model.layers.0.norm.weight"
    document["tensors"][name]["parts"] = [box(name, [0], [0], [8], functions)]
    assert traced_rank(document).tensors[name].problem


def test_a_tensor_that_holds_a_function_of_some_parts_alone_is_refused():
    document, name = rank(1, 0), "model.layers.0.norm.weight"
    functions = ["exp(x) in float32", "neg(x) in float32"]
    document["tensors"][name]["parts"] = [box(name, [0], [0], [4], functions), box(name, [4], [4], [4])]
    assert "then neg(x)" in traced_rank(document).tensors[name].problem
