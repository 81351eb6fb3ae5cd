"""The verb `verify`, of a live server: does it hold the weights of a checkpoint, on every rank?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from reshard.adapter.save_folders import step_of
from reshard.adapter.serving_format.weight_checker import ServerFacts, ServingRank, WeightChecker, split_key
from reshard.canonical.content import Selection
from reshard.engine.blocks import fingerprint_of_result
from reshard.engine.compare import Difference
from reshard.errors import CheckpointError, RequestError, UnsupportedError, printable
from reshard.geometry.meshes import Parallel
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import PathLike, Progress
from reshard.opening.open import opened
from reshard.plans.digests import is_digest
from reshard.plans.plan import Plan
from reshard.plans.summary import casts
from reshard.requests.planning import plan_conversion
from reshard.requests.request import OWN_ADAPTER, ConversionRequest, cast_of_server
from reshard.storage.server import Server
from reshard.verbs.digests import expected_parameters, weight_checkers
from reshard.verbs.server_comparison import ExpectedParameters, ServerComparison, compare_with_server


class HeldWeights(NamedTuple):
    """What a live server answers about its weights."""

    format: str
    """The format that its engine loads."""
    checker: WeightChecker
    """The weight checker that answered."""
    digests: dict[str, str]
    """The digest of every parameter on every rank."""
    parallel: Parallel
    """The server's parallel sizes, as far as its weights depend on them."""
    dtype: str | None
    """The element type to which the server casts weights, if it says so."""
    version: str | None
    """The version that was set with the weights; empty if none was since the server started; None if the server does not tell."""


def verify_server(
    source: Checkpoint | PathLike, address: str, *, selection: Selection | None = None, progress: Progress | None = None
) -> ServerComparison:
    """Whether a live server holds the weights of a checkpoint: every parameter of every rank, by its digest.

    The server is asked for its engine, its parallel sizes and the digests; the checkpoint is laid out for them. A LoRA adapter beside the
    weights is merged, as `Sender` merges it; `selection` can leave it out. If the version that the server tells is a fingerprint, as `push`
    sets it, it is compared, and so is a step that it names, where the bytes do not decide. Of a LoRA adapter alone, the fingerprint is
    compared with the names of the server's adapters.

    Raises: SystemRefusal if the server cannot be reached, CheckpointError if it has no weight checker or its answer is damaged,
    RequestError if nothing tells the scale of the adapter beside the weights.
    """
    checkpoint = opened(source)
    if (content := checkpoint.content(selection)).is_adapter:
        from reshard.verbs.serve.verify_adapter import verify_adapter

        return verify_adapter(checkpoint, address)
    held = held_weights(Server.at(address))
    asked = ConversionRequest.of(held.format, {"dtype": cast_of_server(checkpoint.index, held.dtype)})
    request = replace(asked, target=replace(asked.target, parallel=held.parallel), selection=selection or Selection())
    if content.adapter:
        _check_settings(checkpoint)
        request = replace(request, merge_adapter=(OWN_ADAPTER,), adapter_weights=(1.0,))

    def compared(planned: Plan) -> ServerComparison:
        expected = expected_parameters(planned, held.digests, held.checker, progress)
        return compare_with_server(_on_replicas(expected, held.digests, address), held.digests, held.checker)

    planned = plan_conversion(checkpoint, request)
    result = compared(planned)
    values_differ = bool(result.differences)
    _compare_versions(result, planned, held.version)
    _compare_steps(result, checkpoint, held.version)
    result.notes.append(f"the server runs {held.format} on {held.parallel}")
    if content.adapter:
        result.notes.append("compared with the LoRA adapter of the checkpoint merged into its weights")
        base = replace(request, merge_adapter=(), adapter_weights=(), drop_adapter=True)
        if values_differ and not compared(plan_conversion(checkpoint, base)).differences:
            result.notes.append("what could be compared is the base of the checkpoint: the server holds it without the LoRA adapter")
    result.notes += [f"compared after a cast of {count} from {a} to {b}, as the server casts" for a, b, count in casts(planned)]
    return result


def _check_settings(checkpoint: Checkpoint) -> None:
    """Raises RequestError if nothing tells by which factor the adapter beside the weights is merged."""
    if (checkpoint.model_files.adapter_config or {}).get("lora_alpha") is None:
        raise RequestError(
            "the checkpoint has a LoRA adapter, and nothing tells its lora_alpha",
            where=checkpoint.path,
            why="The weights that a server holds with the adapter depend on it",
            do="Put the adapter_config.json of the training into that directory; or compare the base alone with `exclude='*lora_*'`",
        )


