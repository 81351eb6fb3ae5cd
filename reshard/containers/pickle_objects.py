"""Pickles of a million small objects: the objects become rows of columns, and the rest of the pickle is loaded as any other.

The .metadata of a large checkpoint is such a pickle: lists of chunks and a dict of entries, whose attributes are numbers, sizes and texts.
As values they would take a kilobyte and 20 us each. Here they are read in lockstep, opcode by opcode, thousands at once:

    GET class   EMPTY_TUPLE NEWOBJ MEMOIZE   EMPTY_DICT MEMOIZE   MARK   (GET name, value) ...   SETITEMS BUILD

where a value is a number, None, a short text, an earlier text or size (GET), or a size: GET torch.Size, a tuple of numbers, REDUCE.

An example, with the byte offset of each opcode: two chunks of a list, of [2, 6] at (2, 0) and (4, 0). An earlier chunk was numbered 4 in
the memo, its class 3, the texts "offsets" and "sizes" 6 and 13, and torch.Size 9:

    144  GET 3   ) NEWOBJ MEMOIZE=17   } MEMOIZE=18   MARK
    152      GET 6    GET 9 (2 0) MEMOIZE=19 (.) MEMOIZE=20 REDUCE MEMOIZE=21     offsets = torch.Size((2, 0))
    166      GET 13   GET 9 (2 6) MEMOIZE=22 (.) MEMOIZE=23 REDUCE MEMOIZE=24     sizes = torch.Size((2, 6))
    180  SETITEMS BUILD
    182  GET 3   ) NEWOBJ MEMOIZE=25 ... SETITEMS BUILD                           the same 38 bytes, with 4 in place of 2

`_starts` finds 144 and 182, each 2 bytes before the six bytes that every object has. `_Reading.block` then steps through both at once:
at = [144, 182] -> [152, 190] for the first name -> [166, 204] for the second one -> [180, 218], where both end. Both have the form
(class 3, Size 9, names 6 and 13), so they are rows 0 and 1 of it: offsets.sizes = [[2, 0], [4, 0]], sizes.sizes = [[2, 6], [2, 6]]. Each
numbers 8 values. In the rest of the pickle one external value stands for bytes 144 to 220: `Run(first=0, count=2)`. It numbers nothing,
so what is numbered 33 after it has the number 33 - 16 = 17 in the rest (`_Rest.shifted`). A reference to 19, which lies in what was cut
out, becomes an external value too: the size (2, 0), which `_Earlier` finds in the columns.

The pickle without these objects is loaded by `inert_pickle`, with all its checks; where consecutive objects were cut out, it holds a
`Run`. Objects of any other form stay in the pickle, such as the first of each class, which defines the names, and those that a frame
interrupts. What the columns refer to is checked after that. If anything is not as expected, the caller loads the whole pickle.
"""

from __future__ import annotations

import pickle
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.containers.inert_pickle import Function, Inert, after_opcode, load_with_memo
from reshard.errors import CheckpointError
from reshard.geometry.sections import distinct
from reshard.geometry.value import mutable

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[Any]
"""Integers of any width: most columns are narrow, because there are millions of rows."""
_Objects = tuple[Integers, Integers, Integers, Integers]
"""Objects as they were read, of any form, [n] each: the byte at which each starts; its length in bytes; the number of its form; how many
of its values the pickle numbers."""

# A pickle is read in columns if it has at least this size, and such objects make up at least this share of its bytes.
SMALLEST, _SHARE = 1 << 20, 0.6
# Objects that are read at once; the most bytes that reading one can look at; the most attributes, and the most axes of a size.
_BLOCK, _LONGEST, _ATTRIBUTES, _AXES = 1 << 15, 1 << 12, 4, 4
_START = b")\x81\x94}\x94("
_WINDOW, _MOST_MEMOS, _MOST_FORMS = 1 << 22, 1 << 31, 256
_GET, _LONG_GET, _MEMOIZE, _SHORT_TEXT = pickle.BINGET[0], pickle.LONG_BINGET[0], pickle.MEMOIZE[0], pickle.SHORT_BINUNICODE[0]
_NONE_OPCODE, _SETITEMS, _BUILD = pickle.NONE[0], pickle.SETITEMS[0], pickle.BUILD[0]
# The end of a call with one argument, whose value and tuple of arguments the pickle numbers.
_CALL = b"\x85\x94R\x94"
# Opcodes with numbers of their own, and external values: no pickle of protocol 4 needs them.
_REFUSED = frozenset((*pickle.PUT, *pickle.BINPUT, *pickle.LONG_BINPUT, *pickle.GET, *pickle.PERSID, *pickle.BINPERSID))
# Any odd weights: texts with the same sum are compared.
_WEIGHTS = np.array([pow(0x9E3779B97F4A7C15, i + 1, 1 << 63) | 1 for i in range(256)], np.int64)
# What an external value in the rest of the pickle is: a run, or a text or size inside one.
_RUN, _VALUE = 0, 1
# The kinds of values in the columns. _EARLIER: a text or a size to which the pickle refers by its memo number.
_NUMBER, _NONE, _TEXT, _SIZE, _EARLIER = range(5)


