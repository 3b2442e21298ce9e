"""Requests to a step, and their tasks for the mover, one for each subgroup.

    request ─► its subgroups in order ─► read what is not in memory, compute, write

Invariant: a task reads only the newest version of a state, and writes only to the slot
that the step builds. No result is returned or stored for params that differ from the
store's. The arrays of a request belong to the caller: they are only read, and copied
where a part is not contiguous; no task uses them after `StepRunner.update` or
`read_states` has returned.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from jaxinf.compress import SparseGradient, SparseLeaf
from jaxinf.csd import Csd, CsdBuffer, Rounding, Update, initialise_states, is_idle
from jaxinf.engine.description import StoreDescription
from jaxinf.engine.reading import StateReader
from jaxinf.engine.resume_check import (
    COMPARE_BUFFER_BYTES,
    compare_chunks,
    diverged_error,
    show_difference,
)
from jaxinf.engine.store_files import StoreFiles
from jaxinf.engine.subgroup_table import Move, SubgroupLayout, SubgroupTable
from jaxinf.errors import NonFiniteScalarError, StoreMismatchError
from jaxinf.kernels import scalars_used, specialise, state_read
from jaxinf.layout import chunks_of_box, rounding_of_chunk, target_view
from jaxinf.program import Kernel, LeafInputs
from jaxinf.store import ERROR_FEEDBACK, ScalarState, dtype_of
from jaxinf.transfer import Task
from jaxinf.typing import Array


class InitialParams(NamedTuple):
    """The params of a leaf of a new store, or of a shard of it."""

    leaf: int
    params: Array  # in their own dtype; only read
    origin: Sequence[int]  # index in the leaf of their first element
    inputs: LeafInputs  # what the initial state depends on beside the params


@dataclass(frozen=True)
class StateRequest:
    """A request to read a state of a leaf, or of a JAX device's shard of it."""

    leaf: int
    state_name: str
    origin: tuple[int, ...]  # index in the leaf of the first element of `out`
    out: Array  # receives the values in its dtype


@dataclass(frozen=True)
class UpdateRequest:
    """The arrays of an update of a leaf, or of a JAX device's shard of it.

    Attributes:
      origin: Index in the leaf of the arrays' first element.
      gradient: 16 or 32 bits, or its compressed form; only read.
      inputs: Scalars, and arrays of the gradient's shape.
      out: Of the gradient's shape; float32 receives the update, 16 bits the new params,
        rounded to nearest even, or as the store rounds them (docs/format.md, "Codecs").
        None if no result is needed.
      probe: The first few params on the JAX device, to compare with the master, or
        none.
      params: The params on the JAX device, of the gradient's shape, if the callback has
        them. The store's `params` are not read if these equal them to the bit.
      feedback: float32 of the gradient's shape, the error feedback after this step;
        None if it does not change.
    """

    leaf: int
    kernel: Kernel
    origin: tuple[int, ...]
    gradient: Array | SparseLeaf
    inputs: LeafInputs
    out: Array | None
    probe: Array
    params: Array | None = None
    feedback: Array | None = None


# --- an update -----------------------------------------------------------------------


