"""reshard cache: converted models for an engine's start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.documents import document
from reshard.geometry.quantities import nbytes_text, plural
from reshard.pages.sections import Rows
from reshard.pages.texts import age_text

from ... import options
from ...progress import working
from ...replies import Reply

if TYPE_CHECKING:
    from reshard.verbs.serve.cache import Cache


@options.command(
    "cache",
    "vllm serve $(reshard cache get llama-3-8b --to vllm --tp 8) --load-format sharded_state -tp 8",
    "reshard cache list",
    "reshard cache clean --yes",
)
@click.argument("action", type=click.Choice(["get", "list", "clean"]))
@options.checkpoint("source", required=False)
@options.option(
    "--cache", "folder", section=options.OUTPUT, metavar="DIR", help="The cache (default: RESHARD_CACHE, else ~/.cache/reshard)."
)
@options.option(
    "--max-size", section=options.OUTPUT, type=options.SIZE, metavar="SIZE",
    help="get: remove what was used longest ago until the cache is not larger. clean: keep so much.",
)  # fmt: skip
@options.switch("--yes", options.OUTPUT, "clean: remove. Without it, nothing is removed.")
@options.target(required=False)
@options.selection("Convert")
@options.format_name
@options.model
@options.fail_if_skipped
@options.effort
def command(action: str, source: str | None, to: str | None, folder: str | None, yes: bool, **given: Any) -> Reply:
    """get: print the folder of SOURCE, converted for an engine: from the cache, or converted into it now. Nothing else is printed.

    list: what is in the cache. clean: what can be removed from it, and with --yes remove it.

    An entry is found by the plan and by names, lengths and times of the source's files, and is named by its content: the fingerprint of the
    weights, the sizes, the engine's version. Processes that ask at once convert once.
    """
    from reshard.verbs.serve.cache import Cache

    max_size = given.pop("max_size")
    context = click.get_current_context()
    if action == "get":
        if source is None or to is None:
            raise click.UsageError("`reshard cache get SOURCE --to FORMAT` needs both", context)
        return _get(source, to, folder, max_size, given)
    if source is not None:
        raise click.UsageError(f"`reshard cache {action}` takes no SOURCE", context)
    cache = Cache(folder)
    return _list(cache) if action == "list" else _clean(cache, max_size or 0, yes)


def _get(source: str, to: str, folder: str | None, max_size: int | None, given: dict[str, Any]) -> Reply:
    import reshard
    from reshard.opening.keywords import ConvertOptions, OpenOptions
    from reshard.verbs.plan import effort_of

    asked, show_progress = options.take(given, ConvertOptions), given.pop("show_progress")
    plan = reshard.plan(reshard.open(source, **options.take(given, OpenOptions)), to=to, **given)
    effort = {**effort_of(plan, asked), "show_progress": show_progress}
    with working("convert", sum(file.nbytes for file in plan.layout.files), effort) as working_with:
        entry = reshard.cache(plan, root=folder, max_size=max_size, **working_with)
    return Reply(document(entry, source_checks=entry.source_checks), [entry.path])


def _list(cache: Cache) -> Reply:
    entries = cache.entries()
    rows = [
        (entry.path.rpartition("/")[2], entry.format, nbytes_text(entry.nbytes), age_text(entry.age), entry.source) for entry in entries
    ]
    line = f"{cache.root}: {plural(len(entries), 'entry', 'entries')}, {nbytes_text(sum(entry.nbytes for entry in entries))}"
    table = ("", Rows(("entry", "for", "bytes", "last used", "from"), rows)) if rows else ()
    return Reply({"root": str(cache.root), "entries": [document(entry) for entry in entries]}, [line, *table])


def _clean(cache: Cache, keep: int, yes: bool) -> Reply:
    """Remove the entries that were used longest ago, until at most `keep` bytes are left."""
    entries, kept, removable = cache.entries(), 0, []
    for entry in entries:
        kept += entry.nbytes
        if kept > keep:
            removable.append(entry)
    for entry in removable if yes else ():
        cache.remove(entry)
    size = nbytes_text(sum(entry.nbytes for entry in removable))
    done = "removed" if yes else "can be removed. Nothing was removed: --yes removes"
    made = {"root": str(cache.root), "removed": yes, "entries": [document(entry) for entry in removable]}
    return Reply(made, [f"{cache.root}: {plural(len(removable), 'entry', 'entries')}, {size}, {done}"])
