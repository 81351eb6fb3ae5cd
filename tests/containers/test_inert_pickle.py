"""The inert unpickler on what real classes write: everything can be found again, nothing of it is real."""

from __future__ import annotations

import argparse
import collections
import enum
import pathlib
import pickle
import signal
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.containers import inert_pickle
from reshard.containers.inert_pickle import Inert, sealed
from reshard.errors import CheckpointError

PROTOCOLS = [0, 1, 2, 3, 4, 5]


class Plain:
    def __init__(self) -> None:
        self.value = [1, "two"]

    class Nested:
        pass


class Slots:
    __slots__ = ("left", "right")


class OwnState:
    def __getstate__(self) -> tuple[int, ...]:
        return (1, 2, 3, 4, 5)

    def __setstate__(self, state: object) -> None:
        pass


class AList(list[int]):
    pass


class ADict(dict[str, int]):
    pass


class Pair(NamedTuple):
    left: int
    right: str


class Needs:
    def __new__(cls, *, width: int) -> Needs:
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"width": 7}


class Colour(enum.Enum):
    RED = 3


@dataclass(frozen=True)
class Key:
    """A dict key that gets its state after it is one, like DCP's MetadataIndex."""

    name: str


def loaded(thing: object, protocol: int = 2) -> Any:
    return inert_pickle.load(pickle.dumps(thing, protocol), where="test")


