"""Numbers that depend on the tensor-parallel size and rank: a position, a size or a step in a learned layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from reshard.errors import RequestError
from reshard.geometry.value import value

TpRank = tuple[int, int]
"""A tensor-parallel size and a rank: (tp, tp_rank)."""
ONE_RANK: TpRank = 1, 0


class NoRule(RequestError):
    """A rule has no value at a tensor-parallel size."""


@value
class Rule:
    """A number that depends on the rank, by one of _RULES. A layout file has it as a list, such as ["share", 4096]."""

    word: str
    """The rule."""
    numbers: tuple[Any, ...]
    """What it takes besides the size and the rank."""

    def at(self, tp: int, tp_rank: int) -> int:
        """The number on a rank. Raises NoRule if there is none: the ranks do not share something equally."""
        return _RULES[self.word](tp, tp_rank, *self.numbers)


Number = int | Rule
"""A number that is the same on all ranks, or the rule that gives it."""


def _share(tp: int, tp_rank: int, total: int, heads: int = 0) -> int:
    """An equal share of `total`. With `heads`, there are at most that many shares: more ranks hold the same share several times."""
    if heads and tp % heads and heads % tp:
        raise NoRule(f"{tp} ranks do not share {heads} heads")
    return _exact(total, min(tp, heads) if heads else tp)


def _start(tp: int, tp_rank: int, total: int, base: int, heads: int = 0) -> int:
    """The position where the rank's share of `total` starts. Rank 0 has `base`."""
    share = _share(tp, tp_rank, total, heads)
    return base + tp_rank * (min(tp, heads) if heads else tp) // tp * share


def _rest(tp: int, tp_rank: int, total: int, padded: int) -> int:
    """What padding leaves of a rank's share: `total` rows, padded to `padded`, are cut into equal shares."""
    share = _exact(padded, tp)
    return max(0, min(share, total - tp_rank * share))


def _sum(tp: int, tp_rank: int, first: Rule, second: Rule) -> int:
    """The sum of two shares, as where key heads that several ranks hold follow query heads."""
    return first.at(tp, tp_rank) + second.at(tp, tp_rank)


def _first(tp: int, tp_rank: int, number: int) -> int:
    """A number on rank 0, and 0 on all other ranks, such as the size of a bias that only one rank adds."""
    return 0 if tp_rank else number


def _listed(tp: int, tp_rank: int, *traced: tuple[int, tuple[int, ...]]) -> int:
    """A number that follows no rule. traced: each traced size, with the number on each of its ranks."""
    numbers = dict(traced)
    if tp not in numbers or tp_rank >= len(numbers[tp]):
        raise NoRule(f"the layout was traced at TP {', '.join(map(str, sorted(numbers)))}")
    return numbers[tp][tp_rank]


_RULES: Mapping[str, Callable[..., int]] = {
    "share": _share, "start": _start, "rest": _rest, "sum": _sum, "first": _first, "listed": _listed,
}  # fmt: skip


def _exact(number: int, parts: int) -> int:
    if number % parts:
        raise NoRule(f"{number} is not a multiple of {parts}")
    return number // parts


def values(numbers: Iterable[Number], rank: TpRank) -> tuple[int, ...]:
    """The numbers on a rank. Raises NoRule if a rule has none there."""
    return tuple(number if isinstance(number, int) else number.at(*rank) for number in numbers)


def fitted(points: Mapping[TpRank, int]) -> Number | None:
    """The simplest rule that gives these numbers; None if no rule does."""
    return _fitted(tuple(sorted(points.items())))


@lru_cache(maxsize=1 << 16)
def _fitted(points: tuple[tuple[TpRank, int], ...]) -> Number | None:
    distinct = {number for _, number in points}
    if len(distinct) == 1:
        return distinct.pop()
    return next((rule for rule in _candidates(points) if _gives(rule, points)), None)


def _candidates(points: tuple[tuple[TpRank, int], ...]) -> Iterator[Rule]:
    """The rules that may give these numbers, the simplest first."""
    sizes = sorted({tp for (tp, _), _ in points})
    for heads in range(sizes[-1]):
        yield from _shares(points, heads)
    yield from _sums(points)
    yield Rule("first", (points[0][1],))
    total = max(sum(number for (other, _), number in points if other == tp) for tp in sizes)
    for multiple in (64, *sizes):
        yield Rule("rest", (total, -(-total // multiple) * multiple))


def _shares(points: tuple[tuple[TpRank, int], ...], heads: int) -> Iterator[Rule]:
    """The sizes and positions with that number of heads that give the first points that tell them."""
    (tp, _), first = points[0]
    of_heads = (heads,) if heads else ()
    yield Rule("share", (first * (min(tp, heads) if heads else tp), *of_heads))
    bases = {rank[0]: value for rank, value in points if rank[1] == 0}
    for (tp, rank), value in points:
        parts = min(tp, heads) if heads else tp
        number = rank * parts // tp
        if number and tp in bases and value > bases[tp] and (value - bases[tp]) % number == 0:
            yield Rule("start", ((value - bases[tp]) // number * parts, bases[tp], *of_heads))
            return


def _sums(points: tuple[tuple[TpRank, int], ...]) -> Iterator[Rule]:
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
                yield Rule("sum", (Rule("share", (total,)), Rule("share", (second, heads))))


def heads_of(rule: Rule) -> tuple[int, ...]:
    """The numbers of heads that a rule assumes."""
    match rule:
        case Rule("share", (_, heads)) | Rule("start", (_, _, heads)):
            return (heads,)
        case Rule("sum", shares):
            return tuple(heads for share in shares for heads in heads_of(share))
    return ()


def _gives(rule: Rule, points: tuple[tuple[TpRank, int], ...]) -> bool:
    try:
        return all(rule.at(*rank) == value for rank, value in points)
    except NoRule:
        return False


def listed(points: Mapping[TpRank, int]) -> Rule:
    """The numbers themselves. Ranks without a number get 0, which nothing uses."""
    sizes = sorted({tp for tp, _ in points})
    return Rule("listed", tuple((tp, tuple(points.get((tp, rank), 0) for rank in range(tp))) for tp in sizes))
