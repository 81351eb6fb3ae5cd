"""The verb `verify`: do two checkpoints hold the same weights? Does a folder hold what reshard wrote, or a live server what it should?"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Unpack

from reshard.adapter import registry
from reshard.adapter.serving_format import ServingFormat
from reshard.canonical.content import Content, Selection, check_selected, content_of, tensors_by_key
from reshard.canonical.stacked_experts import by_expert
from reshard.engine.checks.recorded_digests import check_digests
from reshard.engine.checks.written_files import (
    KnownDigests,
    check_fixed_bytes,
    check_nothing_was_added,
    check_sizes,
    check_small_files,
    check_tensors,
    hash_blocks,
)
from reshard.engine.compare import Comparison, Difference, Side, check_recorded, compare
from reshard.engine.events import details, event
from reshard.engine.pool import Effort
from reshard.engine.recorded import fingerprint_of
from reshard.engine.walk import block_digests
from reshard.errors import CheckpointError, DifferenceFound, RequestError
from reshard.geometry.dtypes import DType
from reshard.geometry.meshes import Parallel
from reshard.geometry.quantities import plural
from reshard.index.index import Index, Tensor
from reshard.models.model import Model
from reshard.models.quantization import quantization_settings, without_quantization
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import EffortOptions, OpenOptions, PathLike, checked_keywords
from reshard.opening.open import look, open_both, opened
from reshard.opening.steps import COVERING
from reshard.plans.digests import VERSION_1
from reshard.plans.layout import Target
from reshard.plans.manifest import MANIFEST, Digests, Manifest, read_digests, read_manifest
from reshard.serving.weights import stored_dtypes
from reshard.storage.server import is_server
from reshard.storage.tar import open_files, open_tree
from reshard.storage.trees import chain_of
from reshard.verbs.resumed import compare_counts, compared_once, notes_on_masters

if TYPE_CHECKING:
    from reshard.signing.check import SignedComparison


@checked_keywords
def verify(
    left: Checkpoint | PathLike,
    right: Checkpoint | PathLike | None = None,
    *,
    cast: bool = False,
    selection: Selection | None = None,
    signed_by: PathLike | None = None,
    signature_file: PathLike | None = None,
    **options: Unpack[EffortOptions],
) -> Comparison:
    """Whether two checkpoints hold the same weights, whatever their layouts: names, shapes, element types, every bit.

    Where only one of them has a config, it speaks for both. cast: where element types differ, compare after casting the left's. Without
    `right`, a folder that reshard wrote is compared with its own record, reshard.json (`verify_written`). If `right` is the address of a
    server, such as http://localhost:8000, it is asked what its ranks hold (`verify_server`); the result is a ServerComparison. If one of
    them holds a form that `quantize=` computes, and the other one plain weights, these are quantized to it first, as its config says.

    signed_by: a public key in a PEM file. `left` must be a folder that its owner has signed, as it is, or the file of a signature: then
    `right` must hold the weights of which it tells the fingerprint. signature_file: of `left`; None: model.sig in it.
    """
    effort = Effort.of(options)
    if signed_by is not None:
        signed = _signed(left, right, signed_by, signature_file, options)
        if right is None or not signed.equal or signed.of_weights:
            return signed
        result = verify(left, right, cast=cast, selection=selection, **options)
        result.notes.insert(0, f"signed with the key {signed.key[:12]}: {signed.statement}")
        return result
    if signature_file is not None:
        raise RequestError("a signature needs the key that it is checked with", do="Name the public key with `signed_by=`")
    if is_server(right):
        if cast:
            raise RequestError("a cast needs a second checkpoint", why="A server is compared in the element type to which it casts weights")
        from reshard.verbs.verify_server import verify_server

        left = opened(left)
        check_digests(effort, (left.files, left.index.tensors))
        return verify_server(left, str(right), selection=selection, progress=effort.progress)
    if right is None:
        if cast or selection is not None:
            raise RequestError("a cast or a selection needs a second checkpoint", why=f"The whole folder is compared with its {MANIFEST}")
        return verify_written(left, effort)
    left_side, right_side = sides_of(left, right, selection)
    result = Comparison()
    left_side, as_stored = _quantized_as(right_side, left_side, with_cast=cast)
    right_side, other = _quantized_as(left_side, right_side)
    result.notes.extend(filter(None, (as_stored, other)))
    result.notes.extend(check_digests(effort, *((side.files, side.index.tensors) for side in (left_side, right_side))).notes())
    held_as = {} if cast else types_of_engine(left_side, right_side)
    compare(left_side, right_side, result, with_cast=cast, held_as=held_as, effort=effort)
    result.notes.extend(about_types_of_engine(held_as))
    compare_counts(left_side, right_side, result)
    _forgive_implied(result, left_side, right_side)
    result.notes.extend(notes_on_masters(left_side, right_side))
    result.notes.extend(_about_unknown(result, left_side, right_side))
    for side in (left_side, right_side):
        result.notes.extend(not_compared(side))
    log_compared(result)
    return result


def _signed(
    left: Checkpoint | PathLike,
    right: Checkpoint | PathLike | None,
    signed_by: PathLike,
    signature: PathLike | None,
    options: EffortOptions,
) -> SignedComparison:
    """Whether `left` is as it was signed; or, if it is a signature, whether `right` has the weights of which that tells the fingerprint."""
    from reshard.signing.check import check_fingerprint, check_folder, check_tells_fingerprint, is_signature, read_signature

    if is_server(right):
        raise RequestError("a server has no files, so no signature covers it", do="Check the folder first, without the server")
    if isinstance(left, Checkpoint) or not is_signature(left):
        folder = open_files(left.path if isinstance(left, Checkpoint) else left)
        return check_folder(folder, signed_by, signature, Effort.of(options))
    if right is None:
        raise RequestError(
            "a signature alone is no checkpoint", where=os.fspath(left), do="Give the folder whose weights are compared as RIGHT"
        )
    from reshard.verbs.look.fingerprint import fingerprint

    result = read_signature(left, signed_by)
    check_tells_fingerprint(result)
    result.of_weights = True
    if result.statement:
        side = opened(right)
        try:
            check_fingerprint(result, fingerprint(side, **options).root, side.path)
        except (CheckpointError, DifferenceFound) as error:
            result.blame(error, side.files)
    return result


def sides_of(left: Checkpoint | PathLike, right: Checkpoint | PathLike, selection: Selection | None) -> tuple[Side, Side]:
    """Two checkpoints with the tensors that are compared. Where only one of them has a config, it speaks for both."""
    if isinstance(left, Checkpoint) or isinstance(right, Checkpoint):
        a, b = opened(left), opened(right)
    else:
        a, b = open_both(left, right)
    selections = _selections((a, b), selection)
    # Each by its own config: under another model's config its weights would be unknown, and not compared.
    models = _models_of(a, b)
    contents = (side.content(chosen, model=model) for side, chosen, model in zip((a, b), selections, models, strict=True))
    left_side, right_side = (Side(side.files, side.index, content) for side, content in zip((a, b), contents, strict=True))
    check_selected(left_side.content, right_side.content)
    return compared_once(left_side, right_side)


def _models_of(left: Checkpoint, right: Checkpoint) -> tuple[Model | None, Model | None]:
    """The model by which each side is named: its own. Embedding models that differ in the first word of their names alone are one: files
    of ranks, for example, do not tell whether the model's own names have it."""
    heads = [model.architecture.head for model in (left.model, right.model) if model and model.architecture.head]
    if len(heads) == 2 and replace(heads[0], front=heads[1].front) == heads[1]:
        return left.model, left.model
    return left.model or _model_of_other(left, right.model), right.model or _model_of_other(right, left.model)


