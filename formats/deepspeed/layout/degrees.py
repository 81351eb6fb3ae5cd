"""The parallel sizes of a run, and one model-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.geometry.value import value


@value
class ModelRank:
    """One model-parallel rank: the files of one pipeline stage and one tensor-parallel rank."""

    number: int
    """The MM of mp_rank_MM: stage * tp + tp_rank."""
    stage: int
    """The pipeline stage."""
    tp_rank: int
    """The tensor-parallel rank."""


@value
class RunDegrees:
    """The parallel sizes of the run that saved a tag."""

    pp: int
    """Pipeline-parallel size."""
    tp: int
    """Tensor-parallel size."""
    dp: int = 1
    """Data-parallel size."""
    ep: int = 1
    """Expert-parallel size. Expert parallelism lies inside data parallelism: it does not multiply the number of ranks."""

    @property
    def model_ranks(self) -> int:
        """The number of model-parallel ranks."""
        return self.pp * self.tp

    def model_rank(self, number: int) -> ModelRank:
        """The model-parallel rank of that number."""
        return ModelRank(number, *divmod(number, self.tp))

    def each_model_rank(self) -> Iterator[ModelRank]:
        """All model-parallel ranks, in order."""
        return map(self.model_rank, range(self.model_ranks))

    def sizes(self) -> dict[str, int]:
        """The sizes by their short names; the expert-parallel one if there is expert parallelism."""
        return {"dp": self.dp, "tp": self.tp, "pp": self.pp} | ({"ep": self.ep} if self.ep > 1 else {})
