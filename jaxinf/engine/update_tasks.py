"""Turns requests for updates and for slots into tasks of the pipeline.

Invariant: a task reads only the newest version of a state, and writes only to the slot
that the step builds.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxinf.csd import Csd, CsdBuffer, is_idle
from jaxinf.engine.opened import OpenStore
from jaxinf.engine.shape import StoreShape
from jaxinf.engine.subgroup_arrays import rounding_of
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.engine.subgroup_update import SubgroupUpdate
from jaxinf.engine.update_request import KeptLeaf, SlotRequest, UpdateRequest
from jaxinf.engine.updaters import Updater
from jaxinf.errors import NonFiniteScalarError
from jaxinf.kernels.specialise import scalars_used, specialise, state_read
from jaxinf.layout import scatter
from jaxinf.program import Kernel
from jaxinf.store import ERROR_FEEDBACK, ScalarState, dtype_of
from jaxinf.transfer import Task
from jaxinf.typing import Array

AT_ONCE = frozenset({0})
"""States that streamed steps write in any case: programs read params from the drive."""


@dataclass(frozen=True)
class RequestTasks:
    """The tasks of a request.

    Attributes:
      link_down_bytes: bytes from the caller, including params that are used; where
        other processes hold a part, in proportion. And new state from an updater.
      link_up_bytes: bytes of results, likewise; and state and gradients to an updater.
    """

    tasks: Sequence[Task]
    updates: Sequence[SubgroupUpdate]
    link_down_bytes: int
    link_up_bytes: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether the gradient is finite; known when the tasks have computed."""
        return all(update.is_finite for update in self.updates)


def kept_tasks(opened: OpenStore, kept: KeptLeaf) -> RequestTasks:
    """Makes the tasks of a leaf that a step leaves as it is: they move nothing."""
    layouts = opened.layouts(kept.leaf, kept.origin, kept.shape)
    return RequestTasks([Task(layout, compute_nothing) for layout in layouts], (), 0)


def compute_nothing(csd: Csd, buffer: CsdBuffer, tells: Collection[int]) -> None:
    del csd, buffer, tells


def request_tasks(
    opened: OpenStore, request: UpdateRequest, step: int, *, inexact: float | None
) -> RequestTasks:
    """Makes the tasks of an update; they raise the errors of `SubgroupUpdate.run`.

    Args:
      step: the step after the update.
      inexact: the greatest difference of the caller's 16-bit params from the store's;
        None if they must be equal to the bit.
    """
    kernel = specialise(request.kernel, request.inputs.scalars)
    given = _given(opened, request)
    tasks, updates = [], []
    for layout in opened.layouts(request.leaf, request.origin, request.gradient.shape):
        loads, stores = _moved(kernel, layout.slots, request.feedback is not None)
        if request.returns_params:
            loads |= {0}
        chunk = opened.directory.chunks[request.leaf][layout.subgroup.chunk]
        is_first = (
            layout.subgroup.offset_elements == 0 and chunk.start == request.origin
        )
        # In an uncommitted step the parts of a chunk are overwritten one by one, so the
        # whole can no longer be compared later.
        is_part = layout.subgroup.num_elements < chunk.num_elements
        is_whole = not (is_part and opened.num_uncommitted > 0)
        is_given = given is not None and 0 in loads
        is_taken = is_given and is_whole and inexact is None
        # Nothing on the drive could be compared with them if their checksums differ.
        is_taken &= not opened.chunks.is_in_memory(layout, 0)
        updater = _updater(opened, request, layout, kernel)
        if is_taken:
            loads -= {0}
        update = SubgroupUpdate(
            opened.directory,
            opened.chunks,
            request,
            layout,
            kernel,
            rounding_of(layout, step),
            given=given if is_taken else None,
            compared=given if is_given and not is_taken else None,
            is_probed=is_first and request.probe.size > 0 and 0 in loads,
            is_first=step == 1,
            inexact=inexact or 0.0,
            is_whole=is_whole,
            updater=updater,
        )
        updates.append(update)
        tasks.append(
            Task(
                layout,
                update.run,
                loads=opened.chunks.sources(layout, sorted(loads)),
                stores=stores,
                runs_kernel=not is_idle(kernel),
                is_elsewhere=update.updater is not None,
            )
        )
    link_down_bytes = request.link_bytes + (0 if given is None else given.nbytes)
    link_up_bytes = request.link_up_bytes
    if not opened.directory.manifest.leaves[request.leaf].is_whole:
        num_all = max(1, math.prod(request.gradient.shape))
        num_held = sum(task.piece.subgroup.num_elements for task in tasks)
        link_down_bytes = link_down_bytes * num_held // num_all
        link_up_bytes = link_up_bytes * num_held // num_all
    sent = [one for one in (request.gradient, given) if isinstance(one, np.ndarray)]
    for task, update in zip(tasks, updates, strict=True):
        if update.updater is not None:
            extents, num = task.piece.extents, task.piece.subgroup.num_elements
            link_up_bytes += sum([extents[n].num_bytes for n, _ in task.loads])
            link_up_bytes += sum([num * array.itemsize for array in sent])
            link_down_bytes += sum([extents[n].num_bytes for n in task.stores])
    return RequestTasks(tasks, updates, link_down_bytes, link_up_bytes)


