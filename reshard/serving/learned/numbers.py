"""Numbers that depend on the tensor-parallel size and rank: a position, a size or a step in a learned layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from reshard.geometry.value import value

TpRank = tuple[int, int]
"""A tensor-parallel size and a rank: (tp, tp_rank)."""
ONE_RANK: TpRank = 1, 0


class NoRule(Exception):
    """A rule has no value at a tensor-parallel size."""


def _exact(number: int, parts: int) -> int:
    if number % parts:
        raise NoRule(f"{number} is not a multiple of {parts}")
    return number // parts


@value
class Share:
    """An equal share of `total`, or the position where the rank's share starts, counted from `base`.

    With `heads`, there are at most so many shares: more ranks than heads hold the same share several times.
    """

    total: int
    base: int | None
    """None: the size of a share. Otherwise the position of the rank's share, where rank 0 has `base`."""
    heads: int = 0

    def at(self, tp: int, tp_rank: int) -> int:
        """The number on a rank. Raises NoRule if the ranks do not share the total equally."""
        if self.heads and tp % self.heads and self.heads % tp:
            raise NoRule(f"{tp} ranks do not share {self.heads} heads")
        parts = min(tp, self.heads) if self.heads else tp
        share = _exact(self.total, parts)
        return share if self.base is None else self.base + tp_rank * parts // tp * share


@value
class Rest:
    """What padding leaves of a rank's share: `total` rows, padded to `padded`, are cut into equal shares."""

    total: int
    padded: int

    def at(self, tp: int, tp_rank: int) -> int:
        """The number of rows on a rank that are no padding. Raises NoRule if the ranks do not share the padded rows equally."""
        share = _exact(self.padded, tp)
        return max(0, min(share, self.total - tp_rank * share))


@value
class Sum:
    """The sum of two shares, as where key heads that several ranks hold follow query heads."""

    first: Share
    second: Share

    def at(self, tp: int, tp_rank: int) -> int:
        """The number on a rank. Raises NoRule if the ranks do not share one of the two equally."""
        return self.first.at(tp, tp_rank) + self.second.at(tp, tp_rank)


@value
class OnFirst:
    """A number on rank 0, and 0 on all other ranks, such as the size of a bias that only one rank adds."""

    number: int

    def at(self, tp: int, tp_rank: int) -> int:
        """The number on a rank."""
        return 0 if tp_rank else self.number


@value(slots=False)
class Listed:
    """A number that follows no rule: one for each rank of the traced sizes."""

    numbers: Mapping[int, tuple[int, ...]]
    """Tensor-parallel size -> the number on each rank."""

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.numbers.items())))

    def at(self, tp: int, tp_rank: int) -> int:
        """The number on a rank. Raises NoRule for a size that was not traced."""
        if tp not in self.numbers:
            raise NoRule(f"the layout was traced at TP {', '.join(map(str, sorted(self.numbers)))}")
        return self.numbers[tp][tp_rank]


Rule = Share | Rest | Sum | OnFirst | Listed
Number = int | Rule
"""A number that is the same on all ranks, or the rule that gives it."""


def values(numbers: Iterable[Number], rank: TpRank) -> tuple[int, ...]:
    """The numbers on a rank. Raises NoRule if a rule has none there."""
    return tuple(number if isinstance(number, int) else number.at(*rank) for number in numbers)


def fitted(points: Mapping[TpRank, int]) -> Number | None:
    """The simplest rule that gives these numbers; None if no rule does."""
    return _fitted(tuple(sorted(points.items())))


@lru_cache(maxsize=1 << 16)
def _fitted(points: tuple[tuple[TpRank, int], ...]) -> Number | None:
    found = {number for _, number in points}
    if len(found) == 1:
        return found.pop()
    return next((rule for rule in _candidates(points) if _gives(rule, points)), None)


def _candidates(points: tuple[tuple[TpRank, int], ...]) -> Iterator[Rule]:
    """The rules that may give these numbers, the simplest first."""
    sizes = sorted({tp for (tp, _), _ in points})
    for heads in range(sizes[-1]):
        yield from _shares(points, heads)
    yield from _sums(points)
    yield OnFirst(points[0][1])
    total = max(sum(number for (other, _), number in points if other == tp) for tp in sizes)
    for multiple in (64, *sizes):
        yield Rest(total, -(-total // multiple) * multiple)


def _shares(points: tuple[tuple[TpRank, int], ...], heads: int) -> list[Share]:
    """The sizes and positions with that number of heads that give the first points that tell them."""
    (tp, _), first = points[0]
    found = [Share(first * (min(tp, heads) if heads else tp), None, heads)]
    bases = {rank[0]: value for rank, value in points if rank[1] == 0}
    for (tp, rank), value in points:
        parts = min(tp, heads) if heads else tp
        number = rank * parts // tp
        if number and tp in bases and value > bases[tp] and (value - bases[tp]) % number == 0:
            found.append(Share((value - bases[tp]) // number * parts, bases[tp], heads))
            break
    return found


def _sums(points: tuple[tuple[TpRank, int], ...]) -> Iterator[Sum]:
    """The sums of a share of all ranks and a share of some heads that give the numbers of the first and the last size."""
    sizes = sorted({tp: value for (tp, _), value in points}.items())
    (one, first), (other, last) = sizes[0], sizes[-1]
    for heads in range(1, other):
        # first = a / one + b / min(one, heads), last = a / other + b / min(other, heads)
        few, many = min(one, heads), min(other, heads)
        if factor := one * many - other * few:
            second, rest = divmod((first * one - last * other) * few * many, factor)
            total = first * one - second * one // few
            if not rest and second > 0 and total > 0:
                yield Sum(Share(total, None), Share(second, None, heads))


def heads_of(number: Number) -> tuple[int, ...]:
    """The numbers of heads that a rule assumes."""
    if isinstance(number, Sum):
        return number.first.heads, number.second.heads
    return (number.heads,) if isinstance(number, Share) else ()


def _gives(rule: Rule, points: tuple[tuple[TpRank, int], ...]) -> bool:
    try:
        return all(rule.at(*rank) == value for rank, value in points)
    except NoRule:
        return False


def listed(points: Mapping[TpRank, int]) -> Listed:
    """The numbers themselves. Ranks without a number get 0, which nothing uses."""
    sizes = sorted({tp for tp, _ in points})
    return Listed({tp: tuple(points.get((tp, rank), 0) for rank in range(tp)) for tp in sizes})
