"""Laws of a serving engine's format: which ranks there are, and what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard
from reshard.errors import RequestError
from reshard.geometry.value import value
from reshard.plans.plan import Plan
from reshard.testing.format_laws import described

Sizes = Mapping[str, int]
"""Parallel sizes, such as {"tp": 2, "pp": 2}."""


@value
class EngineCase:
    """A model on which the laws of an engine are tested."""

    format: str
    """The name of the engine's format."""
    checkpoint: Path
    """A checkpoint of the model, in any format, with its config."""
    legal: Sequence[Sizes]
    """Sizes at which the engine serves the model."""
    illegal: Sequence[Sizes]
    """Sizes that the engine refuses."""
    held: Sequence[tuple[Sizes, Mapping[str, Mapping[str, Mapping[str, Any]]]]] = ()
    """What the engine's own ranks hold: sizes, and file -> name -> {"dtype": "BF16", "shape": [rows, columns], "sha256": "..."}."""

    def plan(self, sizes: Mapping[str, Any]) -> Plan:
        """The plan of a conversion for these sizes."""
        return reshard.plan(self.checkpoint, to=self.format, **sizes)


class EngineLaws:
    """What the format of a serving engine owes. A class that inherits it has a fixture `case`, which returns an EngineCase."""

    def test_ranks_hold_every_weight(self, case: EngineCase) -> None:
        for sizes in case.legal:
            plan = case.plan(sizes)
            counts = {name: np.zeros(tensor.shape, np.int64) for name, tensor in plan.content.weights.items()}
            for section in (section for file in plan.layout.files for placed in file.tensors for section in placed.tensor.sections):
                counts[section.name][tuple(map(slice, section.box.offsets, section.box.stops))] += 1
            lost = [name for name, count in counts.items() if name not in plan.layout.aliases and not count.all()]
            assert not lost, f"{sizes}: no rank holds all of {lost[0]}"

    def test_sizes_that_the_engine_refuses_are_refused(self, case: EngineCase) -> None:
        for sizes in case.illegal:
            with pytest.raises(RequestError):
                case.plan(sizes)

    def test_ranks_hold_what_those_of_the_engine_hold(self, case: EngineCase, tmp_path: Path) -> None:
        for number, (sizes, held) in enumerate(case.held):
            plan, out = case.plan(sizes), tmp_path / str(number)
            reshard.convert(plan, out)
            assert held.keys() == {file.path for file in plan.layout.files}
            for file in plan.layout.files:
                content, tensors = (out / file.path).read_bytes(), [(placed.tensor, placed.byte_offset) for placed in file.tensors]
                assert held[file.path] == {
                    tensor.name: described(tensor.dtype, tensor.shape, content[start : start + tensor.nbytes]) for tensor, start in tensors
                }
