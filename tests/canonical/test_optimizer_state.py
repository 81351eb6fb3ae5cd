"""Numbers of an optimizer's parameters: named where the recorded order leaves one way, left alone where it leaves two."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.canonical.optimizer_state import names_for, names_of_numbers

MODEL = [("embed", (50, 16)), ("q", (16, 16)), ("norm", (16,)), ("k", (16, 16)), ("head", (50, 16))]


def test_one_group_counts_the_model():
    assert names_of_numbers([range(5)], {i: shape for i, (_, shape) in enumerate(MODEL)}, MODEL) == dict(enumerate(n for n, _ in MODEL))


def test_decay_groups_are_told_apart_by_shape():
    shapes = {0: (50, 16), 1: (16, 16), 2: (16, 16), 3: (50, 16), 4: (16,)}
    assert names_of_numbers([[0, 1, 2, 3], [4]], shapes, MODEL) == {0: "embed", 1: "q", 2: "k", 3: "head", 4: "norm"}


def test_equal_shapes_in_two_groups_are_ambiguous():
    found = names_of_numbers([[0], [1]], {0: (3,), 1: (3,)}, [("a", (3,)), ("b", (3,))])
    assert isinstance(found, str) and "a or b" in found


def test_another_model_does_not_fit():
    assert isinstance(names_of_numbers([[0]], {0: (3,)}, [("a", (4,))]), str)
    assert isinstance(names_of_numbers([[0]], {0: (3,)}, [("a", (3,)), ("b", (3,))]), str)
    assert isinstance(names_of_numbers([[0], [0]], {0: (3,)}, [("a", (3,)), ("b", (3,))]), str)


@given(st.lists(st.tuples(st.sampled_from([(2,), (3,), (2, 2)]), st.integers(0, 2)), min_size=1, max_size=12))
def test_whatever_is_named_is_named_right(drawn):
    """Parameters dealt to three groups: the true names are found, or none at all."""
    model = [(f"p{i}", shape) for i, (shape, _) in enumerate(drawn)]
    groups, truth, shapes = [], {}, {}
    for group in range(3):
        groups.append([])
        for i, (shape, of) in enumerate(drawn):
            if of == group:
                number = len(truth)
                truth[number], shapes[number] = f"p{i}", shape
                groups[-1].append(number)
    found = names_of_numbers(groups, shapes, model)
    assert isinstance(found, str) or found == truth


def test_names_stand_for_themselves_and_recorded_ones_count():
    assert names_for({"param_groups": [{"params": ["a"]}]}, [["a"]], {}, [])[0] == {"a": "a"}
    assert names_for({"param_groups": [{"params": [0], "param_names": ["a"]}]}, [[0]], {}, [])[0] == {0: "a"}


@pytest.mark.parametrize("count", [40])
def test_many_groups_of_one_shape_end_soon(count):
    model = [(f"p{i}", (2,)) for i in range(count)]
    groups = [[i] for i in range(count)]
    assert isinstance(names_of_numbers(groups, dict.fromkeys(range(count), (2,)), model), str)
