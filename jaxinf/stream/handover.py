"""Chooses the params that stay in memory instead of being read again.

A read may serve the calls of a later one. The last read of a unit before its gradient
is complete may serve its update, too; the unit then stays until it is updated.

Invariant: the memory of a step stays within the limit; beyond it a unit is read again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from jaxinf.stream.calls import Call
from jaxinf.stream.fetch import Fetch, held_bytes, page_bytes
from jaxinf.stream.places import Places, Unit

__all__ = ["completions", "hand_over", "keep_between"]


def keep_between(
    fetches: Sequence[Fetch], num_calls: int, limit_bytes: int
) -> tuple[Fetch, ...]:
    """Joins reads of the same unit, those that are nearest to each other first.

    Args:
      fetches: The reads of a step, in order.
      num_calls: Number of calls in a step.
      limit_bytes: Memory for units; at least `window_bytes` of the reads.
    """
    held = held_bytes(fetches, num_calls)
    before: dict[int, int] = {}  # by read, the one that serves its calls
    pairs = sorted(
        _pairs(fetches), key=lambda p: fetches[p[1]].first - fetches[p[0]].last
    )
    for one, other in pairs:
        between = slice(fetches[one].end + 2, fetches[other].first)
        num_bytes = page_bytes(fetches[one].unit)
        if held[between].max(initial=0) + num_bytes <= limit_bytes:
            held[between] += num_bytes
            before[other] = one
    joined = list(fetches)
    for other in sorted(before, reverse=True):
        one = before[other]
        joined[one] = replace(joined[one], last=joined[other].last)
    return tuple(fetch for i, fetch in enumerate(joined) if i not in before)


def _pairs(fetches: Sequence[Fetch]) -> Iterator[tuple[int, int]]:
    """Yields the numbers of successive reads of the same unit."""
    last: dict[Unit, int] = {}
    for number, fetch in enumerate(fetches):
        if fetch.unit in last:
            yield last[fetch.unit], number
        last[fetch.unit] = number


def completions(calls: Sequence[Call], places: Places) -> Mapping[Unit, int]:
    """Returns for each unit the number of the call that completes its gradient."""
    return {
        places.unit(piece): number
        for number, call in enumerate(calls)
        for piece, _ in call.gradients
    }


def hand_over(
    fetches: Sequence[Fetch],
    gradients: Mapping[Unit, int],
    can_take: Callable[[Unit], bool],
    num_calls: int,
    limit_bytes: int,
    is_staged: bool = False,
) -> tuple[Fetch, ...]:
    """Chooses the reads that serve an update, those that wait least first.

    Args:
      fetches: The reads of a step, in order.
      gradients: From `completions`.
      can_take: Whether the update of a unit can take its params from a read.
      num_calls: Number of calls in a step.
      limit_bytes: Memory for units; at least `window_bytes` of the reads, unless
        these are staged.
      is_staged: Whether units only pass through this memory on their way to the device.

    Returns:
      The reads; those that serve an update have a `gradient`.
    """
    last: dict[Unit, int] = {}  # by unit, the last read before its gradient
    for number, fetch in enumerate(fetches):
        if fetch.first <= gradients.get(fetch.unit, -1) and can_take(fetch.unit):
            last[fetch.unit] = number

    def waiting(one: tuple[Unit, int]) -> int:
        unit, number = one
        return gradients[unit] - fetches[number].last

    chosen = list(fetches)
    held = held_bytes(() if is_staged else fetches, num_calls)
    for unit, number in sorted(last.items(), key=waiting):
        one = replace(fetches[number], gradient=gradients[unit])
        waits = slice(one.first if is_staged else one.last + 2, one.end + 2)
        num_bytes = page_bytes(unit)
        if held[waits].max(initial=0) + num_bytes <= limit_bytes:
            held[waits] += num_bytes
            chosen[number] = one
    return tuple(chosen)
