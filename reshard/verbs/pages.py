"""The pages of `--html`: what a verb found, as one self-contained file. Each function fills a Page from a value that the verb returned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import TargetError
from reshard.geometry.quantities import nbytes_text, plural
from reshard.index.drawing import shard_map, share_table, tensor_map, tree_list
from reshard.index.fold import Fold, fold
from reshard.picture.page import Html, Page, element, facts, folded, table
from reshard.plans import summary
from reshard.storage.system_calls import system_errors

if TYPE_CHECKING:
    from reshard.index.index import Tensor
    from reshard.verbs.checkpoint import Checkpoint
    from reshard.verbs.outlook import Outlook
    from reshard.verbs.request import PathLike


def write_page(page: Page, path: PathLike, *, interactive: bool = False) -> int:
    """Write a page to a file, which is replaced if it exists, and return its length in bytes."""
    target, content = Path(path), page.render(interactive=interactive).encode("utf-8", "replace")
    if target.is_dir():
        raise TargetError("it is a directory", where=str(target), do="Give the name of a file, such as report.html")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    with system_errors("written", target):
        try:
            partial.write_bytes(content)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    return len(content)


def folded_tree(checkpoint: Checkpoint) -> Fold:
    """The tensors of a checkpoint as a tree in the model's order."""
    order = {name: position for position, name in enumerate(checkpoint.model.weights)} if checkpoint.model else None
    return fold(checkpoint.index.tensors, order)


def checkpoint_page(checkpoint: Checkpoint, outlook: Outlook, tensors: list[Tensor]) -> Page:
    """What a checkpoint is, who holds what, and what it holds. tensors: those that are drawn one by one."""
    index, run = checkpoint.index, checkpoint.index.facts
    tree, page = folded_tree(checkpoint), Page(checkpoint.path)
    nbytes = sum(file.nbytes for file in index.files)
    page.add(
        "Summary",
        facts(
            [
                ("format", " ".join(filter(None, (index.format, run.producer, run.version)))),
                ("model", _model(checkpoint)),
                *([("step", run.step)] if run.step is not None else []),
                *([("mesh", f"{run.mesh}: {run.mesh.ranks} ranks")] if run.mesh else []),
                *([("run", ", ".join(f"{name} {size}" for name, size in run.parallel.items()))] if run.parallel else []),
                ("stored", f"{plural(len(index.tensors), 'tensor')} in {plural(len(index.files), 'file')}, {nbytes_text(nbytes)}"),
                ("complete", _error(outlook.problem) if outlook.problem else "no piece of a tensor is missing"),
                *(("serves", f"{name} at TP {', '.join(map(str, sizes))}") for name, sizes in outlook.engines.items()),
                *(("needed", text) for text in outlook.needed),
                *([("padding", nbytes_text(sum(each.nbytes for each in index.constants)))] if index.constants else []),
                *(("note", note) for note in run.notes),
            ]
        ),
    )
    kinds = [(row.kind, row.dtype, row.tensors, row.elements, nbytes_text(row.nbytes)) for row in summary.kinds(index)]
    page.add("Kinds", table(("kind", "dtype", "tensors", "elements", "bytes"), kinds))
    for tensor in tensors:
        page.add(tensor.name, element("p", f"{tensor.kind} {tensor.dtype} {list(tensor.shape)}"), tensor_map(tensor))
    page.add("Who holds what", shard_map(tree))
    for by in ("rank", "file"):
        content = share_table(index, by)
        page.add(
            f"Bytes by {by}",
            folded(f"{plural(content.count('<tr>') - 1, 'row')}", content, is_open=content.count("<tr>") <= 17) if content else "",
        )
    page.add("Bytes by layer", folded("Every layer", share_table(index, "layer")))
    page.add("Tensors", tree_list(tree))
    return page


def _model(checkpoint: Checkpoint) -> str:
    model = checkpoint.model
    if model is None:
        return "not known"
    return f"{model.architecture.model_type}: {', '.join(f'{name} {size:,}' for name, size in model.dimensions.items())}"


def _error(text: str) -> Html:
    return element("span", text, class_="error")
