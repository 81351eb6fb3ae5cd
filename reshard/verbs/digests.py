"""The verb `digests`: the digest of every parameter of every rank as a serving engine holds it, and the comparison with what a live server
answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Unpack

from reshard.adapter import registry
from reshard.adapter.serving_format import ServingFormat
from reshard.adapter.serving_format.weight_checker import ParameterHash, ServingRank, WeightChecker, split_key
from reshard.engine.compare import Comparison, Difference
from reshard.engine.pool import run_jobs, workers_within
from reshard.engine.views import LazyTensor, View
from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.light_dataclass import dataclass
from reshard.geometry.quantities import plural
from reshard.plans.plan import Plan
from reshard.verbs.checkpoint import Checkpoint
from reshard.verbs.plan import plan
from reshard.verbs.request import PathLike, PlanOptions, Progress

# Parameters, the smallest ones, that tell how a server hashes.
_SAMPLE = 16


def digests(source: Checkpoint | PathLike, *, to: str, progress: Progress | None = None, **options: Unpack[PlanOptions]) -> dict[str, str]:
    """The digest of every parameter of every rank, as the engine's weight checker computes it: for vLLM the SHA-256. The keys are those of
    vLLM's checker: `dp0:pp0:pcp0:tp3:` and the parameter's name. Takes the keywords of `plan`. The names are those of the engine's files;
    where the engine has two names for one parameter, its checker may use the other one.

    Buffers, such as the scales of the KV cache, are left out.

    Raises: RequestError if the format is not that of a serving engine with a weight checker.
    """
    checker = weight_checker(to)
    return digests_of(parameters(plan(source, to=to, **options)), checker.hashes[0], progress)


def weight_checker(to: str) -> WeightChecker:
    """The weight checker of the engine that loads a format. Raises RequestError if there is none."""
    target = registry.target(to)
    if not isinstance(target, ServingFormat) or target.weight_checker is None:
        raise RequestError(
            f"--to {to}: digests are those of a serving engine's ranks",
            do=f"Use a format whose engine has a weight checker: {', '.join(weight_checkers())}",
        )
    return target.weight_checker


def weight_checkers() -> dict[str, WeightChecker]:
    """The weight checkers of all engines, by format."""
    return {name: found.weight_checker for name, found in registry.serving_formats().items() if found.weight_checker}


def parameters(planned: Plan) -> dict[str, View]:
    """Every parameter of every rank of a serving engine, by the key of its digest. Each view holds one parameter."""
    # A rank may hold nothing but padding of a table, which is a parameter of it all the same.
    weights = {item.tensor.name for file in planned.layout.files for item in file.tensors if item.tensor.sections}
    return {
        _rank(file.ranks).key(item.tensor.name): View({item.tensor.name: item.tensor}, planned.content.tensors, planned.source_files)
        for file in planned.layout.files
        for item in file.tensors
        if item.tensor.name in weights
    }


def digests_of(of: Mapping[str, View], new_hash: Callable[[], ParameterHash], progress: Progress | None = None) -> dict[str, str]:
    """The digest of each parameter, by key."""

    def perform(job: tuple[str, View]) -> tuple[str, str, int]:
        key, view = job
        (tensor,) = view.values()
        return key, _digest(tensor, new_hash), tensor.nbytes

    found: dict[str, str] = {}
    for key, digest, nbytes in run_jobs(of.items(), lambda: perform, workers_within(None, None, 8, buffers=3)):
        found[key] = digest
        if progress:
            progress(nbytes)
    return {key: found[key] for key in of}


def likely_hash(of: Mapping[str, View], held: Mapping[str, str], checker: WeightChecker) -> Callable[[], ParameterHash]:
    """The way in which a server hashed: the one that gives it most of a few small parameters. held: the server's digests."""
    if len(checker.hashes) == 1:
        return checker.hashes[0]
    common = sorted((key for key in of if key in held), key=lambda key: next(iter(of[key].values())).nbytes)[:_SAMPLE]
    sample = {key: of[key] for key in common}
    counts = [sum(held[key] == digest for key, digest in digests_of(sample, new_hash).items()) for new_hash in checker.hashes]
    return checker.hashes[counts.index(max(counts))]


def _rank(ranks: Mapping[str, int]) -> ServingRank:
    return ServingRank(dp=ranks.get("dp", 0), pp=ranks.get("pp", 0), tp=ranks.get("tp", 0))


def _digest(tensor: LazyTensor, new_hash: Callable[[], ParameterHash]) -> str:
    digest = new_hash()
    try:
        for part in tensor.parts():
            digest.update(part.words().reshape(-1).view("u1").data)
    except UnsupportedError:  # interleaved rows: read it whole
        digest = new_hash()
        digest.update(tensor.words().reshape(-1).view("u1").data)
    return digest.hexdigest()


@dataclass(slots=True)
class ServerComparison(Comparison):
    """What a live server holds, compared with what a checkpoint gives its ranks. Keys are those of `digests`. A difference of the kind
    "values" has other bytes, one of the kind "missing" is not on the server."""

    matching: int = 0
    """Parameters with the expected digest."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Parameters with the expected digest under another name: the server's key -> ours."""
    not_comparable: list[str] = field(default_factory=list)
    """Parameters that cannot be compared with the checkpoint: repacked after loading, so that nothing is left under their name, or made by
    the engine."""

    def keys(self, kind: str) -> list[str]:
        """The parameters that differ in one way."""
        return [each.name for each in self.differences if each.kind == kind]

    def __repr__(self) -> str:
        return f"ServerComparison({self.matching + len(self.renamed):,} equal, {plural(len(self.differences), 'difference')})"


def compare_with_server(expected: Mapping[str, str], held: Mapping[str, str], checker: WeightChecker) -> ServerComparison:
    """Compare the digests of `digests` with those of a server: its answer to the weight checker's action `checksum`."""
    result = ServerComparison()
    empty = {new_hash().hexdigest() for new_hash in checker.hashes}
    by_digest: dict[tuple[ServingRank, str], list[str]] = {}
    for key, digest in expected.items():
        if held.get(key) != digest:
            by_digest.setdefault((_rank_of(key), digest), []).append(key)
    found: set[str] = set()
    different: list[str] = []
    repacked = {_module_of(key) for key, digest in held.items() if digest in empty and expected.get(key) != digest}
    for key, digest in held.items():
        if expected.get(key) == digest:
            result.matching += 1
        elif key in expected:
            # The bias of a repacked layer may have another element type.
            (result.not_comparable if _module_of(key) in repacked else different).append(key)
        elif names := by_digest.get((_rank_of(key), digest)):
            result.renamed[key] = names[0]
            found.update(names)
        else:
            result.not_comparable.append(key)
    # A parameter whose digest stands under another name is found, even if its own name has other bytes.
    result.differences += [Difference(key, "values", "the server holds other bytes") for key in different if key not in found]
    missing = [key for key in expected if key not in held and key not in found]
    result.differences += [Difference(key, "missing", "the server does not hold it under any name") for key in missing]
    result.tensors = result.matching + len(result.renamed) + len(result.differences)
    if not result.tensors:
        result.differences.append(Difference("all parameters", "missing", "the server holds none that can be compared"))
    return result


def _rank_of(key: str) -> ServingRank:
    return split_key(key)[0]


def _module_of(key: str) -> str:
    """The module that a parameter belongs to, with its rank."""
    return key.rpartition(".")[0]
