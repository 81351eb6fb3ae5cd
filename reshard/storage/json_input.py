"""JSON text that another program wrote, read with limits.

Without limits, a config of a few kilobytes can hold a value that no code behind it can handle: one that is nested deeper than Python's
stack, or a whole number that no float can hold.
"""

from __future__ import annotations

import json
from typing import Any

# Configs of real models have fewer than 10 levels. The longest number is model_max_length in configs of tokenizers: int(1e30), 31 digits.
MOST_LEVELS = 100
MOST_DIGITS = 100


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError if it is not JSON, is nested deeper than 100 levels, or holds a whole number of more than
    100 digits."""
    try:
        value = _DECODER.decode(text if isinstance(text, str) else text.decode(json.detect_encoding(text), "surrogatepass"))
    except RecursionError:
        raise _too_deep() from None
    _check_levels(value)
    return value


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"the number {digits[:20]}... has {len(digits):,} digits, more than {MOST_DIGITS}")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_whole_number)


def _check_levels(value: Any) -> None:
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        if not level:
            return
        level = [
            inner
            for container in level
            for inner in (container.values() if isinstance(container, dict) else container if isinstance(container, list) else ())
            if isinstance(inner, dict | list)
        ]
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {MOST_LEVELS} levels")
