"""reshard verify: do two checkpoints hold the same weights? Does a folder hold what reshard wrote, or a live server what it should?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.documents import document
from reshard.geometry.quantities import plural

from .. import options
from ..invocation import current
from ..json_output import show_json
from ..progress import bar
from ..server import allow_not_comparable, exit_code, server_document, show_server
from ..tables import nbytes_text, show, table

if TYPE_CHECKING:
    from reshard.engine.compare import Comparison
    from reshard.verbs.server_comparison import ServerComparison


@click.command(
    "verify",
    cls=options.Command,
    examples=[
        "reshard verify step-1000 out",
        "reshard verify step-1000 out --cast",
        "reshard verify out",
        "reshard verify step-1000 http://localhost:8000",
    ],
)
@click.argument("left")
@click.argument("right", required=False)
@click.option("--cast", is_flag=True, help="Where element types differ, cast LEFT's values to RIGHT's before comparing.")
@click.option(
    "--layout", "stored_layout", metavar="FILE", help="The learned layout that a serving engine's files follow, if none lies beside them."
)
@allow_not_comparable
@options.selection("Compare")
@options.model
@options.effort
@options.page
@options.as_json
def command(
    left: str, right: str | None, cast: bool, allow_not_comparable: bool, as_json: bool, show_progress: bool | None, **given: Any
) -> None:
    """Check that LEFT and RIGHT hold the same weights, bit by bit, whatever their layouts.

    Names, shapes, element types and values are compared, including replicas and padding. The exit code is 1 if they differ. If only one
    of them has a config.json, it applies to both.

    Without RIGHT, check that the folder LEFT holds what reshard wrote: every bit of weights, optimizer state, replicas, padding, headers
    and small files is compared with reshard.json and reshard.digests, and missing and added files are named.

    If RIGHT is the address of a server, such as http://localhost:8000, ask its weight checker for the digest of every parameter of every
    rank, and compare them with those that LEFT has at the server's parallel sizes. vLLM answers if it was started with
    VLLM_SERVER_DEV_MODE=1. Where the engine has repacked weights after loading in a way that is not known, the answer is "cannot tell",
    with exit code 1; --allow-not-comparable accepts it.
    """
    import reshard
    from reshard.engine.pool import Effort
    from reshard.errors import RequestError
    from reshard.plans.manifest import usable_manifest
    from reshard.requests.keywords import EffortOptions, ModelOptions
    from reshard.requests.opening import open_both
    from reshard.requests.request import selection_of
    from reshard.storage.server import is_server
    from reshard.storage.tar import open_tree
    from reshard.verbs.verify import verify_written

    metrics, page = current().metrics, options.page_of(given)
    metrics.label(target=left if right is None else right)
    about_model, effort = options.take(given, ModelOptions), options.take(given, EffortOptions)
    result: Comparison
    on_server: ServerComparison | None = None
    if right is not None and is_server(right):
        from reshard.verbs.verify_server import verify_server

        if cast:
            raise RequestError("a cast needs a second checkpoint", why="A server is compared in the element type to which it casts weights")
        opened = reshard.open(left, **about_model)
        total = sum(tensor.nbytes for tensor in opened.index.tensors if tensor.kind == "weight")
        with bar(total, "verify", show_progress) as advance:
            on_server = verify_server(opened, right, selection=selection_of(given), progress=advance)
        result = on_server
    elif allow_not_comparable:
        raise RequestError("--allow-not-comparable is for a server", do="Give the address of a server as RIGHT, or leave it out")
    elif right is None:
        if cast or any(given.values()):
            raise RequestError("a cast or a selection needs a second checkpoint", do="Give RIGHT, or leave these options out")
        manifest = usable_manifest(open_tree(left))
        metrics.label(format=manifest.format if manifest else None)
        total = sum(manifest.files.values()) if manifest and manifest.files else 0
        with bar(total, "verify", show_progress) as advance:
            result = verify_written(left, Effort(**{**effort, "progress": advance}), **about_model)
    else:
        a, b = open_both(left, right, **about_model)
        metrics.label(format=b.format)
        total = sum(tensor.nbytes for tensor in b.index.tensors if tensor.kind == "weight")
        with bar(total, "verify", show_progress) as advance:
            result = reshard.verify(a, b, cast=cast, selection=selection_of(given), **{**effort, "progress": advance})
    metrics.record(bytes_read=result.nbytes, tensors=result.tensors, differences=len(result.differences))
    if page.path:
        from reshard.pages.pages import comparison_page

        page.write(comparison_page(result, f"{left}: as written?" if right is None else f"{left} and {right}"))
    if as_json:
        show_json(document(result, server=server_document(on_server) if on_server is not None else None))
    elif on_server is not None:
        show_server(on_server, str(right).rstrip("/"))
    else:
        _show(result, with_manifest=right is None)
    is_equal = exit_code(on_server, allowed=allow_not_comparable) == 0 if on_server is not None else result.equal
    click.get_current_context().exit(0 if is_equal else 1)


def _show(result: Comparison, *, with_manifest: bool) -> None:
    """The result, the differences, and what was not compared."""
    compared = f"{plural(result.tensors, 'tensor')}, {nbytes_text(result.nbytes)}, every bit"
    if result.equal:
        show(f"as written: {compared}, and the other files" if with_manifest else f"equal: {compared}")
    else:
        of_what = "from reshard.json" if with_manifest else f"in {plural(result.tensors, 'common tensor')}"
        show(f"different: {plural(len(result.differences), 'difference')} {of_what}")
        first = "tensor or file" if with_manifest else "tensor"
        if not current().log.quiet:
            show(*table([(d.name, d.kind, d.detail) for d in result.differences], (first, "what", "how")))
    for note in result.notes if not current().log.quiet else ():
        show(f"  note      {note}")
