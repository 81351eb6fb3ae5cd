"""Cases of which `make test` takes a sample, and `.ci/run slow` the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """The cases for a test of one or several arguments: one of `every` is run always, the others have the marker `slow`."""
    listed = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if number % every == 0 else pytest.mark.slow) for number, case in enumerate(listed)]
