"""reshard: convert training checkpoints to what serving engines load, on one CPU machine, in constant memory, bit-exact, proven.

import reshard

ckpt = reshard.open("step-1000")                       # what is in it; no weight is read
plan = reshard.plan(ckpt, to="vllm", tp=8)             # what goes where, proven
reshard.convert(plan, "out/")
reshard.verify("step-1000", "out/").raise_if_different()
rank3 = ckpt.view(to="vllm", tp=8, rank=3)             # name -> array, read when asked for

reshard.convert("step-1000", "out/", to="vllm", tp=8)  # the command line as a call
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if not os.path.isdir(os.path.join(__path__[0], "formats")):
    __path__.append(os.path.dirname(__path__[0]))  # in a checkout, formats/, cli/ and plugins/ lie beside this folder

if TYPE_CHECKING:
    from reshard.canonical.content import Selection
    from reshard.doors.folder import folder
    from reshard.doors.hub import hub
    from reshard.errors import CheckpointError, DifferenceFound, RequestError, ReshardError
    from reshard.opening.checkpoint import Checkpoint
    from reshard.opening.open import open
    from reshard.storage.stores.urls import storage_options
    from reshard.verbs.convert import convert, convert_part
    from reshard.verbs.delta import apply, delta
    from reshard.verbs.digests import digests
    from reshard.verbs.look.degrees import degrees
    from reshard.verbs.look.diff import diff
    from reshard.verbs.look.doctor import doctor
    from reshard.verbs.look.estimate import estimate
    from reshard.verbs.look.explain import explain
    from reshard.verbs.look.fingerprint import fingerprint
    from reshard.verbs.look.learn import learn
    from reshard.verbs.look.log import log
    from reshard.verbs.look.stats import stats
    from reshard.verbs.plan import load_plan, plan, save_plan
    from reshard.verbs.push import push
    from reshard.verbs.roundtrip import roundtrip
    from reshard.verbs.serve.cache import cache
    from reshard.verbs.serve.push_adapter import push_adapter
    from reshard.verbs.serve.serve_check import serve_check
    from reshard.verbs.serve.sign import sign
    from reshard.verbs.transfers import transfers
    from reshard.verbs.verify import verify
    from reshard.verbs.watch import watch

__version__ = "0.2.0"
__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DifferenceFound",
    "RequestError",
    "ReshardError",
    "Selection",
    "apply",
    "cache",
    "convert",
    "convert_part",
    "degrees",
    "delta",
    "diff",
    "digests",
    "doctor",
    "estimate",
    "explain",
    "fingerprint",
    "folder",
    "hub",
    "learn",
    "load_plan",
    "log",
    "open",
    "plan",
    "push",
    "push_adapter",
    "roundtrip",
    "save_plan",
    "serve_check",
    "sign",
    "stats",
    "storage_options",
    "transfers",
    "verify",
    "watch",
]
_ELSEWHERE = {
    "apply": "verbs.delta", "folder": "doors.folder", "hub": "doors.hub",
    "Checkpoint": "opening.checkpoint", "Selection": "canonical.content", "open": "opening.open", "convert_part": "verbs.convert",
    "load_plan": "verbs.plan", "save_plan": "verbs.plan", "storage_options": "storage.stores.urls",
    "cache": "verbs.serve.cache", "push_adapter": "verbs.serve.push_adapter", "serve_check": "verbs.serve.serve_check",
    "sign": "verbs.serve.sign",
}  # fmt: skip
_LOOKS = {"degrees", "diff", "doctor", "estimate", "explain", "fingerprint", "learn", "log", "stats"}


def __getattr__(name: str) -> Any:
    """The public names, loaded on first use: `import reshard` costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'reshard' has no attribute {name!r}" + _in_its_place(name))
    from importlib import import_module

    from reshard.storage.system_calls import check_platform

    check_platform()
    attribute = getattr(import_module(f"reshard.{_module_of(name)}"), name)
    _bind_from_above(is_checkpoint=name in ("Checkpoint", "open"))
    return attribute


def _in_its_place(name: str) -> str:
    """The end of the sentence that a name is not there: the function that does it."""
    by_method = {"inspect": "open", "load": "open", "cat": "open", "view": "open", "export": "open", "save": "convert"}
    if name.startswith("_"):
        return ""
    from reshard.errors import nearest

    near = by_method.get(name) or nearest(name, __all__)
    return f". Did you mean reshard.{near}?" if near else ""


def _bind_from_above(*, is_checkpoint: bool) -> None:
    """What draws a value, and the verbs that a checkpoint has as methods, stand above it. They are loaded when they are asked for."""
    from importlib import import_module

    from reshard.geometry.value import draw_with

    draw_with(lambda value, for_notebook: str(import_module("reshard.pages.pictures").draw(value, for_notebook)))
    if is_checkpoint:
        from reshard.opening.checkpoint import verbs_from

        verbs_from(lambda verb: getattr(import_module(f"reshard.verbs.{verb}"), verb))


def _module_of(name: str) -> str:
    if name.endswith(("Error", "Found")):
        return "errors"
    return _ELSEWHERE.get(name) or (f"verbs.look.{name}" if name in _LOOKS else f"verbs.{name}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
