"""reshard architectures: the declared models, the declaration of one of them, and the draft of a new declaration."""

from __future__ import annotations

import click

from reshard.pages.sections import Verbatim

from .. import options
from ..replies import Reply


@options.command(
    "architectures",
    "reshard architectures",
    "reshard architectures qwen2",
    "reshard architectures --start my-checkpoint > my_model.yaml",
)
@click.argument("name", required=False, shell_complete=options.architecture_names)
@click.option("--start", type=options.CheckpointPlace(), metavar="CKPT", help="Draft a declaration for the model of this checkpoint.")
@options.format_name
@click.option("--model", metavar="DIR", help="With --start: directory with config.json, if the checkpoint has none.")
def command(name: str | None, start: str | None, format: str | None, model: str | None) -> Reply:
    """List the declared architectures, show the declaration NAME, or draft a new one.

    An architecture has the name of the model_type in the configs of its models. `reshard architectures --start CKPT > my.yaml` drafts a
    declaration for a model that is not in the list. Every command takes the file as --architecture my.yaml.
    """
    from reshard.errors import RequestError
    from reshard.models.lookup import declaration_text, known_model_types

    if name is not None and start is not None:
        raise RequestError(f"{name} with --start: one shows a declaration, the other drafts a new one", do="Give one of the two")
    if start is None and (format or model):
        raise RequestError("--format and --model are about the checkpoint of --start", do="Add --start CKPT, or leave them out")
    if name is None and start is None:
        names = known_model_types()
        return Reply({"architectures": list(names)}, names)
    text = declaration_text(name).rstrip("\n") if name is not None else _draft(str(start), format, model)
    return Reply({"declaration": text + "\n"}, [Verbatim(text)])


def _draft(start: str, format: str | None, model: str | None) -> str:
    import reshard
    from reshard.errors import RequestError
    from reshard.models.declared.draft import draft

    opened = reshard.open(start, format=format, model=model)
    if opened.index.facts.unanswered:
        raise RequestError(
            f"the tensors of this {opened.format} checkpoint do not have the model's own names",
            where=start,
            why="A declaration is about the names of the model's Hugging Face form",
            do="Give --start a release of the model, or a checkpoint by FSDP, DeepSpeed or torch.distributed.checkpoint",
        )
    index = opened.index
    tensors = {**index.by_kind("buffer"), **index.by_kind("master"), **index.by_kind("weight")}
    return draft({name: tensor.shape for name, tensor in tensors.items()}, opened.model_files.config, start)
