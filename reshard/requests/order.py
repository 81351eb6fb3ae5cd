"""Orders and plan files: a conversion is planned once and run by many machines.

A plan file is an order and not a map. It holds what was asked for, the small files that the options name, and what the source's files
looked like; no place of a byte. Whoever reads it opens the source, plans again, and compares the digests of the two plans. So every plan
that runs has been proven, and a damaged or forged file is refused (docs/recipes/many-machines.md says why).

    safetensors:  {"__metadata__": {"kind": "reshard plan", "version": "2", "order": JSON, "digest": of everything},
                   "model/config.json": U8 [n], "architecture/mine.yaml": U8 [n], ...}
    order         {"reshard": version, "source": path, "open": keywords, "plan": keywords, "identity": digest, "request": digest,
                   "files": [[path, bytes, stamp, digest of samples, or null in a store], ...]}
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import reshard
from reshard.adapter import registry
from reshard.containers import safetensors
from reshard.engine.events import details, event
from reshard.engine.record import request_digest, samples
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.geometry.dtypes import from_torch
from reshard.geometry.quantities import plural
from reshard.geometry.value import value
from reshard.index.index import StoredFile
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import OpenOptions
from reshard.opening.open import open_several
from reshard.plans.digests import content_digest
from reshard.plans.plan import Order, Plan
from reshard.plans.summary import drops
from reshard.requests.planning import plan_conversion
from reshard.requests.request import ConversionRequest
from reshard.secrets import masked_in, public
from reshard.storage.files import Files, VirtualFiles, inside, read_range
from reshard.storage.system_calls import system_errors
from reshard.storage.trees import numbered, tree_at, trees_of

_KIND, _VERSION, _PLAN = "reshard plan", "2", "plan"
# What is planned takes memory for each rank of the target: 200 MB for as many as these.
_MOST_RANKS = 1 << 16
# The keywords whose files belong to an order, besides the model's folder.
_ATTACHED = ("architecture", "stored_layout", "layout", "adapter_config")


def planned(source: Checkpoint, request: ConversionRequest, asked: Mapping[str, Any], others: Sequence[Checkpoint] = ()) -> Plan:
    """The proven plan of a request, with the order that makes it again.

    asked: the keywords of `plan`, with `to`, without those of `open`. others: the checkpoints that the source is combined with.

    Raises: RequestError if there are several sources, and the request does not say how they become one.
    """
    began = time.monotonic()
    if others and request.formula is None:
        raise RequestError(
            f"{plural(len(others) + 1, 'source')} are given, and nothing says how they become one",
            why="A conversion writes one checkpoint",
            do="Add `average=`, or convert each by itself",
        )
    plan = plan_conversion(source, request, request.adapters_for(source), others)
    # Whoever plans again takes what was found, such as a learned layout, and does not look for it.
    if plan.target.options != request.target.options:
        asked = {**{name: value for name, value in asked.items() if name not in request.target.options}, **plan.target.options}
    plan = replace(plan, order=_order_of((source, *others), asked))
    _log_planned(plan, time.monotonic() - began)
    return plan


@value
class PlanFile:
    """A plan as the content of a file, which another process plans again."""

    content: bytes
    """The content of the file."""
    path: str = _PLAN
    """Its path, for messages."""

    @staticmethod
    def of(plan: Plan) -> PlanFile:
        """The file of a plan. Raises UnsupportedError if an option names another checkpoint."""
        order = plan.order
        assert order is not None, "a plan that can be run was asked for"
        attached = order.attached()
        _check_is_attached({**order.opened, **order.asked}, {name.partition("/")[0] for name in attached})
        text = json.dumps(
            masked_in(
                {
                    "reshard": reshard.__version__,
                    "source": order.source,
                    **({"others": order.others} if order.others else {}),
                    "open": dict(order.opened),
                    "plan": dict(order.asked),
                    "identity": plan.identity(),
                    "request": request_digest(plan),
                    "files": [_looks_of(plan, file) for file in plan.source.files],
                }
            )
        )
        metadata = {"kind": _KIND, "version": _VERSION, "order": text, "digest": _digest(text, attached)}
        dtype = from_torch("uint8", where=_KIND)
        frame = safetensors.frame(((name, dtype, (len(content),)) for name, content in attached.items()), metadata)
        return PlanFile(frame.header + b"".join(attached.values()))

    def planned(self, sources: Sequence[str]) -> Plan:
        """The plan of the order for a source, or for those that are combined. Raises: as `load_plan` does."""
        try:
            return self._planned(sources)
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError, RecursionError) as error:
            # A forged file with a right digest can hold anything where a keyword is expected.
            raise self._damaged(f"it does not describe a plan ({type(error).__name__}: {error})") from None

    def _planned(self, sources: Sequence[str]) -> Plan:
        order, attached = self._read()
        opened_with, asked = _keywords(order["open"]), _keywords(order["plan"])
        sizes = [asked.get(axis, 1) for axis in ("tp", "pp", "ep", "dp")]
        if not OpenOptions.__annotations__.keys() >= opened_with.keys() or "only" in asked or math.prod(sizes) > _MOST_RANKS:
            raise self._damaged(f"it asks for what no plan file does, or for more than {_MOST_RANKS:,} ranks")
        from reshard.opening.deltas import tree_of

        self._check_number(sources, order)
        self._check_source([tree for source in sources for tree in trees_of(tree_of(source))], order["files"])
        held = _Folder(attached)
        _check_is_attached({**opened_with, **asked}, held.paths)
        keywords = {**opened_with, **_among(held.paths, opened_with)}
        checkpoint, *others = open_several(sources, keywords)
        about = {**asked, **_among(held.paths, asked)}
        to = about.pop("to")
        plan = planned(checkpoint, ConversionRequest.of(to, about), {"to": to, **about}, others)
        # The plan and its records name files as the caller did.
        options = {**plan.target.options, **_among(asked, held.paths)}
        remade = Order(order["source"], tuple(order.get("others", ())), opened_with, asked, lambda: attached, held)
        plan = replace(plan, order=remade, target=replace(plan.target, options=options))
        if (plan.identity(), request_digest(plan)) != (order["identity"], order["request"]):
            version, own = str(order["reshard"]), reshard.__version__
            if version != own:
                raise self._unsupported(f"reshard {version} wrote it, and this version, {own}, plans the conversion otherwise")
            raise self._damaged("its options give another plan for this source than the one that it names")
        return plan

    def _read(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The order, and the files that are attached by name."""
        files = VirtualFiles(self.path)
        files.add(self.path, len(self.content), [(0, self.content)])
        header = safetensors.read_header(files, self.path)
        kind, version, text = (header.metadata.get(key, "") for key in ("kind", "version", "order"))
        if kind == _KIND and version != _VERSION:
            raise self._unsupported(f"its version is {version!r}, and this version of reshard reads {_VERSION}")
        attached = {entry.name: read_range(files, self.path, entry.byte_offset, entry.nbytes) for entry in header.entries}
        if kind != _KIND or header.metadata.get("digest") != _digest(text, attached):
            raise self._damaged("it is not a plan file, or its content does not match its digest")
        return json.loads(text), attached

    def _check_number(self, sources: Sequence[str], order: Mapping[str, Any]) -> None:
        """Raises RequestError unless there are as many sources as were planned."""
        if len(sources) != (number := 1 + len(order.get("others", ()))):
            raise RequestError(
                f"{plural(len(sources), 'source')} for a plan of {number}",
                where=self.path,
                do=f"Give the sources in the order of the plan: {', '.join(map(str, (order['source'], *order.get('others', ()))))}",
            )

    def _check_source(self, sources: Sequence[Files], planned: list[Any]) -> None:
        """Raises CheckpointError if a file of the source has another length or stamp than it was planned with, or other samples."""
        for name, nbytes, stamp, sampled in planned:
            source, path = tree_at(sources, name)
            size = source.size(inside(path, where=self.path))
            if size is None:
                was = "is missing"
            elif size != nbytes:
                was = f"has {size:,} bytes, {nbytes:,} were planned"
            elif source.stamp(path) != stamp:
                was = "was written since"
            elif _samples(source, path, size) != sampled:
                was = "has other content, although its length and time are the same"
            else:
                continue
            raise CheckpointError(
                f"the source is not the one that {self.path} was made for: the file {was}",
                where=path,
                why="The plan is of the source as it was",
                do="Give the directory that was planned, or plan it again",
            )

    def _unsupported(self, what: str) -> UnsupportedError:
        return UnsupportedError(what, where=self.path, do="Write the file again with this version of reshard")

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            what, where=self.path, why="The file was damaged, or another program wrote it", do="Copy the file again, or write it again"
        )