def recall_tasks(opened: OpenStore, request: SlotRequest) -> list[Task]:
    """Makes the tasks that read a slot in the middle of a step; they write nothing."""
    layouts = opened.layouts(request.leaf, request.origin, request.out.shape)
    return [_recall_task(opened, request, layout) for layout in layouts]


def _recall_task(
    opened: OpenStore, request: SlotRequest, layout: SubgroupLayout
) -> Task:
    state = layout.slots.index(request.slot)
    subgroup = layout.subgroup
    chunk = opened.directory.chunks[subgroup.leaf][subgroup.chunk]

    def compute(csd: Csd, buffer: CsdBuffer, tells: Collection[int]) -> None:
        del tells
        values = csd.view(buffer, layout.extents[state])[: subgroup.num_elements]
        values = values.astype(request.out.dtype, copy=False)
        scatter(request.out, chunk, request.origin, subgroup.offset_elements, values)

    return Task(layout, compute, loads=opened.chunks.sources(layout, [state]))


def nan_scalars(
    opened: OpenStore, requests: Sequence[UpdateRequest]
) -> tuple[str, ...]:
    """Returns the scalars that are NaN and used, by leaf and number, for an error.

    A learning rate of NaN turns all state into NaN, whatever the gradients are. Inf is
    accepted, because some optimizers start with it. A scalar is checked only in a
    branch that the step takes.
    """
    seen: dict[int, bool] = {}
    found = []
    for request in requests:
        for number, scalar in enumerate(request.inputs.scalars):
            is_nan = seen.get(id(scalar))
            if is_nan is None:
                is_nan = seen[id(scalar)] = bool(scalar != scalar)
            if is_nan and number in scalars_used(
                request.kernel, request.inputs.scalars
            ):
                name = opened.directory.manifest.leaves[request.leaf].name
                found.append(f"scalar {number} of the update of leaf {name}")
    return tuple(found)


def nan_scalar_error(
    opened: OpenStore, step: int, found: Sequence[str], scalars: Sequence[ScalarState]
) -> NonFiniteScalarError:
    """Makes the error for a step that would compute with NaN.

    Args:
      scalars: the optimizer's scalars, which may name the value.
    """
    held = [
        scalar.path
        for scalar in scalars
        if scalar.value.dtype.kind in "fcV"
        and bool((scalar.value != scalar.value).any())
    ]
    named = f"{', '.join(held)} of the optimizer's state" if held else found[0]
    return NonFiniteScalarError(
        f"{opened.options.path}: step {step}: expected numbers to update with, found "
        f"NaN in {named}; the step was refused, the store stays at step "
        f"{opened.finished.step}. Look at the learning rate and its schedule"
    )


def _updater(
    opened: OpenStore, request: UpdateRequest, layout: SubgroupLayout, kernel: Kernel
) -> Updater | None:
    """Returns what computes an update in place of the CSD, if anything does."""
    if layout.subgroup not in opened.assignment.subgroups or is_idle(kernel):
        return None
    is_dense = isinstance(request.gradient, np.ndarray) and request.feedback is None
    return opened.assignment.updater if is_dense else None


def _given(opened: OpenStore, request: UpdateRequest) -> Array | None:
    """Returns the caller's params if they equal the store's and are needed."""
    params = request.params
    if params is None or not can_take(opened, request.leaf, params.dtype):
        return None
    return params


def can_take(opened: StoreShape, leaf: int, dtype: np.dtype) -> bool:
    """Whether an update can use a caller's params of a dtype in place of the store's.

    It does if its kernel reads them.
    """
    stored = opened.directory.manifest.leaves[leaf].states[0]
    return opened.options.csd.takes_params and dtype == dtype_of(stored.dtype)


def moved_states(
    kernel: Kernel, layout: SubgroupLayout
) -> tuple[frozenset[int], tuple[int, ...]]:
    """Returns the states that an update reads from the drive, and those it writes.

    Args:
      kernel: the update, not specialised.
      layout: the subgroup's.
    """
    return _moved(kernel, layout.slots, layout.feedback is not None)


@lru_cache
def _moved(
    kernel: Kernel, slots: tuple[str, ...], has_feedback: bool
) -> tuple[frozenset[int], tuple[int, ...]]:
    """Returns the states that a kernel's update reads, and those that it changes."""
    needed, unchanged = state_read(kernel), kernel.unchanged
    if not has_feedback:
        unchanged |= {ERROR_FEEDBACK}
    return (
        frozenset(n for n, slot in enumerate(slots) if slot in needed),
        tuple(n for n, slot in enumerate(slots) if slot not in unchanged),
    )