class NotColumnsError(Exception):
    """The pickle does not have the expected form: it has to be loaded as a whole."""


class Run:
    """What stands in a pickle for objects that were cut out: consecutive items of a list, or, as one key, of a dict."""

    __slots__ = ("count", "first")

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        """The number of the first object among all objects of the pickle."""
        self.count = count
        """The number of objects; an item of a dict is two."""

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("it changes a run of objects")


@mutable(eq=False)
class _Values:
    """One attribute of n objects of a form."""

    kinds: npt.NDArray[np.int8]
    """[n]: the kind of each value."""
    numbers: Integers
    """[n]: a number, the number of a text in the list of texts, the number of axes of a size, or the memo number of an earlier value."""
    sizes: Integers
    """[n, axes]: the numbers of a size."""
    memo: npt.NDArray[np.int8]
    """[n]: the memo number of a text or size that stands here, counted from that of the object; -1 for other kinds."""


@mutable(eq=False)
class _Form:
    """Objects of one class with the same attributes."""

    key: tuple[int, ...]
    """Memo numbers: the class, torch.Size (-1: no size), and the names of the attributes."""
    attributes: list[_Values]
    """In the order of their names."""
    memos: Integers
    """[n]: the memo number of each object."""

    def release(self) -> None:
        """Drop the memo numbers."""
        self.memos = self.memos[:0]
        for values in self.attributes:
            values.memo = values.memo[:0]


class ObjectTable:
    """The objects that were cut out of a pickle."""

    def __init__(self, forms: list[_Form], names: list[tuple[str, ...]], texts: list[str], form_of: Integers, row_of: Integers) -> None:
        self._forms, self._names, self.texts = forms, names, texts
        self._form_of, self._row_of = form_of, row_of

    @classmethod
    def empty(cls) -> ObjectTable:
        """The table of a pickle that was loaded as a whole."""
        return cls([], [], [], np.zeros(0, np.int16), np.zeros(0, np.int32))

    def numbers(self, objects: Integers, attribute: str) -> Integers:
        """[n]: the values of an attribute that is a number in all of these objects."""
        return self._column(objects, attribute, _NUMBER)[0]

    def text_numbers(self, objects: Integers, attribute: str) -> Integers:
        """[n]: the values of an attribute that is a text in all of these objects, as numbers in `texts`."""
        return self._column(objects, attribute, _TEXT)[0]

    def sizes(self, objects: Integers, attribute: str) -> tuple[Integers, Integers]:
        """[n], [n, axes]: the number of axes, and the numbers, of an attribute that is a size in all of these objects."""
        return self._column(objects, attribute, _SIZE)

    def clear(self) -> None:
        """Release the columns."""
        self._forms.clear()

    def has(self, objects: Integers, attribute: str) -> bool:
        """Whether any of these objects has a value other than None for an attribute."""
        for form in distinct(self._form_of[objects]).tolist():
            names = self._names[form][1:]
            if attribute in names:
                rows = self._row_of[objects[self._form_of[objects] == form]]
                if (self._forms[form].attributes[names.index(attribute)].kinds[rows] != _NONE).any():
                    return True
        return False

    def _column(self, objects: Integers, attribute: str, kind: int) -> tuple[Integers, Integers]:
        forms = self._form_of[objects]
        axes = max((values.sizes.shape[1] for form in self._forms for values in form.attributes), default=0) if kind == _SIZE else 0
        dtype = np.result_type(np.int32, *(values.numbers for form in self._forms for values in form.attributes))
        numbers, sizes = np.zeros(len(objects), dtype), np.zeros((len(objects), axes), np.int64)
        for form in distinct(forms).tolist():
            names = self._names[form][1:]
            if attribute not in names:
                raise NotColumnsError
            chosen = np.flatnonzero(forms == form)
            values, rows = self._forms[form].attributes[names.index(attribute)], self._row_of[objects[chosen]]
            if (values.kinds[rows] != kind).any():
                raise NotColumnsError
            numbers[chosen] = values.numbers[rows]
            if axes:
                sizes[chosen, : values.sizes.shape[1]] = values.sizes[rows]
        return numbers, sizes


