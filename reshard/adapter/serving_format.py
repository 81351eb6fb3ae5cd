"""ServingFormat: a format that one serving engine loads rank by rank."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from reshard.adapter.format import Format

if TYPE_CHECKING:
    from reshard.models.model import Model
    from reshard.plans.target import Target
    from reshard.serving.rules import EngineRules


class ServingFormat(Format):
    """A serving engine's own format: each rank's state dict in files of its own."""

    @abstractmethod
    def engine_rules(self, model: Model, target: Target) -> EngineRules:
        """How the engine lays out one rank of the model for the target's sizes and engine version.

        Raises: RequestError for sizes, versions or models that the engine does not serve.
        """
