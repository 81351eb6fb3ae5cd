"""Hello: what a rank of an engine says of itself when it joins a channel, and whether a plan is made for it.

A document of plain values goes over the channel:

    engine      "vllm 0.32.0"                                              the program and its version
    rank        3                                                          the number of this rank among those of its engine
    degrees     {"tp": 2, "tp_rank": 1, "pp": 1, "pp_rank": 0, "ep": 1}    parallel sizes and ranks
    config      {"model_type": "llama", "vocab_size": 250, ...}            the model's config as the engine has read it
    model       "/models/llama"                                            the directory or the name by which the engine opened it
    tensors     [[["model.norm.weight"], "BF16", [32]], ...]               the load form: all names of each tensor, element type, shape
    others      ["model.layers.0.self_attn.attn._k_scale", ...]            what the engine computes itself: it takes no update of these
    is_open     false                                                      whether an update has begun and has not been finished
    holds       "blake3:01ab..."                                           the fingerprint of what its staging still holds; "": none
    number      18                                                         the highest number that its weights had as version
    before      "train.py (host h, process 7)"                             who had joined it before and has ended; "": nobody

A rank that takes no update tells {"refused": why} instead, and "in_use": true where another sender has joined it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from reshard.errors import RequestError, some
from reshard.geometry.boxes import row_major
from reshard.geometry.dtypes import from_safetensors
from reshard.geometry.meshes import Parallel
from reshard.geometry.value import value
from reshard.live.plan.schedule import HeldTensor

_KINDS = {"engine": str, "rank": int, "degrees": dict, "config": dict, "model": str, "is_open": bool, "holds": str}
_KINDS |= {"number": int, "before": str}
"""The fields of a hello that are no lists."""
_MOST_ELEMENTS = 1 << 48
_TAKE_OVER = "Close that Sender, end its process or wait for that push; or take over: Sender(..., take_over=True), push --take-over"


@value
class KeptTensor:
    """A tensor of the load form in an engine's rank."""

    names: tuple[str, ...]
    """All names by which the engine knows it."""
    dtype: str
    """Its element type's name in safetensors."""
    shape: tuple[int, ...]
    """Its local shape."""


@value(eq=False)
class Hello:
    """What a rank of an engine says of itself."""

    engine: str
    """The program and its version."""
    rank: int
    """Its number among the ranks of the engine."""
    degrees: Mapping[str, int]
    """Parallel sizes and ranks."""
    config: Mapping[str, Any]
    """The model's config as the engine has read it."""
    model: str
    """The directory or the name by which the engine opened the model."""
    tensors: tuple[KeptTensor, ...]
    """The load form."""
    others: frozenset[str]
    """Tensors that the engine computes itself."""
    is_open: bool
    """Whether an update has begun and has not been finished."""
    holds: str = ""
    """The fingerprint of the weights that its staging still holds, of an update that was installed; empty: it holds none."""
    number: int = 0
    """The highest number that its weights had as version."""
    before: str = ""
    """The sender that had joined it before and has ended without leaving; empty: none."""

    @staticmethod
    def of(document: Mapping[str, Any]) -> Hello:
        """From the document. Raises RequestError if it is another one, or tells why the rank takes no update."""
        if isinstance(document, Mapping) and "refused" in document:
            if document.get("in_use"):
                why = "Two senders would undo each other's updates. Nothing was sent"
                raise RequestError(str(document["refused"]), where="a rank of the engine", why=why, do=_TAKE_OVER, id="target-in-use")
            raise RequestError(str(document["refused"]), where="a rank of the engine")
        try:
            tensors = tuple(KeptTensor(_texts(names), _typed(dtype, str), _sizes(shape)) for names, dtype, shape in document["tensors"])
            values = {name: _typed(document[name], kind) for name, kind in _KINDS.items()}
            _sizes([values["rank"], *values["degrees"].values()])
            if values["number"] < 0 or not all(tensor.names for tensor in tensors):
                raise ValueError("a version is negative, or a tensor has no name")
            return Hello(**values, tensors=tensors, others=frozenset(_texts(document["others"])))
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(
                f"an engine says of itself what this version of reshard does not understand: {error!r}",
                do="Install the same version of reshard in the trainer's environment and in the engine's",
            ) from None

    @property
    def parallel(self) -> Parallel:
        """The parallel sizes of the rank's engine. Raises RequestError for a size of 0."""
        return Parallel(*(self.degrees.get(axis, 1) for axis in ("tp", "pp", "ep")))

    @property
    def position(self) -> tuple[int, int]:
        """The rank's pipeline stage, and its number in the stage."""
        return self.degrees.get("pp_rank", 0), self.degrees.get("tp_rank", 0)


