"""Sections in columns: they are the sections that were given, and overlaps are found whatever the strides."""

from collections import Counter
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.geometry.boxes import Box, row_major
from reshard.geometry.dtypes import F32
from reshard.geometry.sections import Pattern, Section, Sections, first_overlap, part, whole


@st.composite
def sections(draw):
    """A few sections of up to three axes, with strides of a row-major array, reversed axes or gaps; they may overlap."""
    found = []
    for number in range(draw(st.integers(1, 4))):
        sizes = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        strides = row_major(sizes)
        if draw(st.booleans()):
            strides = strides[::-1]
        factor = draw(st.integers(1, 3))
        box = Box(tuple(draw(st.integers(0, 5)) for _ in sizes), sizes)
        found.append(Section(f"weight {number}", box, draw(st.integers(0, 20)), tuple(factor * stride for stride in strides)))
    return found


def claimed(section):
    """The stored elements that a section claims, each as often as it is claimed."""
    steps = product(*map(range, section.box.sizes))
    return [section.start + sum(i * stride for i, stride in zip(step, section.strides, strict=True)) for step in steps]


@given(sections())
def test_columns_give_back_the_sections(given):
    columns = Sections.of(given)
    assert list(columns) == given and columns[-1] == given[-1] and columns == Sections.of(given)
    assert columns.pattern.elements == sum(section.box.volume for section in given)
    assert columns.pattern.repeated(3, 100).starts.tolist() == [section.start + 100 * i for i in range(3) for section in given]


@given(sections(), st.integers(1, 60))
def test_an_overlap_is_found_if_and_only_if_there_is_one(given, length):
    owners = Counter(element for section in given for element in claimed(section))
    overlaps = any(count > 1 for count in owners.values()) or any(element >= length for element in owners)
    found = first_overlap(Sections.of(given).pattern, length)
    assert (found is not None) == overlaps
    if found:
        first, second = (claimed(given[row]) for row in found)
        is_beyond = found[0] == found[1] and max(first) >= length
        assert is_beyond or (len(set(first)) < len(first) if found[0] == found[1] else set(first) & set(second))


def test_interleaved_columns_of_a_large_tensor_are_proven_quickly():
    """Gate and up as even and odd columns of 128 transposed experts: a billion runs of one element, which are never listed."""
    experts, rows, columns = 128, 2880, 2880
    starts = [expert * 2 * rows * columns + odd for expert in range(experts) for odd in (0, 1)]
    sizes = np.tile(np.array([[1, columns, rows]], np.int64), (2 * experts, 1))
    strides = np.tile(np.array([[1, 2, 2 * columns]], np.int64), (2 * experts, 1))
    pattern = Pattern(np.zeros_like(sizes), sizes, np.array(starts, np.int64), strides)
    assert first_overlap(pattern, 2 * experts * rows * columns) is None
    starts[3] -= 1
    assert first_overlap(Pattern(pattern.offsets, sizes, np.array(starts, np.int64), strides), 2 * experts * rows * columns) == (2, 3)


def test_tensors_of_equal_boxes_share_their_pattern():
    """Of 100,000 tensors, as in an adapter of experts, a pattern for each would need four times the memory, and be proven each time."""
    half = Box((2, 0), (2, 3))
    tensors = [whole("a", F32, (4, 3)), whole("b", F32, (4, 3)), part("c", "a", F32, (4, 3), half), part("d", "b", F32, (4, 3), half)]
    assert [tensor.sections[0] for tensor in tensors] == [
        Section("a", Box.whole((4, 3)), 0, (3, 1)), Section("b", Box.whole((4, 3)), 0, (3, 1)), Section("a", half, 0, (3, 1)),
        Section("b", half, 0, (3, 1)),
    ]  # fmt: skip
    assert tensors[0].sections.pattern is tensors[1].sections.pattern and tensors[2].sections.pattern is tensors[3].sections.pattern
