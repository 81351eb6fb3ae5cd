"""People's front: pages for a browser, made when they are opened. They hold no script and load nothing.

/                       the repositories; a client that does not ask for HTML gets S3's list of buckets
/-/ORG/NAME/REV         what the checkpoint holds, its files and its tensors
?plan                   what the conversion that is served does
?tensor=N               one tensor: its shape and sharding, how its values are distributed, the first of them
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from reshard.doors.catalogue import MAIN, Catalogue, Repository, Revision
from reshard.doors.fronts.messages import HTML, Request, Response, encoded
from reshard.engine.views import LazyTensor
from reshard.geometry.quantities import nbytes_text
from reshard.geometry.sections import whole
from reshard.index.coverage import sharding_text
from reshard.pages.checkpoints import checkpoint_sections
from reshard.pages.pages import page_of
from reshard.pages.plans import plan_sections
from reshard.pages.sections import Facts, Head, Rows, Section, Share, TreeView
from reshard.pages.texts import shape_text
from reshard.picture.page import Html, element
from reshard.secrets import public
from reshard.verbs.look.inspection import Inspection

_BINS, _MOST_VALUES, _MOST_ROWS = 24, 64, 1000


def answer(request: Request, catalogue: Catalogue) -> Response | None:
    """The page that a browser asks for; None for anything else. Raises ReshardError if a checkpoint cannot be read."""
    segments = request.segments
    if segments == ("",) and not request.asks_s3 and "text/html" in request.headers.get("accept", ""):
        return _page(_repositories(catalogue))
    repository = catalogue.by_name.get("/".join(segments[1:3])) if segments[0] == "-" and len(segments) == 4 else None
    if repository is None or (revision := repository.revision(segments[3])) is None:
        return _page([Head("not found", "page"), Facts([("page", "there is no such page")])], 404) if segments[0] == "-" else None
    number = request.parameter("tensor")
    if number.isascii() and number.isdecimal() and int(number[:9]) < len(revision.folder.plan.content.tensors):
        return _page(_tensor(revision, int(number[:9])))
    if any(name == "plan" for name, _ in request.query):
        return _page([Head(f"plan of {revision.repository}", "plan"), *plan_sections(revision.folder.plan)])
    return _page(_contents(repository, revision))


def _page(sections: Iterable[Section], status: int = 200) -> Response:
    content = page_of([*sections]).render()
    return Response(status, content.encode("utf-8", "replace"), {"Content-Type": HTML, "Cache-Control": "no-store"})


def _link(text: str, *place: str, query: str = "") -> Html:
    return element("a", text, href=f"/{'/'.join(encoded(part, '/-_.~') for part in place)}{query}")


def _repositories(catalogue: Catalogue) -> Iterator[Section]:
    yield Head("reshard hub", "server")
    rows = [
        (_link(repository.name, "-", repository.name, name), name, repository.bucket)
        for repository in catalogue.by_name.values()
        for name in (repository.revisions[-_MOST_ROWS:] if repository.is_run else (MAIN,))
    ]
    yield Rows(("repository", "revision", "bucket"), rows, "Repositories")


def _contents(repository: Repository, revision: Revision) -> Iterator[Section]:
    """What a checkpoint holds, with links to its files and tensors."""
    folder, place = revision.folder, ("-", revision.repository, revision.name)
    if folder.checkpoint is not None:
        yield from checkpoint_sections(Inspection(folder.checkpoint), TreeView(), None)
    else:
        yield Head(public(folder.source_path), "checkpoint")
    yield Facts([("plan", _link("what is converted when a file is read", *place, query="?plan"))], "Served")
    above = (repository.bucket, revision.name) if repository.is_run else (repository.bucket,)
    files = [(_link(path, *above, path), nbytes_text(file.size)) for path, file in folder.items()]
    yield Rows(("file", "bytes"), files[:_MOST_ROWS], "Files", hidden=max(0, len(files) - _MOST_ROWS))
    tensors = folder.plan.content.tensors
    rows = [
        (_link(name, *place, query=f"?tensor={number}"), tensor.dtype.name, shape_text(tensor.shape), nbytes_text(tensor.nbytes))
        for number, (name, tensor) in zip(range(_MOST_ROWS), tensors.items(), strict=False)
    ]
    yield Rows(("tensor", "dtype", "shape", "bytes"), rows, "Single tensors", hidden=len(tensors) - len(rows))


def _tensor(revision: Revision, number: int) -> Iterator[Section]:
    """One tensor. Of a large one, the values of the first 2 million elements are read."""
    plan = revision.folder.plan
    name, tensor = list(plan.content.tensors.items())[number]
    lazy = LazyTensor(whole(name, tensor.dtype, tensor.shape), plan.content.tensors, plan.source_files)
    first = next(lazy.parts(), None)
    values = (
        np.zeros(0)
        if first is None
        else first.numpy().astype(np.float64 if tensor.dtype.name[0] != "C" else np.complex128).real.reshape(-1)
    )
    finite = values[np.isfinite(values)]
    facts: list[tuple[str, object]] = [
        ("dtype", tensor.dtype.name),
        ("shape", shape_text(tensor.shape)),
        ("size", nbytes_text(tensor.nbytes)),
    ]
    yield Head(name, "tensor", facts=facts)
    yield Facts(
        [
            ("sharding", sharding_text(tensor)),
            ("files", ", ".join(tensor.shards.holders[:8])),
            ("from", _link("the checkpoint", "-", revision.repository, revision.name)),
        ]
    )
    if finite.size:
        counts, edges = np.histogram(finite, _BINS)
        bars = [
            (f"{low:.4g}", f"{high:.4g}", int(count), Share(count / counts.max()))
            for low, high, count in zip(edges, edges[1:], counts, strict=False)
        ]
        read = f"{finite.size:,} finite values of the first {values.size:,} of {tensor.elements:,}"
        note = f"{read}: mean {finite.mean():.6g}, standard deviation {finite.std():.6g}"
        yield Rows(("from", "to", "values", ""), bars, "Histogram", notes=[note])
    yield Facts([("values", ", ".join(f"{element:.6g}" for element in values[:_MOST_VALUES]))], "First values")