def load_objects(content: Callable[[], bytes], items: str, pairs: tuple[str, str], *, where: str) -> tuple[Any, ObjectTable]:
    """The root object of a pickle, with a `Run` in place of consecutive objects, and these objects.

    content: reads the pickle. items: the class of objects in lists. pairs: the classes of keys and values in a dict. Names without modules.
    Raises: NotColumnsError if the pickle has to be loaded as a whole.
    """
    data = content()
    if len(data) < SMALLEST:
        raise NotColumnsError
    reading = _Reading(np.frombuffer(data, np.uint8))
    blocks = [reading.block(starts) for starts in _starts(reading.data)]
    if not blocks:
        raise NotColumnsError
    starts, lengths, form_of, counts = (np.concatenate(columns) for columns in zip(*blocks, strict=True))
    blocks.clear()
    if int(lengths.sum(dtype=np.int64)) < _SHARE * len(data) or int(counts.sum(dtype=np.int64)) >= _MOST_MEMOS:
        raise NotColumnsError
    rest = _Rest(data, (starts, lengths, form_of, counts), reading.classes(), items, pairs)
    del data, reading.data, starts, lengths, counts
    forms, row_of = reading.finished(form_of, rest.memos)
    earlier, memo = _Earlier(forms, reading.texts), dict[int, object]()

    def value(pid: tuple[Any, ...]) -> object:
        kind, number = pid
        if kind == _RUN:
            return rest.runs[number]
        return earlier.value(number)

    try:
        root = load_with_memo(rest.pickle, where=where, storage=value, memo=memo)
    except CheckpointError:
        raise NotColumnsError from None
    names: list[tuple[str, ...]] = []
    rest.clear()
    for number, form in enumerate(forms):
        of_rest = [memo.get(rest.shifted(key)) for key in form.key]
        names.append(_names(of_rest, form.key, rest.classes_of_forms.get(number)))
        for values in form.attributes if names[-1] else ():
            earlier.resolve(values, lambda number: memo.get(rest.shifted(number)))
    for form in forms:
        form.release()
    return root, ObjectTable(forms, names, reading.texts, form_of, row_of)


def _names(values: list[object], key: tuple[int, ...], expected: str | None) -> tuple[str, ...]:
    """The class and the attributes of a form; () if no run has such objects. Raises NotColumnsError if they are something else."""
    if expected is None:
        return ()
    of_class, of_size, *names = values
    is_class = isinstance(of_class, type) and issubclass(of_class, Inert) and of_class.class_name.rpartition(".")[2] == expected
    is_size = key[1] < 0 or (isinstance(of_size, Function) and of_size.class_name == "torch.Size")
    if not is_class or not is_size or not all(type(name) is str for name in names) or len(set(names)) < len(names):
        raise NotColumnsError
    return expected, *map(str, names)


# ---- reading in lockstep ----


def _starts(data: Bytes) -> Iterator[Integers]:
    """Where objects may start, in order, in blocks."""
    end = len(data) - _LONGEST
    for first in range(0, end, _WINDOW):
        part = data[first : min(first + _WINDOW, end) + len(_START)]
        at = np.flatnonzero(part[1 : 1 - len(_START)] == _START[1])
        for i, byte in enumerate(_START):
            at = at[part[at + i] == byte]
        at = at[at < _WINDOW] + first
        at = at[at >= 5]
        is_long, is_short = data[at - 5] == _LONG_GET, data[at - 2] == _GET
        starts = np.where(is_long, at - 5, at - 2)[is_long | is_short]
        yield from (starts[i : i + _BLOCK] for i in range(0, len(starts), _BLOCK))


