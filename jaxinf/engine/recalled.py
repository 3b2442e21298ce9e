"""Reads a slot of a leaf in the middle of a step, through the pipeline.

Invariant: it is the newest version, committed or not, verified against its checksum;
nothing is written.
"""

from collections.abc import Collection
from dataclasses import dataclass

from jaxinf.csd import Csd, CsdBuffer
from jaxinf.engine.opened import OpenStore
from jaxinf.engine.pipeline import Task
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.layout import scatter
from jaxinf.typing import Array


@dataclass(frozen=True)
class SlotRequest:
    """A request for a slot of a leaf, or of a JAX device's shard of it.

    Attributes:
      leaf: its number.
      slot: the slot's name.
      origin: index in the leaf of the first element of `out`.
      out: receives the values in its dtype.
    """

    leaf: int
    slot: str
    origin: tuple[int, ...]
    out: Array


def recall_tasks(opened: OpenStore, request: SlotRequest) -> list[Task]:
    layouts = opened.layouts(request.leaf, request.origin, request.out.shape)
    return [_task(opened, request, layout) for layout in layouts]


def _task(opened: OpenStore, request: SlotRequest, layout: SubgroupLayout) -> Task:
    state = layout.slots.index(request.slot)
    subgroup = layout.subgroup
    chunk = opened.directory.chunks[subgroup.leaf][subgroup.chunk]

    def compute(csd: Csd, buffer: CsdBuffer, tells: Collection[int]) -> None:
        del tells
        values = csd.view(buffer, layout.extents[state])[: subgroup.num_elements]
        values = values.astype(request.out.dtype, copy=False)
        scatter(request.out, chunk, request.origin, subgroup.offset_elements, values)

    return Task(layout, compute, loads=opened.chunks.sources(layout, [state]))
