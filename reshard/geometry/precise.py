"""Functions of real numbers to 50 decimal digits, which are rounded to float64 once: the same on every machine. (The C library's sine and
cosine differ in the last bit from one library to another.)"""

from __future__ import annotations

from decimal import Context, Decimal, localcontext
from fractions import Fraction

Number = Decimal | Fraction | int | float

_DIGITS, _GUARD = 50, 10
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")


def decimal(number: Number) -> Decimal:
    """The number to 50 digits; a float exactly."""
    with localcontext(Context(prec=_DIGITS + _GUARD)):
        return Decimal(number.numerator) / Decimal(number.denominator) if isinstance(number, Fraction) else Decimal(number)


def root(number: Number) -> Decimal:
    """The square root."""
    return decimal(number).sqrt(Context(prec=_DIGITS + _GUARD))


def pi_times(number: Number) -> Decimal:
    """Pi times a number."""
    with localcontext(Context(prec=_DIGITS + _GUARD)):
        return _PI * decimal(number)


def cosine(angle: Number) -> Decimal:
    """The cosine of an angle from 0 to pi."""
    return _series(decimal(angle), Decimal(1), 0)


def sine(angle: Number) -> Decimal:
    """The sine of an angle from 0 to pi."""
    return _series(decimal(angle), decimal(angle), 1)


def angle_of(cosine_of_it: float) -> Decimal:
    """The angle from 0 to pi whose cosine is this number, which must not be near -1 or 1: Newton's method from float64 on."""
    import math

    angle = decimal(math.acos(cosine_of_it))
    for _ in range(3):  # 16 digits, then 32, then all
        with localcontext(Context(prec=_DIGITS + _GUARD)):
            angle += (cosine(angle) - decimal(cosine_of_it)) / sine(angle)
    return angle


def _series(angle: Decimal, first: Decimal, power: int) -> Decimal:
    """The Taylor series that begins with the term of that power."""
    with localcontext(Context(prec=_DIGITS + _GUARD)):
        total, term, square = Decimal(0), first, -angle * angle
        while total + term != total:
            total += term
            power += 2
            term = term * square / (power * (power - 1))
        return total
