"""Divides chunks into subgroups and assigns them to CSDs.

Invariant: the subgroups of a leaf partition its elements. Each lies in one chunk, and
so on one CSD, and starts on a page of its file in every dtype.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

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


def assign_csds(chunk_bytes: Sequence[int], num_csds: int) -> list[int]:
    """Assigns chunks to CSDs so that each has about as many bytes.

    Chunks are assigned in order of size, the largest first, each to the CSD with the
    fewest bytes, and of several such to the one with the lowest index. Then chunks of
    equal size are exchanged so that neighbours lie on different CSDs, as far as the
    balance allows. A leaf is read in order, and so from all drives at once.

    Args:
      chunk_bytes: bytes of each chunk.
      num_csds: number of CSDs, at least 1.

    Returns:
      The CSD of each chunk; the same for the same arguments, everywhere.
    """
    loads, result = [0] * num_csds, [0] * len(chunk_bytes)
    largest_first = sorted(range(len(chunk_bytes)), key=lambda i: -chunk_bytes[i])
    for num_bytes, group in groupby(largest_first, key=lambda i: chunk_bytes[i]):
        positions = list(group)
        counts = Counter([_add(loads, num_bytes) for _ in positions])
        for position, csd in zip(positions, _spread(counts), strict=True):
            result[position] = csd
    return result


def _add(loads: list[int], num_bytes: int) -> int:
    """Adds a chunk to the CSD with the fewest bytes, and returns that."""
    csd = loads.index(min(loads))
    loads[csd] += num_bytes
    return csd


def assign_owners(
    chunk_bytes: Sequence[int], holders: Sequence[Sequence[int]], num_processes: int
) -> list[int]:
    """Deals chunks to the processes of a run, each to one of those that hold it.

    Chunks that one process alone holds come first. The others follow in order of size,
    the largest first, each to its holder with the fewest bytes, and of several such to
    the one with the lowest number.

    Args:
      chunk_bytes: bytes of each chunk.
      holders: for each chunk the processes whose JAX devices have it, at least one.
      num_processes: number of processes.

    Returns:
      The owner of each chunk; the same for the same arguments, everywhere.
    """
    loads = [0] * num_processes
    result = [0] * len(chunk_bytes)
    order = sorted(
        range(len(chunk_bytes)), key=lambda i: (len(holders[i]) > 1, -chunk_bytes[i])
    )
    for position in order:
        owner = min(holders[position], key=lambda process: (loads[process], process))
        result[position] = owner
        loads[owner] += chunk_bytes[position]
    return result


def reassign_csds(
    chunk_bytes: Sequence[int], held: Sequence[int | None], num_csds: int
) -> list[int]:
    """Reassigns chunks to other CSDs and moves few of them.

    If the loads are balanced already, all chunks stay. Otherwise a chunk stays as long
    as its CSD has no more than its part; the others go, the largest first, to the CSD
    with the fewest bytes.

    Args:
      chunk_bytes: bytes of each chunk.
      held: each chunk's present CSD, by the new numbers; None if that CSD is removed.
      num_csds: number of CSDs, at least 1.

    Returns:
      The CSD of each chunk. The loads differ by no more than the largest chunk.
    """
    loads, wanted = [0] * num_csds, sum(chunk_bytes) // num_csds
    kept = [csd for csd in held if csd is not None]
    if len(kept) == len(held):
        for num_bytes, csd in zip(chunk_bytes, kept, strict=True):
            loads[csd] += num_bytes
        if max(loads) - min(loads) <= max(chunk_bytes, default=0):
            return kept
    loads, result = [0] * num_csds, [-1] * len(chunk_bytes)
    largest_first = sorted(range(len(chunk_bytes)), key=lambda i: -chunk_bytes[i])
    for num_bytes, group in groupby(largest_first, key=lambda i: chunk_bytes[i]):
        by_csd = defaultdict[int, list[int]](list)
        for position in group:
            if (csd := held[position]) is not None:
                by_csd[csd].append(position)
        for csd, positions in by_csd.items():
            num_kept = len(positions)
            if num_bytes:
                left_bytes = max(0, wanted - loads[csd])
                num_kept = min(num_kept, left_bytes // num_bytes)
            loads[csd] += num_kept * num_bytes
            for number in range(num_kept):  # of all parts of a leaf as many
                result[positions[number * len(positions) // num_kept]] = csd
    for position in largest_first:
        if result[position] < 0:
            result[position] = _add(loads, chunk_bytes[position])
    return result


def _spread(counts: Counter[int]) -> list[int]:
    """Orders CSDs in turn, so that equal ones are far apart, as long as possible.

    Neighbours can differ while no CSD has more than half of the remaining chunks; a CSD
    near that limit goes first.
    """
    turns = deque(sorted(counts))
    order: list[int] = []
    for left in range(counts.total(), 0, -1):
        leader = max(turns, key=lambda csd: counts[csd])
        forced = 2 * counts[leader] > left and order[-1:] != [leader]
        csd = leader if forced else turns[0]
        order.append(csd)
        turns.remove(csd)
        counts[csd] -= 1
        if counts[csd]:
            turns.append(csd)
    return order
