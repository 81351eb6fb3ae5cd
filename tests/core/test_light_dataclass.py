"""The dataclass of a quick start compares, hashes and shows values as that of the standard library does."""

import copy
import dataclasses
import pickle
from dataclasses import field

import pytest

from reshard.geometry.light_dataclass import dataclass


def point(decorator, **options):
    @decorator(**options)
    class Point:
        x: int
        y: tuple[int, ...] = ()
        note: str = field(default="", compare=False, repr=False)

    return Point


@dataclass(frozen=True, slots=True)
class Named:
    """At the top of a module, where pickle finds it."""

    name: str


@dataclass(frozen=True, slots=True)
class Special(Named):
    number: int = 0

    def __repr__(self):
        return "special"

    def __eq__(self, other):
        return True


OPTIONS = [{"frozen": frozen, "slots": slots, "eq": eq} for frozen in (False, True) for slots in (False, True) for eq in (False, True)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_does_what_the_standard_library_does(options):
    ours, theirs = (point(decorator, **options) for decorator in (dataclass, dataclasses.dataclass))
    assert repr(ours(1, (2,), "a")) == repr(theirs(1, (2,), "a"))
    for other in ((1, (2,), "b"), (1, (3,), "a")):
        assert (ours(1, (2,), "a") == ours(*other)) == (theirs(1, (2,), "a") == theirs(*other))
    assert ours(1) != theirs(1) and ours(1) != 1
    assert (ours.__hash__ is None) == (theirs.__hash__ is None)
    if ours.__hash__ is not None:
        assert (hash(ours(1, note="a")) == hash(ours(1, note="b"))) == (options["eq"])
    assert hasattr(ours(1), "__dict__") == hasattr(theirs(1), "__dict__")
    assert [each.name for each in dataclasses.fields(ours)] == ["x", "y", "note"]
    assert dataclasses.asdict(dataclasses.replace(ours(1), x=2)) == {"x": 2, "y": (), "note": ""}


def test_methods_of_the_class_itself_are_kept():
    assert repr(Special("a", 1)) == "special" and Special("a") == 5 and hash(Special("a")) == hash(Special("a"))


@pytest.mark.parametrize("value", [Named("a"), Special("a", 2)])
def test_values_can_be_copied_and_pickled(value):
    for again in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(again) is type(value) and dataclasses.astuple(again) == dataclasses.astuple(value)
