"""Drawn: a value that has a picture and does not know how it is drawn."""

from __future__ import annotations

from collections.abc import Callable


class Drawn:
    """A value that a notebook shows as a drawing. What draws it stands above it: `reshard/__init__.py` binds `draw_with`."""

    __slots__ = ()

    def picture(self) -> str:
        """What it shows, as SVG with captions, or as a table."""
        return _draw(self, False)

    def _repr_html_(self) -> str:
        return _draw(self, True)


def draw_with(draw: Callable[[object, bool], str]) -> None:
    """Bind what draws values. draw: takes a value, and whether it is for a notebook, which needs the colours with it."""
    global _draw
    _draw = draw


def _unbound(value: object, for_notebook: bool) -> str:
    return repr(value)


_draw: Callable[[object, bool], str] = _unbound
