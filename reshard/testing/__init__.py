"""Laws for formats, stores and engines of others, as classes for pytest.

    from reshard.testing import FormatCase, FormatLaws, read_truth

    class TestRaw(FormatLaws):
        @pytest.fixture
        def case(self) -> FormatCase:
            return FormatCase("raw", HERE / "checkpoint", read_truth(HERE / "truth.json"))

A class inherits the laws and overrides one fixture; pytest finds the laws as its tests. `tests/third_party/` is a complete package that
does so. reshard's own formats, stores and engines run the same classes.

This is the only room of reshard that imports pytest.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("reshard.testing.format_laws", "reshard.testing.store_laws", "reshard.testing.engine_laws")

from reshard.testing.engine_laws import EngineCase, EngineLaws  # noqa: E402
from reshard.testing.format_laws import FormatCase, FormatLaws, ReadingLaws, TruthLaws, WritingLaws, read_truth  # noqa: E402
from reshard.testing.store_laws import StoreLaws  # noqa: E402

__all__ = ["EngineCase", "EngineLaws", "FormatCase", "FormatLaws", "ReadingLaws", "StoreLaws", "TruthLaws", "WritingLaws", "read_truth"]
