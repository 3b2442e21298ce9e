"""What a step is asked for, and its tasks for the mover, one for each subgroup.

    request ─► its subgroups in order ─► read what is not in memory, compute, write

Invariant: a task reads only the newest version of a state, and writes only to the slot
that the step builds. No result is returned or stored for params that differ from the
store's. The arrays of a request belong to the caller: they are only read, copied where
a part is not contiguous, and used only until `StepRunner.update` or `recall` returns.
Which subgroups an updater computes changes between steps only.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from jaxinf.compress import SparseGradient, SparseLeaf
from jaxinf.csd import Csd, CsdBuffer, Rounding, Update, initialise_states, is_idle
from jaxinf.engine.description import StoreDescription
from jaxinf.engine.reading import StateReader
from jaxinf.engine.resume_check import (
    COMPARING_BYTES,
    difference,
    difference_of,
    diverged_error,
)
from jaxinf.engine.store_files import StoreFiles
from jaxinf.engine.subgroup_table import Move, SubgroupLayout, SubgroupTable
from jaxinf.errors import NonFiniteScalarError, StoreMismatchError
from jaxinf.kernels import scalars_used, specialise, state_read
from jaxinf.layout import covers, rounding_of_chunk, target_view
from jaxinf.program import Kernel, LeafInputs
from jaxinf.store import ERROR_FEEDBACK, ScalarState, dtype_of
from jaxinf.transfer import Task
from jaxinf.typing import Array


class FirstParams(NamedTuple):
    """The params of a leaf of a new store, or of a shard of it.

    Attributes:
      params: in their own dtype; only read.
      origin: index in the leaf of the array's first element.
      inputs: inputs of the initial state beside the params.
    """

    leaf: int
    params: Array
    origin: Sequence[int]
    inputs: LeafInputs


@dataclass(frozen=True)
class StateRequest:
    """A request for a state of a leaf, or of a JAX device's shard of it.

    Attributes:
      origin: index in the leaf of the first element of `out`.
      out: receives the values in its dtype.
    """

    leaf: int
    state_name: str
    origin: tuple[int, ...]
    out: Array


@dataclass(frozen=True)
class UpdateRequest:
    """The arrays of an update of a leaf, or of a JAX device's shard of it.

    Attributes:
      origin: index in the leaf of the arrays' first element.
      gradient: 16 or 32 bits, or its compressed form; only read.
      inputs: scalars, and arrays of the gradient's shape.
      out: of the gradient's shape; float32 receives the update, 16 bits the new params,
        rounded to nearest even, or as the store rounds them (docs/format.md, "Codecs").
        None if no result is needed.
      probe: the first few params on the JAX device, to compare with the master; or
        empty.
      params: params on the JAX device, of the gradient's shape. If they equal the
        store's `params` to the bit, those are not read. None if they are not available.
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


