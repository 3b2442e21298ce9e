"""The subgroups of a store: the parts of its chunks that are moved as units.

Invariant: they are known before the store is made, and do not change. Every worker (on
a card, every worker of its share) can hold two subgroups if `check_memory` accepts the
budget, and each subgroup starts on a page of its files.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
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
    chunks_of_box,
    cut_subgroups,
    gather,
    scatter,
)
from jaxinf.store import (
    ERROR_FEEDBACK,
    ChunkFile,
    LeafRecord,
    StateRecord,
    StoreDirectory,
    dtype_of,
)
from jaxinf.transfer import ByteCounts, huge_page_ceil, huge_page_floor, page_ceil
from jaxinf.typing import Array

_LEAST_CARD_WORKERS = 4  # at one of several cards

_PER_WORKER = 2
"""Subgroups that a worker can hold: one that moves, one that is computed or waits."""

_WINDOW_SHARE = 8
"""The part of the host's memory that the subgroups of all workers are to take; the rest
is for cached state."""

_FULL_RATE_BYTES = 8 * 1024 * 1024
"""A length that moves at a drive's full rate: subgroups are not cut shorter, nor are
workers left with less, to have more state cached."""


@dataclass(frozen=True)
class SubgroupLayout:
    """The places of a subgroup's states in its buffer; master params come first."""

    subgroup: Subgroup
    state_names: tuple[str, ...]  # scales have that of the state that they scale
    extents: tuple[Extent, ...]
    record: LeafRecord = field(compare=False)
    entries: Sequence[int] = field(compare=False)  # of `Manifest.held_chunks`

    @property
    def key(self) -> Subgroup:
        return self.subgroup

    @property
    def drive(self) -> int:
        return self.subgroup.csd

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(extent.num_bytes for extent in self.extents)

    @cached_property
    def feedback(self) -> int | None:
        """The number of the error feedback, which is the last state."""
        last = len(self.state_names) - 1
        return last if self.state_names[last] == ERROR_FEEDBACK else None

    @cached_property
    def kernel_extents(self) -> tuple[Extent, ...]:
        """The places of the states that a kernel updates."""
        return self.extents[: self.feedback]

    @cached_property
    def num_bytes(self) -> int:
        last = self.extents[-1]
        return huge_page_ceil(last.buffer_offset_bytes + last.num_bytes)

    @cached_property
    def chunk(self) -> Chunk:
        return self.record.grid.chunks()[self.subgroup.chunk]

    def file(self, state: int) -> ChunkFile:
        """Returns the file of its chunk of a state, by number."""
        leaf, chunk = self.subgroup.leaf, self.subgroup.chunk
        return ChunkFile(leaf, self.record, self.record.states[state], chunk)

    def file_bytes(self, states: Iterable[int]) -> int:
        """Returns the bytes that drives move for states, by number.

        Whole pages, but no more than the file has, whose end may be odd.
        """
        moved_bytes = 0
        for state in states:
            extent = self.extents[state]
            rest_bytes = self.file(state).file_bytes - extent.file_offset_bytes
            moved_bytes += min(page_ceil(extent.num_bytes), rest_bytes)
        return moved_bytes

    def gather(self, array: Array, origin: Sequence[int]) -> Array:
        """Returns its elements of a leaf's or shard's array, a view if contiguous."""
        run = self.subgroup.offset_elements, self.subgroup.num_elements
        return gather(array, self.chunk, tuple(origin), *run)

    def scatter(self, out: Array, origin: Sequence[int], values: Array) -> None:
        """Writes its elements into an array of the leaf or shard."""
        offset = self.subgroup.offset_elements
        scatter(out, self.chunk, tuple(origin), offset, values)


class Move(NamedTuple):
    """The states of a subgroup, by number, that a step reads and writes."""

    layout: SubgroupLayout
    loads: Sequence[int]  # one twice that is read twice
    stores: Sequence[int]


