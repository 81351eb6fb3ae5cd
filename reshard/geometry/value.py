"""value and mutable: dataclasses for a tool that starts often and makes millions of values.

    @value                 a value: frozen, with slots, compared and hashed by its fields
    @value(eq=False)       compared by identity, because it is large or holds functions
    @value(slots=False)    with a dictionary, because it has cached properties
    @mutable               a record whose fields change while it is made

The standard library compiles six methods for each frozen dataclass: 0.5 ms each time a process starts, and for the 140 classes of a
small inspection a third of its processor time. Here only `__init__` is compiled, in 0.04 ms; the other methods are shared functions.
Values are frozen for the type checker, and not at run time: a class that is frozen there sets each field by a call, and takes four times
as long to make.

Drawn is a value that has a picture and does not know how it is drawn; Tabular is a result that has rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform, overload

__all__ = ["mutable", "value"]

T = TypeVar("T")


@overload
def value(cls: type[T], /) -> type[T]: ...
@overload
def value(*, slots: bool = True, eq: bool = True, repr: bool = True) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True)
def value(cls: Any = None, /, *, slots: bool = True, eq: bool = True, repr: bool = True) -> Any:
    """Make a class a dataclass whose values never change. `fields`, `replace` and `asdict` of `dataclasses` take them.

    A method that the class defines itself is kept.
    """
    return _decorated(cls, slots=slots, eq=eq, repr=repr, hashable=True)


@overload
def mutable(cls: type[T], /) -> type[T]: ...
@overload
def mutable(*, eq: bool = True) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform()
def mutable(cls: Any = None, /, *, eq: bool = True) -> Any:
    """Make a class a dataclass whose fields may be set; it has no hash if it is compared by its fields."""
    return _decorated(cls, slots=True, eq=eq, repr=True, hashable=False)


def _decorated(cls: type | None, **options: bool) -> Any:
    return (lambda plain: _made(plain, **options)) if cls is None else _made(cls, **options)


def _made(plain: type, *, slots: bool, eq: bool, repr: bool, hashable: bool) -> type:
    methods: dict[str, Any] = {"__repr__": _shown} if repr else {}
    own = {*plain.__dict__} - ({"__hash__"} if plain.__dict__.get("__hash__") is None else set())
    cls: type[Any] = dataclass(slots=slots, eq=False, repr=False, init=False)(plain)
    methods["__init__"] = _init(cls.__qualname__, fields(cls), has_post_init=hasattr(cls, "__post_init__"))
    if eq:
        values = _values_of([field.name for field in fields(cls) if field.compare])
        methods |= {"__eq__": _equals(values), "__hash__": _hash(values) if hashable else None}
    for name in methods.keys() - own:
        setattr(cls, name, methods[name])
    return cls


def _init(owner: str, of: tuple[Field[Any], ...], *, has_post_init: bool) -> Callable[..., None]:
    """The `__init__` of a class, which sets these fields. (That of the standard library also evaluates each annotation: three times the
    time.)"""
    parameters, lines, names = [], [], dict[str, Any]()
    for field in of:
        name, default, factory = field.name, f"default_{field.name}", field.default_factory
        given = name if factory is MISSING else f"{default}() if {name} is MISSING else {name}"
        lines.append(f" self.{name} = {given}")
        if factory is not MISSING:
            names |= {default: factory, "MISSING": MISSING}
            parameters.append(f"{name}=MISSING")
        elif field.default is not MISSING:
            names[default] = field.default
            parameters.append(f"{name}={default}")
        else:
            parameters.append(name)
    lines += [" self.__post_init__()"] if has_post_init else []
    exec(f"def __init__(self, {', '.join(parameters)}):\n" + ("\n".join(lines) or " pass"), names)
    made: Callable[..., None] = names["__init__"]
    made.__qualname__ = f"{owner}.__init__"
    made.__annotations__ = {field.name: field.type for field in of} | {"return": None}
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


class Drawn:
    """A value that a notebook shows as a drawing. What draws it stands above it: `reshard/__init__.py` binds `draw_with`."""

    __slots__ = ()

    def picture(self) -> str:
        """What it shows, as SVG with captions, or as a table."""
        return _draw(self, False)

    def _repr_html_(self) -> str:
        return _draw(self, True)


class Tabular(Drawn):
    """A result with one row for each of its parts. `print` shows the first rows, a notebook more of them."""

    __slots__ = ()

    def table(self) -> Any:
        """The rows of the result, as a `Table` (geometry/table.py)."""
        raise NotImplementedError

    def sorted_by(self, column: str, *, reverse: bool = False) -> Any:
        """The rows in the order of a column. Raises RequestError, with the nearest name, if there is no such column."""
        return self.table().sorted_by(column, reverse=reverse)

    def to_pandas(self) -> Any:
        """The rows as a pandas DataFrame. Raises RequestError if pandas is not installed."""
        return self.table().to_pandas()

    def __str__(self) -> str:
        rows = self.table()
        return f"{self!r}\n{rows}" if rows else repr(self)


def draw_with(draw: Callable[[object, bool], str]) -> None:
    """Bind what draws values. draw: takes a value, and whether it is for a notebook, which needs the colours with it."""
    global _draw
    _draw = draw


def _unbound(value: object, for_notebook: bool) -> str:
    return repr(value)


_draw: Callable[[object, bool], str] = _unbound