class RequestedUpdate:
    """The tasks of an update of a leaf or shard, and what they find.

    Args:
      step: the step after the update.

    Attributes:
      tasks: one for each subgroup; they raise `DivergedParamsError` if the caller's
        params differ from the store's.
      is_finite: whether the gradient is finite; known when the tasks have computed.
    """

    def __init__(self, files: StoreFiles, request: UpdateRequest, step: int) -> None:
        self._files, self._request, self._step = files, request, step
        self._kernel = specialise(request.kernel, request.inputs.scalars)
        # The greatest difference of the caller's 16-bit params from the store's.
        name = files.leaves[request.leaf].name
        self._inexact, self._where = files.finished.inexact.get(name), f"leaf {name}"
        params, self._given = request.params, None
        if params is not None and can_take(files.subgroups, request.leaf, params.dtype):
            self._given = params
        self._out_dtype = np.dtype(np.float32)
        if request.out is not None:
            self._out_dtype = request.out.dtype
        self.is_finite = True
        box = request.leaf, request.origin, request.gradient.shape
        self.tasks = [self._task(layout) for layout in files.subgroups.layouts(*box)]

    def _task(self, layout: SubgroupLayout) -> Task:
        files, request, kernel = self._files, self._request, self._kernel
        loads, stores = _moved(kernel, layout.state_names, request.feedback is not None)
        if self._out_dtype != np.float32:
            loads |= {0}  # the result depends on the params
        takes_given = (
            self._given is not None
            and 0 in loads
            and self._inexact is None
            # Else nothing on the drive can be compared where their checksums differ.
            and self._is_comparable(layout)
        )
        if takes_given:
            loads -= {0}
        updater = None
        is_dense = isinstance(request.gradient, np.ndarray) and request.feedback is None
        if is_dense and layout.subgroup in files.elsewhere and not is_idle(kernel):
            updater = files.assignment.updater
        task = Task(
            layout,
            loads=files.chunks.sources(layout, sorted(loads)),
            stores=stores,
            runs_kernel=not is_idle(kernel),
            is_elsewhere=updater is not None,
        )
        task.compute = partial(self._compute, task, takes_given, updater)
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
        takes_given: bool,
        updater: Any,
        csd: Csd,
        buffer: CsdBuffer,
        tells: Collection[int],
    ) -> Mapping[int, int]:
        """Updates the buffer and the request's `out`; returns checksums as read."""
        request, layout, origin = self._request, task.piece, self._request.origin
        subgroup, chunk = layout.subgroup, layout.chunk
        offset, num = subgroup.offset_elements, subgroup.num_elements
        params = None if self._given is None else layout.gather(self._given, origin)
        if any(state == 0 for state, _ in task.loads):
            master, probe = csd.view(buffer, layout.extents[0]), request.probe
            if params is not None:
                self._compare(layout, master, params)
            elif not offset and chunk.start == origin and probe.size:
                self._compare(layout, master[: probe.size], probe)
        result = out = None
        if request.out is not None:
            out = target_view(request.out, chunk, origin, offset, num)
            result = np.empty(num, self._out_dtype) if out is None else out
        gradient = self._gradient(layout)
        update = Update(
            extents=layout.kernel_extents,
            kernel=self._kernel,
            gradient=gradient,
            inputs=gather_inputs(layout, request.inputs, origin),
            out=result,
            rounding=rounding_of(layout, self._step),
            caller_params=params if takes_given else None,
            wanted_checksums=tells,
        )
        down = gradient.nbytes + (0 if params is None else params.nbytes)
        up = 0 if result is None else result.nbytes
        if updater is None:
            outcome = csd.update(buffer, update)
        else:
            assert request.out is None, "nothing but state leaves an updater"
            outcome = updater.update(csd, buffer, update)
            up += down + sum([layout.sizes[state] for state, _ in task.loads])
            down += sum([layout.sizes[state] for state in task.stores])
        checksums = dict(outcome.read_checksums)
        if takes_given:
            self._check_taken(layout, checksums.pop(0))
        if not outcome.is_finite:
            self.is_finite = False
        if request.feedback is not None:
            assert layout.feedback is not None
            left = layout.gather(request.feedback, origin)
            csd.put(buffer, layout.extents[layout.feedback], left)
            down += left.nbytes
        if out is None and result is not None:
            layout.scatter(request.out, origin, result)
        self._files.meters.add(link_down_bytes=down, link_up_bytes=up)
        return checksums

    def _gradient(self, layout: SubgroupLayout) -> Array | SparseGradient:
        """Returns a subgroup's part of a dense or sparse gradient."""
        gradient, origin = self._request.gradient, self._request.origin
        if not isinstance(gradient, SparseLeaf):
            return layout.gather(gradient, origin)
        subgroup = layout.subgroup
        record = self._files.leaves[subgroup.leaf]
        positions = covers(record.grid, tuple(origin), gradient.shape)
        chunks = record.grid.chunks()
        if tuple(gradient.lengths) != tuple(chunks[n].num_elements for n in positions):
            raise StoreMismatchError(
                f"leaf {record.name}: the gradient was compressed for chunks of other "
                f"lengths than the store's ({record.chunk_shape}): the update was "
                "traced before the store was made; trace it again"
            )
        sent = gradient.chunk(positions.index(subgroup.chunk))
        start = subgroup.offset_elements
        return sent.part(start, start + subgroup.num_elements)

    def _compare(self, layout: SubgroupLayout, stored: Array, given: Array) -> None:
        """Refuses params that differ from the master of a subgroup."""
        if differs := difference(stored, given, self._inexact or 0.0):
            if self._is_comparable(layout):  # damage would explain it
                at = layout.subgroup.leaf, 0, [layout.subgroup.chunk], given.dtype
                with StateReader(self._files, COMPARING_BYTES) as reader:
                    reader.each_piece(*at, lambda _: None)
            raise diverged_error(self._where, differs)

    def _check_taken(self, layout: SubgroupLayout, checksum: int) -> None:
        """Checks that the params used equal those that the last step stored.

        Their checksum is from the pass of the update, whose results are not stored yet.
        If it differs, zeros and denormals may be all that does.
        """
        if self._files.chunks.matches(layout, 0, checksum):
            return
        assert self._given is not None
        chunk, origin = [layout.subgroup.chunk], self._request.origin
        own = layout.subgroup.leaf, self._given, origin, chunk
        if differs := difference_of(self._files, *own):
            raise diverged_error(self._where, differs)


def initialise_leaves(
    files: StoreFiles, description: StoreDescription, given: Sequence[FirstParams]
) -> None:
    """Makes master params and initial states of a new store's leaves; blocks."""
    tasks = [_first_tasks(files, description, one) for one in given]
    files.mover.run([*itertools.chain.from_iterable(tasks)])


