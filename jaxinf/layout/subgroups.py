"""Cuts chunks into subgroups, and deals chunks to CSDs.

Invariant: the subgroups of a leaf partition its elements. Each lies in one chunk, and
so on one CSD, and starts on a page of its file in every dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxinf.layout.grid import CHUNK_ALIGNMENT_ELEMENTS, LeafGrid


@dataclass(frozen=True)
class Subgroup:
    """A page-aligned run of a chunk, which is read, updated and written as a unit."""

    leaf: int  # the leaf's position in the flattened tree
    chunk: int  # the chunk's position in `LeafGrid.chunks()`
    csd: int
    offset_elements: int  # start in the chunk, a multiple of 4,096
    num_elements: int  # a multiple of 4,096, except for a chunk's last run


def cut_subgroups(
    leaf: int,
    grid: LeafGrid,
    csds: Sequence[int],
    max_elements: int,
    unit_elements: int = CHUNK_ALIGNMENT_ELEMENTS,
) -> list[Subgroup]:
    """Cuts the chunks of a leaf, by its position in the flattened tree, into subgroups.

    Each chunk has as few as possible; their lengths differ by less than two units. They
    start at multiples of `unit_elements`. `csds` has the CSD of each chunk.
    """
    max_units = max_elements // unit_elements
    assert max_units, f"leaf {leaf}: a limit of {max_elements} elements"
    return [
        Subgroup(leaf, position, csd, offset, num_elements)
        for position, (chunk, csd) in enumerate(zip(grid.chunks(), csds, strict=True))
        for offset, num_elements in _cut(chunk.num_elements, max_units, unit_elements)
    ]


def _cut(num_elements: int, max_units: int, unit: int) -> list[tuple[int, int]]:
    num_units = -(-num_elements // unit)
    num_runs = -(-num_units // max_units)
    bounds = [i * num_units // num_runs * unit for i in range(num_runs)]
    return [(a, b - a) for a, b in pairwise([*bounds, num_elements])]


def deal_chunks(
    chunk_bytes: Sequence[int], num: int, holders: Sequence[Sequence[int]] = ()
) -> list[int]:
    """Deals chunks to `num` CSDs, or processes, so that each has about as many bytes.

    Chunks with only one possible holder come first. The others follow, the largest
    first, each to the holder with the fewest bytes so far, the lowest number first. So
    neighbours of one size lie on different CSDs, and a leaf is read from all drives at
    once. The result, the number that has each chunk, is the same everywhere.

    Args:
      holders: For each chunk the numbers that may have it; by default all.
    """
    loads, dealt = [0] * num, [0] * len(chunk_bytes)

    def order(chunk: int) -> tuple[bool, int]:
        return bool(holders) and len(holders[chunk]) > 1, -chunk_bytes[chunk]

    for chunk in sorted(range(len(chunk_bytes)), key=order):
        candidates = holders[chunk] if holders else range(num)
        dealt[chunk] = lightest = min(candidates, key=lambda n: (loads[n], n))
        loads[lightest] += chunk_bytes[chunk]
    return dealt