class _Reading:
    """Objects read so far, by form."""

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.texts: list[str] = []
        """The texts that stand in the objects."""
        self._number_of: dict[bytes, int] = {}
        self._forms: dict[tuple[int, ...], tuple[int, list[list[_Values]]]] = {}

    def classes(self) -> list[int]:
        """The memo number of the class of each form."""
        return [key[0] for key in self._forms]

    def finished(self, form_of: Integers, memos: Integers) -> tuple[list[_Form], Integers]:
        """The forms, and the row of each object in its form. memos: the memo number of each object. Empties this."""
        forms, row_of = [], np.zeros(len(form_of), np.int32)
        for key, (number, parts) in self._forms.items():
            rows = np.flatnonzero(form_of == number)
            row_of[rows] = np.arange(len(rows), dtype=np.int32)
            # One by one, because all of them together are most of the memory.
            forms.append(_Form(key, [_joined(values) for values in _emptied(parts)], memos[rows]))
        return forms, row_of

    def block(self, starts: Integers) -> _Objects:
        """Read the objects that start at these bytes. What is not an object is left out."""
        data = self.data
        at, classes, good = _reference(data, starts)
        at = at + len(_START)
        counts = np.full(len(starts), 2, np.int64)
        keys = np.full((len(starts), 2 + _ATTRIBUTES), -1, np.int64)
        keys[:, 0] = classes
        columns: list[_Values] = []
        for number in range(_ATTRIBUTES):
            live = np.flatnonzero(good & (data[at] != _SETITEMS))
            if not len(live):
                break
            value_at, names, is_reference = _reference(data, at[live])
            values, ends, numbered, size_class = self._values(value_at)
            keys[live, 2 + number] = names
            fits = (size_class < 0) | (keys[live, 1] < 0) | (keys[live, 1] == size_class)
            keys[live, 1] = np.maximum(keys[live, 1], size_class)
            good[live] &= is_reference & fits & (values.kinds >= 0)
            at[live] = np.where(good[live], ends, 0)
            values.memo = np.where(values.memo >= 0, values.memo + counts[live], -1).astype(np.int8)
            counts[live] += numbered
            columns.append(_scattered(values, live, len(starts)))
        good &= (data[at] == _SETITEMS) & (data[at + 1] == _BUILD)
        rows = np.flatnonzero(good)
        lengths = (at[rows] + 2 - starts[rows]).astype(np.int16)
        return starts[rows], lengths, self._add(rows, keys, columns), counts[rows].astype(np.int8)

    def _add(self, rows: Integers, keys: Integers, columns: list[_Values]) -> npt.NDArray[np.int16]:
        """Add the objects in these rows to their forms. The number of the form of each."""
        forms = np.zeros(len(rows), np.int16)
        left = np.arange(len(rows))
        while len(left):
            key = keys[rows[left[0]]]
            alike = (keys[rows[left]] == key).all(axis=1)
            chosen, left = left[alike], left[~alike]
            used = int((key[2:] >= 0).sum())
            if len(self._forms) > _MOST_FORMS:
                raise NotColumnsError
            number, parts = self._forms.setdefault(tuple(key[: 2 + used].tolist()), (len(self._forms), [[] for _ in range(used)]))
            forms[chosen] = number
            for part, values in zip(parts, columns, strict=False):
                part.append(_taken(values, rows[chosen]))
        return forms

    def _values(self, at: Integers) -> tuple[_Values, Integers, Integers, Integers]:
        """The values that start at these bytes, of kind -1 if they are none of these kinds; the byte after each; how many values the
        pickle numbers there; the memo number of torch.Size, -1 for all but sizes."""
        data = self.data
        opcodes = data[at]
        numbers, ends, is_number = _integers(data, at)
        values = _no_values(len(at))
        values.kinds[is_number], values.numbers = _NUMBER, numbers
        counts, size_class = np.zeros(len(at), np.int64), np.full(len(at), -1, np.int64)
        if len(rows := np.flatnonzero(opcodes == _NONE_OPCODE)):
            values.kinds[rows], ends[rows] = _NONE, at[rows] + 1
        if len(rows := np.flatnonzero(opcodes == _SHORT_TEXT)):
            lengths = data[at[rows] + 1].astype(np.int64)
            rows = rows[is_whole := data[at[rows] + 2 + lengths] == _MEMOIZE]
            lengths = lengths[is_whole]
            values.kinds[rows], values.memo[rows], counts[rows], ends[rows] = _TEXT, 0, 1, at[rows] + 3 + lengths
            values.numbers[rows] = self._text_numbers(at[rows] + 2, lengths)
        if len(rows := np.flatnonzero((opcodes == _GET) | (opcodes == _LONG_GET))):
            after, references, _ = _reference(data, at[rows])
            follows = data[after]
            is_last = (follows == _GET) | (follows == _LONG_GET) | (follows == _SETITEMS)
            earlier = rows[is_last]
            values.kinds[earlier], values.numbers[earlier], ends[earlier] = _EARLIER, references[is_last], after[is_last]
            rows, after, references = rows[~is_last], after[~is_last], references[~is_last]
            if len(rows):
                sizes, axes, after, numbered, is_size = _sizes(data, after)
                values.kinds[rows] = np.where(is_size, _SIZE, -1)
                values.numbers[rows], values.sizes[rows], values.memo[rows] = axes, sizes, numbered - 1
                counts[rows], ends[rows], size_class[rows] = numbered, after, np.where(is_size, references, -1)
        return values, ends, counts, size_class

    def _text_numbers(self, starts: Integers, lengths: Integers) -> Integers:
        """The numbers of the texts at these bytes. Equal texts of a block are looked up once."""
        numbers = np.zeros(len(starts), np.int64)
        for length in distinct(lengths).tolist():
            rows = np.flatnonzero(lengths == length)
            # 20,000 times one of seven names of one length: a matrix product, 20,000 sums, seven of them distinct, seven texts looked up.
            letters = self.data[starts[rows][:, None] + np.arange(length)]
            _, first, inverse = np.unique(letters @ _WEIGHTS[:length], return_index=True, return_inverse=True)
            if not (letters[first][inverse] == letters).all():
                first, inverse = np.arange(len(rows)), np.arange(len(rows))
            numbers[rows] = np.array([self._text_number(bytes(letters[i])) for i in first.tolist()], np.int64)[inverse]
        return numbers

    def _text_number(self, raw: bytes) -> int:
        number = self._number_of.get(raw)
        if number is None:
            number = self._number_of[raw] = len(self.texts)
            try:
                self.texts.append(raw.decode("utf-8", "surrogatepass"))
            except UnicodeDecodeError:
                raise NotColumnsError from None
        return number


