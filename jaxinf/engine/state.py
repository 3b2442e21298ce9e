"""Whole leaves in and out of a store, streamed: initial state, comparison, reading.

Invariant: never more of a leaf in memory than the caller's own array and the ring.
"""

from collections.abc import Callable, Sequence

import numpy as np

from jaxinf.compress import SparseGradient, SparseLeaf
from jaxinf.csd import Csd, CsdBuffer, Rounding, ScalarInputs
from jaxinf.engine.opened import OpenStore
from jaxinf.engine.pipeline import Task
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.errors import DivergedParamsError, StoreMismatchError
from jaxinf.kernels import CodedSlot
from jaxinf.layout import covers, gather, scatter
from jaxinf.program import InitKernel
from jaxinf.store import CommitRecord, ScalarState
from jaxinf.typing import Array

__all__ = [
    "compare_chunk",
    "compare_params",
    "diverged_error",
    "finish_initialisation",
    "gather_gradient",
    "gather_inputs",
    "gather_run",
    "initialise",
    "read_state",
    "rounding_of",
    "rounding_of_chunk",
    "same_values",
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
            chunk = gather_run(opened, layout, params, origin)
            own = gather_inputs(opened, layout, inputs, origin)
            extents, rounding = layout.kernel_extents, rounding_of(layout, 0)
            csd.initialise(buffer, extents, kernel, chunk, own, rounding)
            if layout.feedback is not None:
                csd.view(buffer, layout.extents[layout.feedback])[...] = 0
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


def compare_chunk(
    opened: OpenStore, layout: SubgroupLayout, params: Array, origin: Sequence[int]
) -> None:
    """Checks that params are what a chunk holds but for zeros and denormals.

    Reads the chunk anew: for when a checksum has said that they differ in some bit.

    Args:
      opened: the store.
      layout: a subgroup of the chunk.
      params: the leaf or a shard of it, of the dtype in which the store has its params.
      origin: index in the leaf of the array's first element.

    Raises:
      DivergedParamsError: they differ; says where.
      StoreCorruptError: the chunk is not what was written.
    """
    opened.chunks.check_file(layout, 0)
    slot = opened.chunks.source(layout, 0)
    file = opened.directory.chunk_file(slot, *layout.place(0))
    subgroup = layout.subgroup
    chunk = opened.directory.chunks[subgroup.leaf][subgroup.chunk]
    for start in range(0, chunk.num_elements, _PIECE_ELEMENTS):
        count = min(_PIECE_ELEMENTS, chunk.num_elements - start)
        offset = start * params.itemsize
        held = np.fromfile(file, params.dtype, count, offset=offset)
        given = gather(params, chunk, tuple(origin), start, count)
        if not same_values(held, given):
            name = opened.directory.manifest.leaves[subgroup.leaf].name
            first = int(np.argmax(held != given))
            raise diverged_error(
                name, given[first : first + 3], held[first : first + 3]
            )


def diverged_error(name: str, given: Array, held: Array) -> DivergedParamsError:
    """What is raised for params that the store's master is not of."""
    return DivergedParamsError(
        f"leaf {name}: the params given to update are not those the store's master is "
        f"of (at one place they are {given}, the store's {held}); apply the returned "
        "updates unchanged (smart_update last in the chain, then "
        "optax.apply_updates), or take store.params(like=params)"
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


def same_values(a: Array, b: Array) -> bool:
    """Equal element by element; NaNs are equal, and so are zeros and denormals.

    JAX on a CPU flushes denormals, NumPy does not: neither is a difference.
    """
    wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
    same = wide_a == wide_b
    if same.all():
        return True
    tiny = np.finfo(np.float32).tiny
    same |= (np.abs(wide_a) < tiny) & (np.abs(wide_b) < tiny)
    same |= np.isnan(wide_a) & np.isnan(wide_b)
    return bool(same.all())


def gather_run(
    opened: OpenStore, layout: SubgroupLayout, array: Array, origin: Sequence[int]
) -> Array:
    """A subgroup's elements of a leaf's array, as a view where they lie in one run."""
    subgroup = layout.subgroup
    chunk = opened.directory.chunks[subgroup.leaf][subgroup.chunk]
    return gather(
        array, chunk, tuple(origin), subgroup.offset_elements, subgroup.num_elements
    )


def rounding_of(layout: SubgroupLayout, step: int) -> Rounding:
    """The random bits of a subgroup in a step: the same wherever it is computed."""
    subgroup = layout.subgroup
    key = rounding_of_chunk(subgroup.leaf, subgroup.chunk, step)
    return Rounding(key, subgroup.offset_elements)


def rounding_of_chunk(leaf: int, chunk: int, step: int) -> int:
    """32 bits that differ from chunk to chunk and from step to step."""
    key = leaf
    for part in (chunk, step):
        key = (key * 0x9E3779B1 + part + 0x7F4A7C15) & 0xFFFFFFFF
        key ^= key >> 15
    return (key * 0x85EBCA6B) & 0xFFFFFFFF


def gather_gradient(
    opened: OpenStore,
    layout: SubgroupLayout,
    gradient: Array | SparseLeaf,
    origin: Sequence[int],
) -> Array | SparseGradient:
    """A subgroup's part of a gradient, dense or sparse as it came.

    Raises:
      StoreMismatchError: it was compressed for other chunks.
    """
    if not isinstance(gradient, SparseLeaf):
        return gather_run(opened, layout, gradient, origin)
    subgroup = layout.subgroup
    record = opened.directory.manifest.leaves[subgroup.leaf]
    positions = covers(record.grid, tuple(origin), gradient.shape)
    chunks = opened.directory.chunks[subgroup.leaf]
    lengths = tuple(chunks[position].num_elements for position in positions)
    if tuple(gradient.lengths) != lengths:
        raise StoreMismatchError(
            f"leaf {record.name}: the gradient was compressed for chunks of other "
            f"lengths than the store's ({record.chunk_shape}): the update was traced "
            "before the store was made; trace it again"
        )
    sent = gradient.chunk(positions.index(subgroup.chunk))
    start = subgroup.offset_elements
    return sent.part(start, start + subgroup.num_elements)


def gather_inputs(
    opened: OpenStore,
    layout: SubgroupLayout,
    inputs: ScalarInputs,
    origin: Sequence[int],
) -> ScalarInputs:
    """The same of a kernel's further arrays."""
    if not inputs.arrays:
        return inputs
    arrays = tuple(gather_run(opened, layout, a, origin) for a in inputs.arrays)
    return ScalarInputs(inputs.scalars, arrays)


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
