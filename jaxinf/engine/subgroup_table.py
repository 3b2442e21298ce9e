"""The subgroups of a store: the parts of its chunks that are moved as units.

Invariant: they are known before the store is made, and do not change. Every worker (on
a card, every worker of its share) can hold two subgroups if `check_memory` accepts the
budget, and each subgroup starts on a page of its files.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from jaxinf.csd import Extent
from jaxinf.engine.options import StoreOptions
from jaxinf.errors import StoreMismatchError
from jaxinf.exchange import least_memory
from jaxinf.layout import (
    CHUNK_ALIGNMENT_ELEMENTS,
    DEFAULT_CHUNK_ELEMENTS,
    SCALES_ALIGNMENT_ELEMENTS,
    Chunk,
    Subgroup,
    covers,
    gather,
    scatter,
    subgroups,
)
from jaxinf.store import (
    ERROR_FEEDBACK,
    ChunkFile,
    LeafRecord,
    StateRecord,
    StoreDirectory,
    dtype_of,
)
from jaxinf.transfer import ByteCounts, long_ceil, long_floor, page_ceil
from jaxinf.typing import Array

_LEAST_SHARE = 4  # workers at one of several cards

_EACH = 2
"""Subgroups that a worker can hold: one that moves, one that is computed or waits."""

_WINDOW_SHARE = 8
"""Subgroups of all workers are to be this part of the host's memory; the rest is for
state that stays."""

_QUICK_BYTES = 8 * 1024 * 1024
"""What moves at a drive's full rate: no subgroup is shorter, and no worker has less to
move, for the sake of state that stays."""


@dataclass(frozen=True)
class SubgroupLayout:
    """The places of a subgroup's states in its buffer.

    Attributes:
      state_names: of each stored array, the name of its state; master params first. An
        array of scales has the name of the state that they scale.
      extents: one for each array.
      entries: for each array, the number of the chunk in `Manifest.held`.
    """

    subgroup: Subgroup
    state_names: tuple[str, ...]
    extents: tuple[Extent, ...]
    record: LeafRecord = field(compare=False)
    entries: Sequence[int] = field(compare=False)

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
        last = len(self.state_names) - 1
        return last if self.state_names[last] == ERROR_FEEDBACK else None

    @cached_property
    def kernel_extents(self) -> tuple[Extent, ...]:
        """Extents of the states that a kernel updates."""
        return self.extents[: self.feedback]

    @cached_property
    def num_bytes(self) -> int:
        """Length of the buffer."""
        last = self.extents[-1]
        return long_ceil(last.buffer_offset_bytes + last.num_bytes)

    @cached_property
    def chunk(self) -> Chunk:
        """Its chunk of the leaf."""
        return self.record.grid.chunks()[self.subgroup.chunk]

    def file(self, state: int) -> ChunkFile:
        """Returns the file of its chunk of a state, by number."""
        own = self.subgroup
        return ChunkFile(own.leaf, self.record, self.record.states[state], own.chunk)

    def gather(self, array: Array, origin: Sequence[int]) -> Array:
        """Returns its elements of a leaf's or shard's array, a view if contiguous."""
        own = self.subgroup.offset_elements, self.subgroup.num_elements
        return gather(array, self.chunk, tuple(origin), *own)

    def scatter(self, out: Array, origin: Sequence[int], values: Array) -> None:
        """Writes its elements into an array of the leaf or shard."""
        offset = self.subgroup.offset_elements
        scatter(out, self.chunk, tuple(origin), offset, values)


class Move(NamedTuple):
    """What a step moves of a subgroup.

    Attributes:
      loads: numbers of the states that it reads; twice, if it reads one twice.
      stores: numbers of the states that it writes.
    """

    layout: SubgroupLayout
    loads: Sequence[int]
    stores: Sequence[int]


@lru_cache(maxsize=1 << 14)  # most leaves of a large store are alike
def _placed(
    states: tuple[StateRecord, ...], offset_elements: int, num_elements: int
) -> tuple[tuple[str, ...], tuple[Extent, ...]]:
    """Returns state names and extents of a subgroup, each state on a new page."""
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
    return tuple(state.base_name for state in states), tuple(extents)


class SubgroupTable:
    """The subgroups into which the chunks of a store are cut.

    The store may still have to be made.

    Args:
      options: the options of `open_store`.
      directory: the store, whose files may be missing.

    Attributes:
      leaves: the leaves' records.
      memory_bytes: memory for state.
      num_workers: requests at the drives at once.
      num_bytes: of all subgroups.
      longest_bytes, longest_elements: of a subgroup.
    """

    def __init__(self, options: StoreOptions, directory: StoreDirectory) -> None:
        self.options = options
        self.directory, self.leaves = directory, directory.manifest.leaves
        self.memory_bytes = options.memory_bytes - self.export_bytes
        self.num_workers = options.workers_of(len(directory.manifest.csds) or 1)
        self._layouts = self._cut()
        self._all = [one for leaf in self._layouts for chunk in leaf for one in chunk]
        self.num_bytes = sum([one.num_bytes for one in self._all])
        self.longest_bytes = max((x.num_bytes for x in self._all), default=0)
        lengths = (x.subgroup.num_elements for x in self._all)
        self.longest_elements = max(lengths, default=0)
        self._boxes: dict[tuple[Any, ...], list[SubgroupLayout]] = {}

    @property
    def export_bytes(self) -> int:
        """Memory on the host that exports take; 0 without exports."""
        has_exports = self.options.export_every > 0
        return least_memory(self.directory.manifest) if has_exports else 0

    @property
    def least_memory_bytes(self) -> int:
        """The least memory on the host: to read, compute and write a subgroup."""
        return 3 * self.longest_bytes

    # --- the length of subgroups ------------------------------------------------------

    def check_memory(self) -> None:
        """Refuses a budget in which not every worker can hold two least subgroups."""
        unit, num_buffers, itemsize = self._least_buffers()
        need, exports = num_buffers * itemsize * unit, self.export_bytes
        if self.options.memory_bytes - exports < need:
            beside = f" beside the {exports} of exports" if exports else ""
            raise ValueError(
                f"memory_bytes={self.options.memory_bytes}: {self.num_workers} "
                f"workers need at least {need} bytes for this optimizer's state"
                f"{beside}; give more memory"
            )

    def _least_buffers(self) -> tuple[int, int, int]:
        """Returns the length of the least subgroups, buffers, and bytes an element."""
        workers = self.num_workers
        sizes = [sum(s.itemsize for s in leaf.states) for leaf in self.leaves]
        if self.options.csd.has_cards:
            share = -(-workers // (len(self.directory.manifest.csds) or 1))
            workers = min(workers, max(_LEAST_SHARE, share))
        unit = max(map(_unit_elements, self.leaves), default=0)
        unit = max(unit, CHUNK_ALIGNMENT_ELEMENTS)
        return unit, _EACH * workers, max(sizes, default=4)

    def _cut(self) -> list[list[list[SubgroupLayout]]]:
        """Returns the held subgroups by leaf and chunk.

        They are the longest of which every worker can hold two in the budget, but not
        below the shortest possible ones, for a store whose budget is not used.
        """
        unit, num_buffers, itemsize = self._least_buffers()
        window_bytes = self.memory_bytes
        if not self.options.csd.has_cards:
            quick_bytes = _EACH * self.num_workers * _QUICK_BYTES
            quick_bytes = min(window_bytes, quick_bytes)
            window_bytes = max(window_bytes // _WINDOW_SHARE, quick_bytes)
        each_bytes = long_floor(max(0, window_bytes) // num_buffers)
        fitting = each_bytes // (itemsize * unit) * unit
        most = max(unit, min(fitting, DEFAULT_CHUNK_ELEMENTS))
        found, first = [], 0
        for leaf, record in enumerate(self.leaves):
            chunks: list[list[SubgroupLayout]] = [[] for _ in record.csds]
            own, num_held = _unit_elements(record), len(record.held)
            last = first + num_held * len(record.states)
            for item in subgroups(leaf, record.grid, record.csds, most, own):
                place = record.places[item.chunk]
                if place >= 0:
                    entries = range(first + place, last, num_held)
                    run = item.offset_elements, item.num_elements
                    placed = _placed(record.states, *run)
                    layout = SubgroupLayout(item, *placed, record, entries)
                    chunks[item.chunk].append(layout)
            found.append(chunks)
            first = last
        return found

    # --- where they are ---------------------------------------------------------------

    def chunk_layouts(self, leaf: int) -> Sequence[Sequence[SubgroupLayout]]:
        """Returns the held subgroups of a leaf, by chunk."""
        return [chunk for chunk in self._layouts[leaf] if chunk]

    def layouts(
        self, leaf: int, origin: Sequence[int], extent: Sequence[int]
    ) -> Sequence[SubgroupLayout]:
        """Returns the held subgroups of a box: a JAX device's shard, or a leaf."""
        box = leaf, tuple(origin), tuple(extent)
        if box not in self._boxes:
            self._boxes[box] = [
                layout
                for chunk in self.chunks_of(*box)
                for layout in self._layouts[leaf][chunk]
            ]
        return self._boxes[box]

    def chunks_of(
        self, leaf: int, origin: Sequence[int], extent: Sequence[int]
    ) -> Sequence[int]:
        """Returns the numbers of the held chunks of a box, which may not cut one."""
        record = self.leaves[leaf]
        try:
            found = covers(record.grid, tuple(origin), tuple(extent))
        except ValueError as error:
            raise StoreMismatchError(
                f"leaf {record.name}: the store's chunks {record.chunk_shape} (made "
                f"for shards {record.shard_counts}) do not divide at the shard "
                f"boundaries of this run ({error}); run on a mesh whose shards are "
                "whole multiples; give the trainer --elastic, which gives the store "
                "another grid; or take the step to a new store (Store.load). An init "
                "that does not know the shards, as in jit(init, out_shardings=…), "
                "needs smart_update(tx, store, shardings=…)"
            ) from error
        return found if record.is_whole else [n for n in found if record.places[n] >= 0]

    def entry(self, leaf: int, chunk: int, state: int) -> int:
        """Returns the number of a held chunk of a state in `Manifest.held`."""
        return self._layouts[leaf][chunk][0].entries[state]

    def divides(self, leaf: int, origin: Sequence[int], extent: Sequence[int]) -> bool:
        """Whether a box of a leaf consists of whole chunks, so it can move alone."""
        try:
            self.chunks_of(leaf, origin, extent)
        except StoreMismatchError:
            return False
        return True

    def file_bytes(self, layout: SubgroupLayout, states: Iterable[int]) -> int:
        """Returns the bytes that drives move for states of a subgroup, by number.

        Whole pages, but no more than the file has, whose end may be odd.
        """
        moved = 0
        for state in states:
            extent = layout.extents[state]
            left = layout.file(state).file_bytes - extent.file_offset_bytes
            moved += min(page_ceil(extent.num_bytes), left)
        return moved

    # --- state that stays in memory ---------------------------------------------------

    def staying(
        self, memory_bytes: int, moved: Collection[Subgroup] | None = None
    ) -> frozenset[Subgroup]:
        """Returns the subgroups whose states stay in the host's memory between steps.

        Each is used once a step, so their order makes no difference to the bytes that
        are not read again (docs/decisions.md). Short ones stay first, as they cost the
        most requests. State of cards never passes the host.

        Args:
          memory_bytes: the limit of buffers on the host.
          moved: the subgroups that steps move; None for all.
        """
        if self.options.csd.has_cards:
            return frozenset()
        if self.num_bytes > memory_bytes:
            # Reads, updates and writes overlap there; short subgroups move together.
            longest_bytes = max(self.longest_bytes, _QUICK_BYTES)
            memory_bytes -= _EACH * self.num_workers * longest_bytes
        found = set[Subgroup]()
        for one in sorted(self._all, key=lambda layout: layout.num_bytes):
            if moved is None or one.subgroup in moved:
                memory_bytes -= one.num_bytes
                if memory_bytes < 0:
                    break
                found.add(one.subgroup)
        return frozenset(found)

    def moved_bytes(
        self,
        moves: Collection[Move],
        memory_bytes: int,
        steps_per_commit: float,
        at_once: Collection[int] = (),
    ) -> ByteCounts:
        """Counts the bytes of state that updates move on drives in a step, on average.

        Args:
          moves: of `update_moves`.
          memory_bytes: the limit of buffers on the host.
          steps_per_commit: used where commits alone write what stays in memory.
          at_once: states that every step writes, even if they stay.
        """
        moved = {layout.subgroup for layout, *states in moves if any(states)}
        there, read, written = self.staying(memory_bytes, moved), 0, 0.0
        for layout, loads, stores in moves:
            late: set[int] = set()
            if layout.subgroup not in there:
                read += self.file_bytes(layout, loads)
            elif self.options.rewrites_steps:
                late = {*stores} - {*at_once}
            written += self.file_bytes(layout, {*stores} - late)
            written += self.file_bytes(layout, late) / steps_per_commit
        return ByteCounts(drive_read_bytes=read, drive_write_bytes=round(written))


def _unit_elements(leaf: LeafRecord) -> int:
    """Returns the unit of subgroup starts: a page of every array's file."""
    has_scales = any(state.codec == "scale" for state in leaf.states)
    return SCALES_ALIGNMENT_ELEMENTS if has_scales else CHUNK_ALIGNMENT_ELEMENTS
