"""Groups small leaves whose gradients arrive together into one call of the host.

    arrival:   … [small small] LONG [small small …] LONG …     (the tree backwards)
    calls:       └─────────── one ────────┘  and each long leaf by itself

A call costs as much for a few elements as for a million. Invariant: the leaves of a
call are sharded over the same axes; its first gradient waits for few others.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SMALL_BYTES = 1 << 20
"""A leaf that is shorter, on each JAX device, shares a call."""

GROUP_BYTES = 8 << 20
"""No call brings more small leaves than this."""

SPAN_BYTES = 64 << 20
"""No gradient waits for more bytes of others, long leaves between them included."""


class Member(NamedTuple):
    """A leaf with the data for grouping.

    Attributes:
      number: number of the leaf.
      num_bytes: bytes of its gradient on each JAX device, at 4 bytes an element.
      kind: leaves of different kinds never share a call.
    """

    number: int
    num_bytes: int
    kind: Hashable


@dataclass
class _Group:
    """A call that may still get more leaves.

    Attributes:
      began: bytes that arrived before its first leaf.
    """

    began: int
    num_bytes: int = 0
    numbers: list[int] = field(default_factory=list)


def grouped(members: Sequence[Member]) -> list[list[int]]:
    """Returns the leaves of each call, in the order of the first gradients.

    Args:
      members: in the order of the tree; gradients arrive in the reverse order.
    """
    groups: list[_Group] = []
    filling: dict[Hashable, _Group] = {}
    arrived = 0
    for member in reversed(members):
        is_small = member.num_bytes < SMALL_BYTES
        group = filling.get(member.kind) if is_small else None
        if group is None or not _has_room(group, member.num_bytes, arrived):
            group = _Group(arrived)
            groups.append(group)
            if is_small:
                filling[member.kind] = group
        group.numbers.append(member.number)
        group.num_bytes += member.num_bytes
        arrived += member.num_bytes
    return [group.numbers for group in groups]


def _has_room(group: _Group, num_bytes: int, arrived: int) -> bool:
    fits = group.num_bytes + num_bytes <= GROUP_BYTES
    return fits and arrived + num_bytes - group.began <= SPAN_BYTES
