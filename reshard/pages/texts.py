"""Texts of single values, as terminals and pages show them."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.geometry.quantities import nbytes_text as nbytes_text


def age_text(seconds: float) -> str:
    """A time as people say it: 40 s, 12 min, 3 h, 5 days."""
    for most, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def count_text(count: int) -> str:
    """8.03 B, 74,016: exact below a million."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"


def shape_text(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def bar_text(share: float, width: int = 12) -> str:
    """A bar for a share of 0 to 1, in eighths of a character; a share above 0 is never drawn as nothing."""
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def strip_text(start: int, stop: int, size: int, *, replica: bool = False, width: int = 24) -> str:
    """The part start..stop of an axis as a strip of characters; a part that is not empty fills one at least."""
    first = min(start * width // max(size, 1), width - 1)
    last = max(-(-stop * width // max(size, 1)), first + 1) if stop > start else first
    return "·" * first + ("▒" if replica else "█") * (last - first) + "·" * (width - last)


def sparkline(counts: Sequence[int]) -> str:
    """A histogram as one line; a bin that is not empty is never drawn as empty."""
    highest = max(counts, default=0)
    return "".join(" " if not count else "▁▂▃▄▅▆▇█"[min(7, count * 8 // highest)] for count in counts)
