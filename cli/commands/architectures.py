"""reshard architectures: the models whose split over ranks is declared; and how a declaration of another one begins."""

from __future__ import annotations

import click

from .. import options
from ..tables import show, show_json


@click.command(
    "architectures",
    cls=options.Command,
    examples=["reshard architectures", "reshard architectures --start my-checkpoint > my_model.yaml"],
)
@click.option("--start", metavar="CKPT", help="Print a draft declaration for the model of this checkpoint.")
@options.format_name
@click.option("--model", metavar="DIR", help="With --start: directory with config.json, if the checkpoint has none.")
@options.as_json
def command(start: str | None, format: str | None, model: str | None, as_json: bool) -> None:
    """List the supported architectures, or draft a declaration for a new one.

    Architectures are named by the model_type of their configs. `reshard architectures --start CKPT > my.yaml` drafts a declaration, which
    every command takes as --architecture my.yaml.
    """
    from reshard.models.lookup import known_model_types

    if start is not None:
        text = _beginning(start, format, model)
        show_json({"declaration": text + "\n"}) if as_json else show(text)
        return
    found = known_model_types()
    show_json(list(found)) if as_json else show("\n".join(found))


def _beginning(start: str, format: str | None, model: str | None) -> str:
    import reshard
    from reshard.errors import RequestError
    from reshard.models.declared.draft import skeleton

    opened = reshard.open(start, format=format, model=model)
    if opened.index.facts.unanswered:
        raise RequestError(
            f"the tensors of this {opened.format} checkpoint do not have the model's own names",
            where=start,
            why="A declaration is about the names of the model's Hugging Face form",
            do="Give --start a release of the model, or a checkpoint by FSDP, DeepSpeed or torch.distributed.checkpoint",
        )
    index = opened.index
    weights = {**index.by_kind("master"), **index.by_kind("weight")}
    return skeleton({name: tensor.shape for name, tensor in weights.items()}, opened.model_files.config, start)
