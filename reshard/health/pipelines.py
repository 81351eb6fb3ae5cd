"""Checks of a diffusers pipeline as a whole: whether model_index.json and the folders agree, and what serves it."""

from __future__ import annotations

from collections.abc import Iterator

from reshard.adapter import registry
from reshard.adapter.model_files import PIPELINE
from reshard.adapter.serving_format import ServingFormat
from reshard.health.findings import Finding, found
from reshard.opening.pipelines import Pipeline, PipelinePart


def unlike_index(pipeline: Pipeline) -> Iterator[Finding]:
    """Where model_index.json and the folders disagree. diffusers builds the classes that model_index.json names."""
    if pipeline.class_name is None:
        yield found("unlike-pipeline", "it names no class: `_class_name` is missing", file=PIPELINE)
    for component in pipeline.components:
        yield from _of_component(component)


def _of_component(component: PipelinePart) -> Iterator[Finding]:
    place, named = f"{component.name}/", component.named_class
    if named is None:
        yield found("unlike-pipeline", f"{PIPELINE} does not name the folder, so diffusers does not load it", file=place)
    elif not component.nbytes:
        yield found("missing-file", f"{PIPELINE} names the class {named}, and the folder holds no file or is not there", file=place)
        return
    elif component.stored_class not in (None, named):
        yield found("unlike-pipeline", f"{PIPELINE} names the class {named}, and its config.json {component.stored_class}", file=place)
    if component.has_config and component.format is None:
        yield found("missing-file", f"no file of its weights is there, and its config.json names the class {component.stored_class}",
                    file=place)  # fmt: skip


def served_by(pipeline: Pipeline) -> Iterator[Finding]:
    """What is known of the servers of diffusion pipelines. SGLang 0.5.23 chooses by `_class_name` (multimodal_gen/registry.py)."""
    named = pipeline.class_name or "the pipeline"
    for format in registry.formats().values():
        release = format.release if isinstance(format, ServingFormat) else None
        if release and release.pipelines:
            has = "has a pipeline of its own for" if pipeline.class_name in release.pipelines else "has no pipeline of its own for"
            other = "" if pipeline.class_name in release.pipelines else ", and runs that of diffusers"
            yield found("not-known", f"the diffusion server of {release.engine} {has} {named}{other}; its loader was not compared")
    yield found("not-known", "vLLM has no diffusion pipelines; nothing is known here of vLLM-Omni, another program, which has some")
