"""Folders, described once: the checkpoints of a run, a model without weights, the files of a checkpoint that cannot be opened."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from reshard.errors import MOST_NAMES
from reshard.geometry.quantities import by_numbers, plural
from reshard.pages.sections import Facts, Head, Rows, Section
from reshard.pages.texts import age_text, count_text, nbytes_text

if TYPE_CHECKING:
    from reshard.models.model import Model
    from reshard.opening.pipelines import Pipeline
    from reshard.opening.run_folders import Step

# Files that are listed of a checkpoint that cannot be opened.
_MOST_FILES = 20


def run_sections(run: str, steps: Sequence[Step]) -> Iterator[Section]:
    """The checkpoints of a folder, one row each. Below them stands why some are incomplete: there, a narrow terminal has room for it."""
    done, numbers = sum(step.complete for step in steps), {step.number for step in steps if step.number is not None}
    of_steps = f" of {plural(len(numbers), 'step')}" if numbers else ""
    yield Head(
        run, "folder", f"{done:,} complete", "good" if done else "open", [("checkpoints", len(steps)), ("steps", len(numbers) or None)]
    )
    yield from (f"{run}: {plural(len(steps), 'checkpoint')}{of_steps}, {done:,} complete", "")
    rows = [
        (
            *(("-" if step.number is None else str(step.number),) if numbers else ()),
            _folder(run, step),
            step.format or "-",
            nbytes_text(step.nbytes),
            "-" if step.age is None else age_text(step.age),
            "complete" if step.complete else "settling" if step.completeness.may_settle else "incomplete",
            step.completeness.reason if step.complete else "",
        )
        for step in steps
    ]
    headings = (*(("step",) if numbers else ()), "folder", "format", "bytes", "age", "", "because")
    last = len(headings) - 1
    yield Rows(headings, rows, "Checkpoints", optional=(last, last - 2, last - 3))
    if incomplete := [step for step in steps if not step.complete]:
        more = f"{len(incomplete) - MOST_NAMES:,} more are incomplete" if len(incomplete) > MOST_NAMES else ""
        yield from (
            "",
            Facts([("note", [*(f"{_folder(run, s)}: {s.completeness.reason}" for s in incomplete[:MOST_NAMES]), more])], "Incomplete", 4),
        )


def pipeline_sections(pipeline: Pipeline) -> Iterator[Section]:
    """The components of a diffusers pipeline, and where model_index.json and the folders disagree."""
    from reshard.health.pipelines import unlike_index

    parts, problems = pipeline.components, [f"{finding.file}: {finding.detail}" for finding in unlike_index(pipeline)]
    named = pipeline.class_name or "no class named"
    sizes = [("components", len(parts)), ("bytes", nbytes_text(sum(part.nbytes for part in parts)))]
    yield Head(pipeline.path, "pipeline", named, "bad" if problems else "good", sizes)
    version = f", saved by diffusers {pipeline.version}" if pipeline.version else ""
    yield f"{pipeline.path}: {named}, a pipeline of diffusers with {plural(len(parts), 'component')}{version}"
    rows = [
        (
            part.name,
            part.stored_class or part.named_class or "-",
            part.library or "-",
            ", ".join(part.dtypes) or "-",
            count_text(part.parameters) if part.format else "-",
            nbytes_text(part.nbytes),
        )
        for part in parts
    ]
    yield Rows(("component", "class", "library", "dtypes", "parameters", "bytes"), rows, "Components", optional=(2, 3))
    first = max(parts, key=lambda part: part.nbytes, default=None)
    next_one = f"reshard inspect {shlex.quote(first.path)}" if first and first.format else None
    yield from ("", Facts([("problem", problems), ("next", next_one)]))


def _folder(run: str, step: Step) -> str:
    return step.path[len(run) :].strip("/")


def bare_model_sections(path: str, model: Model, engines: Mapping[str, tuple[int, ...]], command: str | None) -> Iterator[Section]:
    """The model of a config, which engines serve it, and the command that plans with it."""
    from reshard.models.model import Model
    from reshard.models.quantization import without_quantization
    from reshard.pages.checkpoints import dimensions_text, experts_text, sizes_text
    from reshard.plans import summary
    from reshard.training.parameter_counts import parameters

    plain = Model(model.architecture, without_quantization(model.config))
    experts, count, active = summary.experts(plain), parameters(plain), None
    if experts is not None and experts.idle_parameters is not None:
        # As those of the model, without the layers for multi-token prediction.
        ahead = sum(weight.elements for weight in plain.weights.values() if weight.optional and weight.role.startswith("expert."))
        active = count - experts.idle_parameters + ahead // experts.number * (experts.number - (experts.per_token or 0))
    about = f"{count_text(count)} parameters{experts_text(experts, active)}; a model without weights, its config alone"
    yield Head(path, "model", model.architecture.model_type, "open", [("parameters", count_text(count))], command)
    yield f"{path}: {model.architecture.model_type}, {about}"
    yield Facts([("model", dimensions_text(model)), ("serves", sizes_text(engines)), ("next", command)])


def damaged_sections(path: str) -> Iterator[Section]:
    """The files of a checkpoint that cannot be opened: what is there. Nothing if not even its format is known."""
    from reshard.adapter import registry
    from reshard.adapter.model_files import find_model_files_near
    from reshard.errors import ReshardError
    from reshard.health.files import paths_of
    from reshard.storage.tar import open_tree
    from reshard.verbs.look.inspection import name_of_model

    try:
        files = open_tree(path)
        format, _ = registry.detect(files)
        paths, config = paths_of(files, ()), find_model_files_near(files).config or {}
    except ReshardError:
        return
    sizes = {name: files.size(name) or 0 for name in sorted(paths, key=by_numbers)}
    stored = f"{plural(len(sizes), 'file')}, {nbytes_text(sum(sizes.values()))}"
    yield f"{path}: {name_of_model(config) or 'unknown model'}; {format.name}, incomplete or damaged; {stored} are here"
    yield Rows(("file", "bytes"), [(name, nbytes_text(nbytes)) for name, nbytes in sizes.items()], limit=_MOST_FILES)
