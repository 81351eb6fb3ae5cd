"""Stand-ins for packages that an engine's modules import, and of which loading weights calls nothing. They are used only where the package
is not installed."""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _AnyClass(type):
    """A class that has every attribute, and takes part in every annotation."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return cls

    def __ror__(cls, _: Any) -> Any:
        return cls


class Anything(metaclass=_AnyClass):
    """What a stand-in has under every name: a class, a function or a decorator. A decorator returns what it is applied to."""

    def __new__(cls, *args: Any, **names: Any) -> Any:
        if cls is Anything and len(args) == 1 and not names and (isinstance(args[0], type) or callable(args[0])):
            return args[0]
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *args: Any, **names: Any) -> Any:
        return args[0] if len(args) == 1 and not names and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, _: Any) -> Any:
        return self


_WORDS = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")
# Attributes that are looked at when a module is imported.
_KNOWN = {"InterpolationMode": enum.Enum("InterpolationMode", {word.upper().replace("-", "_"): word for word in _WORDS})}


class _StandInFinder(MetaPathFinder, Loader):
    """Finds every module of some packages."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: Any = ModuleType(spec.name)
        module.__version__ = "0.0"
        module.__getattr__ = _attribute
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None: ...


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _KNOWN.get(name, Anything)


def stand_in(packages: Sequence[str]) -> None:
    """Let those of the packages that are not installed be imported. Called once."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_StandInFinder(missing))
