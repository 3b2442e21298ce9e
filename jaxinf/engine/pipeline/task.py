"""What the transfer handler is asked to do: one task, one subgroup.

Invariant: a task names everything it touches; the handler decides only when.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from jaxinf.csd import Csd, CsdBuffer
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.store import Slot

__all__ = ["Loads", "Task", "TaskGroup"]

Loads: TypeAlias = tuple[tuple[int, Slot], ...]
"""States of a subgroup by number, each with the slot that it is read from."""


@dataclass(eq=False)
class TaskGroup:
    """Tasks that one caller has submitted together and waits for.

    Attributes:
      num_waiting: how many have not computed.
      num_running: how many a worker is computing.
    """

    num_waiting: int = 0
    num_running: int = 0


_NOBODY = TaskGroup()
"""Of tasks that nobody waits for."""


@dataclass(eq=False, slots=True)
class Task:
    """The way of one subgroup: load → compute → write.

    Attributes:
      layout: the subgroup and its buffer.
      compute: what to do with the loaded buffer; runs once, on a worker or on the
        submitter's thread. Gets the states whose checksum, as they were loaded, nobody
        knows yet, and returns those checksums, by state.
      loads: what to read: indices into the layout's states, each with its slot.
      stores: what to write, to the slot that the step builds.
      runs_kernel: whether `compute` runs a kernel of the CSD over what is loaded, which
        tells those checksums; else the host takes them before.
      group: whom to tell when `compute` is done.
    """

    layout: SubgroupLayout
    compute: Callable[[Csd, CsdBuffer, Collection[int]], Mapping[int, int] | None]
    loads: Loads = ()
    stores: tuple[int, ...] = ()
    runs_kernel: bool = False
    group: TaskGroup = _NOBODY

    @property
    def csd(self) -> int:
        """The number of the CSD that the subgroup is on."""
        return self.layout.subgroup.csd