def _model_of_other(side: Checkpoint, other: Model | None) -> Model | None:
    """The other side's model for a side without a config: not quantized, if the side has plain weights."""
    if other is None or other.quantization is None or other.quantization.is_stored(tensor.name for tensor in side.index.tensors):
        return other
    return Model(other.architecture, without_quantization(other.config))


def _quantized_as(stored: Side, values: Side, *, with_cast: bool = False) -> tuple[Side, str]:
    """The side with plain weights in the quantized form of the other one, if `quantize=` computes it, and a sentence about it.

    with_cast: the weights are cast to the element type of most weights that the other side holds as they are.
    """
    plain, model = values.content, stored.content.model
    if model is None or model.quantization is None or not model.quantization.is_stored(stored.content.tensors):
        return values, ""
    if plain.model is None or plain.model.quantization is not None:
        return values, ""
    from reshard.canonical.quantizing import form_of_settings, quantized

    if (form := form_of_settings(model.config)) is None:
        return values, ""
    index, tensors, single = values.index, plain.tensors, plain.model
    if form not in single.architecture.quantized_as:
        index, tensors, single = by_expert(index, tensors, single)
    held = Counter(tensor.dtype for name, tensor in stored.content.tensors.items() if name in tensors and tensor.dtype.itemsize > 1)
    cast_to = held.most_common(1)[0][0] if with_cast and held else None
    content = replace(plain, tensors=tensors, model=single)
    settings = quantization_settings(model.config)
    try:
        made, _ = quantized(content, without_quantization(model.config), form, settings, lambda tensor: cast_to or tensor.dtype)
    except RequestError:  # other shapes: the comparison tells
        return values, ""
    kept = {name for name, tensor in made.tensors.items() if tensor is plain.tensors.get(name)}
    made = replace(made, recorded=lambda: {name: text for name, text in plain.recorded().items() if name in kept})
    text = f"compared after {values.files.root} was quantized to {form}, the form of {stored.files.root}"
    return replace(values, index=index, content=made), text


