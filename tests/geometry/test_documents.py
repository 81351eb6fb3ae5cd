"""A document has the keys that its class says, in their order, and nothing that JSON does not know."""

import json
import math

from reshard.geometry.documents import document, keys_of, to_json
from reshard.geometry.value import value


@value
class Inner:
    nbytes: int
    layers: range | None = None


@value
class Outer:
    JSON = "size name=label first=inner.nbytes count inner"

    label: str
    inner: Inner | None

    def size(self) -> float:
        return math.inf


def test_keys_are_the_fields_and_nbytes_is_called_bytes():
    assert keys_of(Inner) == {"bytes": "nbytes", "layers": "layers"}
    assert document(Inner(3, range(1, 4))) == {"bytes": 3, "layers": [1, 4]}


def test_a_class_says_its_keys_their_order_and_where_they_come_from():
    found = document(Outer("a", Inner(3)), count=2, more=(1, 2))
    assert list(found) == ["size", "name", "first", "count", "inner", "more"]
    assert found == {"size": None, "name": "a", "first": 3, "count": 2, "inner": {"bytes": 3, "layers": None}, "more": [1, 2]}


def test_a_path_through_none_is_none():
    assert document(Outer("a", None), count=0)["first"] is None


def test_json_takes_whatever_comes_out():
    values = {1: math.nan, "b": [True, 1.5, "x", None], "c": {Inner(1)}}
    assert json.loads(json.dumps(to_json(values), allow_nan=False)) == {
        "1": None,
        "b": [True, 1.5, "x", None],
        "c": [{"bytes": 1, "layers": None}],
    }
