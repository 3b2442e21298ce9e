"""Divides chunks into subgroups and assigns them to CSDs.

Invariant: the subgroups of a leaf partition its elements. Each lies in one chunk, and
so on one CSD, and starts on a page of its file in every dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxinf.layout.grid import CHUNK_ALIGNMENT_ELEMENTS, LeafGrid


@dataclass(frozen=True)
class Subgroup:
    """A contiguous, page-aligned run of a chunk: read, updated and written as a unit.

    Attributes:
      leaf: the leaf's position in the flattened tree.
      chunk: the chunk's position in `LeafGrid.chunks()`.
      csd: the CSD that holds the chunk.
      offset_elements: start of the run within the chunk, a multiple of 4,096.
      num_elements: length of the run, a multiple of 4,096 except for a chunk's last.
    """

    leaf: int
    chunk: int
    csd: int
    offset_elements: int
    num_elements: int


def subgroups(
    leaf: int,
    grid: LeafGrid,
    csds: Sequence[int],
    max_elements: int,
    unit_elements: int = CHUNK_ALIGNMENT_ELEMENTS,
) -> list[Subgroup]:
    """Cuts the chunks of a leaf into subgroups.

    Args:
      leaf: the leaf's position in the flattened tree.
      grid: the leaf's chunk grid.
      csds: the CSD of each chunk, in the order of `grid.chunks()`.
      max_elements: most elements of a subgroup, at least one unit.
      unit_elements: subgroups of a chunk start at multiples of this.

    Returns:
      The subgroups in the order of the chunks: one for each chunk if it fits, otherwise
      as few as possible, with lengths that differ by less than two units.
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


def deal(
    chunk_bytes: Sequence[int], num: int, holders: Sequence[Sequence[int]] = ()
) -> list[int]:
    """Deals chunks to CSDs, or to processes, so that each has about as many bytes.

    Chunks that only one may have come first. The others follow in order of size, the
    largest first, each to the one with the fewest bytes, and of several such to that
    with the lowest number. So neighbours of one size lie on different CSDs, and a leaf
    is read from all drives at once.

    Args:
      chunk_bytes: bytes of each chunk.
      num: number of CSDs or processes, at least 1.
      holders: for each chunk those that may have it, at least one; by default all.

    Returns:
      The number of each chunk's; the same for the same arguments, everywhere.
    """
    loads, result = [0] * num, [0] * len(chunk_bytes)

    def order(chunk: int) -> tuple[bool, int]:
        return bool(holders) and len(holders[chunk]) > 1, -chunk_bytes[chunk]

    for chunk in sorted(range(len(chunk_bytes)), key=order):
        may = holders[chunk] if holders else range(num)
        result[chunk] = best = min(may, key=lambda one: (loads[one], one))
        loads[best] += chunk_bytes[chunk]
    return result
