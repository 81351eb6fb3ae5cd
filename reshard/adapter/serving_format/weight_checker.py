"""WeightChecker: how a live server of an engine tells the digests of the parameters that its ranks hold, and how reshard says the same.

Inside reshard, a parameter has one key for all engines, the one of vLLM's checker: the rank, and the parameter's name.

    dp0:pp0:pcp0:tp3:model.norm.weight

Engines arrange the bytes of some weights anew after loading, under the weight's own name. A weight is a matrix [rows, columns], or a stack
of them ([experts, rows, columns]). Kernels for processors take it in panels of rows. In a panel, `together` neighbours of a row stay
neighbours, and those of all its rows follow each other:

    rows=2, together=2:     a b c d        a b e f  c d g h
                            e f g h   ->   i j m n  k l o p
                            i j k l
                            m n o p

A panel of all rows is the transposed matrix. The bytes are the same ones, so that an equal digest proves equal weights.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from reshard.errors import CheckpointError
from reshard.geometry.dtypes import DType

Words = npt.NDArray[Any]


class ReadableWeight(Protocol):
    """A weight that is read when asked for: a LazyTensor (engine/views.py) or a slice of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> DType: ...
    def words(self) -> Words: ...
    def numpy(self) -> Words: ...
    def __getitem__(self, key: Any) -> ReadableWeight: ...


Repacking = Callable[[ReadableWeight], Iterator[Words]]
"""A known way to arrange a weight: its words as they lie in memory, in parts; none if its shape does not allow it."""
# The most elements that are read at a time.
_ELEMENTS = 1 << 21
_KEY = re.compile(r"dp(\d{1,6}):pp(\d{1,6}):pcp(\d{1,6}):tp(\d{1,6}):(.+)", re.DOTALL)


class ParameterHash(Protocol):
    """A running hash of a parameter's bytes."""

    def update(self, data: memoryview, /) -> object:
        """Add bytes."""

    def hexdigest(self) -> str:
        """The digest of all bytes so far, as the engine writes it."""


class ServingRank(NamedTuple):
    """The numbers of one rank of a server."""

    dp: int = 0
    """Data-parallel rank."""
    pp: int = 0
    """Pipeline stage."""
    pcp: int = 0
    """Rank of prefill context parallelism: such ranks hold the same weights."""
    tp: int = 0
    """Tensor-parallel rank."""

    def key(self, name: str) -> str:
        """The key of a parameter on this rank."""
        return f"dp{self.dp}:pp{self.pp}:pcp{self.pcp}:tp{self.tp}:{name}"


OtherNames = tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]
"""Modules that an engine knows under several names: a pattern of one name, and what else may stand in the place of what it matches."""


class ServerFacts(NamedTuple):
    """What a server says about itself."""

    expert_parallel: bool = False
    """Whether its ranks share the experts."""
    dtype: str | None = None
    """The element type to which it casts the weights, such as bfloat16; None if it does not say."""
    sizes: ServingRank | None = None
    """How many ranks it has along each axis; None if it does not say."""
    model: str | None = None
    """The directory or the name by which it opened the model; None if it does not say."""


