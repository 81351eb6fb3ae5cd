"""Gathered: what is known of a part of a tensor, which is added to what is known of another part."""

from __future__ import annotations

import operator
from dataclasses import fields
from typing import Any, Self


class Gathered:
    """What is known of a part of a tensor. A field is added to that of another part, or combined as its metadata says."""

    __slots__ = ()

    def add(self, part: Self) -> None:
        """Take in another part."""
        whole: Any = self
        for field in fields(whole):
            combine = field.metadata.get("combine", operator.add)
            setattr(self, field.name, combine(getattr(self, field.name), getattr(part, field.name)))
