"""The laws of reshard.testing, run on the format `raw`: `pip install -e . && pytest`."""

from pathlib import Path

import pytest

from reshard.testing import FormatCase, FormatLaws, read_truth

FIXTURE = Path(__file__).resolve().parent / "fixture"


class TestRaw(FormatLaws):
    @pytest.fixture
    def case(self) -> FormatCase:
        return FormatCase("raw", FIXTURE / "checkpoint", read_truth(FIXTURE / "truth.json"), options={"alignment": 64})
