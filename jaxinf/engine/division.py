"""Divides a store's chunks into subgroups, as long as the memory allows.

Invariant: every worker (on a card, every worker of its share) can hold two subgroups if
`check_memory` accepts the budget, and each subgroup starts on a page of its files.
"""

from collections.abc import Iterable, Sequence

from jaxinf.engine.options import StoreOptions
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.io import free_memory
from jaxinf.layout import (
    CHUNK_ALIGNMENT_ELEMENTS,
    DEFAULT_CHUNK_ELEMENTS,
    SCALES_ALIGNMENT_ELEMENTS,
    Subgroup,
    subgroups,
)
from jaxinf.store import LeafRecord, Manifest

_LEAST_SHARE = 4  # workers at one of several cards


def subgroup_elements(options: StoreOptions, manifest: Manifest) -> int:
    """Returns the longest subgroup of which every worker can hold two in the budget.

    At least the shortest possible one, for a store whose budget is not used.
    """
    unit, unit_bytes = _least_buffers(options, manifest)
    fitting = max(0, _moving_bytes(options, manifest)) // unit_bytes * unit
    return max(unit, min(fitting, DEFAULT_CHUNK_ELEMENTS))


def check_memory(options: StoreOptions, manifest: Manifest) -> None:
    """Refuses a budget in which not every worker can hold two of the least subgroups.

    Raises:
      ValueError: gives the memory that is needed.
    """
    _, need = _least_buffers(options, manifest)
    if _moving_bytes(options, manifest) < need:
        tier = ""
        if options.host_tier_bytes:
            tier = f' beside the {options.host_tier_bytes} of tiers["host"]'
        if options.export_every:
            tier += f" beside the {options.export_bytes(manifest)} of exports"
        raise ValueError(
            f"memory_bytes={options.memory_bytes}: "
            f"{options.workers_of(len(manifest.csds) or 1)} workers need at least "
            f"{need} bytes for this optimizer's state{tier}; give more memory"
            + (", or a smaller tier" if tier else "")
        )


def _moving_bytes(options: StoreOptions, manifest: Manifest) -> int:
    """Memory for state that moves, beside what stays on the host, and exports."""
    beside = options.host_tier_bytes + options.export_bytes(manifest)
    return options.memory_bytes - beside


def _least_buffers(options: StoreOptions, manifest: Manifest) -> tuple[int, int]:
    """Returns the length of the least subgroups, and bytes of two for each worker."""
    sizes = [sum(s.itemsize for s in leaf.states) for leaf in manifest.leaves]
    element_bytes = max(sizes, default=4)
    workers = options.workers_of(len(manifest.csds) or 1)
    if options.csd.has_cards:
        share = -(-workers // (len(manifest.csds) or 1))
        workers = min(workers, max(_LEAST_SHARE, share))
    unit = max(map(_unit_elements, manifest.leaves), default=0)
    unit = max(unit, CHUNK_ALIGNMENT_ELEMENTS)
    return unit, 2 * workers * element_bytes * unit


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


def staying(
    chunks: Iterable[Sequence[SubgroupLayout]], num_bytes: int
) -> frozenset[Subgroup]:
    """Returns the subgroups that stay in a memory, in that many bytes.

    They are of whole chunks, since a chunk is verified as a whole when it is read.
    Short chunks come first: reading them costs most for the memory that they take.

    Args:
      chunks: those that may stay, by subgroups.
    """
    found: list[Subgroup] = []
    for chunk in sorted(chunks, key=_held_bytes):
        num_bytes -= _held_bytes(chunk)
        if num_bytes < 0:
            break
        found += [layout.subgroup for layout in chunk]
    return frozenset(found)


def check_host_tier(
    options: StoreOptions, layouts: list[list[list[SubgroupLayout]]]
) -> None:
    """Refuses a host tier whose state takes more memory than is free.

    Raises:
      ValueError: gives the memory that is free, and what limits it.
    """
    chunks = [chunk for leaf in layouts for chunk in leaf]
    stays = staying(chunks, options.host_tier_bytes)
    held = sum(_held_bytes(c) for c in chunks if c and c[0].subgroup in stays)
    free = free_memory() if held else None
    if free is not None and held > free[0]:
        raise ValueError(
            f'{options.path}: expected {held} bytes of free memory for tiers["host"], '
            f"found {free[0]} ({free[1]}); give a smaller tier, or free memory"
        )


def _held_bytes(chunk: Sequence[SubgroupLayout]) -> int:
    return sum(layout.num_bytes for layout in chunk)


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
