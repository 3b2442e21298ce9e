"""The bytes on the drive that a step's plan implies.

Invariant: the meters of a step show exactly these bytes. An optimizer that leaves state
alone in some steps moves fewer in those. State that stays on the host is read by the
first step alone, and what commits alone write of it is counted apart.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Sequence

from jaxinf.engine import (
    StoreShape,
    SubgroupLayout,
    can_take,
    moved_states,
)
from jaxinf.io import ByteCounts
from jaxinf.io.pages import page_ceil
from jaxinf.program import Passes, UpdateProgram
from jaxinf.schedule.reads import Fetch
from jaxinf.store import MASTER_PARAMS
from jaxinf.streaming.program.units import Unit

__all__ = [
    "is_parted",
    "moved_bytes",
    "planned_traffic",
    "reads_params",
    "written_bytes",
]

_PARAMS = 0  # the first of a leaf's states


def planned_traffic(
    opened: StoreShape,
    fetches: Sequence[Fetch],
    units: Iterable[Unit],
    program: UpdateProgram,
    passes: Passes,
    waiting: ByteCounts,
    given: Container[Unit] = (),
) -> tuple[ByteCounts, int]:
    """Returns what a step moves on the drive, and bytes that a commit writes beside.

    The latter are 0 if options say which steps commit: they are divided among all then.

    Args:
      opened: The store; it need not be there.
      fetches: The reads of params.
      units: The units that are updated.
      program: The optimizer.
      passes: Its passes.
      waiting: Gradients and activations that wait on the drive.
      given: Units whose update takes params that stay in memory.
    """
    read, written = waiting.drive_read_bytes, waiting.drive_write_bytes
    by_commits = 0
    taken = {fetch.unit for fetch in fetches if fetch.gradient is not None}
    for fetch in fetches:
        for layout in _layouts(opened, fetch.unit):
            read += moved_bytes(opened, layout, [_PARAMS])
    for unit in units:
        kernel = program.leaves[unit.leaf].kernel
        has_params = unit in taken or unit in given
        for layout in _layouts(opened, unit):
            loads, stores = moved_states(kernel, layout)
            if has_params:
                loads -= {_PARAMS}
            if layout.subgroup in opened.host_tier:
                now, later = written_bytes(opened, layout, stores)
                written, by_commits = written + now, by_commits + later
                continue
            read += moved_bytes(opened, layout, sorted(loads))
            written += moved_bytes(opened, layout, stores)
            for names in _read_by_passes(passes, unit, has_params):
                states = [layout.slots.index(name) for name in names]
                read += moved_bytes(opened, layout, states)
    if every := opened.options.mean_steps_per_commit():
        written, by_commits = written + round(by_commits / every), 0
    return ByteCounts(drive_read_bytes=read, drive_write_bytes=written), by_commits


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
    if not opened.options.takes_params or not can_take(opened, unit.leaf, unit.dtype):
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
      opened: The store.
      layout: A subgroup that stays.
      stores: States that an update stores.
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
    leaf, number = layout.subgroup.leaf, layout.subgroup.chunk
    stored = opened.directory.chunks[leaf][number].stored_elements
    records = opened.directory.manifest.leaves[leaf].states
    moved = 0
    for state in states:
        extent = layout.extents[state]
        file_bytes = records[state].num_elements(stored) * extent.dtype.itemsize
        left = file_bytes - extent.file_offset_bytes
        moved += min(page_ceil(extent.num_bytes), left)
    return moved