def _order_of(sources: Sequence[Checkpoint], asked: Mapping[str, Any]) -> Order:
    # Of several sources, some were opened without an option that they do not need.
    opened_with = {key: value for source in sources for key, value in source.options.items() if value is not None}
    if "architecture" in opened_with and (declared := next((source.architecture for source in sources if source.architecture), None)):
        opened_with["architecture"] = declared.declared_in or declared.model_type
    with_model = next((source for source in sources if source.options.get("model") is not None), sources[0])
    given = {key: value for key, value in asked.items() if value is not None}

    def attached() -> dict[str, bytes]:
        model = with_model.model_files.contents() if "model" in opened_with else {}
        files = ((key, os.fspath(value)) for key, value in {**opened_with, **given}.items() if key in _ATTACHED)
        return {
            **{f"model/{name}": content for name, content in model.items()},
            **{f"{key}/{os.path.basename(path)}": Path(path).read_bytes() for key, path in files if os.path.isfile(path)},
        }

    first, *others = (source.path if source.deltas else source.files.root for source in sources)
    return Order(public(first), tuple(map(public, others)), opened_with, given, attached)


def _looks_of(plan: Plan, file: StoredFile) -> tuple[str, int, str, str | None]:
    """What tells whether a file of the source is still the one that was planned: path, length, stamp, and samples."""
    name = numbered(plan.source_files, file.path)
    files, path = tree_at(trees_of(plan.source_files), name)
    return name, file.nbytes, files.stamp(path), _samples(files, path, file.nbytes)


