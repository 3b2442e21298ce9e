"""Streams whole leaves in and out of a store: initial state, comparison, reading.

Invariant: memory holds no more of a leaf than the caller's own array and the ring.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxinf.csd import Csd, CsdBuffer, ScalarInputs
from jaxinf.engine.divergence import same_values
from jaxinf.engine.opened import OpenStore
from jaxinf.engine.pipeline import Task
from jaxinf.engine.subgroup_arrays import gather_inputs, gather_run, rounding_of
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.errors import StoreError, StoreMismatchError
from jaxinf.layout import gather, scatter
from jaxinf.program import InitKernel
from jaxinf.store import CommitRecord, Piece, ScalarState, StepReader, dtype_of
from jaxinf.typing import Array, JsonValue

__all__ = [
    "committed_reader",
    "committed_step",
    "compare_params",
    "finish_initialisation",
    "initialise",
    "read_box",
    "read_state",
]


def initialise(
    opened: OpenStore,
    leaf: int,
    kernel: InitKernel,
    params: Array,
    origin: Sequence[int],
    inputs: ScalarInputs,
) -> None:
    """Writes a leaf's master params and initial state; blocks until it is written.

    Args:
      opened: new.
      leaf: which.
      kernel: computes the initial state.
      params: the leaf or one shard of it, its own dtype; only read.
      origin: index in the leaf of the array's first element.
      inputs: what the initial state is computed from beside the params.
    """
    held = [(params, inputs)]
    tasks = []
    for layout in opened.layouts(leaf, origin, params.shape):

        def compute(
            csd: Csd,
            buffer: CsdBuffer,
            _: Collection[int],
            layout: SubgroupLayout = layout,
        ) -> None:
            [(params, inputs)] = held
            chunk = gather_run(opened.directory, layout, params, origin)
            own = gather_inputs(opened.directory, layout, inputs, origin)
            extents, rounding = layout.kernel_extents, rounding_of(layout, 0)
            csd.initialise(buffer, extents, kernel, chunk, own, rounding)
            if layout.feedback is not None:
                extent = layout.extents[layout.feedback]
                zeros = np.zeros(extent.num_elements, extent.dtype)
                csd.put(buffer, extent, zeros)
            opened.meters.add(link_down_bytes=chunk.nbytes)

        stores = tuple(range(len(layout.states)))
        tasks.append(Task(layout, compute, stores=stores))
    opened.handler.run(tasks)
    opened.handler.drain()
    held.clear()  # a worker keeps a reference to its last task


def finish_initialisation(
    opened: OpenStore, scalars: Sequence[ScalarState], payload: JsonValue = None
) -> None:
    """Commits step 0; every leaf must have been initialised."""
    opened.check()
    opened.chunks.end_step()
    assert opened.chunks.is_all_written
    opened.finished = CommitRecord(step=0, scalar_state=tuple(scalars), payload=payload)
    opened.publish()


def compare_params(
    opened: OpenStore, leaf: int, params: Array, origin: Sequence[int]
) -> None:
    """Checks that params equal the store's, rounded to their dtype.

    Raises:
      StoreMismatchError: they differ; names the place and the remedy.
    """
    differing: list[int] = []

    def visit(piece: Piece) -> None:
        given = gather(
            params, piece.chunk, tuple(origin), piece.start, piece.values.size
        )
        if not same_values(piece.values, given):
            differing.append(piece.number)

    with committed_reader(opened, opened.options.memory_bytes) as reader:
        _each_piece(opened, reader, leaf, params.dtype, params.shape, origin, visit)
    if differing:
        record = opened.directory.manifest.leaves[leaf]
        step = opened.commit.step
        raise StoreMismatchError(
            f"{opened.options.path}: the store is at step {step} and holds other "
            f"params than init was given (leaf {record.name}); take the store's own "
            "before init, params = store.params(like=params), or use another store"
        )


def read_state(
    opened: OpenStore, leaf: int, out: Array, origin: Sequence[int], state: int = 0
) -> None:
    """Reads a leaf's committed master params, or other state, in the dtype of `out`.

    In the dtype of the store's `params` they are rounded in the same way as these, in
    any other to nearest even.

    Args:
      opened: the store, no step in flight.
      leaf: which.
      out: the leaf or one shard of it; written.
      origin: index in the leaf of the array's first element.
      state: another of its states, which is no coded one.
    """

    with committed_reader(opened, opened.options.memory_bytes) as reader:
        read_box(opened, reader, leaf, out, origin, state)


def read_box(
    opened: OpenStore,
    reader: StepReader,
    leaf: int,
    out: Array,
    origin: Sequence[int],
    state: int = 0,
) -> None:
    """Reads with an existing reader; otherwise as `read_state`.

    A step with a commit may be under way, since it writes to the other slot.

    Args:
      opened: the store.
      reader: from `committed_reader`, with no commit since.
      leaf, out, origin, state: as for `read_state`.
    """

    def visit(piece: Piece) -> None:
        scatter(out, piece.chunk, tuple(origin), piece.start, piece.values)
        opened.meters.add(link_up_bytes=piece.values.nbytes)

    _each_piece(opened, reader, leaf, out.dtype, out.shape, origin, visit, state)


def committed_reader(opened: OpenStore, memory_bytes: int) -> StepReader:
    """Makes a reader of the committed step that uses about this much memory."""
    path, commit = committed_step(opened)
    return StepReader(
        path,
        commit,
        directory=opened.directory,
        memory_bytes=memory_bytes,
        meters=opened.meters,
    )


def committed_step(opened: OpenStore) -> tuple[Path, CommitRecord]:
    """The directory and the record of the committed step, for a reader of it.

    Nothing may be committed while it is read.
    """
    return opened.directory.step_path(opened.chunks.committed), opened.commit


def _each_piece(
    opened: OpenStore,
    reader: StepReader,
    leaf: int,
    dtype: np.dtype,
    extent: Sequence[int],
    origin: Sequence[int],
    visit: Callable[[Piece], None],
    state: int = 0,
) -> None:
    """Calls `visit`, from several threads, with all of a committed state's pieces.

    Args:
      opened: the store.
      reader: of its committed step.
      leaf: which.
      dtype: that the pieces have.
      extent: shape of the box of the leaf.
      origin: index in the leaf of its first element.
      visit: gets each piece.
      state: by its place in the leaf's record; the master params by default.
    """
    record = opened.directory.manifest.leaves[leaf]
    chosen = record.states[state]
    chunks = opened.chunks_of(leaf, origin, extent)

    def pieces(number: int) -> Iterator[Piece]:
        if dtype_of(chosen.dtype) == dtype:
            return reader.stored(record, chosen, number)
        return reader.pieces(record, chosen, [number])

    def take(piece: Piece) -> None:
        visit(replace(piece, values=piece.values.astype(dtype, copy=False)))

    try:
        reader.each(chunks, pieces, take)
    except StoreError as error:
        opened.fail(error)
        raise
