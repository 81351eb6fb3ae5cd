"""Target: the request that a format lays out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from reshard.canonical.globs import matches
from reshard.geometry.dtypes import DType
from reshard.geometry.parallel import ONE_RANK, Parallel
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.index.index import Tensor


@value
class Target:
    """A request for a target: a format, parallel sizes, element types, and the format's own options."""

    format: str
    """The format's name."""
    parallel: Parallel = ONE_RANK
    """The parallel sizes."""
    dtype: DType | None = None
    """Cast floating-point weights to this type; None: each weight keeps its own type."""
    keep_dtype: tuple[str, ...] = ()
    """Globs of tensors that `dtype` does not cast."""
    dtype_kept_for: frozenset[str] = frozenset()
    """Names of tensors that `dtype` never casts: quantized weights and their scales."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The format's own options, parsed."""
    only_rank: Mapping[str, int] = field(default_factory=dict)
    """The one rank that is requested, such as {"tp": 3, "pp": 0}; a layout may leave out the files of other ranks. Empty: all ranks."""

    @property
    def engine_version(self) -> str | None:
        """The version of the serving engine that will load the files; None for the newest known version."""
        return self.options.get("engine_version")

    @property
    def max_shard_size(self) -> int | None:
        """The most bytes of tensors in one file; None for no limit."""
        return self.options.get("max_shard_size")

    def wants(self, ranks: Mapping[str, int]) -> bool:
        """Whether the files of a rank, such as {"tp": 3, "pp": 0}, are requested. An axis that `ranks` does not name counts as rank 0; an
        axis that `only_rank` does not name does not matter."""
        return all(ranks.get(axis, 0) == rank for axis, rank in self.only_rank.items())

    def dtype_of(self, tensor: Tensor) -> DType:
        """The element type in which the target stores a tensor. Where a source holds a function of a weight, it is that of the weight."""
        if tensor.derivation:
            return tensor.dtype
        if tensor.encoding:
            return self.dtype or tensor.encoding.dtype
        if (
            self.dtype is None
            or not tensor.dtype.floating
            or tensor.kind not in ("weight", "buffer", "adapter", "other", "master")
            or tensor.name in self.dtype_kept_for
            or matches(tensor.name, self.keep_dtype)
        ):
            return tensor.dtype.of("")
        return self.dtype

    def __repr__(self) -> str:
        return f"Target({self.format}, {self.parallel}, dtype {self.dtype or 'kept'}, {plural(len(self.options), 'option')})"
