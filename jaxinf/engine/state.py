"""Whole leaves in and out of a store, streamed: initial state, comparison, reading.

Invariant: never more of a leaf in memory than the caller's own array and the ring.
"""

from collections.abc import Callable, Sequence

import numpy as np

from jaxinf.csd import Csd, CsdBuffer, ScalarInputs
from jaxinf.engine.divergence import same_values
from jaxinf.engine.opened import OpenStore
from jaxinf.engine.pipeline import Task
from jaxinf.engine.subgroup_arrays import gather_inputs, gather_run, rounding_of
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.errors import StoreMismatchError
from jaxinf.kernels import CodedSlot
from jaxinf.layout import gather, scatter
from jaxinf.program import InitKernel
from jaxinf.store import CommitRecord, ScalarState
from jaxinf.typing import Array

__all__ = [
    "compare_params",
    "finish_initialisation",
    "initialise",
    "read_state",
]


_PIECE_ELEMENTS = 1 << 20


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
    tasks = []
    for layout in opened.layouts(leaf, origin, params.shape):

        def compute(
            csd: Csd, buffer: CsdBuffer, layout: SubgroupLayout = layout
        ) -> None:
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


def finish_initialisation(opened: OpenStore, scalars: Sequence[ScalarState]) -> None:
    """Commits step 0; every leaf must have been initialised."""
    opened.check()
    opened.chunks.end_step()
    assert opened.chunks.is_all_written
    opened.finished = CommitRecord(step=0, scalar_state=tuple(scalars))
    opened.publish()


def compare_params(
    opened: OpenStore, leaf: int, params: Array, origin: Sequence[int]
) -> None:
    """Checks that params are what the store holds, rounded to their dtype.

    Raises:
      StoreMismatchError: they are not; says where and what to do.
    """
    differing: list[int] = []

    def visit(chunk: int, start: int, held: Array) -> None:
        part = opened.directory.chunks[leaf][chunk]
        given = gather(params, part, tuple(origin), start, held.size)
        if not same_values(held, given):
            differing.append(chunk)

    _stream_state(opened, leaf, params.dtype, params.shape, origin, visit)
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

    To the dtype of the store's `params` they are rounded as these are, to any other to
    nearest even.

    Args:
      opened: the store, no step in flight.
      leaf: which.
      out: the leaf or one shard of it; written.
      origin: index in the leaf of the array's first element.
      state: another of its states, which is no coded one.
    """
    chunks = opened.directory.chunks[leaf]

    def visit(chunk: int, start: int, values: Array) -> None:
        scatter(out, chunks[chunk], tuple(origin), start, values)
        opened.meters.add(link_up_bytes=values.nbytes)

    _stream_state(opened, leaf, out.dtype, out.shape, origin, visit, state)


def _stream_state(
    opened: OpenStore,
    leaf: int,
    dtype: np.dtype,
    extent: Sequence[int],
    origin: Sequence[int],
    visit: Callable[[int, int, Array], None],
    state: int = 0,
) -> None:
    """Calls `visit`, from several threads, with all of a state, a piece at a time.

    Args:
      opened: the store.
      leaf: which.
      dtype: that the pieces have.
      extent: shape of the box of the leaf.
      origin: index in the leaf of its first element.
      visit: gets a chunk's number, where in it the piece starts, and its elements.
      state: by its place in the leaf's record; the master params by default.
    """
    tasks = []
    for layout in opened.layouts(leaf, origin, extent):
        arrays = _arrays_of(layout, state, dtype)

        def compute(
            csd: Csd,
            buffer: CsdBuffer,
            layout: SubgroupLayout = layout,
            arrays: Sequence[int] = arrays,
        ) -> None:
            views = [csd.view(buffer, layout.extents[n]) for n in arrays]
            subgroup, first = layout.subgroup, layout.extents[state]
            for start in range(0, views[0].size, _PIECE_ELEMENTS):
                pieces = [view[start : start + _PIECE_ELEMENTS] for view in views]
                values = pieces[0]
                if first.codec and first.dtype != dtype:
                    beside = pieces[1] if len(pieces) > 1 else None
                    values = CodedSlot.of(values, beside).decode()
                place = subgroup.offset_elements + start
                visit(subgroup.chunk, place, values.astype(dtype, copy=False))

        source = opened.chunks.source
        tasks.append(
            Task(layout, compute, loads=tuple((n, source(layout, n)) for n in arrays))
        )
    opened.handler.run(tasks)
    opened.handler.drain()


def _arrays_of(layout: SubgroupLayout, state: int, dtype: np.dtype) -> Sequence[int]:
    """What is read of a state to have it in a dtype: its array, and a remainder's."""
    if layout.extents[state].dtype == dtype:
        return (state,)
    name = layout.slots[state]
    return [n for n, slot in enumerate(layout.slots) if slot == name]
