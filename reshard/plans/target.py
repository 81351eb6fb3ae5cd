"""TODO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from reshard.errors import RequestError
from reshard.geometry.dtypes import BF16, DType
from reshard.geometry.parallel import ONE_RANK, Parallel
from reshard.index.index import Tensor


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked for: a format, parallel sizes, and what a format's own options say.

    dtype: cast floating-point weights to it, but for names that match a glob of keep_dtype. engine_version: of the serving engine that will
    load the result. max_shard_bytes: where a format cuts files, the most that one holds. fixed: tensors whose type stays, whatever dtype
    says. options: what only some formats know.
    only: the one rank that is asked for, such as {"tp": 3, "pp": 0}; a layout may leave out the files of all others.
    """

    format: str
    parallel: Parallel = ONE_RANK
    dtype: DType | None = None
    keep_dtype: tuple[str, ...] = ()
    engine_version: str | None = None
    max_shard_bytes: int | None = None
    dtype_kept_for: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)
    only_rank: Mapping[str, int] = field(default_factory=dict)

    def wants(self, ranks: Mapping[str, int]) -> bool:
        """Whether the files of a rank are asked for. An axis that one side does not name has one rank, 0, or does not matter."""
        return all(ranks.get(axis, 0) == rank for axis, rank in self.only_rank.items())

    def dtype_of(self, tensor: Tensor) -> DType:
        """The element type that a tensor will be stored with."""
        if tensor.scaling:
            return self.dtype or BF16
        is_weight = tensor.kind in ("weight", "master")
        if (
            self.dtype is None
            or not tensor.dtype.floating
            or not is_weight
            or tensor.name in self.dtype_kept_for
            or any(fnmatchcase(tensor.name, glob) for glob in self.keep_dtype)
        ):
            return tensor.dtype
        return self.dtype

    def refuse_engine_version(self, what: str) -> None:
        """Raises RequestError if one was asked for, where there are no engines."""
        if self.engine_version is not None:
            raise RequestError(f"--engine-version does not apply to {what}", do="Leave it out")
