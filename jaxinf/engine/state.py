"""Streams whole leaves in and out of a store: initial state, comparison, reading.

Invariant: memory holds no more of a leaf than the caller's own array and the ring.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxinf.csd import Csd, CsdBuffer, ScalarInputs, initialise_states
from jaxinf.engine.divergence import same_values
from jaxinf.engine.opened import OpenStore
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.engine.update_tasks import (
    AT_ONCE,
    gather_inputs,
    gather_run,
    rounding_of,
)
from jaxinf.errors import StoreError
from jaxinf.layout import Chunk, gather, scatter, target_view
from jaxinf.program import Kernel
from jaxinf.store import (
    CommitRecord,
    Piece,
    ScalarState,
    Slot,
    StepReader,
    dtype_of,
    over,
    schedule_free_params,
)
from jaxinf.transfer import Task, crc32c
from jaxinf.typing import Array


class FirstParams(NamedTuple):
    """The params of a leaf of a new store, or of a shard of it.

    Attributes:
      leaf: its number.
      params: in their own dtype; only read.
      origin: index in the leaf of the array's first element.
      inputs: inputs of the initial state beside the params.
    """

    leaf: int
    params: Array
    origin: Sequence[int]
    inputs: ScalarInputs


def initialise(
    opened: OpenStore, kernels: Sequence[Kernel], given: Sequence[FirstParams]
) -> None:
    """Makes master params and initial states, which workers write; blocks.

    Args:
      opened: a new store.
      kernels: compute the initial state of each leaf of the store.
    """
    held, tasks = list(given), []
    for place, one in enumerate(given):
        for layout in opened.layouts(one.leaf, one.origin, one.params.shape):
            compute = partial(_first_state, opened, kernels, held, place, layout)
            tasks.append(Task(layout, compute, stores=tuple(range(len(layout.states)))))
    opened.mover.run(tasks)
    held.clear()  # a worker keeps a reference to its last task


def _first_state(
    opened: OpenStore,
    kernels: Sequence[Kernel],
    held: Sequence[FirstParams],
    place: int,
    layout: SubgroupLayout,
    csd: Csd,
    buffer: CsdBuffer,
    tells: Collection[int],
) -> None:
    del tells
    leaf, params, origin, inputs = held[place]
    chunk = gather_run(opened.directory, layout, params, origin)
    own = gather_inputs(opened.directory, layout, inputs, origin)
    extents, rounding = layout.kernel_extents, rounding_of(layout, 0)
    initialise_states(csd, buffer, extents, kernels[leaf], chunk, own, rounding)
    if layout.feedback is not None:
        extent = layout.extents[layout.feedback]
        csd.put(buffer, extent, np.zeros(extent.num_elements, extent.dtype))
    opened.meters.add(link_down_bytes=chunk.nbytes)


def finish_initialisation(opened: OpenStore, scalars: Sequence[ScalarState]) -> None:
    """Commits step 0; every leaf must have been initialised."""
    opened.mover.drain()
    opened.health.check()
    opened.chunks.end_step()
    assert opened.chunks.is_all_written
    payload = opened.annotations.take(0)
    opened.finished = CommitRecord(step=0, scalar_state=tuple(scalars), payload=payload)
    opened.publish()


def same_params(
    opened: OpenStore,
    commit: CommitRecord,
    reader: StepReader,
    leaf: int,
    params: Array,
    origin: Sequence[int],
) -> bool:
    """Whether params equal a step's master params, rounded to their dtype.

    Chunks with exactly the params' bits are compared by checksum, others are read. A
    leaf that the record calls inexact may differ by as much as it says.

    Args:
      params: the leaf or one shard of it, in its own dtype; only read.
      origin: index in the leaf of the array's first element.
    """
    record = opened.directory.manifest.leaves[leaf]
    numbers = opened.chunks_of(leaf, origin, params.shape)
    if dtype_of(record.states[0].dtype) == params.dtype:
        numbers = list(_differing(opened, commit, leaf, params, origin))
    differing: list[int] = []
    bound, start = commit.inexact.get(record.name, 0.0), tuple(origin)

    def visit(piece: Piece) -> None:
        given = gather(params, piece.chunk, start, piece.start, piece.values.size)
        if not same_values(piece.values, given, bound=bound):
            differing.append(piece.number)

    _each_piece(opened, reader, leaf, params.dtype, numbers, visit)
    return not differing


def has_params(
    opened: OpenStore, leaf: int, params: Array, origin: Sequence[int]
) -> bool:
    """Whether params have exactly the bits of the last committed step's; reads nothing.

    Args:
      params: the leaf or one shard of it, in the dtype of the store's params.
      origin: index in the leaf of the array's first element.
    """
    return not any(
        True for _ in _differing(opened, opened.commit, leaf, params, origin)
    )


def _differing(
    opened: OpenStore,
    commit: CommitRecord,
    leaf: int,
    params: Array,
    origin: Sequence[int],
) -> Iterator[int]:
    """Yields the numbers of the chunks that have other bits, by their checksums."""
    record = opened.directory.manifest.leaves[leaf]
    sums = commit.checksums[record.array_name(record.states[0].name)]
    for number in opened.chunks_of(leaf, origin, params.shape):
        chunk = opened.directory.chunks[leaf][number]
        run = gather(params, chunk, tuple(origin), 0, chunk.num_elements)
        if crc32c(np.ascontiguousarray(run)) != sums[record.places[number]]:
            yield number


def read_state(
    opened: OpenStore, leaf: int, out: Array, origin: Sequence[int], *states: int
) -> None:
    """Reads a leaf's committed state, or its average, in the dtype of `out`.

    If `out` has the dtype of the store's `params`, they are rounded in the same way as
    these, otherwise to nearest even.

    Args:
      out: the leaf or one shard of it; written.
      origin: index in the leaf of the array's first element.
      states: number of the state, or the two of `OpenStore.averaged`.
    """
    with committed_reader(opened) as reader:
        chunks = opened.chunks_of(leaf, origin, out.shape)
        _read_chunks(opened, reader, leaf, out, origin, chunks, states)


def read_feedback(
    opened: OpenStore, leaf: int, out: Array, origin: Sequence[int]
) -> None:
    """Reads a leaf's or a shard's error feedback, the last of its states."""
    states = opened.directory.manifest.leaves[leaf].states
    read_state(opened, leaf, out, origin, len(states) - 1)


class ParamsReader:
    """Reads master params of the last finished step, which may not be committed.

    A step may be under way if it writes nothing that is read here.

    Args:
      opened: the store, no step ending.
      memory_bytes: memory for reads.
      average: whether to read the params' average instead.
    """

    def __init__(
        self, opened: OpenStore, memory_bytes: int, *, average: bool = False
    ) -> None:
        self._opened = opened
        self._is_average = average
        chunks, directory = opened.chunks, opened.directory
        opened.mover.write_at_once(AT_ONCE)  # read from the drive here
        slots: list[Slot] = []
        if not chunks.is_all_written:
            slots.append(chunks.committed)
        if chunks.has_working:
            slots.append(chunks.target)
        record = replace(opened.finished, checksums=chunks.checksums())
        self._readers = {
            slot: StepReader(
                directory.step_path(slot),
                record,
                directory=directory,
                memory_bytes=memory_bytes // len(slots),
                meters=opened.meters,
            )
            for slot in slots
        }

    def read(self, leaf: int, out: Array, origin: Sequence[int]) -> None:
        """Reads a box of a leaf's master params; blocks.

        Args:
          leaf: number of the leaf.
          out: an array of the wanted dtype; it must cover whole chunks
            (`StoreShape.divides`).
          origin: index in the leaf of its first element.
        """
        opened = self._opened
        states = opened.averaged(leaf) if self._is_average else (0,)
        layouts = list(opened.layouts(leaf, origin, out.shape))
        slots = {
            layout.subgroup.chunk: opened.chunks.source(layout, states[0])
            for layout in layouts
        }
        for slot, reader in self._readers.items():
            numbers = [number for number, held in slots.items() if held == slot]
            if numbers:
                _read_chunks(opened, reader, leaf, out, origin, numbers, states)

    def close(self) -> None:
        """Frees the memory."""
        for reader in self._readers.values():
            reader.__exit__()


def _read_chunks(
    opened: OpenStore,
    reader: StepReader,
    leaf: int,
    out: Array,
    origin: Sequence[int],
    chunks: Sequence[int],
    states: Sequence[int],
) -> None:
    """Reads chunks of a state into the box `out` of the leaf, in place if it can be.

    Of two states the schedule-free average is computed, chunk by chunk.
    """
    if len(states) > 1:
        b1 = opened.finished.schedule_free_b1
        assert b1 is not None
        for number in chunks:
            chunk = opened.directory.chunks[leaf][number]
            y, z = (np.empty(chunk.extent, np.float32) for _ in range(2))
            for state, part in zip(states, (y, z), strict=True):
                _read_chunks(opened, reader, leaf, part, chunk.start, [number], [state])
            values = schedule_free_params(y, z, b1).astype(out.dtype)
            scatter(out, chunk, tuple(origin), 0, values.reshape(-1))
        return

    def visit(piece: Piece) -> None:
        if not np.may_share_memory(piece.values, out):
            scatter(out, piece.chunk, tuple(origin), piece.start, piece.values)
        opened.meters.add(link_up_bytes=piece.values.nbytes)

    def into(chunk: Chunk) -> Array | None:
        return target_view(out, chunk, tuple(origin), 0, chunk.num_elements)

    _each_piece(opened, reader, leaf, out.dtype, chunks, visit, states[0], into)


def committed_step(opened: OpenStore) -> tuple[Path, CommitRecord]:
    """Returns the directory and the record of the committed step, for a reader.

    Nothing may be committed while it is read.
    """
    return opened.directory.step_path(opened.chunks.committed), opened.commit


def committed_reader(opened: OpenStore) -> StepReader:
    """Makes a reader of the committed step, for `committed_step`."""
    memory_bytes = opened.options.memory_bytes
    own = {"directory": opened.directory, "meters": opened.meters}
    return StepReader(*committed_step(opened), memory_bytes=memory_bytes, **own)


def _each_piece(
    opened: OpenStore,
    reader: StepReader,
    leaf: int,
    dtype: np.dtype,
    chunks: Sequence[int],
    visit: Callable[[Piece], None],
    state: int = 0,
    into: Callable[[Chunk], Array | None] = lambda _: None,
) -> None:
    """Calls `visit`, from several threads, with the pieces of a committed state.

    Args:
      state: number of the state in the leaf's record; the master params by default.
      into: as for `StepReader.stored`, if the pieces are of the stored dtype.
    """
    record = opened.directory.manifest.leaves[leaf]
    chosen = record.states[state]

    def take(number: int) -> None:
        if dtype_of(chosen.dtype) == dtype:
            pieces = reader.stored(record, chosen, number, into=into)
        else:
            pieces = reader.pieces(record, chosen, [number])
        for piece in pieces:
            visit(replace(piece, values=piece.values.astype(dtype, copy=False)))

    try:
        for _ in over(chunks, take, reader.num_threads):
            pass
    except StoreError as error:
        opened.health.fail(error)
        raise
