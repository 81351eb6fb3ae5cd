"""The verb `digests`: the digest of every parameter of every rank as a serving engine holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Unpack

from reshard.adapter import registry
from reshard.adapter.serving_format import ServingFormat
from reshard.adapter.serving_format.weight_checker import ParameterHash, ServingRank, WeightChecker
from reshard.engine.pool import NO_LIMITS, run_jobs
from reshard.engine.views import LazyTensor
from reshard.errors import RequestError, UnsupportedError
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import PathLike, PlanOptions, Progress, checked_keywords
from reshard.plans.plan import Plan
from reshard.verbs.plan import plan
from reshard.verbs.server_comparison import ExpectedParameters

# Parameters, the smallest ones, that tell how a server hashes.
_SAMPLE = 16


@checked_keywords
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
            f"`to={to}`: digests are those of a serving engine's ranks",
            do=f"Use a format whose engine has a weight checker: {', '.join(weight_checkers())}",
        )
    return target.weight_checker


def weight_checkers() -> dict[str, WeightChecker]:
    """The weight checkers of all engines, by format."""
    return {name: format.weight_checker for name, format in registry.serving_formats().items() if format.weight_checker}


def expected_parameters(
    planned: Plan, held: Mapping[str, str], checker: WeightChecker, progress: Progress | None = None
) -> ExpectedParameters:
    """What a plan gives the ranks of a serving engine, hashed as the server has hashed. held: the server's digests."""
    tensors = parameters(planned)
    new_hash = likely_hash(tensors, held, checker)
    return ExpectedParameters(tensors, digests_of(tensors, new_hash, progress), new_hash)


def parameters(planned: Plan) -> dict[str, LazyTensor]:
    """Every parameter of every rank of a serving engine, by the key of its digest."""
    # A rank may hold nothing but padding of a table, which is a parameter of it all the same.
    weights = {item.tensor.name for file in planned.layout.files for item in file.tensors if item.tensor.sections}
    return {
        _rank(file.ranks).key(item.tensor.name): LazyTensor(item.tensor, planned.content.tensors, planned.source_files)
        for file in planned.layout.files
        for item in file.tensors
        if item.tensor.name in weights
    }


def digests_of(of: Mapping[str, LazyTensor], new_hash: Callable[[], ParameterHash], progress: Progress | None = None) -> dict[str, str]:
    """The digest of each parameter, by key."""

    def perform(job: tuple[str, LazyTensor]) -> tuple[str, str, int]:
        key, tensor = job
        return key, _digest(tensor, new_hash), tensor.nbytes

    by_key: dict[str, str] = {}
    for key, digest, nbytes in run_jobs(of.items(), lambda: perform, NO_LIMITS.threads(8, buffers=3)):
        by_key[key] = digest
        if progress:
            progress(nbytes)
    return {key: by_key[key] for key in of}


def likely_hash(of: Mapping[str, LazyTensor], held: Mapping[str, str], checker: WeightChecker) -> Callable[[], ParameterHash]:
    """The way in which a server hashed: the one that gives it most of a few small parameters. held: the server's digests."""
    if len(checker.hashes) == 1:
        return checker.hashes[0]
    common = sorted((key for key in of if key in held), key=lambda key: of[key].nbytes)[:_SAMPLE]
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
