"""The laws of reshard.testing, run on every format of reshard."""

import pytest
from helpers.one_of_each import READ, WRITTEN, read_case, written_case

from reshard.testing import ReadingLaws, WritingLaws


class TestReading(ReadingLaws):
    FLIPS = 32  # tests/hostile changes many more

    @pytest.fixture(params=READ)
    def case(self, request):
        return read_case(request.param)


class TestWriting(WritingLaws):
    @pytest.fixture(params=WRITTEN)
    def case(self, request):
        return written_case(request.param)