def types_of_engine(left: Side, right: Side) -> dict[str, DType]:
    """The tensors that a serving engine holds in an element type of its own, such as scales of the KV cache, and that one side has in this
    type for that reason alone."""
    for engine, other in ((left, right), (right, left)):
        format, model = registry.named(engine.index.format), other.content.model or engine.content.model
        if not isinstance(format, ServingFormat) or isinstance(registry.named(other.index.format), ServingFormat) or model is None:
            continue
        held, given = engine.content.tensors, {name: tensor.dtype for name, tensor in other.content.tensors.items()}
        try:
            rules = format.rules(model, Target(format.name, Parallel(**engine.index.facts.parallel)))
        except RequestError:  # a layout that the engine's loader showed: it casts nothing
            return {}
        stored = stored_dtypes(model, rules, given)
        differing = {
            name: dtype
            for name, dtype in stored.items()
            if name in held and not dtype.function and dtype != given[name] and dtype.floating == given[name].floating
        }
        return {name: dtype for name, dtype in differing.items() if held[name].dtype == dtype}
    return {}


def about_types_of_engine(held_as: Mapping[str, DType]) -> Iterator[str]:
    """A note for each element type. held_as: as `types_of_engine` has them."""
    for dtype in dict.fromkeys(held_as.values()):
        names = [name for name in held_as if held_as[name] == dtype]
        yield f"compared after a cast to {dtype}, in which the engine holds them: {plural(len(names), 'tensor')}, such as {names[0]}"


def _forgive_implied(result: Comparison, left: Side, right: Side) -> None:
    """Turn differences into a note: what serving engines do not keep beside packed weights, and what follows from the weights' shapes."""
    for kind, has, lacks in (("missing", left, right), ("extra", right, left)):
        if not isinstance(registry.named(lacks.index.format), ServingFormat) or has.content.model is None:
            continue
        weights = has.content.model.weights
        implied = {
            gap.name: gap
            for gap in result.differences
            if gap.kind == kind and gap.name in weights and weights[gap.name].implied is not None
        }
        if implied:
            result.differences = [gap for gap in result.differences if gap.name not in implied]
            what = f"{len(implied)} of {has.files.root}, such as {next(iter(implied))}"
            result.notes.append(f"not compared: {what}, which follow from the shapes of the weights, and which engines do not keep")


def _about_unknown(result: Comparison, *sides: Side) -> Iterator[str]:
    """A note if one side lacks weights that the declared architecture lacks, too."""
    unknown = {name for side in sides for name in side.content.unknown}
    if lost := [gap.name for gap in result.differences if gap.kind in ("missing", "extra") and gap.name in unknown]:
        lacks = f"the declared architecture lacks {plural(len(lost), 'weight')} that one side lacks"
        yield f"{lacks}; `drop_unknown=True` leaves out such weights"


def not_compared(side: Side) -> Iterator[str]:
    """Sentences about the tensors of a checkpoint that were left out of a comparison."""
    root, content = side.files.root, side.content
    weights = [drop for drop in content.drops if drop.kind == "weight"]
    for reason, count in Counter(drop.reason for drop in weights).items():
        yield f"not compared in {root}: {count} weight ({reason})"
    if kinds := Counter(drop.kind for drop in content.drops if drop.kind != "weight"):
        hint = "" if content.selection.optimizer else " (`optimizer=True` compares optimizer state)"
        yield f"not compared in {root}: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}{hint}"


def verify_written(
    source: Checkpoint | PathLike, effort: Effort, *, known: KnownDigests = lambda tensor: None, **options: Unpack[OpenOptions]
) -> Comparison:
    """Whether a folder holds what reshard wrote: every bit of weights, optimizer state, replicas, padding, headers and small files; and no
    file is missing or was added.

    Of a base with deltas: whether every tensor is what the last delta says.

    known: the digests of the blocks of a tensor that was read already; None if it was not.

    Raises: RequestError if there is no reshard.json, or another program wrote the last delta.
    """
    if source.deltas if isinstance(source, Checkpoint) else len(chain_of(source)) > 1:
        return _verify_chain(opened(source, **options), effort)
    result = Comparison()
    files = source.files if isinstance(source, Checkpoint) else open_tree(source)
    try:
        manifest = read_manifest(files)
        digests = read_digests(files, manifest) if manifest and manifest.digests else Digests()
    except CheckpointError as error:
        result.blame(error, files)
        return result
    if manifest is None:
        from reshard.opening.choice import only_checkpoint

        only_checkpoint(files.root)  # lists several
        raise RequestError(
            f"there is no {MANIFEST}, so nothing tells what the folder should hold",
            where=files.root,
            do="Give a second checkpoint to compare with: reshard verify A B",
        )
    if not manifest.is_unchanged:
        result.differences.append(Difference(MANIFEST, "values", "the file has changed since reshard wrote it"))
    check_sizes(files, manifest, result)
    if manifest.digests:
        check_nothing_was_added(files, manifest, digests, result)
        check_small_files(files, digests.small_files, result)
        check_fixed_bytes(files, digests.files, result)
    try:
        named: OpenOptions = {**options, "format": manifest.format}
        # Values that contradict each other are found by their digests.
        checkpoint = source if isinstance(source, Checkpoint) else look(source, named, COVERING)
        result.notes.extend(check_digests(effort, (files, checkpoint.index.tensors)).notes())
        _compare_tensors(checkpoint, manifest, digests, result, effort, known)
    except (CheckpointError, RequestError) as error:
        if isinstance(error, RequestError) and result.equal:
            raise
        # The checkpoint was whole when reshard wrote it.
        if result.equal:
            result.blame(error, files)
        result.notes.append(f"the tensors were not compared: {error}")
    log_compared(result)
    return result


