"""The verb `digests`: the SHA-256 of every parameter of every rank as a serving engine holds it, and the comparison with what a live server
says. The server is asked by another program, such as curl: reshard opens no network connection."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Unpack

from reshard.adapter import registry
from reshard.adapter.serving_format import ServingFormat
from reshard.engine.pool import run_jobs, workers_within
from reshard.engine.views import LazyTensor, View
from reshard.errors import RequestError, UnsupportedError
from reshard.geometry.quantities import plural
from reshard.verbs.checkpoint import Checkpoint
from reshard.verbs.plan import plan
from reshard.verbs.request import PathLike, PlanOptions, Progress


def digests(source: Checkpoint | PathLike, *, to: str, progress: Progress | None = None, **options: Unpack[PlanOptions]) -> dict[str, str]:
    """The SHA-256 of every parameter of every rank, under the keys of vLLM's weight checker: `dp0:pp0:pcp0:tp3:` and the parameter's name.
    Takes the keywords of `plan`. The names are those of the engine's files; where the engine has two names for one parameter, its checker
    may use the other one.

    Buffers, such as the scales of the KV cache, are left out, as in the engine's checker.

    Raises: RequestError if the format is not a serving engine's.
    """
    if not isinstance(registry.target(to), ServingFormat):
        raise RequestError(f"--to {to}: digests are those of a serving engine's ranks", do="Use a serving engine's format, such as vllm")
    planned = plan(source, to=to, **options)
    # A rank may hold nothing but padding of a table, which is a parameter of it all the same.
    weights = {item.tensor.name for file in planned.layout.files for item in file.tensors if item.tensor.sections}
    jobs = [
        (_prefix(file.ranks) + item.tensor.name, View({item.tensor.name: item.tensor}, planned.content.tensors, planned.source_files))
        for file in planned.layout.files
        for item in file.tensors
        if item.tensor.name in weights
    ]

    def perform(job: tuple[str, View]) -> tuple[str, str, int]:
        key, view = job
        (tensor,) = view.values()
        return key, _sha256(tensor), tensor.nbytes

    found: dict[str, str] = {}
    for key, digest, nbytes in run_jobs(jobs, lambda: perform, workers_within(None, None, 8, buffers=3)):
        found[key] = digest
        if progress:
            progress(nbytes)
    return {key: found[key] for key, _ in jobs}


def _prefix(ranks: Mapping[str, int]) -> str:
    """The rank as vLLM 0.32 names it (v1/worker/gpu_worker.py, _weight_checksum_prefix)."""
    return f"dp{ranks.get('dp', 0)}:pp{ranks.get('pp', 0)}:pcp0:tp{ranks.get('tp', 0)}:"


def _sha256(tensor: LazyTensor) -> str:
    digest = hashlib.sha256()
    try:
        for part in tensor.parts():
            digest.update(part.words().reshape(-1).view("u1").data)
    except UnsupportedError:  # interleaved rows: read it whole
        digest = hashlib.sha256(tensor.words().reshape(-1).view("u1").data)
    return digest.hexdigest()


@dataclass(slots=True)
class ServerComparison:
    """What a live server holds, compared with what a checkpoint gives its ranks. Keys are those of `digests`."""

    equal: int = 0
    """Parameters with the expected digest."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Parameters with the expected digest under another name: the server's key -> ours."""
    different: list[str] = field(default_factory=list)
    """Parameters with another digest: other weights, or repacked by the engine after loading."""
    missing: list[str] = field(default_factory=list)
    """Parameters that are expected and that the server does not have under any name."""
    not_comparable: list[str] = field(default_factory=list)
    """Parameters of the server that cannot be compared with the checkpoint: made by the engine, or repacked under another name."""

    @property
    def is_equal(self) -> bool:
        """Whether every expected parameter was found with its digest."""
        return not self.different and not self.missing

    def __repr__(self) -> str:
        return f"ServerComparison({self.equal + len(self.renamed):,} equal, {plural(len(self.different), 'difference')})"


def compare_with_server(expected: Mapping[str, str], held: Mapping[str, str]) -> ServerComparison:
    """Compare the digests of `digests` with those of a server: its answer to the weight checker's action `checksum`."""
    result = ServerComparison()
    by_digest: dict[tuple[str, str], list[str]] = {}
    for key, digest in expected.items():
        if held.get(key) != digest:
            by_digest.setdefault((_rank_of(key), digest), []).append(key)
    found: set[str] = set()
    for key, digest in held.items():
        if expected.get(key) == digest:
            result.equal += 1
        elif key in expected:
            result.different.append(key)
        elif names := by_digest.get((_rank_of(key), digest)):
            result.renamed[key] = names[0]
            found.update(names)
        else:
            result.not_comparable.append(key)
    # A parameter whose digest stands under another name is found, even if its own name has other bytes.
    result.different = [key for key in result.different if key not in found]
    result.missing = [key for key in expected if key not in held and key not in found]
    return result


def _rank_of(key: str) -> str:
    return key.rpartition(":")[0]
