"""The places of a subgroup's states in their chunks' files and in a buffer.

Invariant: each state starts on a page of its file and of the buffer.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from jaxinf.csd import Extent
from jaxinf.layout import Subgroup
from jaxinf.store import ERROR_FEEDBACK, LeafRecord, StateRecord, dtype_of
from jaxinf.transfer import page_ceil


@dataclass(frozen=True)
class SubgroupLayout:
    """The places of a subgroup's states in its buffer.

    Attributes:
      subgroup: the subgroup.
      states: names of the stored arrays, master params first.
      slots: for each array, the state of the optimizer to which it belongs.
      extents: one for each array.
    """

    subgroup: Subgroup
    states: tuple[str, ...]
    slots: tuple[str, ...]
    extents: tuple[Extent, ...]

    @property
    def key(self) -> Subgroup:
        return self.subgroup

    @property
    def drive(self) -> int:
        """The number of its CSD."""
        return self.subgroup.csd

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each state."""
        return tuple(extent.num_bytes for extent in self.extents)

    @cached_property
    def feedback(self) -> int | None:
        """Number of the error feedback, the last state, if there is one."""
        last = len(self.states) - 1
        return last if self.states[last] == ERROR_FEEDBACK else None

    @cached_property
    def kernel_extents(self) -> tuple[Extent, ...]:
        """Extents of the states that a kernel updates.

        Equal subgroups of a store have one object: a CSD may keep data by its identity.
        """
        return _shared(self.extents[: self.feedback])

    @cached_property
    def num_bytes(self) -> int:
        """Length of the buffer."""
        last = self.extents[-1]
        return last.buffer_offset_bytes + page_ceil(last.num_bytes)

    def place(self, state: int) -> tuple[int, int, str]:
        """Returns leaf, chunk and name of a state, by which a file is found."""
        return self.subgroup.leaf, self.subgroup.chunk, self.states[state]

    @classmethod
    def of(cls, subgroup: Subgroup, leaf: LeafRecord) -> "SubgroupLayout":
        """Places the states one after another, each on a new page."""
        own = subgroup.offset_elements, subgroup.num_elements
        return cls(subgroup, *_placed(leaf.states, *own))


@lru_cache(maxsize=1 << 14)  # most leaves of a large store are alike
def _placed(
    states: tuple[StateRecord, ...], offset_elements: int, num_elements: int
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[Extent, ...]]:
    """Returns names, slots and extents of a subgroup."""
    extents, offset_bytes = [], 0
    for state in states:
        dtype = dtype_of(state.dtype)
        extents.append(
            Extent(
                dtype=dtype,
                num_elements=state.num_elements(num_elements),
                file_offset_bytes=state.num_elements(offset_elements) * dtype.itemsize,
                buffer_offset_bytes=offset_bytes,
                codec=state.codec,
            )
        )
        offset_bytes += page_ceil(extents[-1].num_bytes)
    names = tuple(state.name for state in states)
    return names, tuple(state.slot for state in states), tuple(extents)


@lru_cache(maxsize=1 << 14)
def _shared(extents: tuple[Extent, ...]) -> tuple[Extent, ...]:
    return extents
