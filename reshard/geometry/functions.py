"""Functions: values that an engine or a framework stores in place of a weight, such as A = -exp(A_log) of state-space models, or a norm's
weight minus one.

The rule: the weight is converted to float32, and the result is the float32 number nearest to the function's exact value. It is the same on
every machine. The mathematical libraries behind torch come close to it, each in its own way: torch 2.13 on x86-64 processors differs by one
unit in the last place for 45 of the 65,280 finite values of bfloat16 (fixtures/functions).
"""

from __future__ import annotations

from decimal import Context, Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

FUNCTIONS = ("-exp", "x-1")
"""Their names: -exp(x), x - 1."""
INVERTIBLE = ("x-1",)
"""The functions from whose values the weight is computed: in float32, rounded once, then cast to the type of the weight."""

Float32 = npt.NDArray[np.float32]

# numpy's float64 functions are exact to some units in the last place, of 2^-53. Where that decides the rounding, more digits are computed.
UNSURE = 2.0**-49
_DIGITS = Context(prec=50, Emin=-(10**6), Emax=10**6)


def values_of(function: str, x: Float32) -> Float32:
    """The values of a function, rounded once to float32. The values of NaN are NaN."""
    return x - np.float32(1) if function == "x-1" else -_exp(x)


def weights_of(function: str, values: Float32) -> Float32:
    """The weights that an invertible function gave these values, rounded once to float32."""
    assert function in INVERTIBLE, "weights do not follow from the values of other functions"
    return values + np.float32(1)


def _exp(x: Float32) -> Float32:
    """e to the power of each element, rounded to nearest."""
    with np.errstate(all="ignore"):
        wide: npt.NDArray[Any] = np.exp(x.astype(np.float64))
        result = wide.astype(np.float32)
        unsure = (wide * (1 - UNSURE)).astype(np.float32) != (wide * (1 + UNSURE)).astype(np.float32)
    unsure &= np.isfinite(x) & (x != 0)
    for at in np.flatnonzero(unsure).tolist():
        result[at] = _nearest(_DIGITS.exp(Decimal(float(x[at]))), result[at])
    return result


def _nearest(exact: Decimal, near: np.float32) -> np.float32:
    """The float32 number nearest to an exact value, which is `near` or one of its neighbours. No value of exp lies midway between two."""
    with np.errstate(all="ignore"):
        neighbours = (np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(np.inf)))
    return min((near for near in neighbours if np.isfinite(near)), key=lambda near: abs(Decimal(float(near)) - exact))