def _reference(data: Bytes, at: Integers) -> tuple[Integers, Integers, npt.NDArray[np.bool_]]:
    """The references (GET) at these bytes: the byte after each, its memo number, and whether it is one."""
    opcodes, numbers = data[at], data[at + 1].astype(np.int64)
    is_long = opcodes == _LONG_GET
    if len(rows := np.flatnonzero(is_long)):
        numbers[rows] = _little_endian(data, at[rows] + 1, 4)
    return at + np.where(is_long, 5, 2), numbers, is_long | (opcodes == _GET)


def _integers(data: Bytes, at: Integers) -> tuple[Integers, Integers, npt.NDArray[np.bool_]]:
    """The integers at these bytes: their values, the byte after each, and whether it is one, and not negative."""
    opcodes = data[at]
    values, ends, good = data[at + 1].astype(np.int64), at + 2, opcodes == pickle.BININT1[0]
    for opcode, width in ((pickle.BININT2[0], 2), (pickle.BININT[0], 4)):
        if len(rows := np.flatnonzero(opcodes == opcode)):
            values[rows], ends[rows] = _little_endian(data, at[rows] + 1, width), at[rows] + 1 + width
            good[rows] = (values[rows] < 1 << 31) & (values[rows] >= 0)
    if len(rows := np.flatnonzero(opcodes == pickle.LONG1[0])):
        widths = data[at[rows] + 1].astype(np.int64)
        wide = _little_endian(data, at[rows] + 2, 8)
        shifts = 8 * (8 - np.clip(widths, 1, 8))
        # The sign is in the highest bit of the last byte.
        wide = (wide << shifts) >> shifts
        values[rows], ends[rows], good[rows] = wide, at[rows] + 2 + widths, (widths >= 1) & (widths <= 8) & (wide >= 0)
    return values, ends, good


