"""One rank of a serving engine in one process: what is the same for every engine.

An engine is a module with the functions of Engine (vllm_ranks.py, sglang_ranks.py).
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

# Larger arrays are made without elements. Smaller ones are real, since models look at maps of experts and at slopes and scales.
LARGEST_REAL = 1 << 16
_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Case:
    """Parallel sizes, as engines take them."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        """The number of ranks. Their numbers are pp_rank * tp + tp_rank."""
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A model in which the loader's work was recorded."""

    model: Any
    """The engine's model."""
    dtype: str
    """The element type in which the engine computes."""
    softened: list[str]
    """What the engine could not choose on this platform."""


class Engine(Protocol):
    """What the tracer needs of a serving engine."""

    def prepare(self) -> None:
        """Import the engine, and change what would need other processes, network or a GPU. Called once, before ranks are forked."""

    def about(self) -> dict[str, str]:
        """The engine's name and version, and the platform of its build."""

    def engine_config(self, model: str, case: Case, *, trust_remote_code: bool) -> Any:
        """The configuration of a model at these sizes, with its class imported. Raises what the engine raises for sizes that it refuses."""

    def loaded_rank(self, config: Any, case: Case, rank: int, recorder: Any, sources: dict[str, Any]) -> AbstractContextManager[LoadedRank]:
        """The model of one rank after the engine's loader has loaded `sources`, with everything recorded.

        sources: name -> tensor on `meta`.
        """

    def kernel_choices(self, model: Any) -> Iterator[tuple[str, str]]:
        """Module -> why the form of its tensors depends on the kernel that the platform chooses."""


def set_environment(variables: Mapping[str, str]) -> None:
    """Set what every engine needs and these variables, where the user has not set them."""
    for name, value in {**_ENVIRONMENT, **variables}.items():
        os.environ.setdefault(name, value)


def fake_new_groups() -> None:
    """Let every new process group be one of torch's fake groups, which need no other process."""
    import torch.distributed as dist

    new_group = dist.new_group

    def fake_group(ranks: Any = None, *_: Any, **names: Any) -> Any:
        return new_group(ranks, backend="fake")

    dist.new_group = fake_group  # type: ignore[assignment,unused-ignore]


def large_on_meta() -> Any:
    """A mode in which large arrays are made on `meta`."""
    import torch
    from torch.overrides import TorchFunctionMode

    sized = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn}

    class LargeOnMeta(TorchFunctionMode):  # type: ignore[misc,unused-ignore]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names = dict(kwargs or {})
            size: Any = None
            if func in sized:
                size = names.get("size", args[0] if args and isinstance(args[0], tuple | list | torch.Size) else args)
            elif func is torch.full or func is torch.empty_strided:
                size = args[0] if args else names.get("size")
            if isinstance(size, tuple | list) and all(isinstance(length, int) for length in size) and math.prod(size) > LARGEST_REAL:
                names["device"] = "meta"
                names.pop("pin_memory", None)
            return func(*args, **names)

    return LargeOnMeta()


class NoKernel:
    """In place of a kernel that this platform lacks. Nothing is computed, so nothing calls it."""

    input_dtype = None

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes what the kernel takes."""

    def input_quant_key(self) -> None:
        """Its inputs are not quantized before it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"this platform has no such kernel ({name})")


class Softening(contextlib.ExitStack):
    """Functions of an engine that may fail, as they need a kernel that this platform lacks, and what takes their place in this context."""

    def __init__(self, lines: list[str]) -> None:
        """lines: gets what was missing."""
        super().__init__()
        self._lines = lines

    def soften(self, module_name: str, name: str, fallback: Callable[..., Any]) -> None:
        """Let a function or class of a module return `fallback` of its arguments where it fails. One that does not exist is passed over."""
        with contextlib.suppress(ImportError, AttributeError):
            owner: Any = importlib.import_module(module_name)
            *path, attribute = name.split(".")
            for part in path:
                owner = getattr(owner, part)
            real, stored = getattr(owner, attribute), vars(owner)[attribute]

            def soft(*args: Any, **names: Any) -> Any:
                try:
                    return real(*args, **names)
                except Exception as error:
                    line = f"{attribute}: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
                    if line not in self._lines:
                        self._lines.append(line)
                    return fallback(*args, **names)

            replacement: Any = staticmethod(soft) if isinstance(stored, classmethod | staticmethod) else soft
            if isinstance(real, type):  # annotations name it
                replacement = type(attribute, (real,), {"__new__": lambda _, *args, **names: soft(*args, **names)})
            self.replace(owner, attribute, replacement)

    def replace(self, owner: Any, attribute: str, value: Any) -> None:
        """Set an attribute until the context ends."""
        stored = vars(owner)[attribute]
        setattr(owner, attribute, value)
        self.callback(setattr, owner, attribute, stored)
