"""ServerComparison: what a live server holds, compared with what a checkpoint gives its ranks, by digests.

A digest is that of a parameter's bytes as they lie in the server's memory, so that three answers are possible for each parameter:

    equal             the server's digest is that of the bytes as loaded, or as a known kernel arranges them
    different         it is another one, and the engine keeps such parameters as they were loaded
    not comparable    it is another one, or that of nothing, and the engine may have arranged the bytes in a way that is not known here
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field

from reshard.adapter.serving_format.weight_checker import ParameterHash, Repacking, ServingRank, WeightChecker, split_key
from reshard.engine.compare import Comparison, Difference
from reshard.engine.views import LazyTensor
from reshard.errors import DifferenceFound, UnsupportedError
from reshard.geometry.quantities import plural
from reshard.geometry.value import mutable, value


@value
class ExpectedParameters:
    """What a checkpoint gives the ranks of a server. Keys are those of `digests`."""

    tensors: Mapping[str, LazyTensor]
    """Every parameter of every rank."""
    digests: Mapping[str, str]
    """Their digests."""
    new_hash: Callable[[], ParameterHash]
    """How they are hashed."""

    def nbytes(self, keys: Iterable[str]) -> int:
        """The bytes of these parameters."""
        return sum(self.tensors[key].nbytes for key in keys)

    def sort(self, key: str) -> tuple[str, int]:
        """The element type of a parameter, and the number of its axes."""
        return self.tensors[key].dtype.name, len(self.tensors[key].shape)

    def repacked(self, key: str, way: Repacking) -> str | None:
        """The digest of a parameter that is arranged in a way; None if its shape does not allow it."""
        digest, found = self.new_hash(), False
        try:
            for part in way(self.tensors[key]):
                digest.update(part.view("u1").data)
                found = True
        except UnsupportedError:  # interleaved rows
            return None
        return digest.hexdigest() if found else None


@mutable
class ServerComparison(Comparison):
    """What a live server holds, compared with what a checkpoint gives its ranks. Keys are those of `digests`. A difference of the kind
    "values" has other bytes, one of the kind "missing" is not on the server."""

    matching: int = 0
    """Parameters with the expected digest, as loaded or as a known kernel arranges them."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Parameters with the expected digest under another name: the server's key -> ours."""
    not_comparable: list[str] = field(default_factory=list)
    """Parameters of the checkpoint that the server has repacked: nothing is left under their name, or their bytes are arranged in a way
    that is not known."""
    unknown: list[str] = field(default_factory=list)
    """Parameters of the server of which the checkpoint says nothing."""
    parameters: int = 0
    """Parameters that the checkpoint gives the ranks."""
    total_nbytes: int = 0
    """The bytes of these parameters, of which `nbytes` were compared."""

    @property
    def equal(self) -> bool | None:
        """Whether the server holds these weights; None if nothing is different, and not everything could be compared."""
        if self.differences:
            return False
        return None if self.not_comparable or self.unknown or not self.parameters else True

    @property
    def found(self) -> int:
        """Parameters that are equal."""
        return self.matching + len(self.renamed)

    def keys(self, kind: str) -> list[str]:
        """The parameters that differ in one way."""
        return [each.name for each in self.differences if each.kind == kind]

    def verdict(self, server: str = "the server") -> str:
        """The result in one sentence."""
        if self.equal is None:
            share = f"{100 * self.nbytes // max(1, self.total_nbytes)} %"
            repacked = f"; {len(self.not_comparable):,} were repacked by this server" if self.not_comparable else ""
            unknown = f"; the checkpoint does not have {len(self.unknown):,} of the server's" if self.unknown else ""
            counts = f"{self.found:,} of {plural(self.parameters, 'parameter')}, {share} of the bytes, are equal"
            return f"cannot tell: {counts}{repacked}{unknown}"
        counts = f"{plural(self.found, 'parameter')} equal, {len(self.keys('values')):,} different, {len(self.keys('missing')):,} missing"
        other = f", {len(self.not_comparable):,} not comparable" if self.not_comparable else ""
        return f"{server} holds {'these' if self.equal else 'other'} weights: {counts}{other}"

    def raise_if_different(self) -> None:
        """Raises DifferenceFound unless the server is known to hold these weights."""
        if not self.equal:
            raise DifferenceFound(self.verdict())

    def __repr__(self) -> str:
        return f"ServerComparison({self.verdict()})"


def compare_with_server(expected: ExpectedParameters, held: Mapping[str, str], checker: WeightChecker) -> ServerComparison:
    """Compare what is expected with the digests that a server answers to the weight checker's action `checksum`."""
    digests, renamed = expected.digests, _renamed(expected.digests, held)
    as_loaded = {key for key, digest in digests.items() if held.get(key) == digest}
    rest = [key for key in digests if key not in as_loaded and key not in {*renamed.values()}]
    nothing = {new_hash().hexdigest() for new_hash in checker.hashes}
    emptied = {_module_of(key) for key, digest in held.items() if digest in nothing and key not in as_loaded}
    repacked = {key for key, tensor in expected.tensors.items() if not checker.keeps(tensor, expected.new_hash)}
    # Nothing is concluded from one parameter that another one contradicts: where one of an element type and number of axes is held as
    # loaded, none of them is expected in another form.
    sorts = {expected.sort(key) for key in as_loaded}
    asked = [key for key in rest if key in held and (_module_of(key) in emptied or (key in repacked and expected.sort(key) not in sorts))]
    equal = as_loaded | {key for key in asked if held[key] in (expected.repacked(key, way) for way in checker.repackings)}
    modules, families = {_module_of(key) for key in repacked}, {_family_of(key) for key in equal}
    result = ServerComparison(renamed=renamed, parameters=len(digests), total_nbytes=expected.nbytes(digests))
    for key in [key for key in rest if key not in equal]:
        if _module_of(key) in emptied or (_module_of(key) in modules and _family_of(key) not in families):
            result.not_comparable.append(key)
        elif key not in held:
            result.differences.append(Difference(key, "missing", "the server does not hold it under any name"))
        else:
            result.differences.append(Difference(key, "values", "the server holds other bytes"))
    result.unknown += [key for key in held if key not in digests and key not in renamed and not checker.own.search(key)]
    result.matching = len(equal)
    result.tensors = result.found + len(result.differences)
    result.nbytes = expected.nbytes((*equal, *renamed.values(), *result.keys("values")))
    return result


def _renamed(digests: Mapping[str, str], held: Mapping[str, str]) -> dict[str, str]:
    """Parameters that the server holds under another name: the server's key -> ours. Each counts once."""
    missing: dict[tuple[ServingRank, str], list[str]] = {}
    for key in (key for key in digests if key not in held):
        missing.setdefault((split_key(key)[0], digests[key]), []).append(key)
    found = {}
    for key, digest in held.items():
        if key not in digests and (names := missing.get((split_key(key)[0], digest))):
            found[key] = names.pop(0)
    return found


def _module_of(key: str) -> str:
    """The module that a parameter belongs to, with its rank."""
    return key.rpartition(".")[0]


def _family_of(key: str) -> str:
    """The name of a parameter without the numbers of its layer, expert and rank."""
    return re.sub(r"\d+", "*", key)