def _log_planned(plan: Plan, seconds: float) -> None:
    layout, casts = plan.layout, sum(route.is_cast for route in plan.routes)
    nbytes = sum(file.nbytes for file in layout.files)
    event(
        "planned",
        f"planned and proved {plan.source.format} -> {layout.format} for {layout.parallel}: {plural(len(plan.routes), 'tensor')} into "
        f"{plural(len(layout.files), 'file')}, {nbytes:,} bytes, {casts} cast, {len(plan.drops)} left out, in {seconds:.2f} s",
        source_format=plan.source.format,
        format=layout.format,
        parallel=asdict(layout.parallel),
        tensors=len(plan.routes),
        files=len(layout.files),
        bytes=nbytes,
        cast=casts,
        dropped=len(plan.drops),
        seconds=round(seconds, 3),
    )
    details(
        "dropped", lambda: ((f"leaves out {plural(group.tensors, group.kind)}: {group.reason}", group.to_json()) for group in drops(plan))
    )
    details("note", lambda: ((f"note: {note}", {"note": note}) for note in layout.notes))


def _names_of_files() -> set[str]:
    """The keywords that name a file or a folder."""
    return {"model", "stored_layout", "merge_adapter", *(option.name for option in registry.options() if option.type == "path")}


def _check_is_attached(keywords: Mapping[str, Any], attached: Collection[str]) -> None:
    """Raises UnsupportedError if a keyword names a file that is not attached, which another machine would look for in its own folders.

    attached: the keywords whose files are.
    """
    is_path = re.compile(r".*[^\w-]", re.DOTALL)
    for key, value in keywords.items():
        if (
            key not in attached
            and value not in (None, ())
            and (key in _names_of_files() or (key == "architecture" and is_path.match(value)))
        ):
            raise UnsupportedError(
                f"`{key}=` names a folder or URL, whose content a plan file does not hold",
                where=str(value),
                why="The file holds the model and small files; another machine would read what has that name there",
                do="Leave out `plan_out=`, and give each part the options",
            )


def _samples(files: Files, path: str, nbytes: int) -> str | None:
    """The digest of the samples of a file; None in a store, whose stamp changes with the content (ETag)."""
    return None if files.store else samples(path, nbytes, partial(read_range, files))


def _digest(order: str, attached: Mapping[str, bytes]) -> str:
    """The digest of everything in a plan file."""
    return content_digest(json.dumps([order, {name: content_digest(content) for name, content in attached.items()}]).encode())


def _keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords from JSON, in which tuples are lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}


def _among(values: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """The values of these keys."""
    return {key: value for key, value in values.items() if key in keys}


class _Folder:
    """A folder for the attached files, which is removed with this object or at the end of the process."""

    def __init__(self, attached: Mapping[str, bytes]) -> None:
        self.paths: dict[str, str] = {}
        """The path of each keyword: of the file, or of the model's folder."""
        if not attached:
            return
        root = tempfile.mkdtemp(prefix="reshard-plan-")
        weakref.finalize(self, shutil.rmtree, root, ignore_errors=True)
        for name, content in attached.items():
            key, _, file = inside(name, where=_KIND).partition("/")
            path = Path(root, key, file)
            if not file:
                raise ValueError(f"{name[:100]!r} is not the name of a file")
            with system_errors("written", path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            self.paths[key] = str(Path(root, key) if key == "model" else path)
