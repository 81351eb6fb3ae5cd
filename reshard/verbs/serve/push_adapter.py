"""The verb `push_adapter`: a LoRA adapter alone becomes one that a running server answers with.

The adapter is written in the form that the server's engine reads, into a folder that the server sees; SGLang gets its tensors by HTTP
where no such folder is named. The server loads it under a name with its fingerprint, and generates a token with it, before an older version
is unloaded.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

from reshard.adapter import registry
from reshard.adapter.model_files import ADAPTER_CONFIG, find_model_files
from reshard.canonical.adapters.base import AdaptedBase
from reshard.canonical.adapters.reading import check_whole, read_adapter
from reshard.canonical.lora import LoraSettings
from reshard.errors import CheckpointError, RequestError, ReshardError, SystemRefusal
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

_SHARED = "/dev/shm"
_UNLOADED = "unloaded"
"""A file in the folder of a version that a push has unloaded."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


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
    folder: str | None
    """The folder from which the server has read it; None: it has got the tensors by HTTP."""
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
    shared_dir: a folder that this machine and the server both see. By default SGLang gets the tensors by HTTP, and vLLM, if it runs on this
    machine, a folder in /dev/shm.
    keep: how many versions stay loaded.

    Raises: CheckpointError or RequestError, before the server is asked to load anything, if the adapter does not fit the server's base or
    lacks an expert; SystemRefusal if the server does not take it. Then the server goes on with the adapters that it had.
    """
    if not _NAME.fullmatch(name):
        raise RequestError(f"`name={name}`: an adapter's name has letters, digits, and . _ - in it", do="Give a name such as tutor")
    began, control = time.monotonic(), adapter_server(server)
    served = control.models()
    folder = None if shared_dir is None and control.takes_tensors else _folder(control, shared_dir)
    given: dict[str, Any] = dict(options)
    if given.get("model") is None:
        given["model"] = base_here(served)
    opened = source if isinstance(source, Checkpoint) else open(source, **given)
    written = Path(tempfile.mkdtemp(prefix=".new-", dir=folder)) / "adapter"
    try:
        planned = plan_of_adapter(opened, control, served, lora_alpha)
        result = convert(planned, written)
        _check_fits(written, given.get("model"), control)
        fingerprint = result.fingerprint.root
        adapter = f"{name}@{digits_of(fingerprint)}"
        target = None if folder is None else Path(folder, adapter)
        if adapter not in served.adapters:
            _load(control, adapter, written, target)
        elif target is not None:
            _check_same(written, target, control.name)
    finally:
        shutil.rmtree(written.parent, ignore_errors=True)
    older = [other for other in served.adapters if is_version(other, name) and other != adapter]
    unloaded, notes = _unload(control, older[: max(0, len(older) - (keep - 1))])
    if folder is not None:
        _remove_unused(folder, name, {*served.adapters, adapter}, unloaded)
    nbytes = sum(tensor.nbytes for tensor in planned.content.tensors.values())
    seconds, where = time.monotonic() - began, None if target is None else str(target)
    return AdapterPushed(control.name, adapter, fingerprint, nbytes, where, unloaded, seconds, (*planned.layout.notes, *notes))


def is_version(adapter: str, name: str = "") -> bool:
    """Whether the name of an adapter is that of a version of `name`, or of any if it is empty: NAME@ and 12 digits of a fingerprint."""
    return re.fullmatch((re.escape(name) or ".*") + "@[0-9a-f]{12}", adapter) is not None


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
            why=f"{control.engine} loads an adapter from a folder that it sees. No release up to 0.33 takes the tensors by HTTP",
            do="Name a folder that both machines see with `shared_dir=DIR`",
        )
    folder = os.path.abspath(f"{_SHARED}/reshard-adapters-{os.getuid()}" if shared_dir is None else shared_dir)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if shared_dir is None and os.stat(folder).st_uid != os.getuid():
        raise RequestError("the folder belongs to another user", where=folder, do="Name a folder of yours with `shared_dir=DIR`")
    return folder


def _check_fits(folder: Path, model: PathLike | None, control: AdapterServer) -> None:
    """Raises RequestError if the server's engine would refuse the adapter in a folder, or apply a part of it; CheckpointError if it is none
    of the server's base, or lacks an expert."""
    config = None if model is None else find_model_files(open_tree(model)).config
    known = None if config is None else find_model(dict(config))
    written, settings = open(folder), json.loads((folder / ADAPTER_CONFIG).read_text())
    index, format = written.index, registry.named(written.format)
    for kind, what, do in format.about_serving(index, settings, control.engine.lower(), config):
        if kind in ("not-served", "never-applied"):
            raise RequestError(what, where=control.name, why="Nothing was sent", do=do)
    if known is None:
        return
    base = AdaptedBase(known, None, "the adapter", None)
    try:
        check_whole(read_adapter(base, LoraSettings(settings), {tensor.name: tensor for tensor in index.tensors}), known)
    except CheckpointError as error:
        raise CheckpointError(
            error.what, where=error.where, why=f"{control.name} serves another base; nothing was sent", do=error.do
        ) from None


