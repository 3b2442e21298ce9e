"""What the transfer handler is asked to do: one task, one subgroup.

Invariant: a task names everything it touches; the handler decides only when.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from jaxinf.csd import Csd, CsdBuffer, Extent
from jaxinf.layout import PAGE_BYTES, Subgroup
from jaxinf.store import ERROR_FEEDBACK, LeafRecord, Slot, dtype_of

__all__ = ["SubgroupLayout", "Task", "TaskGroup"]


@dataclass(frozen=True)
class SubgroupLayout:
    """Where the states of a subgroup lie in its buffer.

    Attributes:
      subgroup: which run of which chunk.
      states: names of the stored arrays, master params first.
      slots: of each, the optimizer's state that it is, or belongs to.
      extents: one an array.
    """

    subgroup: Subgroup
    states: tuple[str, ...]
    slots: tuple[str, ...]
    extents: tuple[Extent, ...]

    @cached_property
    def feedback(self) -> int | None:
        """Which of the states is the error feedback; it comes last."""
        last = len(self.states) - 1
        return last if self.states[last] == ERROR_FEEDBACK else None

    @cached_property
    def kernel_extents(self) -> tuple[Extent, ...]:
        """Of the states that a kernel updates."""
        return self.extents[: self.feedback]

    @cached_property
    def num_bytes(self) -> int:
        """Length of the buffer."""
        last = self.extents[-1]
        pages = -(-last.num_bytes // PAGE_BYTES)
        return last.buffer_offset_bytes + pages * PAGE_BYTES

    def place(self, state: int) -> tuple[int, int, str]:
        """Leaf, chunk and name of a state: what `StoreDirectory` finds its file by."""
        return self.subgroup.leaf, self.subgroup.chunk, self.states[state]

    @classmethod
    def of(cls, subgroup: Subgroup, leaf: LeafRecord) -> "SubgroupLayout":
        """Lays the states out one after another, each from a page on."""
        extents, offset_bytes = [], 0
        for state in leaf.states:
            dtype = dtype_of(state.dtype)
            extents.append(
                Extent(
                    dtype=dtype,
                    num_elements=state.num_elements(subgroup.num_elements),
                    file_offset_bytes=state.num_elements(subgroup.offset_elements)
                    * dtype.itemsize,
                    buffer_offset_bytes=offset_bytes,
                    codec=state.codec,
                )
            )
            pages = -(-extents[-1].num_bytes // PAGE_BYTES)
            offset_bytes += pages * PAGE_BYTES
        names = tuple(s.name for s in leaf.states)
        return cls(subgroup, names, tuple(s.slot for s in leaf.states), tuple(extents))


@dataclass(eq=False)
class TaskGroup:
    """Tasks that somebody waits for together.

    Attributes:
      num_waiting: how many have not computed.
      num_running: how many are in a worker's hands and have not computed.
    """

    num_waiting: int = 0
    num_running: int = 0


_NOBODY = TaskGroup()
"""Of tasks that nobody waits for."""


@dataclass(eq=False, slots=True)
class Task:
    """One subgroup through the ring: load → compute → store.

    Attributes:
      layout: the subgroup and its buffer.
      compute: what to do with the loaded buffer; runs once, on a worker or on the
        submitter's thread. Returns the checksums of loaded states that the CSD could
        not tell before, by state.
      loads: what to read: indices into the layout's states, each with its slot.
      stores: what to write, to the slot that the step builds.
      runs_kernel: whether `compute` runs a kernel of the CSD over what is loaded, which
        tells those checksums; else the host takes them before.
      group: whom to tell when `compute` is done.
    """

    layout: SubgroupLayout
    compute: Callable[[Csd, CsdBuffer], Mapping[int, int] | None]
    loads: tuple[tuple[int, Slot], ...] = ()
    stores: tuple[int, ...] = ()
    runs_kernel: bool = False
    group: TaskGroup = _NOBODY
