"""The bytes on the drive that a step's plan implies.

Invariant: the meters of a step show exactly these bytes. An optimizer that leaves state
alone in some steps moves fewer in those. State that stays in a memory is read by the
first step alone, and what commits alone write of it is counted apart.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxinf.engine import (
    StoreShape,
    SubgroupLayout,
    can_take,
    moved_states,
)
from jaxinf.io.pages import page_ceil
from jaxinf.program import Passes, UpdateProgram
from jaxinf.schedule.placement import Waiting
from jaxinf.schedule.reads import Fetch
from jaxinf.store import MASTER_PARAMS
from jaxinf.streaming.program.units import Unit

_PARAMS = 0  # the first of a leaf's states


def fetched_bytes(
    opened: StoreShape, fetches: Iterable[Fetch]
) -> Sequence[Sequence[int]]:
    """Returns the bytes of params that a run of the calls reads, by fetch and drive.

    Args:
      opened: The store; it need not be there.
    """
    found, num_drives = [], max(1, opened.directory.num_csds)
    for fetch in fetches:
        own = [0] * num_drives
        for layout in _layouts(opened, fetch.unit):
            own[layout.subgroup.csd] += moved_bytes(opened, layout, [_PARAMS])
        found.append(own)
    return found


class UpdateMoves(NamedTuple):
    """What the update of a subgroup moves on the drive.

    Attributes:
      read_bytes: For the update, and for passes over gradients before it.
    """

    layout: SubgroupLayout
    read_bytes: int
    written_bytes: int
    commit_bytes: int = 0

    @property
    def num_elements(self) -> int:
        """Elements that it computes: none of a leaf that stays as it is."""
        moves = self.read_bytes or self.written_bytes or self.commit_bytes
        return self.layout.subgroup.num_elements if moves else 0


class StepMoves(NamedTuple):
    """What a step moves on drives beside its values.

    Attributes:
      fetched: Bytes of params that a run of the calls reads, by fetch and drive.
      waiting: Gradients that wait for the last one; None if none does.
      updates: In the order of the gradients, with the numbers of the calls that they
        wait for; the number of calls if they wait for the last gradient.
    """

    fetched: Sequence[Sequence[int]] = ()
    waiting: Waiting | None = None
    updates: Sequence[tuple[int, UpdateMoves]] = ()
    shares: Sequence[float] = (1.0,)

    @property
    def params_bytes(self) -> int:
        return sum(map(sum, self.fetched))


def update_moves(
    opened: StoreShape,
    unit: Unit,
    program: UpdateProgram,
    passes: Passes,
    *,
    has_params: bool,
) -> Iterator[UpdateMoves]:
    """Yields what the update of each subgroup of a unit moves.

    Args:
      opened: The store; it need not be there.
      has_params: Whether the update takes params that are in memory.
    """
    kernel = program.leaves[unit.leaf].kernel
    for layout in _layouts(opened, unit):
        loads, stores = moved_states(kernel, layout)
        if has_params:
            loads -= {_PARAMS}
        if opened.stays(layout.subgroup):
            yield UpdateMoves(layout, 0, *written_bytes(opened, layout, stores))
            continue
        read = moved_bytes(opened, layout, sorted(loads))
        for names in _read_by_passes(passes, unit, has_params):
            states = [layout.slots.index(name) for name in names]
            read += moved_bytes(opened, layout, states)
        yield UpdateMoves(layout, read, moved_bytes(opened, layout, stores))


def _read_by_passes(
    passes: Passes, unit: Unit, is_taken: bool
) -> Iterator[Sequence[str]]:
    """Yields the states that each pass reads of a unit."""
    for number in range(passes.num_passes):
        part = passes.part(number, unit.leaf)
        if part is None:
            continue
        names = [passes.recalled[v][1].name for v in part.own if v in passes.recalled]
        if passes.params[unit.leaf] in part.own and not is_taken:
            names.append(MASTER_PARAMS)
        yield names


def reads_params(
    opened: StoreShape, unit: Unit, program: UpdateProgram, passes: Passes
) -> bool:
    """Whether a unit's update reads its params, and can take them from a read before.

    They must be what is stored: `float32`, or the stored half of a split master.
    """
    if not can_take(opened, unit.leaf, unit.dtype):
        return False
    part = passes.part(passes.num_passes - 1, unit.leaf)
    if part is not None and passes.params[unit.leaf] in part.own:
        return True
    kernel = program.leaves[unit.leaf].kernel
    return any(
        _PARAMS in moved_states(kernel, layout)[0] for layout in _layouts(opened, unit)
    )


def is_parted(opened: StoreShape, unit: Unit) -> bool:
    """Whether a chunk of a unit is read and written in several parts."""
    return any(
        layout.subgroup.num_elements
        < opened.directory.chunks[unit.leaf][layout.subgroup.chunk].num_elements
        for layout in _layouts(opened, unit)
    )


def written_bytes(
    opened: StoreShape,
    layout: SubgroupLayout,
    stores: Collection[int],
    at_once: Container[int] = (_PARAMS,),
) -> tuple[int, int]:
    """Returns bytes of state that stays: what a step writes, and what commits alone do.

    Args:
      at_once: Those that each step writes; by default params, as streamed steps do.
    """
    rewrites = opened.options.rewrites_steps
    now = [state for state in stores if state in at_once or not rewrites]
    later = [state for state in stores if state not in now]
    return moved_bytes(opened, layout, now), moved_bytes(opened, layout, later)


def _layouts(opened: StoreShape, unit: Unit) -> Sequence[SubgroupLayout]:
    return opened.layouts(unit.leaf, unit.origin, unit.extent)


def moved_bytes(
    opened: StoreShape, layout: SubgroupLayout, states: Iterable[int]
) -> int:
    """Whole pages, but no more than the file has, whose end may be odd."""
    directory = opened.directory
    leaf, number = layout.subgroup.leaf, layout.subgroup.chunk
    records = directory.manifest.leaves[leaf].states
    moved = 0
    for state in states:
        extent = layout.extents[state]
        stored = directory.state_chunk(leaf, number, records[state]).stored_elements
        file_bytes = stored * extent.dtype.itemsize
        left = file_bytes - extent.file_offset_bytes
        moved += min(page_ceil(extent.num_bytes), left)
    return moved
