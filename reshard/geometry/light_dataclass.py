"""dataclass: that of the standard library, for a tool that starts often and makes millions of values.

The standard library compiles six methods for each frozen dataclass: 0.5 ms each time a process starts, and for the 120 classes of a
small inspection a quarter of its processor time. Here only `__init__` is compiled; the other methods are shared functions. Values are
frozen for the type checker alone: a dataclass that is frozen at run time sets each field by a call, and takes four times as long to make.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass as standard_dataclass
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen: bool = False, slots: bool = False, eq: bool = True, repr: bool = True) -> Callable[[type], type]:
        """A decorator with these arguments of `dataclasses.dataclass`; `fields`, `replace` and `asdict` take what it makes.

        `frozen` makes values hashable. A method that the class defines itself is kept.
        """

        def made(plain: type) -> type:
            methods = {"__repr__": _shown} if repr else {}
            own = {*plain.__dict__} - ({"__hash__"} if plain.__dict__.get("__hash__") is None else set())
            cls = standard_dataclass(slots=slots, eq=False, repr=False)(plain)
            if eq:
                values = _values_of([field.name for field in fields(cls) if field.compare])
                methods |= {"__eq__": _equals(values), "__hash__": _hash(values) if frozen else None}
            for name in methods.keys() - own:
                setattr(cls, name, methods[name])
            return cls

        return made


def _shown(self: Any) -> str:
    values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr)
    return f"{type(self).__qualname__}({values})"


def _values_of(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A function from a value to the tuple of these fields."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)


def _equals(values: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any, object], bool]:
    def equals(self: Any, other: object) -> bool:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return equals


def _hash(values: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], int]:
    return lambda self: hash(values(self))
