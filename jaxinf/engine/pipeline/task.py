"""The tasks of the transfer handler, one for each subgroup.

Invariant: a task names everything it touches; the handler decides only the time.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from jaxinf.csd import Csd, CsdBuffer
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.store import Slot

Loads: TypeAlias = tuple[tuple[int, Slot], ...]
"""States of a subgroup by number, each with the slot to read from."""


@dataclass(eq=False)
class TaskGroup:
    """Tasks that one caller has submitted together and waits for.

    Attributes:
      num_waiting: number of tasks that have not computed.
    """

    num_waiting: int = 0
    num_running: int = 0


_NOBODY = TaskGroup()
"""The group of tasks without a waiting caller."""


@dataclass(eq=False, slots=True)
class Task:
    """The work on one subgroup: load → compute → write.

    Attributes:
      layout: the subgroup and its buffer.
      compute: the computation on the loaded buffer. It runs once, on a worker or on the
        submitter's thread. Its argument are the states without a known checksum as
        loaded; it returns these checksums by state.
      loads: states to read, as indices into the layout's states, each with its slot.
      stores: states to write, to the slot that the step builds.
      runs_kernel: whether `compute` runs a kernel of the CSD over the loaded states,
        which computes these checksums; otherwise the host computes them before.
      is_elsewhere: whether `compute` waits for a processor that is not the host's.
      group: the group to notify when `compute` is done.
    """

    layout: SubgroupLayout
    compute: Callable[[Csd, CsdBuffer, Collection[int]], Mapping[int, int] | None]
    loads: Loads = ()
    stores: tuple[int, ...] = ()
    runs_kernel: bool = False
    is_elsewhere: bool = False
    group: TaskGroup = _NOBODY

    @property
    def csd(self) -> int:
        """The number of the subgroup's CSD."""
        return self.layout.subgroup.csd
