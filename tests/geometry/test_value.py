"""The dataclasses of a quick start compares, hashes and shows values as that of the standard library does."""

import copy
import dataclasses
import inspect
import pickle
from dataclasses import field

import pytest

from reshard.geometry.value import mutable, value


def point(decorator):
    @decorator
    class Point:
        x: int
        y: tuple[int, ...] = ()
        note: str = field(default="", compare=False, repr=False)

    return Point


@value
class Named:
    """At the top of a module, where pickle finds it."""

    name: str


@value
class Special(Named):
    number: int = 0

    def __repr__(self):
        return "special"

    def __eq__(self, other):
        return True


CASES = [
    (value, {"frozen": True, "slots": True}),
    (value(eq=False), {"frozen": True, "slots": True, "eq": False}),
    (value(slots=False), {"frozen": True}),
    (value(slots=False, eq=False), {"frozen": True, "eq": False}),
    (mutable, {"slots": True}),
    (mutable(eq=False), {"slots": True, "eq": False}),
]


@pytest.mark.parametrize("decorator, options", CASES, ids=lambda each: str(each) if isinstance(each, dict) else "")
def test_it_does_what_the_standard_library_does(decorator, options):
    ours, theirs = point(decorator), point(dataclasses.dataclass(**options))
    assert repr(ours(1, (2,), "a")) == repr(theirs(1, (2,), "a"))
    for other in ((1, (2,), "b"), (1, (3,), "a")):
        assert (ours(1, (2,), "a") == ours(*other)) == (theirs(1, (2,), "a") == theirs(*other))
    assert ours(1) != theirs(1) and ours(1) != 1
    assert (ours.__hash__ is None) == (theirs.__hash__ is None)
    if ours.__hash__ is not None:
        assert (hash(ours(1, note="a")) == hash(ours(1, note="b"))) == options.get("eq", True)
    assert hasattr(ours(1), "__dict__") == hasattr(theirs(1), "__dict__")
    assert [each.name for each in dataclasses.fields(ours)] == ["x", "y", "note"]
    assert dataclasses.asdict(dataclasses.replace(ours(1), x=2)) == {"x": 2, "y": (), "note": ""}


@pytest.mark.parametrize("decorator", [value, dataclasses.dataclass(frozen=True, slots=True)])
def test_it_is_made_as_by_the_standard_library(decorator):
    @decorator
    class Range:
        start: int
        stop: int = 9
        marks: list[int] = field(default_factory=list)

        def __post_init__(self):
            if self.stop < self.start:
                raise ValueError(f"{self.stop} < {self.start}")

    assert [dataclasses.astuple(Range(*given)) for given in ((1,), (1, 2), (1, 2, [3]))] == [(1, 9, []), (1, 2, []), (1, 2, [3])]
    assert Range(1).marks is not Range(1).marks and Range(stop=3, start=2).stop == 3
    assert list(inspect.signature(Range).parameters) == ["start", "stop", "marks"] and Range.__init__.__annotations__["start"] is int
    with pytest.raises(ValueError, match="0 < 1"):
        Range(1, 0)
    with pytest.raises(TypeError, match=r"Range.__init__\(\) missing 1 required positional argument: 'start'"):
        Range()


def test_methods_of_the_class_itself_are_kept():
    assert repr(Special("a", 1)) == "special" and Special("a") == 5 and hash(Special("a")) == hash(Special("a"))


@pytest.mark.parametrize("original", [Named("a"), Special("a", 2)])
def test_values_can_be_copied_and_pickled(original):
    for again in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert type(again) is type(original) and dataclasses.astuple(again) == dataclasses.astuple(original)
