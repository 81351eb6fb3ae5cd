"""reshard learn: how a serving engine lays out a model, traced from the engine's own loader."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from reshard.geometry.quantities import plural

from ... import options
from ...json_output import show_json
from ...logs import OutputFileParam
from ...tables import show

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
@click.option("--tp", type=options.NUMBERS, default="1", metavar="N,N,..", help="Tensor-parallel sizes to trace (default: 1).")
@click.option("--pp", type=options.NUMBERS, default="1", metavar="N,N,..", help="Pipeline-parallel sizes to trace (default: 1).")
@click.option(
    "--ep",
    type=options.NUMBERS,
    default="1",
    metavar="N,N,..",
    help="Expert-parallel sizes to trace: 1, or sizes of --tp (default: 1).",
)
@click.option("--output", "-o", required=True, metavar="FILE", type=OutputFileParam(), help="Write the layout to this file.")
@click.option("--engine-python", metavar="PATH", help="The Python that has the engine, if it is not this one.")
@click.option("--trust-remote-code", is_flag=True, help="Let the engine run Python code that lies beside the model.")
@options.as_json
def command(model: str, output: OutputFile, as_json: bool, **given: Any) -> None:
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
    seconds = time.monotonic() - began
    show_json(document(layout, str(output), seconds)) if as_json else show_layout(layout, str(output), seconds)


def document(layout: LearnedLayout, output: str, seconds: float) -> dict[str, Any]:
    """The result for --json, with stable keys."""
    templates = [each for stage in layout.stages.values() for each in stage]
    return {
        "layout": output,
        "engine": layout.engine,
        "engine_version": layout.engine_version,
        "platform": layout.platform,
        "model_class": layout.model_class,
        "sizes": [{"tp": list(each.tp), "pp": each.pp, "ep": each.has_ep, "withheld": each.withheld} for each in layout.sizes],
        "templates": len(templates),
        "problems": {each.name: each.template.problem for each in templates if each.template.problem},
        "depend_on_platform": {each.name: each.template.kernel for each in templates if each.template.kernel},
        "seconds": round(seconds, 1),
    }


def show_layout(layout: LearnedLayout, output: str, seconds: float) -> None:
    """Print what was learned, and what a conversion will refuse."""
    from reshard.serving.learned.fit import coverage

    found = document(layout, output, seconds)
    kinds = plural(found["templates"], "kind")
    show(f"{output}: {layout.model_class} of {layout.engine} {layout.engine_version}, {kinds} of tensors, in {seconds:.0f} s")
    show(f"  covers    {coverage(layout)}")
    for name, problem in found["problems"].items():
        show(f"  refused   {name}: {problem}")
    for name, reason in found["depend_on_platform"].items():
        show(f"  platform  {name}: {reason}")
    for line in layout.softened:
        show(f"  skipped   {line}")