def _sizes(data: Bytes, at: Integers) -> tuple[Integers, Integers, Integers, Integers, npt.NDArray[np.bool_]]:
    """The tuples of numbers at these bytes, as arguments of a call: the numbers, the number of axes, the byte after the call, how many
    values the pickle numbers, and whether it is such a call."""
    opens = data[at]
    is_marked, is_empty = opens == pickle.MARK[0], opens == pickle.EMPTY_TUPLE[0]
    at = at + (is_marked | is_empty)
    sizes, axes = np.zeros((len(at), _AXES), np.int64), np.zeros(len(at), np.int64)
    for axis in range(_AXES):
        values, ends, is_number = _integers(data, at)
        is_number &= ~is_empty & (axes == axis)
        sizes[:, axis] = np.where(is_number, values, 0)
        at, axes = np.where(is_number, ends, at), axes + is_number
    closes = data[at]
    closed = np.where(is_marked, closes == pickle.TUPLE[0], (axes >= 1) & (axes <= 3) & (closes == pickle.TUPLE1[0] - 1 + axes))
    good = is_empty | (closed & (data[at + 1] == _MEMOIZE))
    at = np.where(is_empty, at, at + 2)
    for i, byte in enumerate(_CALL):
        good &= data[at + i] == byte
    return sizes, axes, at + len(_CALL), np.where(is_empty, 2, 3), good


def _little_endian(data: Bytes, at: Integers, width: int) -> Integers:
    value = data[at].astype(np.int64)
    for i in range(1, width):
        value |= data[at + i].astype(np.int64) << (8 * i)
    return value


def _no_values(count: int) -> _Values:
    """[count]: values of no kind."""
    nothing = np.full(count, -1, np.int8)
    return _Values(nothing, np.zeros(count, np.int64), np.zeros((count, _AXES), np.int64), nothing.copy())


def _scattered(values: _Values, rows: Integers, count: int) -> _Values:
    """The values in these rows of `count` rows."""
    if len(rows) == count:
        return values
    result = _no_values(count)
    result.kinds[rows], result.numbers[rows], result.sizes[rows], result.memo[rows] = (
        values.kinds, values.numbers, values.sizes, values.memo
    )  # fmt: skip
    return result


def _taken(values: _Values, rows: Integers) -> _Values:
    """The values in these rows, with as many axes as they need."""
    kinds, numbers = values.kinds[rows], values.numbers[rows]
    axes = int(numbers[kinds == _SIZE].max(initial=0))
    return _Values(kinds, _narrow(numbers), _narrow(values.sizes[rows, :axes]), values.memo[rows])


def _narrow(numbers: Integers) -> Integers:
    """The numbers in 4 bytes each, if they fit."""
    return numbers.astype(np.int32) if not numbers.size or numbers.max() < 1 << 31 else numbers


def _emptied(parts: list[list[_Values]]) -> Iterator[list[_Values]]:
    while parts:
        yield parts.pop(0)


def _joined(parts: list[_Values]) -> _Values:
    axes = max(part.sizes.shape[1] for part in parts)
    sizes = np.zeros((sum(len(part.kinds) for part in parts), axes), np.result_type(*(part.sizes for part in parts)))
    at = 0
    for part in parts:
        sizes[at : at + len(part.kinds), : part.sizes.shape[1]] = part.sizes
        at += len(part.kinds)
    kinds, numbers, memo = (np.concatenate([getattr(part, name) for part in parts]) for name in ("kinds", "numbers", "memo"))
    return _Values(kinds, numbers, sizes, memo)


# ---- the rest of the pickle ----


