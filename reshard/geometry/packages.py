"""Packages that reshard does without, until someone asks for what they do."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from reshard.errors import RequestError


def package(name: str, what: str, do: str) -> Any:
    """The module of an optional package. what: what needs it. do: how to install it, or do without it.

    Raises: RequestError if the package is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise RequestError(f"{what} needs {name}, which is not installed", do=do) from None