class LeafUpdate:
    """The tasks of an update of a leaf or shard, and what they find.

    Args:
      step: The step after the update.

    Attributes:
      tasks: One for each subgroup; they raise `DivergedParamsError` if the caller's
        params differ from the store's.
      is_finite: Whether the gradient is finite; known when the tasks have computed.
    """

    def __init__(self, files: StoreFiles, request: UpdateRequest, step: int) -> None:
        self._files, self._request, self._step = files, request, step
        self._kernel = specialise(request.kernel, request.inputs.scalars)
        # The greatest difference of the caller's 16-bit params from the store's.
        name = files.leaves[request.leaf].name
        self._inexact, self._where = files.finished.inexact.get(name), f"leaf {name}"
        params, table = request.params, files.subgroups
        if params is not None and not can_use_params(table, request.leaf, params.dtype):
            params = None
        self._params = params
        out = request.out
        self._out_dtype = np.dtype(np.float32) if out is None else out.dtype
        self.is_finite = True
        box = request.leaf, request.origin, request.gradient.shape
        self.tasks = [self._task(layout) for layout in table.layouts(*box)]

    def _task(self, layout: SubgroupLayout) -> Task:
        files, request, kernel = self._files, self._request, self._kernel
        has_feedback = request.feedback is not None
        loads, stores = _moved_states(kernel, layout.state_names, has_feedback)
        if self._out_dtype != np.float32:
            loads |= {0}  # the result depends on the params
        uses_params = (
            self._params is not None
            and 0 in loads
            and self._inexact is None
            # Else nothing on the drive can be compared where their checksums differ.
            and self._is_comparable(layout)
        )
        if uses_params:
            loads -= {0}
        is_dense = isinstance(request.gradient, np.ndarray) and not has_feedback
        is_assigned = is_dense and layout.subgroup in files.assigned
        task = Task(
            layout,
            loads=files.chunks.sources(layout, sorted(loads)),
            stores=stores,
            runs_kernel=not is_idle(kernel),
            is_remote=is_assigned and not is_idle(kernel),
        )
        task.compute = partial(self._compute, task, uses_params)
        return task

    def _is_comparable(self, layout: SubgroupLayout) -> bool:
        """Whether the chunk's file is as the last step left it, until this one ends.

        In an uncommitted step the parts of a chunk are overwritten one by one, so the
        whole can no longer be compared.
        """
        files = self._files
        is_whole = layout.subgroup.num_elements >= layout.chunk.num_elements
        is_unchanged = is_whole or not files.num_uncommitted
        return is_unchanged and not files.chunks.is_in_memory(layout, 0)

    def _compute(
        self,
        task: Task,
        uses_params: bool,
        csd: Csd,
        buffer: CsdBuffer,
        wanted_checksums: Collection[int],
    ) -> Mapping[int, int]:
        """Updates the buffer and the request's `out`; returns checksums as read."""
        request, layout, origin = self._request, task.layout, self._request.origin
        params = None if self._params is None else layout.gather(self._params, origin)
        if any(state == 0 for state, _ in task.loads):
            self._compare_master(layout, csd.view(buffer, layout.extents[0]), params)
        view = result = None
        if request.out is not None:
            run = layout.subgroup.offset_elements, layout.subgroup.num_elements
            view = target_view(request.out, layout.chunk, origin, *run)
            result = np.empty(run[1], self._out_dtype) if view is None else view
        update = Update(
            extents=layout.kernel_extents,
            kernel=self._kernel,
            gradient=self._gradient(layout),
            inputs=_gather_inputs(layout, request.inputs, origin),
            out=result,
            rounding=_rounding_of(layout, self._step),
            caller_params=params if uses_params else None,
            wanted_checksums=wanted_checksums,
        )
        if task.is_remote:
            assert request.out is None, "nothing but state leaves an updater"
            updater = self._files.assignment.updater
            outcome = updater.update(csd, buffer, update)
        else:
            outcome = csd.update(buffer, update)
        checksums = dict(outcome.read_checksums)
        if uses_params:
            self._check_used(layout, checksums.pop(0))
        if not outcome.is_finite:
            self.is_finite = False
        if request.feedback is not None:
            assert layout.feedback is not None
            feedback = layout.gather(request.feedback, origin)
            csd.put(buffer, layout.extents[layout.feedback], feedback)
            self._files.meters.add(link_down_bytes=feedback.nbytes)
        if view is None and result is not None:
            layout.scatter(request.out, origin, result)
        self._count_link_bytes(task, update, 0 if params is None else params.nbytes)
        return checksums

    def _count_link_bytes(self, task: Task, update: Update, params_bytes: int) -> None:
        down = update.gradient.nbytes + params_bytes
        up = 0 if update.out is None else update.out.nbytes
        if task.is_remote:
            sizes = task.layout.sizes
            up += down + sum([sizes[state] for state, _ in task.loads])
            down += sum([sizes[state] for state in task.stores])
        self._files.meters.add(link_down_bytes=down, link_up_bytes=up)

    def _gradient(self, layout: SubgroupLayout) -> Array | SparseGradient:
        gradient, origin = self._request.gradient, self._request.origin
        if not isinstance(gradient, SparseLeaf):
            return layout.gather(gradient, origin)
        subgroup = layout.subgroup
        record = self._files.leaves[subgroup.leaf]
        numbers = chunks_of_box(record.grid, tuple(origin), gradient.shape)
        chunks = record.grid.chunks()
        if tuple(gradient.lengths) != tuple(chunks[n].num_elements for n in numbers):
            raise StoreMismatchError(
                f"leaf {record.name}: the gradient was compressed for chunks of other "
                f"lengths than the store's ({record.chunk_shape}): the update was "
                "traced before the store was made; trace it again"
            )
        chunk_gradient = gradient.chunk(numbers.index(subgroup.chunk))
        start = subgroup.offset_elements
        return chunk_gradient.part(start, start + subgroup.num_elements)

    def _compare_master(
        self, layout: SubgroupLayout, master: Array, params: Array | None
    ) -> None:
        """Refuses params, or the leaf's first few, that differ from the master."""
        if params is None:
            params = self._request.probe
            is_first = layout.chunk.start == self._request.origin
            if layout.subgroup.offset_elements or not is_first or not params.size:
                return
            master = master[: params.size]
        if differs := show_difference(master, params, self._inexact or 0.0):
            if self._is_comparable(layout):  # damage would explain it
                chunk = [layout.subgroup.chunk]
                state = layout.subgroup.leaf, 0
                with StateReader(self._files, COMPARE_BUFFER_BYTES) as reader:
                    reader.visit_pieces(*state, chunk, params.dtype, lambda _: None)
            raise diverged_error(self._where, differs)

    def _check_used(self, layout: SubgroupLayout, checksum: int) -> None:
        """Checks that the params used equal those that the last step stored.

        Their checksum is from the pass of the update, whose results are not stored yet.
        If it differs, that may be by zeros and denormals alone.
        """
        if self._files.chunks.matches(layout, 0, checksum):
            return
        assert self._params is not None
        difference = compare_chunks(
            self._files,
            layout.subgroup.leaf,
            self._params,
            origin=self._request.origin,
            chunks=[layout.subgroup.chunk],
        )
        if difference:
            raise diverged_error(self._where, difference)