def _typed(told: Any, kind: type) -> Any:
    if type(told) is not kind:
        raise TypeError(f"{str(told)[:60]!r} is of another type than {kind.__name__}")
    return told


def _texts(told: Any) -> tuple[str, ...]:
    return tuple(_typed(word, str) for word in _typed(told, list))


def _sizes(told: Any) -> tuple[int, ...]:
    """Sizes, or places among them: none is negative, and an array of them can be in a memory."""
    sizes = tuple(_typed(size, int) for size in told)
    if min(sizes, default=0) < 0 or math.prod(sizes) > _MOST_ELEMENTS or max(sizes, default=0) > _MOST_ELEMENTS:
        raise ValueError(f"{str(sizes)[:60]} are no sizes")
    return sizes


def check_numbers(hellos: Sequence[Hello]) -> None:
    """Raises RequestError unless the ranks of an engine, in the order of their numbers, are all ranks of one replica or more."""
    for number, hello in enumerate(hellos):
        sizes = hello.parallel
        ranks = sizes.tp * sizes.pp
        if hello.rank != number or hello.position != divmod(number % ranks, sizes.tp) or len(hellos) % ranks:
            raise RequestError(
                f"it says that it is rank {hello.rank}, pipeline stage and number {hello.position}, on {sizes}",
                where=f"rank {number} of {len(hellos)} of {hello.engine}",
                why="It would get the weights of another rank; nothing was sent",
                do="Check the parallel sizes that the engine tells, and that its ranks have the same version of reshard",
            )


def check(hello: Hello, targets: Sequence[HeldTensor], fed: Collection[str], *, has_whole: bool = False) -> None:
    """Raises RequestError, naming the first tensor, unless the plan's tensors for a rank are those that it holds.

    fed: the names of those for which bytes come. The others are constants, which the engine may compute itself.

    has_whole: whether the rank receives whole tensors, too. Then it says itself whether its loader fills all that the plan does not bring.
    """
    planned = {target.name: target for target in targets}
    for kept in hello.tensors:
        brought = [planned.pop(name) for name in kept.names if name in planned]
        if not brought and not has_whole:
            raise _differs(hello, kept.names[0], "the engine holds it, and the plan brings nothing for it")
        for target in brought:
            theirs, ours = (kept.dtype, list(kept.shape)), (target.dtype.name, list(target.shape))
            if theirs != ours:
                raise _differs(hello, target.name, f"the engine holds {theirs[0]} {theirs[1]}, the plan brings {ours[0]} {ours[1]}")
    if surplus := [name for name in planned if name not in hello.others]:
        raise _differs(hello, surplus[0], f"the plan brings {some(surplus, most=1)}, and the engine does not hold it")
    if surplus := [name for name in planned if name in fed]:
        raise _differs(hello, surplus[0], f"the engine takes no values of {some(surplus, most=1)}, and the plan brings them")


def _differs(hello: Hello, name: str, what: str) -> RequestError:
    degrees = ", ".join(f"{name} {number}" for name, number in hello.degrees.items())
    return RequestError(
        what,
        where=f"{name} of rank {hello.rank} of {hello.engine} ({degrees})",
        why="Nothing was sent, the engine answers with the weights that it has",
        do="Check that trainer and engine have the same model, and the plan the engine's parallel sizes",
    )


def held_to_json(tensors: Iterable[HeldTensor]) -> list[Any]:
    """Contiguous tensors as plain values."""
    return [[tensor.name, tensor.dtype.name, tensor.dtype.function, tensor.shape] for tensor in tensors]


def held_from_json(document: Iterable[Any]) -> tuple[HeldTensor, ...]:
    """The tensors that `held_to_json` has written."""
    return tuple(
        HeldTensor(name, from_safetensors(dtype, where=name).of(function), tuple(shape), row_major(shape))
        for name, dtype, function, shape in document
    )
