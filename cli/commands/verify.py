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
    "reshard verify out --signed-by release.pub",
    "reshard verify step-1000/model.sig out --signed-by release.pub",
)
@options.checkpoint("left")
@options.checkpoint("right", required=False)
@click.option("--cast", is_flag=True, help="Where element types differ, cast LEFT's values to RIGHT's before comparing.")
@click.option(
    "--layout", "stored_layout", metavar="FILE", help="The learned layout that a serving engine's files follow, if none lies beside them."
)
@allow_not_comparable
@click.option("--signed-by", metavar="FILE", help="Check that the owner of this public key has signed LEFT as it is (`reshard sign`).")
@click.option("--signature-file", metavar="FILE", help="With --signed-by: the signature of LEFT (default: model.sig in it).")
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

    With --signed-by, LEFT must hold the files that were signed, and no others; that it holds what reshard wrote is not asked. If LEFT is a
    signature, such as step-1000/model.sig, RIGHT must hold the weights of the checkpoint that was signed, whatever its layout.
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
    from reshard.signing.check import SignedComparison, is_signature
    from reshard.storage.server import is_server
    from reshard.storage.trees import chain_of
    from reshard.verbs.verify import verify_written

    metrics = current().metrics
    metrics.label(target=left if right is None else right)
    signer = {name: given.pop(name) for name in ("signed_by", "signature_file")}
    if any(signer.values()) and (right is None or is_signature(left)):
        return _signed(left, right, signer, cast=cast, given=given)
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
        total = weight_bytes(b) + (sum(file.nbytes for file in a.index.files) if signer["signed_by"] else 0)
    result: Any
    with working("verify", total, given) as effort:
        if right is None:
            result = verify_written(left, Effort.of(effort), **about_model)
        else:
            result = reshard.verify(a, b, cast=cast, selection=selection_of(selected), **signer, **effort)
    metrics.record(bytes_read=result.nbytes, tensors=result.tensors, differences=len(result.differences))
    if isinstance(result, SignedComparison):  # LEFT is not as it was signed
        return _signed_reply(result, left)
    if has_server:
        made = document(result, server=server_document(result), signature=None)
        return server_reply(result, str(right).rstrip("/"), made, allowed=allow_not_comparable)
    title, record = f"{left} and {right}", ""
    if right is None:
        title, record = f"{left}: as written?", "the last delta" if len(chain_of(left)) > 1 else "reshard.json"
    return Reply(
        document(result, server=None, signature=None), comparison_sections(result, title, record), 0 if result.equal else 1, brief=True
    )


def _signed(left: str, right: str | None, signer: dict[str, Any], *, cast: bool, given: dict[str, Any]) -> Reply:
    """Whether LEFT is as it was signed; or, if it is a signature, whether RIGHT has the weights that were signed."""
    import reshard
    from reshard.errors import RequestError
    from reshard.opening.keywords import ModelOptions, SelectionOptions
    from reshard.signing.signed_files import covered_files
    from reshard.storage.tar import open_files

    if signer["signed_by"] is None:
        raise RequestError("a signature needs the key that it is checked with", do="Name the public key with --signed-by")
    about_model, selected, formats = options.take(given, ModelOptions), options.take(given, SelectionOptions), given.pop("formats")
    if cast or any(selected.values()) or len(formats) > (right is not None):
        raise RequestError("a cast, a selection or a format is not of a signature", do="Leave it out, or compare two checkpoints")
    other = reshard.open(right, format=next(iter(formats), None), **about_model) if right is not None else None
    total = weight_bytes(other) if other else sum(nbytes or 0 for _, nbytes in covered_files(open_files(left), ()))
    with working("verify", total, given) as effort:
        result: Any = reshard.verify(left, other, **signer, **effort)
    current().metrics.record(bytes_read=result.nbytes, tensors=result.tensors, differences=len(result.differences))
    return _signed_reply(result, left)


def _signed_reply(result: Any, left: str) -> Reply:
    from reshard.pages.comparisons import signed_sections

    made = document(result, server=None, signature=result.signature())
    return Reply(made, signed_sections(result, f"{left}: as signed?"), 0 if result.equal else 1, brief=True)