def _verify_chain(checkpoint: Checkpoint, effort: Effort) -> Comparison:
    if not checkpoint.digests:
        what = f"another program wrote the delta {checkpoint.deltas[-1].path}, so nothing tells what the checkpoint should hold"
        raise RequestError(what, where=checkpoint.path, do="Give a second checkpoint to compare with: reshard verify A B")
    result, tensors = Comparison(), tensors_by_key(checkpoint.index)
    result.tensors, result.nbytes = len(tensors), sum(tensor.nbytes for tensor in tensors.values())
    content = Content(tensors, (), checkpoint.model, recorded=lambda: checkpoint.digests, deltas=checkpoint.deltas)
    try:
        check_recorded(Side(checkpoint.files, checkpoint.index, content), block_digests(checkpoint.files, tensors, effort))
    except (CheckpointError, DifferenceFound) as error:
        result.blame(error, checkpoint.files)
    log_compared(result)
    return result


def log_compared(result: Comparison) -> None:
    outcome = "equal" if result.equal else plural(len(result.differences), "difference")
    event(
        "compared",
        f"compared {plural(result.tensors, 'tensor')}, {result.nbytes:,} bytes: {outcome}",
        equal=result.equal,
        tensors=result.tensors,
        bytes=result.nbytes,
        differences=len(result.differences),
    )
    details("difference", lambda: ((f"{row.name}: {row.kind}: {row.detail}", asdict(row)) for row in result.differences))


def _compare_tensors(
    checkpoint: Checkpoint, manifest: Manifest, digests: Digests, result: Comparison, effort: Effort, known: KnownDigests
) -> None:
    index = checkpoint.index if registry.named(checkpoint.format).keeps_names else checkpoint.named()
    tensors = tensors_by_key(index)
    if manifest.digests:
        side = Side(checkpoint.files, index, Content(tensors, (), checkpoint.model))
        check_tensors(side, tensors, digests, result, known, effort)
        return
    # Version 1 recorded the digest of all tensors together, but not which tensors these are.
    of_blocks = hash_blocks(checkpoint.files, tensors, result, effort, VERSION_1)
    result.tensors = len(tensors)
    if manifest.fingerprint not in {fingerprint_of(chosen, of_blocks, VERSION_1).root for chosen in _choices(checkpoint, index)}:
        result.differences.append(Difference("fingerprint", "values", f"the weights are not those of the fingerprint in {MANIFEST}"))
    result.notes.append(f"{MANIFEST} is of version 0.1, which recorded no digests of single tensors and of small files")


def _choices(checkpoint: Checkpoint, index: Index) -> Iterator[Mapping[str, Tensor]]:
    """The sets of tensors that a conversion by version 0.1 can have written: the weights alone, or with optimizer state."""
    yield tensors_by_key(index)
    for selection in (Selection(), Selection(optimizer=True), Selection(optimizer=True, masters=True)):
        try:
            yield content_of(index, checkpoint.model, selection).tensors
        except RequestError:
            continue


def _selections(checkpoints: tuple[Checkpoint, Checkpoint], selection: Selection | None) -> tuple[Selection | None, ...]:
    """The selection for each side. With optimizer state it has the masters, unless a copy of the weights is chosen. A root counts for the
    checkpoint that has it: the other may be the model that was converted from it."""
    if selection is not None and selection.optimizer and selection.weights is None:
        selection = replace(selection, masters=True)
    if selection is None or selection.root is None:
        return selection, selection
    has_root = [any(model.root == selection.root for model in checkpoint.models) for checkpoint in checkpoints]
    if not any(has_root):
        return selection, selection
    return tuple(selection if has else replace(selection, root=None) for has in has_root)
