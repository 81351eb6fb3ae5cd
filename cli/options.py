"""Every option of the command line, declared once; and how words become values."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class SizeParam(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in newer versions of click
    """A number of bytes: 512MiB, 5GB, 1000000."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", str(value).lower())
        if not match:
            self.fail(f"{value!r} is not a size such as 512MiB or 5GB", param, ctx)
        return int(float(match[1]) * _UNITS[match[2] or ""])


class CountParam(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A number of things: 7B, 1.5M, 7000000000."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmbt]?)", str(value).lower())
        number = round(Fraction(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}[match[2]]) if match else 0
        if not number:
            self.fail(f"{value!r} is not a number such as 7B or 350M", param, ctx)
        return number


class NumbersParam(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Numbers with commas between them: 7,8,8,7."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        if not re.fullmatch(r"\d+(,\d+)*", str(value)):
            self.fail(f"{value!r} are no numbers such as 7,8,8,7", param, ctx)
        return tuple(int(word) for word in str(value).split(","))


def _all(*decorators: Callable[[Function], Function]) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
format_name = click.option("--format", "format_name", metavar="FORMAT", help="The checkpoint's format, instead of detecting it.")
architecture = click.option(
    "--architecture", metavar="NAME|FILE", help="A declared model, or a file that declares one, for one that we do not know."
)
model = _all(
    click.option("--model", metavar="DIR", help="A directory with the model's Hugging Face config, where the checkpoint has none."),
    click.option("--vocab-size", type=click.IntRange(1), metavar="N", help="Rows of the embedding that are no padding (Megatron)."),
    architecture,
)

selection = _all(
    click.option("--weights", type=click.Choice(["model", "master"]), help="The model's copy or the optimizer's full-precision one."),
    click.option("--include", multiple=True, metavar="GLOB", help="Only tensors of these names."),
    click.option("--exclude", multiple=True, metavar="GLOB", help="No tensors of these names."),
    click.option("--strip-prefix", default="", metavar="P", help="Take this off the front of names before anything else."),
    click.option("--optimizer", is_flag=True, help="The optimizer's state of these weights, too."),
)

target = _all(
    click.option("--to", required=True, metavar="FORMAT", help="The format to make; `reshard formats` lists them."),
    click.option("--tp", default=1, metavar="N", help="Tensor-parallel size."),
    click.option("--pp", default=1, metavar="N", help="Pipeline-parallel size."),
    click.option("--ep", default=1, metavar="N", help="Expert-parallel size."),
    click.option("--dp", default=1, metavar="N", help="How many data-parallel ranks share every tensor (FSDP, ZeRO-3)."),
    click.option("--dtype", metavar="DTYPE", help="Cast floating-point tensors, as torch does: bf16, fp16, fp32, fp8 ..."),
    click.option("--keep-dtype", multiple=True, metavar="GLOB", help="Exempt tensors of these names from --dtype."),
    click.option("--dequantize", is_flag=True, help="Quantised weights as values, in --dtype or bf16."),
    click.option("--engine-version", metavar="V", help="The serving engine's version (default: the newest known)."),
    click.option("--max-shard-size", type=SizeParam(), metavar="SIZE", help="Start a new file where one would grow beyond this."),
    click.option("--like", metavar="DIR", help="hf: names, fusions, element types and files as in this folder; its headers are read."),
    click.option("--vp", type=click.IntRange(1), metavar="N", help="Megatron: chunks per stage (virtual pipeline)."),
    click.option("--etp", type=click.IntRange(1), metavar="N", help="Megatron: tensor-parallel size of experts (default: --tp)."),
    click.option("--stage-layers", type=NumbersParam(), metavar="N,N,..", help="Megatron: layers of every chunk (default: equal)."),
    click.option("--transformer-impl", type=click.Choice(["local", "transformer_engine"]), help="Megatron: whose layers the run has."),
    click.option("--experts", type=click.Choice(["sequential", "grouped", "te-grouped"]), help="Megatron: how the run has its experts."),
    click.option("--vocab-multiple", type=click.IntRange(1), metavar="N", help="Megatron: --make-vocab-size-divisible-by of the run."),
    click.option("--distributed-optimizer/--plain-optimizer", default=None, help="Megatron: whose state (default: as the source's)."),
)

effort = _all(
    click.option("--workers", type=click.IntRange(1), metavar="N", help="Threads (default: processors, at most 8)."),
    click.option("--memory", type=SizeParam(), metavar="SIZE", help="Ceiling for buffers (default 256MiB)."),
    click.option("--progress/--no-progress", "shown", default=None, help="Show a progress bar (default: on a terminal)."),
)


def selection_of(weights: Any, include: tuple[str, ...], exclude: tuple[str, ...], strip_prefix: str, optimizer: bool) -> Any:
    """The Selection that the options of `selection` mean."""
    from reshard.canonical.content import Selection

    return Selection(weights, include, exclude, strip_prefix, optimizer)
