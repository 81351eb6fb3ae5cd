"""SharedConversion: what one process does of a conversion that several share, into a directory (part.py) or a store (stores/part.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.engine.run import Conversion, Done
    from reshard.engine.stores.conversion import StoreConversion
    from reshard.plans.bands import Task
    from reshard.plans.plan import Plan


class SharedConversion(ABC):
    """One process of a conversion that several share. Iterate `run()` to its end."""

    plan: Plan
    """The plan."""
    tasks: Sequence[Task]
    """The tasks that the process converts, unless another process has."""
    resumed_bytes: int
    """The bytes of its tasks that were there already."""
    completed: Conversion | StoreConversion | None
    """The conversion, if the target is complete when `run` has ended."""

    @property
    @abstractmethod
    def total(self) -> int:
        """The bytes that `run` reports in all."""

    @abstractmethod
    def run(self) -> Iterator[Done]:
        """Convert the tasks, and yield each finished block; then complete the target if no task is missing."""