def _first_tasks(
    files: StoreFiles, description: StoreDescription, given: FirstParams
) -> list[Task]:
    kernel = description.leaves[given.leaf].init_kernel

    def compute(
        layout: SubgroupLayout, csd: Csd, buffer: CsdBuffer, _: Collection[int]
    ) -> None:
        own = layout.gather(given.params, given.origin)
        inputs = gather_inputs(layout, given.inputs, given.origin)
        initialise_states(
            csd,
            buffer,
            layout.kernel_extents,
            kernel=kernel,
            params=own,
            inputs=inputs,
            rounding=rounding_of(layout, 0),
        )
        if layout.feedback is not None:
            extent = layout.extents[layout.feedback]
            csd.put(buffer, extent, np.zeros(extent.num_elements, extent.dtype))
        files.meters.add(link_down_bytes=own.nbytes)

    return [
        Task(
            layout,
            partial(compute, layout),
            stores=tuple(range(len(layout.state_names))),
        )
        for layout in files.subgroups.layouts(
            given.leaf, given.origin, given.params.shape
        )
    ]


def recall_tasks(files: StoreFiles, request: StateRequest) -> list[Task]:
    """Makes the tasks that read a state in the middle of a step; they write nothing."""

    def compute(
        layout: SubgroupLayout, csd: Csd, buffer: CsdBuffer, _: Collection[int]
    ) -> None:
        values = csd.view(
            buffer, layout.extents[layout.state_names.index(request.state_name)]
        )
        values = values[: layout.subgroup.num_elements]
        values = values.astype(request.out.dtype, copy=False)
        layout.scatter(request.out, request.origin, values)

    tasks = []
    for layout in files.subgroups.layouts(
        request.leaf, request.origin, request.out.shape
    ):
        state = layout.state_names.index(request.state_name)
        loads = files.chunks.sources(layout, [state])
        tasks.append(Task(layout, partial(compute, layout), loads))
    return tasks


def nan_scalars(
    files: StoreFiles, requests: Sequence[UpdateRequest]
) -> tuple[str, ...]:
    """Names the scalars that are NaN and used, for an error.

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
    files: StoreFiles, found: Sequence[str], scalars: Sequence[ScalarState]
) -> NonFiniteScalarError:
    """Makes the error for a step that would compute with NaN; a scalar may name it."""
    named = ", ".join(
        scalar.path
        for scalar in scalars
        if scalar.value.dtype.kind in "fcV"
        and bool((scalar.value != scalar.value).any())
    )
    named = f"{named} of the optimizer's state" if named else found[0]
    at = files.finished.step
    return NonFiniteScalarError(
        f"{files.options.path}: step {at + 1}: expected numbers to update with, found "
        f"NaN in {named}; the step was refused, the store stays at step {at}. Look at "
        "the learning rate and its schedule"
    )


# --- what an update moves ------------------------------------------------------------


def can_take(subgroups: SubgroupTable, leaf: int, dtype: np.dtype) -> bool:
    """Whether an update can use a caller's params of a dtype in place of the store's.

    It does if its kernel reads them.
    """
    stored = subgroups.leaves[leaf].states[0]
    return not subgroups.options.csd.has_cards and dtype == dtype_of(stored.dtype)


def update_moves(
    subgroups: SubgroupTable,
    kernel: Kernel,
    leaf: int,
    origin: Sequence[int],
    extent: Sequence[int],
    *,
    takes_params: bool = False,
    recalled: Sequence[str] = (),
) -> list[Move]:
    """Returns what an update, not specialised, moves of a leaf, or of a box of it.

    Args:
      takes_params: whether it takes a caller's params in place of the store's.
      recalled: names of the states that the step reads before, too.
    """
    found, taken = [], {0} if takes_params else set[int]()
    for layout in subgroups.layouts(leaf, origin, extent):
        loads, stores = _moved(kernel, layout.state_names, layout.feedback is not None)
        again = map(layout.state_names.index, recalled)
        found.append(Move(layout, (*loads - taken, *again), stores))
    return found


@lru_cache
def _moved(
    kernel: Kernel, state_names: tuple[str, ...], has_feedback: bool
) -> tuple[frozenset[int], tuple[int, ...]]:
    needed, unchanged = state_read(kernel), kernel.unchanged
    if not has_feedback:
        unchanged |= {ERROR_FEEDBACK}
    return (
        frozenset(n for n, name in enumerate(state_names) if name in needed),
        tuple(n for n, name in enumerate(state_names) if name not in unchanged),
    )


# --- what a kernel gets ---------------------------------------------------------------


def gather_inputs(
    layout: SubgroupLayout, inputs: LeafInputs, origin: Sequence[int]
) -> LeafInputs:
    """Returns a subgroup's part of a kernel's other arrays."""
    if not inputs.arrays:
        return inputs
    arrays = tuple(layout.gather(array, origin) for array in inputs.arrays)
    return LeafInputs(inputs.scalars, arrays)


def rounding_of(layout: SubgroupLayout, step: int) -> Rounding:
    """Returns the seed of a subgroup's rounding in a step, the same on every CSD."""
    subgroup = layout.subgroup
    key = rounding_of_chunk(subgroup.leaf, subgroup.chunk, step)
    return Rounding(key, subgroup.offset_elements)