class _Rest:
    """A pickle without objects that can be columns. Its memo numbers count what is left."""

    def __init__(self, data: bytes, objects: _Objects, classes: list[int], items: str, pairs: tuple[str, str]) -> None:
        self.runs: list[Run] = []
        """The runs that were cut out."""
        self.classes_of_forms: dict[int, str] = {}
        """The class that the objects of a form are taken for."""
        self._starts, self._lengths, self._forms, counts = objects
        self.memos = np.zeros(len(counts), np.int32)
        """[n]: the memo number of each object that was cut out."""
        self._classes, self._items, self._pairs = classes, items, pairs
        self._first_memos: list[int] = []
        self._dropped: list[int] = [0]
        self._class_names: dict[int, str] = {}
        follows = self._starts[:-1] + self._lengths[:-1] == self._starts[1:]
        # Where runs end. With the forms [0 0 0 1 2 1 2 1 2 0], all without gaps, the breaks of a list are [2 3 4 5 6 7 8], so that the run
        # from 0 on is 0..2; the breaks of a dict, where the forms of keys and values alternate, are [1 2 7]: the run from 3 on is 3..8.
        is_alike = follows & (self._forms[:-1] == self._forms[1:])
        is_pair = follows[:-1] & follows[1:] & (self._forms[:-2] == self._forms[2:])
        self._follows = follows
        self._breaks = np.flatnonzero(~is_alike), np.flatnonzero(~is_pair)
        self._memo_before = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
        self.pickle = b"".join(self._parts(data))
        """The pickle of the rest."""

    def clear(self) -> None:
        """Release what is needed no more once the rest is loaded."""
        del self._starts, self._lengths, self._forms, self._memo_before, self._follows, self._breaks, self.memos, self.pickle

    def shifted(self, number: int) -> int:
        """The memo number in the rest; -1 if it is that of a value that was cut out."""
        run = bisect_right(self._first_memos, number) - 1
        if run < 0:
            return number
        dropped = self._dropped[run + 1] - self._dropped[run]
        return -1 if number < self._first_memos[run] + dropped else number - self._dropped[run + 1]

    def _parts(self, data: bytes) -> Iterator[bytes]:
        starts = self._starts
        at = memo = number = 0
        next_start = int(starts[0])
        text, name, kept = b"", "", 0
        while True:
            if next_start < at:
                number = int(np.searchsorted(starts, at))
                next_start = int(starts[number]) if number < len(starts) else len(data)
            if next_start == at and (count := self._run(number)):
                yield data[kept:at]
                yield from self._cut(number, count, memo)
                memo += int(self._memo_before[number + count] - self._memo_before[number])
                at = kept = int(starts[number + count - 1]) + int(self._lengths[number + count - 1])
                continue
            try:
                opcode, end = data[at], after_opcode(data, at) if data[at] != pickle.STOP[0] else at + 1
            except (IndexError, ValueError, pickle.UnpicklingError):
                raise NotColumnsError from None
            if opcode in (_GET, _LONG_GET):
                yield data[kept:at]
                yield self._moved_reference(int.from_bytes(data[at + 1 : end], "little"), opcode)
                kept = end
            elif opcode == _MEMOIZE:
                if name:
                    self._class_names[memo] = name
                memo += 1
            elif opcode == pickle.FRAME[0]:
                yield data[kept:at]
                kept = end
                if int.from_bytes(data[at + 1 : end], "little") > len(data) - end:
                    raise NotColumnsError
            elif opcode in _REFUSED:
                raise NotColumnsError
            elif opcode == _SHORT_TEXT:
                text = data[at + 2 : end]
            elif opcode == pickle.STOP[0]:
                yield data[kept:end]
                if end != len(data) or memo >= _MOST_MEMOS:
                    raise NotColumnsError
                return
            name = text.decode("ascii", "replace") if opcode == pickle.STACK_GLOBAL[0] else ""
            at = end

    def _run(self, number: int) -> int:
        """How many objects from this one on can be cut out together."""
        forms = self._forms
        form = int(forms[number])
        name = self._class_names.get(self._classes[form])
        if name == self._items:
            self.classes_of_forms[form] = name
            return self._stop(self._breaks[0], number) + 1 - number
        if name == self._pairs[0] and number + 1 < len(forms) and self._follows[number]:
            value = int(forms[number + 1])
            if self._class_names.get(self._classes[value]) == self._pairs[1]:
                self.classes_of_forms[form], self.classes_of_forms[value] = self._pairs
                return (self._stop(self._breaks[1], number) + 2 - number) // 2 * 2
        return 0

    def _stop(self, breaks: Integers, number: int) -> int:
        at = int(np.searchsorted(breaks, number))
        return int(breaks[at]) if at < len(breaks) else len(self._starts) - (1 if breaks is self._breaks[0] else 2)

    def _cut(self, number: int, count: int, memo: int) -> Iterator[bytes]:
        stop = number + count
        self.memos[number:stop] = self._memo_before[number:stop] + (memo - int(self._memo_before[number]))
        self._first_memos.append(memo)
        self._dropped.append(self._dropped[-1] + int(self._memo_before[stop] - self._memo_before[number]))
        is_dict = self._class_names[self._classes[int(self._forms[number])]] == self._pairs[0]
        yield _external(_RUN, len(self.runs)) + (pickle.NONE if is_dict else b"")
        self.runs.append(Run(number, count))

    def _moved_reference(self, number: int, opcode: int) -> bytes:
        moved = self.shifted(number)
        if moved < 0:
            return _external(_VALUE, number)
        return bytes([opcode]) + moved.to_bytes(1 if opcode == _GET else 4, "little")


