"""Divides a store's chunks into subgroups, as long as the memory allows.

Invariant: every worker (on a card, every worker of its share) can hold two subgroups if
`check_memory` accepts the budget, and each subgroup starts on a page of its files.
"""

from jaxinf.engine.options import StoreOptions
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.layout import (
    CHUNK_ALIGNMENT_ELEMENTS,
    DEFAULT_CHUNK_ELEMENTS,
    SCALES_ALIGNMENT_ELEMENTS,
    subgroups,
)
from jaxinf.store import LeafRecord, Manifest

_LEAST_SHARE = 4  # workers at one of several cards

_EACH = 2
"""Subgroups that a worker can hold: one that moves, one that is computed or waits."""

_WINDOW_SHARE = 8
"""Subgroups of all workers are to be this part of the host's memory; the rest is for
state that stays."""

_QUICK_BYTES = 8 * 1024 * 1024
"""What moves at a drive's full rate: no subgroup is shorter, and no worker has less to
move, for the sake of state that stays."""


def subgroup_elements(options: StoreOptions, manifest: Manifest) -> int:
    """Returns the longest subgroup of which every worker can hold two in the budget.

    At least the shortest possible one, for a store whose budget is not used.
    """
    unit, unit_bytes = _least_buffers(options, manifest)
    window_bytes = _moving_bytes(options, manifest)
    if not options.csd.has_cards:
        num_workers = _num_workers(options, manifest)
        quick_bytes = min(window_bytes, _EACH * num_workers * _QUICK_BYTES)
        window_bytes = max(window_bytes // _WINDOW_SHARE, quick_bytes)
    fitting = max(0, window_bytes) // unit_bytes * unit
    return max(unit, min(fitting, DEFAULT_CHUNK_ELEMENTS))


def window_bytes(
    options: StoreOptions, manifest: Manifest, layouts: list[list[list[SubgroupLayout]]]
) -> int:
    """Memory in which reads, updates and writes of subgroups on a host overlap.

    Short subgroups are moved together.
    """
    num_workers = _num_workers(options, manifest)
    return _EACH * num_workers * max(longest(layouts)[0], _QUICK_BYTES)


def check_memory(options: StoreOptions, manifest: Manifest) -> None:
    """Refuses a budget in which not every worker can hold two of the least subgroups.

    Raises:
      ValueError: gives the memory that is needed.
    """
    _, need = _least_buffers(options, manifest)
    if _moving_bytes(options, manifest) < need:
        beside = ""
        if options.export_every:
            beside = f" beside the {options.export_bytes(manifest)} of exports"
        raise ValueError(
            f"memory_bytes={options.memory_bytes}: "
            f"{_num_workers(options, manifest)} workers need at least "
            f"{need} bytes for this optimizer's state{beside}; give more memory"
        )


def _num_workers(options: StoreOptions, manifest: Manifest) -> int:
    return options.workers_of(len(manifest.csds) or 1)


def _moving_bytes(options: StoreOptions, manifest: Manifest) -> int:
    """Memory for state, beside exports."""
    return options.memory_bytes - options.export_bytes(manifest)


def _least_buffers(options: StoreOptions, manifest: Manifest) -> tuple[int, int]:
    """Returns the length of the least subgroups, and bytes of two for each worker."""
    sizes = [sum(s.itemsize for s in leaf.states) for leaf in manifest.leaves]
    element_bytes = max(sizes, default=4)
    workers = _num_workers(options, manifest)
    if options.csd.has_cards:
        share = -(-workers // (len(manifest.csds) or 1))
        workers = min(workers, max(_LEAST_SHARE, share))
    unit = max(map(_unit_elements, manifest.leaves), default=0)
    unit = max(unit, CHUNK_ALIGNMENT_ELEMENTS)
    return unit, _EACH * workers * element_bytes * unit


def cut_subgroups(
    manifest: Manifest, max_elements: int
) -> list[list[list[SubgroupLayout]]]:
    result = []
    for leaf, record in enumerate(manifest.leaves):
        per_chunk: list[list[SubgroupLayout]] = [[] for _ in record.csds]
        unit = _unit_elements(record)
        for item in subgroups(leaf, record.grid, record.csds, max_elements, unit):
            if record.places[item.chunk] < 0:
                continue
            per_chunk[item.chunk].append(SubgroupLayout.of(item, record))
        result.append(per_chunk)
    return result


def longest(layouts: list[list[list[SubgroupLayout]]]) -> tuple[int, int]:
    """Returns the bytes and elements of the longest subgroup."""
    items = [item for leaf in layouts for chunk in leaf for item in chunk]
    return (
        max((item.num_bytes for item in items), default=0),
        max((item.subgroup.num_elements for item in items), default=0),
    )


def _unit_elements(leaf: LeafRecord) -> int:
    """Returns the unit of subgroup starts: a page of every array's file."""
    has_scales = any(state.codec == "scale" for state in leaf.states)
    return SCALES_ALIGNMENT_ELEMENTS if has_scales else CHUNK_ALIGNMENT_ELEMENTS