@lru_cache(maxsize=1 << 14)  # most leaves of a large store are alike
def _place_states(
    states: tuple[StateRecord, ...], offset_elements: int, num_elements: int
) -> tuple[tuple[str, ...], tuple[Extent, ...]]:
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
    """The subgroups into which the chunks of a store, perhaps a future one, are cut."""

    def __init__(self, options: StoreOptions, directory: StoreDirectory) -> None:
        self.options = options
        self.directory, self.leaves = directory, directory.manifest.leaves
        self.memory_bytes = options.memory_bytes - self.export_bytes
        self.num_workers = options.num_workers_for(len(directory.manifest.csds) or 1)
        self._layouts = self._cut()
        self._all = [*chain.from_iterable(chain.from_iterable(self._layouts))]
        sizes = [layout.num_bytes for layout in self._all]
        self.num_bytes, self.longest_bytes = sum(sizes), max(sizes, default=0)
        lengths = [layout.subgroup.num_elements for layout in self._all]
        self.longest_elements = max(lengths, default=0)
        self._boxes: dict[tuple[Any, ...], list[SubgroupLayout]] = {}

    @property
    def export_bytes(self) -> int:
        has_exports = self.options.export_every > 0
        return least_memory(self.directory.manifest) if has_exports else 0

    @property
    def least_memory_bytes(self) -> int:
        """The least host memory: to read, compute and write a subgroup at once."""
        return 3 * self.longest_bytes

    # --- the length of subgroups ------------------------------------------------------

    def check_memory(self) -> None:
        """Refuses a budget in which not every worker can hold two least subgroups."""
        unit, num_buffers, itemsize = self._least_buffers()
        least_bytes, export_bytes = num_buffers * itemsize * unit, self.export_bytes
        if self.memory_bytes < least_bytes:
            beside = f" beside the {export_bytes} of exports" if export_bytes else ""
            raise ValueError(
                f"memory_bytes={self.options.memory_bytes}: {self.num_workers} "
                f"workers need at least {least_bytes} bytes for this optimizer's state"
                f"{beside}; give more memory"
            )

    def _least_buffers(self) -> tuple[int, int, int]:
        """Returns the least subgroup's elements, buffers, and the bytes an element."""
        num_workers = self.num_workers
        itemsizes = [sum(s.itemsize for s in leaf.states) for leaf in self.leaves]
        if self.options.csd.has_cards:
            share = -(-num_workers // (len(self.directory.manifest.csds) or 1))
            num_workers = min(num_workers, max(_LEAST_CARD_WORKERS, share))
        units = [_unit_elements(leaf) for leaf in self.leaves]
        unit = max(units, default=CHUNK_ALIGNMENT_ELEMENTS)
        return unit, _PER_WORKER * num_workers, max(itemsizes, default=4)

    def _cut(self) -> list[list[list[SubgroupLayout]]]:
        """Returns the held subgroups by leaf and chunk.

        They are the longest of which every worker can hold two in the budget; the least
        ones if it cannot, for a store whose budget is not used.
        """
        unit, num_buffers, itemsize = self._least_buffers()
        window_bytes = self.memory_bytes
        if not self.options.csd.has_cards:
            full_rate_bytes = _PER_WORKER * self.num_workers * _FULL_RATE_BYTES
            full_rate_bytes = min(window_bytes, full_rate_bytes)
            window_bytes = max(window_bytes // _WINDOW_SHARE, full_rate_bytes)
        buffer_bytes = huge_page_floor(max(0, window_bytes) // num_buffers)
        fitting = buffer_bytes // (itemsize * unit) * unit
        limit = max(unit, min(fitting, DEFAULT_CHUNK_ELEMENTS))
        layouts, first = [], 0
        for leaf, record in enumerate(self.leaves):
            chunks: list[list[SubgroupLayout]] = [[] for _ in record.csds]
            leaf_unit, num_held = _unit_elements(record), len(record.held_numbers)
            last = first + num_held * len(record.states)
            for each in cut_subgroups(leaf, record.grid, record.csds, limit, leaf_unit):
                place = record.positions[each.chunk]
                if place >= 0:
                    entries = range(first + place, last, num_held)
                    run = each.offset_elements, each.num_elements
                    places = _place_states(record.states, *run)
                    layout = SubgroupLayout(each, *places, record, entries)
                    chunks[each.chunk].append(layout)
            layouts.append(chunks)
            first = last
        return layouts

    # --- where they are ---------------------------------------------------------------

    def layouts_by_chunk(self, leaf: int) -> Sequence[Sequence[SubgroupLayout]]:
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
            chunks = chunks_of_box(record.grid, tuple(origin), tuple(extent))
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
        if record.is_whole:
            return chunks
        return [number for number in chunks if record.positions[number] >= 0]

    def entry(self, leaf: int, chunk: int, state: int) -> int:
        """Returns the number of a held chunk of a state in `Manifest.held_chunks`."""
        return self._layouts[leaf][chunk][0].entries[state]

    def has_whole_chunks(
        self, leaf: int, origin: Sequence[int], extent: Sequence[int]
    ) -> bool:
        """Whether a box of a leaf consists of whole chunks, so it can move alone."""
        try:
            self.chunks_of(leaf, origin, extent)
        except StoreMismatchError:
            return False
        return True

    # --- state that stays in memory ---------------------------------------------------

    def choose_cached(
        self, memory_bytes: int, moved: Collection[Subgroup] | None = None
    ) -> frozenset[Subgroup]:
        """Returns the subgroups whose states stay in host memory between steps.

        A step uses each once, so their order makes no difference to the bytes that are
        not read again (docs/decisions.md). Short ones come first, since they cost the
        most requests. State of cards never passes the host.

        Args:
          moved: The subgroups that steps move; None for all.
        """
        if self.options.csd.has_cards:
            return frozenset()
        if self.num_bytes > memory_bytes:
            # Reads, updates and writes overlap there; short subgroups move together.
            longest_bytes = max(self.longest_bytes, _FULL_RATE_BYTES)
            memory_bytes -= _PER_WORKER * self.num_workers * longest_bytes
        cached = set[Subgroup]()
        for layout in sorted(self._all, key=lambda layout: layout.num_bytes):
            if moved is None or layout.subgroup in moved:
                memory_bytes -= layout.num_bytes
                if memory_bytes < 0:
                    break
                cached.add(layout.subgroup)
        return frozenset(cached)

    def count_moved_bytes(
        self,
        moves: Collection[Move],
        *,
        memory_bytes: int,
        steps_per_commit: float,
        written_through: Collection[int] = (),
    ) -> ByteCounts:
        """Counts the bytes of state that updates move on drives in a step, on average.

        Args:
          moves: The result of `list_moves`.
          steps_per_commit: How many steps a deferred write serves.
          written_through: States that every step writes, even if they are cached.
        """
        moved = {layout.subgroup for layout, *states in moves if any(states)}
        cached, read, written = self.choose_cached(memory_bytes, moved), 0, 0.0
        for layout, loads, stores in moves:
            deferred: set[int] = set()
            if layout.subgroup not in cached:
                read += layout.file_bytes(loads)
            elif self.options.rewrites_steps:
                deferred = {*stores} - {*written_through}
            written += layout.file_bytes({*stores} - deferred)
            written += layout.file_bytes(deferred) / steps_per_commit
        return ByteCounts(drive_read_bytes=read, drive_write_bytes=round(written))


def _unit_elements(leaf: LeafRecord) -> int:
    """Returns the elements between possible starts: a page of every state's file."""
    has_scales = any(state.codec == "scale" for state in leaf.states)
    return SCALES_ALIGNMENT_ELEMENTS if has_scales else CHUNK_ALIGNMENT_ELEMENTS
