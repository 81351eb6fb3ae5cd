"""`make test` runs a sample of the cases of some tests. `.ci/run slow` runs the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """The cases of a test for `parametrize`. The first one of `every` always runs; the others have the marker `slow`."""
    listed = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if number % every == 0 else pytest.mark.slow) for number, case in enumerate(listed)]