def split_key(key: str) -> tuple[ServingRank, str]:
    """The rank and the parameter's name in a key. Raises ValueError for another text."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(key)
    dp, pp, pcp, tp = (int(number) for number in match.groups()[:4])
    return ServingRank(dp, pp, pcp, tp), match[5]


class WeightChecker(ABC):
    """The weight checker of one engine."""

    path: ClassVar[str]
    """The path of the server's endpoint, which gets `{"action": "checksum"}` by POST."""
    start: ClassVar[str]
    """How to start a server that has the endpoint."""
    info_path: ClassVar[str]
    """The path where the server describes itself."""
    version_path: ClassVar[str] = ""
    """The path where the server tells the version of its weights; empty if it does not."""
    hashes: ClassVar[tuple[Callable[[], ParameterHash], ...]]
    """The ways in which servers hash a parameter, the usual one first."""
    own: ClassVar[re.Pattern[str]]
    """The names of what the engine makes itself, such as scales of the KV cache: no checkpoint says what they should be."""
    other_names: ClassVar[OtherNames] = ()
    """Parameters that the engine has under several names, of which its files have one and its weight checker another."""
    repackings: ClassVar[tuple[Repacking, ...]]
    """How the engine arranges weights anew after loading, as far as that is known."""

    def keeps(self, weight: ReadableWeight, new_hash: Callable[[], ParameterHash]) -> bool:
        """Whether the engine holds a weight as it was loaded, whatever the kernels, or nothing under its name."""
        return weight.dtype.floating and weight.dtype.itemsize > 1 and len(weight.shape) < 3

    def aliases(self, key: str) -> Iterator[str]:
        """The keys under which a parameter may be told, besides its own."""
        for pattern, names in self.other_names:
            yield from (pattern.sub(name, key, count=1) for name in names if pattern.search(key))

    @abstractmethod
    def read(self, answer: Mapping[str, Any]) -> dict[str, str]:
        """The digests in an answer, by key. Raises KeyError, TypeError or ValueError if it is no answer of this checker."""

    def digests_in(self, answer: object, *, where: str) -> dict[str, str]:
        """The digests, by key, in what the server answered, which is not trusted. Raises CheckpointError if no checker answers so."""
        try:
            if isinstance(answer, dict) and (digests := self.read(answer)):
                for key in digests:
                    split_key(key)
                return digests
        except (KeyError, TypeError, ValueError):
            pass
        raise CheckpointError(
            "this is not the answer of a weight checker",
            where=where,
            why='It should be {"checksums": {name: digest}}, or for SGLang {"ranks": [...]}',
            do="If the server answered 404, start it with VLLM_SERVER_DEV_MODE=1 in its environment, and ask again",
        )

    @abstractmethod
    def about(self, info: Mapping[str, Any]) -> ServerFacts:
        """What the weights depend on, in the server's description of itself. Raises as `read` does."""

    def version(self, answer: Mapping[str, Any]) -> str:
        """The version that was set with the server's weights; empty if none was. Raises as `read` does."""
        version = answer["weight_version"]
        if not isinstance(version, str):
            raise TypeError(version)
        # What servers of vLLM 0.32 (v1/engine/core.py) and SGLang 0.5.23 say that loaded their weights at the start.
        return "" if version == "default" else version

    @abstractmethod
    def document(self, digests: Mapping[str, str]) -> dict[str, Any]:
        """Digests in the form in which the engine's programs take them."""


def texts(value: object) -> dict[str, str]:
    """A JSON object of texts. Raises TypeError for anything else."""
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise TypeError(value)
    return value


def widened(weight: ReadableWeight) -> Iterator[Words]:
    """A vector, such as a bias, in 32-bit floats: each value stays what it is."""
    if len(weight.shape) == 1 and weight.dtype.floating:
        yield weight.numpy().astype(np.float32)


def panels(rows: int | None, together: int) -> Repacking:
    """A matrix in panels of `rows` rows (None: all), of which the last may be shorter. `together` neighbours of a row stay neighbours."""

    def arranged(panel: Words) -> Words:
        return panel.reshape(len(panel), -1, together).transpose(1, 0, 2).reshape(-1)

    def of_matrix(matrix: ReadableWeight, height: int, columns: int) -> Iterator[Words]:
        if rows is None:
            width = max(1, _ELEMENTS // height // together) * together
            for start in range(0, columns, width):
                yield arranged(matrix[..., start : start + width].words().reshape(height, -1))
            return
        step = max(1, _ELEMENTS // columns // rows) * rows
        for start in range(0, height, step):
            words = matrix[start : start + step].words().reshape(-1, columns)
            yield from (arranged(words[i : i + rows]) for i in range(0, len(words), rows))

    def repacked(weight: ReadableWeight) -> Iterator[Words]:
        # A weight of a convolution over one channel, [channels, 1, width], is a matrix of two axes.
        shape = tuple(size for size in weight.shape if size != 1)
        if len(shape) not in (2, 3) or shape[-1] % together:
            return
        for matrix in (weight[i] for i in range(shape[0])) if len(shape) == 3 else (weight,):
            yield from of_matrix(matrix, *shape[-2:])

    return repacked
