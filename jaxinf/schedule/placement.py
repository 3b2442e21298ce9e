"""Where tensors are while they are not on the device, tier by tier.

    device   the packer: who leaves, and when each comes back
    host     tensors that stay: those that are needed soonest
             tensors on their way to drives, in turns
             tensors that are read ahead, as far as the others leave room
    drives   the rest

Invariant: the memory of each tier is as planned at every call, however fast the moves
are. What stays on the host never reaches a drive.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxinf.schedule.occupancy import Stay, occupancy
from jaxinf.schedule.packer import evict, fill, prefetch

__all__ = [
    "NUM_COPIES",
    "Eviction",
    "Shortage",
    "Tiers",
    "Waiting",
    "evictions",
    "host_tier",
    "waiting",
]

NUM_COPIES = 2
"""Times that a tensor is on the host on its way to a drive, or back: pinned for the
device, and pageable for the drive. JAX may read pinned memory in place, or copy it."""

# Of the memory beyond the least, so much at most is for what is on its way: a tensor
# may be copied while the one before it is written.
_WAY_SHARE = 4


class Eviction(NamedTuple):
    """The calls between which a tensor leaves the device's memory and is back.

    Attributes:
      written: The call that makes it, after which it leaves.
      gone: The first call before which its memory must be free.
      back: The first call before which its memory is taken again, to read it.
      needed: The next call that reads it.
    """

    written: int
    gone: int
    back: int
    needed: int


class Shortage(NamedTuple):
    """What is missing of a tier's memory.

    Attributes:
      tier: `"device"` or `"host"`.
      missing_bytes: The bytes that are missing.
      smallest_bytes: The smallest memory that would do.
    """

    tier: str
    missing_bytes: int
    smallest_bytes: int


@dataclass(frozen=True)
class Tiers:
    """The host's memory for tensors that are not on the device.

    Attributes:
      on_drive: Tensors that go on to drives, in the order in which they are needed.
      host_bytes: Memory of the host for all of them.
      leaving_bytes: The part for tensors on their way to drives.
      room: Before each call, bytes for tensors that are read ahead; empty if none are.
      shortage: What is missing; None if they fit.
    """

    on_drive: tuple[Any, ...]
    host_bytes: int
    leaving_bytes: int = 0
    room: Sequence[int] = ()
    shortage: Shortage | None = None

    @property
    def buffer_bytes(self) -> int:
        """The most bytes of tensors that are read ahead."""
        return max(self.room, default=0)


class Waiting(NamedTuple):
    """Tensors that wait for the end of a step.

    Attributes:
      capacity_bytes: Memory for those that stay there.
      on_drive: The others, which go to a drive, and their bytes.
      num_reads: Number of times that each is read again.
    """

    capacity_bytes: int
    on_drive: Mapping[Any, int]
    num_reads: int = 1


def waiting(sizes: Mapping[Any, int], capacity: int, num_reads: int = 1) -> Waiting:
    """Chooses the tensors that wait in memory: in the order given, as there is room.

    Args:
      sizes: The tensors and their bytes.
      capacity: Memory for them.
      num_reads: As for `Waiting`.
    """
    stays = [Stay(0, 1, num_bytes, tensor) for tensor, num_bytes in sizes.items()]
    held = {*fill(np.zeros(1, np.int64), stays, capacity)}
    others = {one.tensor: one.num_bytes for one in stays if one not in held}
    return Waiting(capacity, others, num_reads)


def evictions(
    occupied: np.ndarray,
    stays: Iterable[Stay],
    made: Mapping[Any, int],
    capacity: int,
    chosen: Iterable[Stay] | None = None,
) -> dict[Any, Eviction]:
    """Returns as few evictions as the device's capacity needs, or those chosen.

    Of the tensors in memory the one that is needed last leaves. They come back in the
    order of their use, as early as there is room. If all leave, the rest may still
    exceed the capacity.

    Args:
      occupied: Bytes of each call with all tensors in memory; updated. While a call
        runs, the one after it waits: what it needs is there.
      stays: Times that tensors may be away, each to the call before its use.
      made: The calls that make them.
      capacity: The most bytes of a call.
      chosen: Those of the stays that are given up, each as early as possible.
    """
    if chosen is None:
        left = evict(occupied, stays, capacity)
    else:
        left = {stay: stay.start for stay in chosen}
        occupied -= occupancy(len(occupied), left)
    back = prefetch(occupied, left, capacity)
    return {
        stay.tensor: Eviction(
            made[stay.tensor], left[stay] + 1, call + 1, stay.stop + 1
        )
        for stay, call in back.items()
    }


def host_tier(
    num_calls: int,
    away: Mapping[Any, tuple[Eviction, int]],
    capacity: int,
    page_bytes: int = 1,
) -> Tiers:
    """Chooses the tensors that stay on the host, and divides its memory.

    While too many bytes wait, the tensor that is needed last goes to a drive, as soon
    as it is made.

    Args:
      num_calls: Number of calls in a step.
      away: Tensors that leave, and their bytes in whole pages.
      capacity: The most memory of the host for them.
      page_bytes: Bytes of a page.
    """
    stays = [
        Stay(one.written, one.needed, num_bytes, tensor)
        for tensor, (one, num_bytes) in away.items()
    ]
    waiting = occupancy(num_calls, stays)
    everything = int(waiting.max(initial=0))
    if everything <= capacity:
        return Tiers((), everything)
    largest = max(stay.num_bytes for stay in stays)
    passing = 2 * NUM_COPIES * largest
    if capacity < passing:
        least = min(passing, everything)
        return Tiers((), 0, shortage=Shortage("host", least - capacity, least))
    more = min(largest, _floor((capacity - passing) // _WAY_SHARE, page_bytes))
    leaving = NUM_COPIES * largest + more
    left = evict(waiting, stays, capacity - 2 * leaving)
    waiting = occupancy(num_calls, (stay for stay in stays if stay not in left))
    # One tensor at a time is pinned for its copy back.
    ahead = capacity - leaving - (NUM_COPIES - 1) * largest
    most = sum(stay.num_bytes for stay in left)
    later = np.maximum.accumulate(waiting[::-1])[::-1].tolist()
    room = [_floor(min(most, ahead - num_bytes), page_bytes) for num_bytes in later]
    on_drive = tuple(stay.tensor for stay in sorted(left, key=lambda stay: stay.stop))
    return Tiers(on_drive, capacity, leaving, [room[0], *room[:-1]])


def _floor(num_bytes: int, page_bytes: int) -> int:
    return num_bytes - num_bytes % page_bytes
