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

    def repacked(self, key: str, way: Repacking) -> str | None:
        """The digest of a parameter that is arranged in a way; None if its shape does not allow it."""
        digest, has_parts = self.new_hash(), False
        try:
            for part in way(self.tensors[key]):
                digest.update(part.view("u1").data)
                has_parts = True
        except UnsupportedError:  # interleaved rows
            return None
        return digest.hexdigest() if has_parts else None


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
    version: str | None = None
    """The version that was set with the server's weights, such as a fingerprint or a number; None if the server tells none."""
    fingerprint: str | None = None
    """The checkpoint's fingerprint as the server would hold it, if the server's version is a fingerprint."""

    @property
    def equal(self) -> bool | None:
        """Whether the server holds these weights; None if nothing is different, and not everything could be compared."""
        if self.differences:
            return False
        return None if self.not_comparable or self.unknown or not self.parameters else True

    @property
    def same_version(self) -> bool | None:
        """Whether the server's version is that of this checkpoint; None if its version is no fingerprint."""
        return None if self.fingerprint is None else self.version == self.fingerprint

    @property
    def found(self) -> int:
        """Parameters that are equal."""
        return self.matching + len(self.renamed)

    def keys(self, kind: str) -> list[str]:
        """The parameters that differ in one way."""
        return [difference.name for difference in self.differences if difference.kind == kind]

    def verdict(self, server: str = "the server") -> str:
        """The result in one sentence."""
        if self.equal is None:
            share = f"{100 * self.nbytes // max(1, self.total_nbytes)} %"
            repacked = f"; {len(self.not_comparable):,} were repacked by this server" if self.not_comparable else ""
            unknown = f"; the checkpoint does not have {len(self.unknown):,} of the server's" if self.unknown else ""
            counts = f"{self.found:,} of {plural(self.parameters, 'parameter')}, {share} of the bytes, are equal"
            return f"cannot tell: {counts}{repacked}{unknown}"
        if [difference.kind for difference in self.differences] == ["version"]:
            holds = "has" if self.not_comparable or self.unknown else "holds these weights under"
            return f"{server} {holds} the version of other weights: {self.found:,} of {plural(self.parameters, 'parameter')} equal"
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
    expected, own_names = _under_told_names(expected, held, checker)
    digests, kernels = expected.digests, _Kernels(expected, held, checker)
    renamed = _renamed(digests, held)
    result = ServerComparison(renamed=renamed, parameters=len(digests), total_nbytes=expected.nbytes(digests))
    equal = kernels.equal | {*renamed.values()}
    rest = [key for key in digests if key not in equal]
    kernels.find_repacked(rest)
    for key in rest:
        if kernels.may_repack(key):
            result.not_comparable.append(key)
        elif key not in held:
            result.differences.append(Difference(key, "missing", "the server does not hold it under any name"))
        elif key not in kernels.equal:
            result.differences.append(Difference(key, "values", "the server holds other bytes"))
    result.unknown += [key for key in held if key not in digests and key not in renamed and not checker.own.search(key)]
    result.nbytes = expected.nbytes((*kernels.equal, *renamed.values(), *result.keys("values")))
    renamed.update((key, own_names[key]) for key in digests if key in own_names and key in kernels.equal)
    result.matching = len(kernels.equal - own_names.keys())
    result.tensors = result.found + len(result.differences)
    return result


def _under_told_names(
    expected: ExpectedParameters, held: Mapping[str, str], checker: WeightChecker
) -> tuple[ExpectedParameters, dict[str, str]]:
    """What is expected, under the names that the server tells where the engine has several; and these names: the server's key -> ours."""
    told = {key: key for key in expected.digests}
    for key in expected.digests.keys() - held.keys():
        told[key] = next((alias for alias in checker.aliases(key) if alias in held and alias not in expected.digests), key)
    tensors = {told[key]: tensor for key, tensor in expected.tensors.items()}
    digests = {told[key]: digest for key, digest in expected.digests.items()}
    return ExpectedParameters(tensors, digests, expected.new_hash), {name: key for key, name in told.items() if name != key}


class _Kernels:
    """What the digests tell about the kernels of a server: which parameters they arrange anew. Nothing is concluded from one parameter that
    another one contradicts: where one of an element type and number of axes is held as loaded, none of them is expected in another form."""

    def __init__(self, expected: ExpectedParameters, held: Mapping[str, str], checker: WeightChecker) -> None:
        self._expected, self._held, self._checker = expected, held, checker
        self.equal = {key for key, digest in expected.digests.items() if held.get(key) == digest}
        self._as_loaded = {self._sort(key) for key in self.equal}
        nothing = {new_hash().hexdigest() for new_hash in checker.hashes}
        self._emptied = {_module_of(key) for key, digest in held.items() if digest in nothing and key not in self.equal}
        self._kept = {key: checker.keeps(tensor, expected.new_hash) for key, tensor in expected.tensors.items()}
        self._families: set[str] = set()
        self._arranged = {_module_of(key) for key, is_kept in self._kept.items() if not is_kept}

    def find_repacked(self, keys: Iterable[str]) -> None:
        """Add to `equal` those of these parameters that are held as a known kernel arranges them."""
        for key in keys:
            is_emptied = _module_of(key) in self._emptied
            if key in self._held and (is_emptied or (not self._kept[key] and self._sort(key) not in self._as_loaded)):
                digests = (self._expected.repacked(key, way) for way in self._checker.repackings)
                if self._held[key] in digests:
                    self.equal.add(key)
        self._families = {_family_of(key) for key in self.equal}

    def may_repack(self, key: str) -> bool:
        """Whether a parameter that is not equal may be the right one, in a form that is not known."""
        if key in self.equal:
            return False
        if _module_of(key) in self._emptied:
            return True
        return _module_of(key) in self._arranged and _family_of(key) not in self._families

    def _sort(self, key: str) -> tuple[str, int]:
        tensor = self._expected.tensors[key]
        return tensor.dtype.name, len(tensor.shape)


def _renamed(digests: Mapping[str, str], held: Mapping[str, str]) -> dict[str, str]:
    """Parameters that the server holds under another name: the server's key -> ours. Each counts once."""
    missing: dict[tuple[ServingRank, str], list[str]] = {}
    for key in (key for key in digests if key not in held):
        missing.setdefault((split_key(key)[0], digests[key]), []).append(key)
    renamed = {}
    for key, digest in held.items():
        if key not in digests and (names := missing.get((split_key(key)[0], digest))):
            renamed[key] = names.pop(0)
    return renamed


def _module_of(key: str) -> str:
    """The module that a parameter belongs to, with its rank."""
    return key.rpartition(".")[0]


def _family_of(key: str) -> str:
    """The name of a parameter without the numbers of its layer, expert and rank."""
    return re.sub(r"\d+", "*", key)
