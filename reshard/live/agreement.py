"""Agreement: the plan for what a trainer's ranks and an engine's ranks say of themselves, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.canonical.content import Content
from reshard.canonical.quantizing import FORMS, form_of_settings
from reshard.canonical.renaming import is_of_adapter
from reshard.errors import RequestError, UnsupportedError, some
from reshard.geometry.quantities import plural
from reshard.index.index import Tensor
from reshard.live.hello import Hello
from reshard.live.memory.description import RankDescription
from reshard.live.memory.index import checkpoint_of, memories_of
from reshard.live.plan.transfer_plan import TransferPlan, transfer_plan
from reshard.models.architecture import Architecture
from reshard.models.lookup import changed_keys
from reshard.models.quantization import quantization_of, quantization_settings, without_quantization
from reshard.opening.checkpoint import Checkpoint
from reshard.plans.layout import Layout, TargetFile
from reshard.plans.plan import Plan, make_plan
from reshard.requests.planning import plan_conversion
from reshard.requests.request import OWN_ADAPTER, ConversionRequest, cast_of_server

_SHOWN = 5
"""Keys of a config that a message names."""


def agreed_plan(said: Sequence[RankDescription | str], hellos: Sequence[Hello], *, fallback: bool = False) -> TransferPlan:
    """The proven plan from the memory of a trainer's ranks into that of the ranks of one or more engines.

    said: of each rank of the trainer, what it holds, or why it cannot say it. hellos: of all ranks of all engines. These are replicas: they
    serve one model on the same parallel sizes. fallback: whether tensors that cannot be planned are sent whole to the engine's own loader.

    Raises: RequestError if the two sides do not hold one model, or the engines differ. CheckpointError if the trainer's ranks do not hold
    the whole model.
    """
    if failed := next(((rank, answer) for rank, answer in enumerate(said) if isinstance(answer, str)), None):
        raise RequestError(failed[1], where=f"rank {failed[0]} of the trainer")
    descriptions = [answer for answer in said if isinstance(answer, RankDescription)]
    first = hellos[0]
    name, _, version = first.engine.partition(" ")
    parallel = first.parallel
    for hello in hellos:
        if (hello.engine, hello.parallel) != (first.engine, parallel):
            raise RequestError(
                f"the engines differ: {first.engine} on {parallel}, and {hello.engine} on {hello.parallel}",
                do="Update engines of other sizes by a Sender of their own",
            )
    config, form = _served_form(_agreed_config(descriptions, first), descriptions, first)
    source = checkpoint_of(descriptions, config=config)
    served = first.config.get("dtype") or first.config.get("torch_dtype")
    dtype = cast_of_server(source.index, str(served).removeprefix("torch.") if served else None)
    sizes = {"tp": parallel.tp, "pp": parallel.pp, "ep": parallel.ep}
    request = ConversionRequest.of(name, {**sizes, "engine_version": version or None, "dtype": dtype, "quantize": form, **_merging(source)})
    request = replace(request, quantization=quantization_settings(first.config) if form else None)
    ranks = parallel.tp * parallel.pp
    if len(hellos) % ranks:
        raise RequestError(f"{len(hellos)} ranks of engines have joined, and each engine has {ranks}")
    plan, whole = _with_whole(source, request) if fallback else (plan_conversion(source, request), ())
    return transfer_plan(plan, replicas=len(hellos) // ranks, sources=memories_of(descriptions), whole=whole)


def _with_whole(source: Checkpoint, request: ConversionRequest) -> tuple[Plan, Sequence[Tensor]]:
    """The plan of what can be planned, and the tensors that are sent whole: those that the declaration of the model lacks, or all weights
    where there is no declaration of it for the engine."""
    try:
        plan = plan_conversion(source, replace(request, selection=replace(request.selection, drop_unknown=True)))
    except UnsupportedError:
        if request.quantize:
            raise
        parallel = request.target.parallel
        ranks = [{"pp": pp, "tp": tp} for pp in range(parallel.pp) for tp in range(parallel.tp)]
        files = tuple(TargetFile(f"rank {i}", 0, (), (), rank) for i, rank in enumerate(ranks))
        layout = Layout(request.to.name, files, (), parallel)
        plan = make_plan(source.index, source.files, Content({}, (), None), request.target, layout)
        return plan, [tensor for tensor in source.index.tensors if tensor.kind in ("weight", "master")]
    unknown = {drop.name for drop in plan.drops if drop.kind == "unknown"}
    return plan, [tensor for tensor in plan.source.tensors if tensor.name in unknown]


def _merging(source: Checkpoint) -> Mapping[str, Any]:
    """The option that merges the adapter of the trainer's model, if it has one: its base weights alone are another model.

    Raises: RequestError if the settings of the adapter are not known, of which the scale of the products follows.
    """
    adapter = [tensor.name for tensor in source.index.tensors if is_of_adapter(tensor)]
    if not adapter:
        return {}
    if source.model_files.adapter_config is None:
        raise RequestError(
            f"the trainer's model has a LoRA adapter of {plural(len(adapter), 'tensor')}, and nothing tells its settings",
            where=adapter[0],
            why="The weights with the adapter depend on them; those of the base alone are another model. Nothing was sent",
            do="Give Sender PEFT's model, whose `peft_config` has one adapter, or the merged weights by name",
        )
    return {"merge_adapter": OWN_ADAPTER}


def _served_form(config: Mapping[str, Any], descriptions: Sequence[RankDescription], hello: Hello) -> tuple[Mapping[str, Any], str | None]:
    """The config of the trainer's weights, and the form in which the engine holds them quantized; None: in that of the trainer.

    Raises: RequestError if the engine quantizes the trainer's weights in a way that a live update does not compute.
    """
    quantization = quantization_of(config)
    if quantization is None:
        return config, None
    if quantization.is_stored(box.key for description in descriptions for box in description.boxes):
        return config, None
    if (form := form_of_settings(config)) is None:
        forms = [name for name, form in FORMS.items() if not form.has_shared_scale]
        raise RequestError(
            f"the engine holds its weights as {', '.join(stored_form.name for stored_form in quantization.forms)}, and the trainer values",
            where=hello.model,
            why=f"A live update quantizes to {' and '.join(forms)}. Nothing was sent, the engine goes on with the weights that it has",
            do="Serve the model in one of these forms, or without quantization",
        )
    return without_quantization(config), form


def _agreed_config(descriptions: Sequence[RankDescription], hello: Hello) -> Mapping[str, Any]:
    """The engine's config. Raises RequestError if the trainer's config gives the model another layout."""
    own = next((description.config for description in descriptions if description.config is not None), None)
    check_same_model("trainer", own, hello.config, hello.model)
    return hello.config


def check_same_model(
    sender: str, own: Mapping[str, Any] | None, served: Mapping[str, Any], where: str, architecture: Architecture | None = None
) -> None:
    """Raises RequestError, naming the keys, if the config of who sends gives the weights another layout than that of the engine.

    sender: what sends, such as "checkpoint". own: its config; None: it tells none, and its tensors are compared alone.
    """
    if own is None:
        return
    changed = [str(key) for key in changed_keys(served, own, architecture)]
    if (theirs := served.get("model_type")) != (ours := own.get("model_type")):
        changed.insert(0, f"model_type {theirs} -> {ours}")
    if changed:
        raise RequestError(
            f"the {sender}'s model is not the engine's: {some(changed, most=_SHOWN)} (the engine's value -> the {sender}'s)",
            where=where,
            why="The weights of one do not fit into the other; nothing was sent, and the engine goes on with the weights that it has",
            do=f"Give a {sender} of the model that the engine serves, or start the engine with the {sender}'s model",
        )
