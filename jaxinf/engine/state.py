"""The first state of a new store, made of whole leaves.

Invariant: memory holds no more of a leaf than the caller's own array and the buffers.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from jaxinf.csd import Csd, CsdBuffer, ScalarInputs, initialise_states
from jaxinf.engine.opened import OpenStore
from jaxinf.engine.shape import SubgroupLayout
from jaxinf.engine.update_tasks import gather_inputs, gather_run, rounding_of
from jaxinf.program import Kernel
from jaxinf.store import CommitRecord, ScalarState
from jaxinf.transfer import Task
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
