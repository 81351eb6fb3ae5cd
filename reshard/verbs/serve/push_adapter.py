"""The verb `push_adapter`: a LoRA adapter alone becomes one that a running server answers with.

The adapter is written as a folder that the server sees, in the form that its engine reads. The server loads it under a name with its
fingerprint, and generates a token with it, before an older version is unloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Unpack

from reshard.adapter import registry
from reshard.adapter.model_files import ADAPTER_CONFIG, find_model_files
from reshard.canonical.adapters.base import AdaptedBase
from reshard.canonical.adapters.reading import check_whole, read_adapter
from reshard.canonical.lora import LoraSettings
from reshard.errors import CheckpointError, RequestError, SystemRefusal
from reshard.geometry.documents import document
from reshard.geometry.value import value
from reshard.live.engines.adapters import AdapterServer, ServedModels, adapter_server, refusal
from reshard.models.lookup import find_model
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.keywords import OpenOptions, PathLike, checked_keywords
from reshard.opening.open import open
from reshard.plans.plan import Plan
from reshard.storage.tar import open_tree
from reshard.verbs.convert import convert
from reshard.verbs.plan import plan

_SHARED = "/dev/shm/reshard-adapters"


@value
class AdapterPushed:
    """What a push of an adapter has done."""

    JSON = "server adapter fingerprint bytes=nbytes folder unloaded seconds notes"

    server: str
    """The address of the server."""
    adapter: str
    """The name by which requests ask for it: NAME@ and the first 12 digits of the fingerprint."""
    fingerprint: str
    """The fingerprint of the adapter."""
    nbytes: int
    """The bytes of its tensors."""
    folder: str
    """The folder from which the server has read it."""
    unloaded: tuple[str, ...]
    """The versions that the server has forgotten."""
    seconds: float
    """How long it took."""
    notes: tuple[str, ...]
    """What a reader should know."""

    def to_json(self) -> dict[str, Any]:
        """The result as plain values with stable keys."""
        return document(self, seconds=round(self.seconds, 3))


@checked_keywords
def push_adapter(
    source: Checkpoint | PathLike,
    server: str,
    *,
    name: str = "adapter",
    shared_dir: PathLike | None = None,
    keep: int = 1,
    lora_alpha: str | None = None,
    **options: Unpack[OpenOptions],
) -> AdapterPushed:
    """Send a LoRA adapter, or that of a training step, to a running server of vLLM or SGLang.

    name: what the adapter is called; requests ask for NAME@ and 12 digits of its fingerprint, of SGLang for BASE:NAME@ and these.
    shared_dir: a folder that this machine and the server both see (default: a folder in /dev/shm, if the server runs on this machine).
    keep: how many versions stay loaded.

    Raises: CheckpointError or RequestError, before the server is asked to load anything, if the adapter does not fit the server's base or
    lacks an expert; SystemRefusal if the server does not take it. Then the server goes on with the adapters that it had.
    """
    began, control = time.monotonic(), adapter_server(server)
    served = control.models()
    folder = _folder(control, shared_dir)
    given: dict[str, Any] = dict(options)
    if given.get("model") is None:
        given["model"] = base_here(served)
    opened = source if isinstance(source, Checkpoint) else open(source, **given)
    written = Path(tempfile.mkdtemp(prefix=".new-", dir=folder)) / "adapter"
    try:
        planned = plan_of_adapter(opened, control, served, lora_alpha)
        result = convert(planned, written)
        _check_fits(written, given.get("model"), control.name)
        fingerprint = result.fingerprint.root
        adapter = f"{name}@{digits_of(fingerprint)}"
        target = Path(folder, adapter)
        if adapter not in served.adapters:
            shutil.rmtree(target, ignore_errors=True)
            os.rename(written, target)
            _load(control, adapter, target)
    finally:
        shutil.rmtree(written.parent, ignore_errors=True)
    older = [other for other in served.adapters if other.startswith(f"{name}@") and other != adapter]
    unloaded = tuple(older[: max(0, len(older) - (keep - 1))])
    for other in unloaded:
        control.unload(other)
        shutil.rmtree(Path(folder, other), ignore_errors=True)
    nbytes = sum(tensor.nbytes for tensor in planned.content.tensors.values())
    seconds = time.monotonic() - began
    return AdapterPushed(control.name, adapter, fingerprint, nbytes, str(target), unloaded, seconds, planned.layout.notes)


def plan_of_adapter(opened: Checkpoint, control: AdapterServer, served: ServedModels, lora_alpha: str | None) -> Plan:
    """The plan of an adapter as a server reads it: with its engine's form of experts, if the base is known."""
    format = next(known for known in registry.formats().values() if known.holds_adapters)
    asked: dict[str, Any] = {} if opened.model_files.config is None else {"engine": control.engine.lower()}
    asked |= {"lora_alpha": lora_alpha, "base_model": served.folder or served.base}
    return plan(opened, to=format.name, **asked)


def base_here(served: ServedModels) -> str | None:
    """The folder of the server's base, if this machine sees it."""
    return served.folder if served.folder and Path(served.folder, "config.json").is_file() else None


def digits_of(fingerprint: str) -> str:
    """The digits of a fingerprint that stand in the name of an adapter."""
    return fingerprint.rpartition(":")[2][:12]


def _folder(control: AdapterServer, shared_dir: PathLike | None) -> str:
    """The folder that this machine and the server see. Raises RequestError if none is known."""
    if shared_dir is None and not (control.is_on_this_machine and os.path.isdir(os.path.dirname(_SHARED))):
        raise RequestError(
            "the server runs on another machine, or there is no /dev/shm here",
            where=control.name,
            why="Servers load an adapter from a folder that it sees",
            do="Name a folder that both machines see with `shared_dir=DIR`",
        )
    folder = os.path.abspath(_SHARED if shared_dir is None else shared_dir)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder


def _check_fits(folder: Path, model: PathLike | None, server: str) -> None:
    """Raises CheckpointError if the adapter in a folder is none of the server's base, or lacks an expert."""
    config = None if model is None else find_model_files(open_tree(model)).config
    known = None if config is None else find_model(dict(config))
    if known is None:
        return
    index, settings = open(folder).index, json.loads((folder / ADAPTER_CONFIG).read_text())
    base = AdaptedBase(known, None, "the adapter", None)
    try:
        check_whole(read_adapter(base, LoraSettings(settings), {tensor.name: tensor for tensor in index.tensors}), known)
    except CheckpointError as error:
        raise CheckpointError(error.what, where=error.where, why=f"{server} serves another base; nothing was sent", do=error.do) from None


def _load(control: AdapterServer, adapter: str, folder: Path) -> None:
    """Load an adapter and generate a token with it. If the server does not, it has the adapters that it had before."""
    try:
        control.load(adapter, str(folder))
        try:
            control.one_token(adapter)
        except SystemRefusal:
            control.unload(adapter)
            raise
    except SystemRefusal as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise refusal(error, control.name) from None
