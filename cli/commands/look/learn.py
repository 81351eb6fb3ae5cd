"""reshard learn: how a serving engine lays out a model, traced from the engine's own loader."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.quantities import plural
from reshard.pages.sections import Facts, Section

from ... import options
from ...replies import Reply

if TYPE_CHECKING:
    from reshard.serving.learned.layout import LearnedLayout
    from reshard.storage.output_file import OutputFile


@options.command(
    "learn",
    "reshard learn Qwen3-Next-80B --engine vllm --tp 8 -o layout.json --engine-python vllm-env/bin/python",
    "reshard convert step-1000 out --to vllm --tp 8 --layout layout.json",
    "reshard learn granite --engine sglang --tp 1,2,4 -o layout.json --engine-python sglang-env/bin/python",
)
@options.checkpoint("model")
@options.choice
@click.option("--engine", required=True, metavar="ENGINE", help="The serving engine: vllm or sglang.")
@options.sizes("--tp", "1", "Tensor-parallel sizes to trace (default: 1).")
@options.sizes("--pp", "1", "Pipeline-parallel sizes to trace (default: 1).")
@options.sizes("--ep", "1", "Expert-parallel sizes to trace: 1, or sizes of --tp (default: 1).")
@options.output_file("--output -o", "Write the layout to this file.", required=True)
@click.option("--engine-python", metavar="PATH", help="The Python that has the engine, if it is not this one.")
@click.option("--trust-remote-code", is_flag=True, help="Let the engine run Python code that lies beside the model.")
def command(model: str, output: OutputFile, **given: Any) -> Reply:
    """Learn how a serving engine lays out MODEL: which box of which weight its own loader puts where, on every rank.

    MODEL is a directory with config.json and safetensors files. Only the headers of these are read, so files that end after their header
    are enough. No GPU is needed. With at least three sizes of --tp, the layout also covers other sizes, if the rules of some sizes
    predict another one exactly.
    """
    import reshard
    from reshard.verbs.look.learn import write_layout

    began = time.monotonic()
    layout = reshard.learn(model, **given)
    write_layout(layout, output)
    made = document(layout, str(output), time.monotonic() - began)
    return Reply(made, _sections(layout, made))


def document(layout: LearnedLayout, output: str, seconds: float) -> dict[str, Any]:
    """The result for --json, with stable keys."""
    templates = [named for stage in layout.stages.values() for named in stage]
    return {
        "layout": output,
        "engine": layout.engine,
        "engine_version": layout.engine_version,
        "platform": layout.platform,
        "model_class": layout.model_class,
        "sizes": [{"tp": list(sizes.tp), "pp": sizes.pp, "ep": sizes.has_ep, "withheld": sizes.withheld} for sizes in layout.sizes],
        "templates": len(templates),
        "problems": {named.name: named.template.problem for named in templates if named.template.problem},
        "depend_on_platform": {named.name: named.template.kernel for named in templates if named.template.kernel},
        "seconds": round(seconds, 1),
    }


def _sections(layout: LearnedLayout, made: dict[str, Any]) -> Iterator[Section]:
    """What was learned, and what a conversion will refuse."""
    from reshard.serving.learned.fit import coverage

    kinds = plural(made["templates"], "kind")
    engine = f"{layout.engine} {layout.engine_version}"
    yield f"{made['layout']}: {layout.model_class} of {engine}, {kinds} of tensors, in {made['seconds']:.0f} s"
    problems, kernels = ([f"{name}: {why}" for name, why in made[key].items()] for key in ("problems", "depend_on_platform"))
    yield Facts([("covers", coverage(layout)), ("refused", problems), ("platform", kernels), ("skipped", layout.softened)])
