"""CRC-32 of pieces, against zlib's CRC-32 of the whole."""

import functools
import itertools
import random
import time
import timeit
import zlib
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from reshard.storage.crc32 import PiecesCrc32, combine


def test_the_worked_example_of_the_module():
    assert (zlib.crc32(b"a"), zlib.crc32(b"b"), zlib.crc32(b"ab")) == (0xE8B7BE43, 0x71BEEFF9, 0x9E83486D)
    assert combine(0xE8B7BE43, 0x71BEEFF9, 1) == 0x9E83486D
    assert combine(0xE8B7BE43, 0, 1) == 0xEF3DA794


@given(st.binary(max_size=5000), st.binary(max_size=5000))
def test_two_pieces_combine_to_the_crc_of_the_whole(a, b):
    assert combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


def test_pieces_of_many_megabytes_combine():
    mega = bytes(range(256)) * (1 << 12)
    whole = functools.reduce(lambda crc, _: zlib.crc32(mega, crc), range(70), zlib.crc32(b"begin"))
    later = functools.reduce(lambda crc, _: zlib.crc32(mega, crc), range(70), 0)
    assert combine(zlib.crc32(b"begin"), later, 70 * len(mega)) == whole


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**50), st.integers(0, 2**50))
def test_it_does_not_matter_which_neighbours_are_joined_first(a, b, c, nbytes_b, nbytes_c):
    assert combine(combine(a, b, nbytes_b), c, nbytes_c) == combine(a, combine(b, c, nbytes_c), nbytes_b + nbytes_c)


@given(st.binary(min_size=1, max_size=3000), st.data())
def test_pieces_in_any_order_tell_the_crc_of_the_whole(content, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(content) - 1)), max_size=20)) | {0, len(content)})
    pieces = data.draw(st.permutations([*itertools.pairwise(cuts)]))
    crc = PiecesCrc32(len(content))
    for i, (start, stop) in enumerate(pieces):
        assert crc.crc is None, f"{len(pieces) - i} pieces are missing"
        crc.add(start, stop, zlib.crc32(content[start:stop]))
    assert crc.crc == zlib.crc32(content)


@given(st.binary(min_size=1, max_size=400), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), max_size=30))
def test_bytes_that_are_read_twice_count_once(content, reads):
    crc, seen = PiecesCrc32(len(content)), bytearray(len(content))
    for start, stop in [*((a, min(b, len(content))) for a, b in reads if a < min(b, len(content))), (0, len(content))]:
        gaps = crc.lacks(start, stop)
        assert [i for i in range(start, stop) if not seen[i]] == [i for a, b in gaps for i in range(a, b)]
        crc.add(start, stop, zlib.crc32(content[start:stop]))  # ignored where it overlaps
        for a, b in crc.lacks(start, stop):
            crc.add(a, b, zlib.crc32(content[a:b]))
        seen[start:stop] = b"\1" * (stop - start)
    assert crc.crc == zlib.crc32(content)


def test_threads_add_pieces():
    content, crc = random.Random(1).randbytes(1 << 20), PiecesCrc32(1 << 20)
    pieces = [(i, i + 1000 if i + 1000 < len(content) else len(content)) for i in range(0, len(content), 1000)]
    random.Random(2).shuffle(pieces)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda piece: crc.add(*piece, zlib.crc32(content[slice(*piece)])), pieces))
    assert crc.crc == zlib.crc32(content)


def test_no_bytes_have_the_crc_0():
    assert PiecesCrc32(0).crc == 0 == zlib.crc32(b"")


def test_a_combination_takes_less_than_20_microseconds_of_the_processor():
    assert min(timeit.repeat(lambda: combine(0x12345678, 0x87654321, 262144), number=1000, repeat=20, timer=time.process_time)) < 0.02