numbers = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
leaves = st.none() | st.booleans() | numbers | st.text(max_size=20) | st.binary(max_size=20)
plain_values = st.recursive(
    leaves | st.sets(st.integers(), max_size=3) | st.frozensets(st.text(max_size=3), max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)


@given(plain_values, st.sampled_from(PROTOCOLS))
def test_plain_values_are_themselves(value: object, protocol: int) -> None:
    assert loaded(value, protocol) == value


@given(plain_values, plain_values, st.sampled_from(PROTOCOLS))
def test_a_pickle_ends_where_the_next_begins(first: object, second: object, protocol: int) -> None:
    one, two = pickle.dumps(first, protocol), pickle.dumps(second, protocol)
    assert inert_pickle.end_of_pickle(one + two) == len(one)
    assert inert_pickle.end_of_pickle(one + two, len(one)) == len(one + two)


@given(plain_values, st.data())
def test_a_cut_pickle_goes_on(value: object, data: st.DataObject) -> None:
    whole = pickle.dumps(value, 2)
    with pytest.raises(EOFError):
        inert_pickle.end_of_pickle(whole[: data.draw(st.integers(0, len(whole) - 1))])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_attributes_are_found_by_name(protocol: int) -> None:
    stand_in = loaded(Plain(), protocol)
    assert isinstance(stand_in, Inert) and type(stand_in).class_name == f"{__name__}.Plain"
    assert stand_in.get("value") == [1, "two"] and stand_in.get("none", 5) == 5


class SlotsAndMore(Slots):
    pass


def test_slots_and_others_are_attributes_together() -> None:
    thing = SlotsAndMore()
    thing.left, thing.more = 1, 2  # type: ignore[attr-defined]
    assert loaded(thing).state == {"left": 1, "more": 2}


def test_slots_are_attributes_too() -> None:
    thing = Slots()
    thing.left, thing.right = 1, 2
    assert loaded(thing).state == {"left": 1, "right": 2}


@pytest.mark.parametrize("protocol", [2, 4])
def test_other_kinds_of_objects(protocol: int) -> None:
    assert loaded(OwnState(), protocol).state == (1, 2, 3, 4, 5)
    assert loaded(AList([1, 2, 3]), protocol).items == [1, 2, 3]
    assert loaded(ADict(a=1), protocol).mapping == {"a": 1}
    assert loaded(Pair(1, "x"), protocol).args == (1, "x")
    assert loaded(Colour.RED, protocol).args == (3,)
    assert loaded(signal.SIGTERM, protocol).class_name == "signal.Signals"
    assert loaded(argparse.Namespace(tp=2, name="x"), protocol).state == {"tp": 2, "name": "x"}


def test_arguments_by_keyword_are_attributes() -> None:
    assert loaded(Needs(width=7), 4).get("width") == 7


def test_what_a_stand_in_returns_is_a_stand_in() -> None:
    """Protocol 2 has no keywords: it asks for functools.partial(Needs.__new__, Needs, width=7)()."""
    made = loaded(Needs(width=7), 2)
    assert made.class_name == "functools.partial()"
    assert made.args[0].args[0].class_name == f"{__name__}.Needs.__new__"


def test_a_list_longer_than_one_batch_arrives_whole() -> None:
    assert loaded(AList(range(5000))).items == list(range(5000))
    assert loaded(ADict({str(n): n for n in range(5000)})).mapping["4999"] == 4999


def test_a_class_inside_a_class_is_named_in_full() -> None:
    """Protocol 2 asks for getattr(Plain, "Nested")."""
    assert loaded(Plain.Nested()).class_name == f"{__name__}.Plain.Nested"
    assert loaded(Plain.Nested(), 4).class_name == f"{__name__}.Plain.Nested"


def test_keys_are_keys_before_their_state_is_there() -> None:
    index = loaded({Key("a"): 1, Key("b"): 2})
    assert {key.get("name"): value for key, value in index.items()} == {"a": 1, "b": 2}


def test_what_refers_to_itself_is_loaded() -> None:
    thing = Plain()
    thing.value.append(thing)  # type: ignore[arg-type]
    stand_in = loaded(thing)
    assert stand_in.get("value")[2] is stand_in


@pytest.mark.parametrize("protocol", [2, 4])
def test_torch_and_paths_become_plain(protocol: int) -> None:
    assert loaded(torch.Size([2, 3]), protocol) == (2, 3)
    assert loaded(torch.bfloat16, protocol) == "bfloat16"
    assert loaded({torch.float32: 1}, protocol) == {"float32": 1}
    assert loaded(torch.device("cuda", 3), protocol) == "cuda:3"
    assert loaded(torch.device("cpu"), protocol) == "cpu"
    assert loaded(pathlib.PurePosixPath("/runs/a/b"), protocol) == "/runs/a/b"
    assert loaded(pathlib.PurePosixPath("a/b"), protocol) == "a/b"
    assert loaded(collections.defaultdict(int, {"a": 1}), protocol) == {"a": 1}
    assert loaded(collections.OrderedDict(a=1), protocol) == {"a": 1}


def test_a_state_dict_keeps_its_order_and_loses_its_attributes() -> None:
    state = collections.OrderedDict([("b", 1), ("a", 2)])
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    assert list(loaded(state).items()) == [("b", 1), ("a", 2)]


def test_a_path_of_python_3_13_is_a_path() -> None:
    assert inert_pickle.load(b"\x80\x02cpathlib._local\nPosixPath\n(X\x01\x00\x00\x00/X\x01\x00\x00\x00atR.", where="") == "/a"


def test_numpy_is_not_interpreted() -> None:
    array = loaded(np.arange(3))
    assert array.class_name.endswith("multiarray._reconstruct") and len(array.state) == 5
    assert loaded(np.float32(2)).class_name.endswith("multiarray.scalar")


def test_an_unknown_dtype_is_a_class() -> None:
    assert loaded(torch.quint8).class_name == "torch.quint8"


def test_persistent_ids_are_refused_unless_answered() -> None:
    data = b"\x80\x02(X\x01\x00\x00\x00aX\x01\x00\x00\x00btQ."
    with pytest.raises(CheckpointError, match=r"x\.pt: .*\('a', 'b'\)"):
        inert_pickle.load(data, where="x.pt")
    assert inert_pickle.load(data, where="", storage=lambda pid: pid[1]) == "b"


def test_functions_that_are_given_are_called() -> None:
    data = b"\x80\x02cmy.module\ntwice\nK\x04\x85R."
    assert inert_pickle.load(data, where="", rebuild={"my.module.twice": lambda n: 2 * n}) == 8


def test_our_own_errors_come_through_as_they_are() -> None:
    def refuse(pid: object) -> object:
        raise CheckpointError("the storage is gone", where="x.pt")

    with pytest.raises(CheckpointError, match="storage is gone"):
        inert_pickle.load(b"\x80\x02)Q.", where="", storage=refuse)


def test_messages_never_spell_out_what_is_large_or_deep() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    wide = [[]]
    for _ in range(100):
        wide = [wide, wide]  # type: ignore[list-item]
    assert inert_pickle.shown(deep) == inert_pickle.shown(wide) == "a list"
    assert inert_pickle.shown((deep,)) == "a tuple" and inert_pickle.shown(10**5000) == "a int"
    assert len(inert_pickle.shown("x" * 10**6)) == 102


def test_a_sealed_value_pickles_and_compares_like_any_other() -> None:
    assert pickle.loads(pickle.dumps(Sealed(1, (2,)))) == Sealed(1, (2,))


@sealed
@dataclass(frozen=True, slots=True)
class Sealed:
    a: int
    b: tuple[int, ...]


# pytest's import mode does not list the tests' modules, but pickle looks classes up there.
sys.modules.setdefault(__name__, sys.modules[Plain.__module__])