def _check_same(written: Path, loaded: Path, server: str) -> None:
    """Raises RequestError if the server has the same tensors with another scale: the fingerprint in its name is that of the tensors."""
    settings = [json.loads((folder / ADAPTER_CONFIG).read_text()) for folder in (written, loaded) if (folder / ADAPTER_CONFIG).is_file()]
    scales = [[config.get(key) for key in ("lora_alpha", "use_rslora", "alpha_pattern")] for config in settings]
    if scales[0] != scales[-1]:
        raise RequestError(
            "the server has an adapter with these tensors and another scale, such as another lora_alpha",
            where=server,
            why=f"Both would be called {loaded.name}",
            do="Give it another name with `name=`",
        )


def _load(control: AdapterServer, adapter: str, written: Path, target: Path | None) -> None:
    """Load the adapter that was written, from the folder `target` if it is given, and generate a token with it. If the server does not, it
    has the adapters that it had before."""
    moved = target is not None and _moved(written, target)
    try:
        if target is None:
            control.send(adapter, written)
        else:
            control.load(adapter, str(target))
        try:
            control.one_token(adapter)
        except SystemRefusal:
            with suppress(ReshardError):
                control.unload(adapter)
            raise
    except (RequestError, SystemRefusal) as error:
        goes_on = False
        with suppress(ReshardError):
            if adapter in control.models().adapters:
                return  # another push has loaded the same adapter meanwhile
            goes_on = True
        if moved:
            shutil.rmtree(str(target), ignore_errors=True)
        raise (refusal(error, control.name, goes_on) if isinstance(error, SystemRefusal) else error) from None


def _moved(written: Path, target: Path) -> bool:
    """Move a folder; False if the target is there, which another push of the same adapter has written."""
    try:
        os.rename(written, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        (target / _UNLOADED).unlink(missing_ok=True)
        return False
    return True


def _unload(control: AdapterServer, older: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """Unload versions. Returns them, and a note for each that the server keeps."""
    unloaded, notes = [], []
    for other in older:
        try:
            control.unload(other)
        except ReshardError as error:
            with suppress(ReshardError):
                if other not in control.models().adapters:
                    continue  # another push has unloaded it meanwhile
            notes.append(f"{other} stays loaded: {error.what}")
        else:
            unloaded.append(other)
    return tuple(unloaded), notes


def _remove_unused(folder: str, name: str, used: set[str], unloaded: Iterable[str]) -> None:
    """Remove the folders of versions that an earlier push has unloaded. Those unloaded now stay until the next push: vLLM reads a folder
    again if a request that still waits needs an adapter that its cache has dropped."""
    for path in Path(folder).iterdir():
        if is_version(path.name, name) and path.name not in used and (path / _UNLOADED).exists():
            shutil.rmtree(path, ignore_errors=True)
    for other in unloaded:
        with suppress(OSError):
            Path(folder, other, _UNLOADED).touch()
