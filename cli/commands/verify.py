"""reshard verify: do two checkpoints hold the same weights? Does a folder hold what reshard wrote, or a live server what it should?"""

from __future__ import annotations

from typing import Any

import click

from reshard.geometry.documents import document

from .. import options
from ..invocation import current
from ..progress import weight_bytes, working
from ..replies import Reply
from ..server import allow_not_comparable, server_document, server_reply


@options.command(
    "verify",
    "reshard verify step-1000 out",
    "reshard verify step-1000 out --cast",
    "reshard verify out",
    "reshard verify step-1000 http://localhost:8000",
)
@options.checkpoint("left")
@options.checkpoint("right", required=False)
@click.option("--cast", is_flag=True, help="Where element types differ, cast LEFT's values to RIGHT's before comparing.")
@click.option(
    "--layout", "stored_layout", metavar="FILE", help="The learned layout that a serving engine's files follow, if none lies beside them."
)
@allow_not_comparable
@options.selection("Compare")
@options.formats_of_two
@options.choice
@options.model
@options.effort
@options.page
def command(left: str, right: str | None, cast: bool, allow_not_comparable: bool, **given: Any) -> Reply:
    """Check that LEFT and RIGHT hold the same weights, bit by bit, whatever their layouts.

    Names, shapes, element types and values are compared, including replicas and padding. The exit code is 1 if they differ. If only one
    of them has a config.json, it applies to both.

    Without RIGHT, check that the folder LEFT holds what reshard wrote: every bit of weights, optimizer state, replicas, padding, headers
    and small files is compared with reshard.json and reshard.digests, and missing and added files are named.

    If RIGHT is the address of a server, such as http://localhost:8000, ask its weight checker for the digest of every parameter of every
    rank, and compare them with those that LEFT has at the server's parallel sizes. vLLM answers if it was started with
    VLLM_SERVER_DEV_MODE=1. Where the engine has repacked weights after loading in a way that is not known, the answer is "cannot tell",
    with exit code 1; --allow-not-comparable accepts it. A LoRA adapter beside the weights is merged first, as live updates do. If LEFT is a
    LoRA adapter alone, its fingerprint is compared with those in the names of the server's adapters, which `push --adapter` sets.
    """
    import reshard
    from reshard.engine.pool import Effort
    from reshard.errors import RequestError
    from reshard.opening.deltas import tree_of
    from reshard.opening.keywords import ModelOptions, SelectionOptions
    from reshard.opening.open import open_both
    from reshard.pages.comparisons import comparison_sections
    from reshard.plans.manifest import usable_manifest
    from reshard.requests.request import selection_of
    from reshard.storage.server import is_server
    from reshard.storage.trees import chain_of
    from reshard.verbs.verify import verify_written

    metrics = current().metrics
    metrics.label(target=left if right is None else right)
    about_model, selected, has_server = options.take(given, ModelOptions), options.take(given, SelectionOptions), is_server(right)
    a: Any = left
    b: Any = right
    formats = given.pop("formats")
    if (has_server and len(formats) > 1) or (right is None and formats):
        raise RequestError("--format is given for more checkpoints than there are", do="Give RIGHT, or leave it out")
    if has_server:
        a = reshard.open(left, format=next(iter(formats), None), **about_model)
        total = weight_bytes(a)
    elif allow_not_comparable:
        raise RequestError("--allow-not-comparable is for a server", do="Give the address of a server as RIGHT, or leave it out")
    elif right is None:
        if cast or any(selected.values()):
            raise RequestError("a cast or a selection needs a second checkpoint", do="Give RIGHT, or leave these options out")
        manifest = usable_manifest(tree_of(left))
        metrics.label(format=manifest.format if manifest else None)
        total = sum(manifest.files.values()) if manifest and manifest.files else 0
    else:
        a, b = open_both(left, right, formats=formats, **about_model)
        metrics.label(format=b.format)
        total = weight_bytes(b)
    result: Any
    with working("verify", total, given) as effort:
        if right is None:
            result = verify_written(left, Effort.of(effort), **about_model)
        else:
            result = reshard.verify(a, b, cast=cast, selection=selection_of(selected), **effort)
    metrics.record(bytes_read=result.nbytes, tensors=result.tensors, differences=len(result.differences))
    if has_server:
        made = document(result, server=server_document(result))
        return server_reply(result, str(right).rstrip("/"), made, allowed=allow_not_comparable)
    title, record = f"{left} and {right}", ""
    if right is None:
        title, record = f"{left}: as written?", "the last delta" if len(chain_of(left)) > 1 else "reshard.json"
    return Reply(document(result, server=None), comparison_sections(result, title, record), 0 if result.equal else 1, brief=True)