def initialise_leaves(
    files: StoreFiles, description: StoreDescription, leaves: Sequence[InitialParams]
) -> None:
    """Makes master params and initial states of a new store's leaves; blocks."""
    tasks = [_initial_tasks(files, description, leaf) for leaf in leaves]
    files.mover.run([*itertools.chain.from_iterable(tasks)])


def _initial_tasks(
    files: StoreFiles, description: StoreDescription, initial: InitialParams
) -> list[Task]:
    kernel = description.leaves[initial.leaf].init_kernel

    def compute(
        layout: SubgroupLayout, csd: Csd, buffer: CsdBuffer, _: Collection[int]
    ) -> None:
        params = layout.gather(initial.params, initial.origin)
        initialise_states(
            csd,
            buffer,
            layout.kernel_extents,
            kernel=kernel,
            params=params,
            inputs=_gather_inputs(layout, initial.inputs, initial.origin),
            rounding=_rounding_of(layout, 0),
        )
        if layout.feedback is not None:
            extent = layout.extents[layout.feedback]
            csd.put(buffer, extent, np.zeros(extent.num_elements, extent.dtype))
        files.meters.add(link_down_bytes=params.nbytes)

    box = initial.leaf, initial.origin, initial.params.shape
    return [
        Task(layout, partial(compute, layout), stores=(*range(len(layout.extents)),))
        for layout in files.subgroups.layouts(*box)
    ]


def state_tasks(files: StoreFiles, request: StateRequest) -> list[Task]:
    """Makes the tasks that read a state before a step's updates; they write nothing."""

    def make(layout: SubgroupLayout) -> Task:
        state = layout.state_names.index(request.state_name)

        def compute(csd: Csd, buffer: CsdBuffer, _: Collection[int]) -> None:
            values = csd.view(buffer, layout.extents[state])
            values = values[: layout.subgroup.num_elements]
            values = values.astype(request.out.dtype, copy=False)
            layout.scatter(request.out, request.origin, values)

        return Task(layout, compute, files.chunks.sources(layout, [state]))

    box = request.leaf, request.origin, request.out.shape
    return [make(layout) for layout in files.subgroups.layouts(*box)]