def _external(kind: int, number: int) -> bytes:
    """The opcodes of an external value, which `load_objects` looks up."""
    if number >= _MOST_MEMOS:
        raise NotColumnsError
    return pickle.BININT1 + bytes([kind]) + pickle.BININT + number.to_bytes(4, "little") + pickle.TUPLE2 + pickle.BINPERSID


class _Earlier:
    """The texts and sizes in the columns, by memo number."""

    def __init__(self, forms: list[_Form], texts: list[str]) -> None:
        self._texts, self._number_of = texts, {text: i for i, text in enumerate(texts)}
        self._sources: list[tuple[Integers, Integers, _Values]] = []
        for form in forms:
            for values in form.attributes:
                rows = np.flatnonzero((values.memo >= 0) & (form.memos > 0))
                if len(rows):
                    self._sources.append((form.memos[rows] + values.memo[rows], rows, values))

    def value(self, number: int) -> object:
        """The text or size of a memo number. Raises UnpicklingError if there is none."""
        for memos, rows, values in self._sources:
            at = int(np.searchsorted(memos, number))
            if at < len(memos) and memos[at] == number:
                row = rows[at]
                if values.kinds[row] == _TEXT:
                    return self._texts[values.numbers[row]]
                return tuple(values.sizes[row, : values.numbers[row]].tolist())
        raise pickle.UnpicklingError("it refers to a part of an object")

    def resolve(self, values: _Values, of_rest: Callable[[int], object]) -> None:
        """Replace references to earlier values by these values. of_rest: memo number -> value in the rest of the pickle."""
        rows = np.flatnonzero(values.kinds == _EARLIER)
        if not len(rows):
            return
        references, inverse = np.unique(values.numbers[rows], return_inverse=True)
        kinds, numbers = np.full(len(references), -1, np.int8), np.zeros(len(references), np.int64)
        sizes = np.zeros((len(references), _AXES), np.int64)
        for memos, source_rows, source in self._sources:
            at = np.minimum(np.searchsorted(memos, references), len(memos) - 1)
            known = np.flatnonzero(memos[at] == references)
            taken = source_rows[at[known]]
            kinds[known], numbers[known] = source.kinds[taken], source.numbers[taken]
            sizes[known, : source.sizes.shape[1]] = source.sizes[taken]
        for i in np.flatnonzero(kinds < 0).tolist():
            value = of_rest(int(references[i]))
            if type(value) is str:
                kinds[i], numbers[i] = _TEXT, self._text_number(value)
            elif type(value) is tuple and len(value) <= _AXES and all(type(size) is int and 0 <= size < 1 << 62 for size in value):
                kinds[i], numbers[i] = _SIZE, len(value)
                sizes[i, : len(value)] = value
        axes = int(numbers[kinds == _SIZE].max(initial=values.sizes.shape[1]))
        if axes > values.sizes.shape[1]:
            values.sizes = np.concatenate([values.sizes, np.zeros((len(values.kinds), axes - values.sizes.shape[1]), np.int64)], axis=1)
        values.kinds[rows], values.numbers[rows], values.sizes[rows] = kinds[inverse], numbers[inverse], sizes[inverse][:, :axes]

    def _text_number(self, text: str) -> int:
        number = self._number_of.setdefault(text, len(self._texts))
        if number == len(self._texts):
            self._texts.append(text)
        return number