def held_weights(server: Server) -> HeldWeights:
    """What a server answers. Raises CheckpointError if it has no weight checker."""
    for name, checker in weight_checkers().items():
        if (answer := server.ask(checker.path, {"action": "checksum"})) is None:
            continue
        digests = checker.digests_in(answer, where=server.address)
        try:
            facts = checker.about(server.ask(checker.info_path) or {})
        except (CheckpointError, KeyError, TypeError, ValueError):
            facts = ServerFacts()
        return HeldWeights(name, checker, digests, _parallel(server, facts, digests), facts.dtype, _version(server, checker))
    starts = "; ".join(checker.start for checker in weight_checkers().values())
    raise CheckpointError("the server has no weight checker", where=server.address, do=f"Start it with one. {starts}")


def _parallel(server: Server, facts: ServerFacts, digests: Mapping[str, str]) -> Parallel:
    """The parallel sizes: from the ranks that answered, and for the experts from what the server says about itself."""
    ranks = {split_key(key)[0] for key in digests}
    sizes = ServingRank(*(max(numbers) + 1 for numbers in zip(*ranks, strict=True)))
    if len(ranks) != math.prod(sizes):
        answered = f"{len(ranks):,} of {math.prod(sizes):,} ranks answered"
        raise CheckpointError(answered, where=server.address, do="Ask again when all of them run")
    if facts.expert_parallel and sizes.dp * sizes.pcp > 1:
        raise UnsupportedError(
            f"the server splits experts over {sizes.dp * sizes.pcp} data-parallel ranks",
            where=server.address,
            why="reshard lays out experts for the ranks of one replica only",
        )
    return Parallel(tp=sizes.tp, pp=sizes.pp, ep=sizes.tp if facts.expert_parallel else 1)


def _version(server: Server, checker: WeightChecker) -> str | None:
    """The version that was set with a server's weights; empty if none was since it started; None if it does not tell."""
    try:
        return checker.version(server.ask(checker.version_path) or {}) if checker.version_path else None
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None


def _compare_versions(result: ServerComparison, planned: Plan, version: str | None) -> None:
    """Compare the server's version with the fingerprint of the checkpoint, if it is one."""
    result.version = version or None
    if version is None or not is_digest(version):
        return
    result.fingerprint = fingerprint_of_result(planned).root
    if result.same_version:
        result.notes.append(f"the server's version is this checkpoint's fingerprint, {version}")
    else:
        detail = f"the server's version is {version}, and this checkpoint's fingerprint is {result.fingerprint}"
        result.differences.append(Difference("weight_version", "version", detail))


def _compare_steps(result: ServerComparison, checkpoint: Checkpoint, version: str | None) -> None:
    """Compare the step that the server's version names, such as step-300, with that of the checkpoint. A number alone may count updates, as
    that of `Sender` does, and a name of a step counts less than the bytes: it decides only where these do not."""
    if version is None or is_digest(version):
        return
    if not version:
        result.notes.append("no update has set a version since the server started")
        return
    told = f"the server's version is {printable(version)[:80]}"
    step = step_of(checkpoint.path) if checkpoint.index.facts.step is None else checkpoint.index.facts.step
    named = step_of(version)
    is_number = version.isascii() and version.isdecimal() and len(version) < 19
    if step is None:
        result.notes.append(f"{told}, which says nothing about this checkpoint")
    elif named == step or (is_number and int(version) == step):
        result.notes.append(f"{told}, and this checkpoint is of step {step}")
    elif named is not None and not result.equal:
        result.differences.append(Difference("weight_version", "version", f"{told}, and this checkpoint is of step {step}"))
    elif named is not None:
        result.notes.append(f"{told}, and this checkpoint, whose weights it holds, is of step {step}")
    else:
        why = "a number that may count updates" if is_number else "which names no step"
        result.notes.append(f"{told}, {why}: it says nothing about this checkpoint, which is of step {step}")


def _on_replicas(expected: ExpectedParameters, held: Mapping[str, str], address: str) -> ExpectedParameters:
    """What is expected on every replica: ranks that differ in their data-parallel or context-parallel number hold the same."""
    replicas = {(rank.dp, rank.pcp) for rank in (split_key(key)[0] for key in held)}
    if len(replicas) * len(expected.digests) > 4 * len(held) and len(replicas) > 1:
        raise CheckpointError(
            f"the server tells of {len(held):,} parameters on {len(replicas):,} replicas, and the model has {len(expected.digests):,}",
            where=address,
        )
    keys = {
        rank._replace(dp=dp, pcp=pcp).key(name): key
        for key, (rank, name) in ((key, split_key(key)) for key in expected.digests)
        for dp, pcp in replicas
    }
    return ExpectedParameters(
        {replica: expected.tensors[key] for replica, key in keys.items()},
        {replica: expected.digests[key] for replica, key in keys.items()},
        expected.new_hash,
    )