def name_nan_scalars(
    files: StoreFiles, requests: Sequence[UpdateRequest]
) -> tuple[str, ...]:
    """Names the scalars that are NaN and used.

    A learning rate of NaN turns all state into NaN, whatever the gradients are. Inf is
    accepted, because some optimizers start with it. A scalar is checked only in a
    branch that the step takes.
    """
    return tuple(
        f"scalar {number} of the update of leaf {files.leaves[request.leaf].name}"
        for request in requests
        for number, scalar in enumerate(request.inputs.scalars)
        if math.isnan(scalar)
        and number in scalars_used(request.kernel, request.inputs.scalars)
    )


def nan_scalar_error(
    files: StoreFiles, names: Sequence[str], state: Sequence[ScalarState]
) -> NonFiniteScalarError:
    """Returns the error for a step that would compute with NaN; names the cause."""
    named = ", ".join(
        scalar.path
        for scalar in state
        if scalar.value.dtype.kind in "fcV"
        and bool((scalar.value != scalar.value).any())
    )
    named = f"{named} of the optimizer's state" if named else names[0]
    at = files.finished.step
    return NonFiniteScalarError(
        f"{files.options.path}: step {at + 1}: expected numbers to update with, found "
        f"NaN in {named}; the step was refused, the store stays at step {at}. Look at "
        "the learning rate and its schedule"
    )


# --- states that an update reads and writes ------------------------------------------


def can_use_params(subgroups: SubgroupTable, leaf: int, dtype: np.dtype) -> bool:
    """Whether updates can use a caller's params of a dtype in place of the store's."""
    stored = subgroups.leaves[leaf].states[0]
    return not subgroups.options.csd.has_cards and dtype == dtype_of(stored.dtype)


def list_moves(
    subgroups: SubgroupTable,
    kernel: Kernel,
    leaf: int,
    origin: Sequence[int],
    extent: Sequence[int],
    *,
    takes_params: bool = False,
    read_first: Sequence[str] = (),
) -> list[Move]:
    """Returns the states that an update of a box of a leaf reads and writes.

    A step's scalars may spare it some of them.

    Args:
      takes_params: Whether it takes a caller's params in place of the store's.
      read_first: Names of the states that the step has read before.
    """
    moves, taken = [], {0} if takes_params else set[int]()
    for layout in subgroups.layouts(leaf, origin, extent):
        names = layout.state_names
        loads, stores = _moved_states(kernel, names, layout.feedback is not None)
        numbers = [names.index(name) for name in read_first]
        moves.append(Move(layout, (*loads - taken, *numbers), stores))
    return moves


@lru_cache
def _moved_states(
    kernel: Kernel, state_names: tuple[str, ...], has_feedback: bool
) -> tuple[frozenset[int], tuple[int, ...]]:
    needed, unchanged = state_read(kernel), kernel.unchanged
    if not has_feedback:
        unchanged |= {ERROR_FEEDBACK}
    return (
        frozenset(n for n, name in enumerate(state_names) if name in needed),
        tuple(n for n, name in enumerate(state_names) if name not in unchanged),
    )


# --- inputs of a kernel --------------------------------------------------------------


def _gather_inputs(
    layout: SubgroupLayout, inputs: LeafInputs, origin: Sequence[int]
) -> LeafInputs:
    if not inputs.arrays:
        return inputs
    arrays = tuple(layout.gather(array, origin) for array in inputs.arrays)
    return LeafInputs(inputs.scalars, arrays)


def _rounding_of(layout: SubgroupLayout, step: int) -> Rounding:
    subgroup = layout.subgroup
    key = rounding_of_chunk(subgroup.leaf, subgroup.chunk, step)
    return Rounding(key, subgroup.offset_elements)
