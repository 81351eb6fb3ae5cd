"""Deltas on a base: `BASE+DELTA+DELTA`, or `open("base", deltas=[...])`, is one checkpoint, whose tensors are patched when they are read.

It has the base's format, config and files, the weights under their canonical names, and nothing else that the base holds: a delta says
nothing about optimizer state.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from reshard.canonical.content import Content
from reshard.engine.origins.patched import new_checksum
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.geometry.quantities import plural
from reshard.index.deltas import DeltaFacts, Patch
from reshard.index.origin import Patched, Tensor
from reshard.index.provenance import AppliedDelta
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import PathLike
from reshard.storage.files import Files
from reshard.storage.system_calls import is_url
from reshard.storage.tar import open_tree
from reshard.storage.trees import JoinedFiles, chain_of


def tree_of(path: PathLike) -> Files:
    """The files of a checkpoint, or of a base and its deltas."""
    base, *deltas = [open_tree(part) for part in chain_of(path)]
    return JoinedFiles(base, deltas) if deltas else base


def patched(base: Checkpoint, deltas: Sequence[Checkpoint]) -> Checkpoint:
    """The checkpoint that a chain of deltas makes of a base.

    Raises: RequestError if one of them is no delta, or they do not follow each other; CheckpointError if a delta names a tensor that the
    base lacks, or the base is known to be another one; UnsupportedError if the package of its checksums is not installed.
    """
    facts = _chain(base, deltas)
    content = base.content()
    _check_base(base, content, facts[0], deltas[0].path)
    tensors = {name: replace(tensor, name=name) for name, tensor in content.tensors.items()}
    steps: dict[str, list[Patch]] = {}
    for delta, about in zip(deltas, facts, strict=True):
        new_checksum(about.checksum_format)  # refused now if its package is not installed
        for frame in delta.index.tensors:
            name = _name_of(frame.name, content, about, delta.path)
            if name is not None:
                extent = frame.shards.extent(0)
                path = JoinedFiles.path_in(delta.files, extent.path)
                patch = Patch(path, extent.byte_offset, frame.nbytes, about.encoding, about.checksum_format, about.checksums[frame.name])
                steps.setdefault(name, []).append(patch)
    for name, chain in steps.items():
        _check_plain(tensors[name])
        tensors[name] = replace(tensors[name], origin=Patched(tensors[name].shape, tuple(chain)))
    files = [replace(file, path=JoinedFiles.path_in(link.files, file.path)) for link in deltas for file in link.index.files]
    changes = (f"changed by the delta {link.path}, version {about.version}" for link, about in zip(deltas, facts, strict=True))
    notes = (*base.index.facts.notes, *changes)
    index = replace(
        base.index,
        tensors=tuple(tensors.values()),
        files=(*base.index.files, *files),
        facts=replace(base.index.facts, notes=notes, step=facts[-1].step),
        objects=(),
        constants=(),
        param_groups=tuple,
    )
    applied = tuple(
        AppliedDelta(os.path.abspath(link.path) if not is_url(link.path) else link.path, about.version, about.result_fingerprint)
        for link, about in zip(deltas, facts, strict=True)
    )
    return replace(
        base,
        path="+".join([base.path, *(link.path for link in deltas)]),
        files=JoinedFiles(base.files, [link.files for link in deltas]),
        index=index,
        deltas=applied,
        digests=facts[-1].digests,
    )


def _chain(base: Checkpoint, deltas: Sequence[Checkpoint]) -> list[DeltaFacts]:
    """What the deltas say about themselves. Raises RequestError unless each one changes what the one before it makes."""
    if base.index.facts.delta is not None:
        raise RequestError("the base is a delta itself", where=base.path, do="Give the full checkpoint first, then its deltas")
    facts = []
    for delta in deltas:
        if delta.index.facts.delta is None:
            raise RequestError(
                f"it is no delta, but a checkpoint of the format {delta.format}",
                where=delta.path,
                why="What follows the base after `+` is a delta",
                do="Give a folder that `reshard delta` has written",
            )
        facts.append(delta.index.facts.delta)
    for before, after, path in zip(facts, facts[1:], (link.path for link in deltas[1:]), strict=False):
        prints = before.result_fingerprint, after.base_fingerprint
        # Versions may be counted, each pair of checkpoints from 0: fingerprints say more.
        follows = prints[0] == prints[1] if None not in prints else int(after.base_version) == int(before.version)
        if not follows:
            named = [f" ({fingerprint})" if fingerprint else "" for fingerprint in prints]
            raise RequestError(
                f"it changes the version {after.base_version}{named[1]}, and the delta before it makes {before.version}{named[0]}",
                where=path,
                why="Deltas are applied once each, in the order of their versions, each to what the one before it makes",
                do="Give them in this order, without a gap; `reshard inspect DELTA` tells the versions",
            )
    return facts


def _check_base(base: Checkpoint, content: Content, facts: DeltaFacts, path: str) -> None:
    """Raises CheckpointError if reshard wrote the base, and recorded other weights than the delta was made of, or those that it makes."""
    manifest = base.manifest
    if facts.base_fingerprint is None or manifest is None or manifest.digests is None or manifest.fingerprint == facts.base_fingerprint:
        return
    recorded = content.recorded()
    changed = [name for name in recorded if name in facts.checksums]
    if changed and all(recorded[name] == facts.digests.get(name) for name in recorded):
        raise CheckpointError(
            "the base has the values of this delta already: its fingerprint is that of the result",
            where=path,
            why="A delta is applied once",
            do="Leave it out",
        )
    unchanged = [name for name in recorded if name in facts.digests and name not in facts.checksums]
    wrong = next((name for name in unchanged if recorded[name] != facts.digests[name]), None)
    if wrong is not None or recorded.keys() == facts.digests.keys():
        raise CheckpointError(
            f"it was made of the checkpoint {facts.base} with the fingerprint {facts.base_fingerprint}",
            where=path,
            why=f"{base.path} has the fingerprint {manifest.fingerprint}, so the result would be neither of the two",
            do="Give the base that the delta names, and all deltas between",
        )


def _name_of(name: str, content: Content, facts: DeltaFacts, path: str) -> str | None:
    """The canonical tensor that a frame changes; None for another name of a weight, such as a tied head."""
    if name in content.tensors:
        return name
    model = content.model
    if model is not None and (weight := model.aliases.get(name)) and facts.checksums.get(weight) == facts.checksums[name]:
        return None
    raise CheckpointError(
        f"the delta changes it, and the base has no tensor of that name among its {plural(len(content.tensors), 'weight')}",
        where=f"{name} in {path}",
        why="The delta was made of another model, or the names of the base are those of a trainer",
        do="Give the base that the delta names; `model=DIR` gives the base the names of its model",
    )


def _check_plain(tensor: Tensor) -> None:
    if tensor.dtype.function:
        raise UnsupportedError(
            f"the base holds {tensor.dtype.function} of this weight, and a delta changes the weight",
            where=tensor.name,
            do="Give the checkpoint that the base was made from",
        )
