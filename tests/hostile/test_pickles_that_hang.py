"""Pickles that hash, copy or allocate without end: read or refused in a paragraph, in 10 s and 1 GB."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import pytest
from helpers.sampled import sampled
from hostile.lies import P2, call, name, running, value
from hostile.limits import ON_LINUX, limited

from reshard.containers import inert_pickle
from reshard.errors import CheckpointError

PRIME = (1 << 61) - 1  # integers that are equal modulo this prime have the same hash


def get(number: int) -> bytes:
    return b"j" + number.to_bytes(4, "little")


def doubled(levels: int = 40, last: bytes = b"") -> bytes:
    """A tuple of two times one tuple of two times one tuple ...: 2^levels elements, for whom walks through it."""
    return b")" + b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(levels)) + last


def doubled_by_calls(levels: int = 40) -> bytes:
    """The same from tuples that are the arguments of calls; nothing else knows them."""
    step = b"".join(name("a", "B") + b"h%ch%c\x86q%cR0" % (i, i, i + 1) for i in range(levels))
    return b")q\x000" + step + b"h%c" % levels


def deep() -> bytes:
    return b")" + b"\x85" * 300_000


def colliding() -> bytes:
    return b"".join(value(PRIME * i) + b"N" for i in range(1, 100_001))


def keys() -> bytes:
    return b"".join(value((PRIME * i,)) + b"N" for i in range(1, 50_001))


def wide() -> bytes:
    return b"(" + b"K\x01" * 100_000 + b"tq\x01"


def state() -> bytes:
    return b"}q\x01(" + b"".join(value(f"k{i}")[:-2] + b"N" for i in range(30_000)) + b"u0"


NEW = name("a", "B") + b")\x81"
# Made by the test that reads it: together they take seconds to make, and each collection of tests imports this file.
PROGRAMS: dict[str, Callable[[], bytes]] = {
    "a key nested deeply": lambda: P2 + b"}" + deep() + b"Ns.",
    "a key nested deeply with leaves between": lambda: P2 + b"}" + b")" + b"K\x01\x86" * 300_000 + b"Ns.",
    "a key nested deeply by marks": lambda: P2 + b"}" + b"(" * 300_000 + b"t" * 300_000 + b"Ns.",
    "a key nested deeply at protocol 4": lambda: b"\x80\x04}\x94)" + b"\x85\x94" * 300_000 + b"Ns.",
    "an element of a set, nested deeply": lambda: b"\x80\x04\x8f(" + deep() + b"\x90.",
    "an element of a frozenset, nested deeply": lambda: b"\x80\x04(" + deep() + b"\x91.",
    "a frozenset by a call, nested deeply": lambda: running(call(name("builtins", "frozenset"), b"]" + deep() + b"a")),
    "tuples by calls, nested deeply": lambda: (
        P2 + b"}" + b"]" + (b"q\x010" + name("builtins", "tuple") + b"]h\x01a\x85R") * 30_000 + b"Ns."
    ),
    "a key of shared tuples": lambda: P2 + b"}" + doubled() + b"Ns.",
    "a key of shared tuples, by DUP": lambda: P2 + b"})" + b"2\x86" * 60 + b"Ns.",
    "a key of shared arguments": lambda: P2 + b"}" + doubled_by_calls() + b"Ns.",
    "a frozenset of shared tuples": lambda: b"\x80\x04(" + doubled() + b"\x91.",
    "frozensets inside of frozensets, twice": lambda: (
        b"\x80\x04("
        + (b"((" + b"N\x91q\x01" + b"0(h\x01N\x91q\x02(h\x01\x91q\x03\x86" + b"0") * 1
        + b"(" * 40
        + b"N"
        + b"\x91" * 40
        + b"t."
    ),
    "a long key, often": lambda: P2 + b"}(" + wide() + b"N" + b"h\x01N" * 300_000 + b"u.",
    "a long key of arguments, often": lambda: P2 + name("a", "B") + b"(" + b"K\x01" * 100_000 + b"tq\x01R}(" + b"h\x01N" * 300_000 + b"u.",
    "a huge integer as a key, often": lambda: (
        P2 + b"}(\x8b" + (1_000_000).to_bytes(4, "little") + b"\x01" * 1_000_000 + b"q\x01N" + b"h\x01N" * 300_000 + b"u."
    ),
    "integers of one hash": lambda: P2 + b"}(" + colliding() + b"u.",
    "integers of one hash in a set": lambda: b"\x80\x04\x8f(" + colliding().replace(b"N", b"") + b"\x90.",
    "integers of one hash as text": lambda: b"}(" + b"".join(b"L%dL\nN" % (PRIME * i) for i in range(1, 100_001)) + b"u.",
    "floats of one hash": lambda: P2 + b"}(" + b"".join(value(float(2**i) * 2.0**61)[:9] + b"N" for i in range(900)) * 1000 + b"u.",
    "tuples of one hash": lambda: P2 + b"}(" + keys() + b"u.",
    "complex numbers of one hash": lambda: (
        P2
        + b"}("
        + name("builtins", "complex")
        + b"q\x01N"
        + b"".join(b"h\x01" + value((-1000003.0 * i, float(i)))[:-2] + b"RN" for i in range(1, 50_001))
        + b"u."
    ),
    "BUILD again and again": lambda: P2 + state() + NEW + b"h\x01b" * 30_000 + b".",
    "BUILD of slots again and again": lambda: P2 + state() + NEW + b"Nh\x01\x86b" * 30_000 + b".",
    "BUILD of many": lambda: P2 + state() + b"](" + (NEW + b"Nh\x01\x86b") * 30_000 + b"e.",
    "BUILD of many with slots and a dict": lambda: P2 + state() + b"](" + (NEW + b"h\x01h\x01\x86b") * 30_000 + b"e.",
    "a million names": lambda: running(b"(" + b"".join(name("m", f"C{i}") for i in range(1_000_000)) + b"l"),
    "names of names": lambda: running(name("a", "B") + b")R" * 1_000_000),
    "empty sets": lambda: b"\x80\x04(" + b"\x8f" * 10_000_000 + b"l.",
    "empty dicts": lambda: P2 + b"(" + b"}" * 20_000_000 + b"l.",
    "nested tuples without end": lambda: P2 + b")" + b"\x85" * 10_000_000 + b".",
    "calls with one list": lambda: P2 + b"](" + b"N" * 100_000 + b"eq\x010(" + call(name("builtins", "list"), b"h\x01") * 5_000 + b"t.",
}


def outcome(read: Callable[[], object]) -> str:
    try:
        read()
    except CheckpointError as error:
        return f"refused: {error}"
    return "read"


@pytest.mark.skipif(not ON_LINUX, reason="limits of a process are set as on Linux")
@pytest.mark.parametrize("program", sampled(PROGRAMS, 4))
def test_it_ends_soon_with_little_memory(program: str) -> None:
    content = PROGRAMS[program]()
    ended = limited(lambda: outcome(lambda: inert_pickle.load(content, where="x")))
    assert ended == "read" or (ended.startswith("refused: x: the pickle") and "\n" not in ended), ended


REFUSED = [program for program in PROGRAMS if program.startswith("a key")]


@pytest.mark.parametrize("program", REFUSED)
def test_a_nested_tuple_is_not_a_key(program: str) -> None:
    with pytest.raises(CheckpointError, match=r"unhashable|arguments"):
        inert_pickle.load(PROGRAMS[program](), where="x")


@pytest.mark.parametrize("protocol", range(6))
def test_values_of_all_kinds_survive(protocol: int) -> None:
    """Whatever is exchanged for a value that cannot be a key is equal to it."""
    chance = random.Random(1)
    shape = (3, 4)
    thing = {
        "nested": (1, (2, (3, "four")), shape, shape),
        "random state": random.Random(7).getstate(),
        "long": tuple(range(1000)),
        "numbers": [chance.getrandbits(90) for _ in range(12_000)],
        "floats": [chance.random() * 1e300 for _ in range(12_000)],
        (1, 2): "pair",
        ("a", 5): "mixed",
        "set": {("a", 1), ("b", 2)},
        "frozen": frozenset({("a", 1)}),
    }
    assert inert_pickle.load(pickle.dumps(thing, protocol), where="x") == thing
