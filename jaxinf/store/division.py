"""The owner of each chunk in a run of some processes, and the grids that shards need.

Invariant: a division is as near to the present one as may be: chunks stay with their
  owners as far as loads and shards allow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxinf.layout import reassign_csds
from jaxinf.store.making import chunk_holders, is_unfinished
from jaxinf.store.manifest import LeafRecord, Manifest
from jaxinf.store.regridding import ShardsOf, check_blocks, fits, in_line, with_grid
from jaxinf.store.whole import find_members

_NOBODY = -1


@dataclass(frozen=True)
class Division:
    """The leaves with their grids, and the owner of each of their chunks.

    Attributes:
      count: number of processes.
    """

    count: int
    leaves: Sequence[LeafRecord]
    owners: Sequence[Sequence[int]]


def division_for(
    held: Division, count: int, shards_of: ShardsOf | None, where: str
) -> Division:
    """Returns the division that shards need, as near to the present one as may be.

    Args:
      held: the present one.
      count: number of processes.
      shards_of: returns the shards that a leaf will have; by default as `in_line`, and
        what is divided among so many processes already stays as it is.

    Raises:
      StoreMismatchError: as `check_blocks`.
    """
    keeps = count == held.count
    if keeps and shards_of is None:
        return held
    most = max((math.prod(n.chunk_shape) for n in held.leaves), default=1)
    sizes, present, leaves, owners = [], [], [], []
    for leaf, own in zip(held.leaves, held.owners, strict=True):
        shards = shards_of(leaf) if shards_of else in_line(leaf, count)
        new = with_grid(leaf, shards.counts, most)
        if new is not leaf:
            check_blocks(where, leaf, new)
            own = (_NOBODY,) * len(new.csds)
        leaves.append(new)
        if math.prod(shards.counts) > 1:
            places = chunk_holders(new, shards.counts, shards.holders_in(count))
            pairs = zip(own, places, strict=True)
            owners.append(tuple(_owner_of(n, *pair) for n, pair in enumerate(pairs)))
            continue
        owners.append(own if keeps and new is leaf else None)
        if owners[-1] is None:
            for chunk in new.grid.chunks():
                sizes.append(sum(state.stored_bytes(chunk) for state in new.states))
            present += [owner if 0 <= owner < count else None for owner in own]
    dealt = iter(reassign_csds(sizes, present, count))
    return Division(
        count,
        tuple(leaves),
        [
            tuple(next(dealt) for _ in leaf.csds) if found is None else found
            for leaf, found in zip(leaves, owners, strict=True)
        ],
    )


def _owner_of(chunk: int, owner: int, holders: Sequence[int]) -> int:
    """Returns one of the processes that have a chunk, the present owner if it has."""
    return owner if owner in holders else holders[chunk % len(holders)]


def is_divided_for(path: Path, shards_of: ShardsOf) -> bool:
    """Whether the grids and owners of a store or a run suit shards; writes nothing.

    One without a step does, as it is made anew.
    """
    first = path if (path / "jaxinf.json").exists() else find_members(path)[0]
    if is_unfinished(first):
        return True
    manifest = Manifest.read(first / "jaxinf.json")
    count = 1 if manifest.member is None else manifest.member.count
    for leaf in manifest.leaves:
        shards = shards_of(leaf)
        if not fits(leaf, shards.counts):
            return False
        places = chunk_holders(leaf, shards.counts, shards.holders_in(count))
        if math.prod(shards.counts) > 1 and any(
            owner not in place
            for owner, place in zip(leaf.owners, places, strict=False)
        ):
            return False
    return True


def num_processes(path: Path) -> int | None:
    """Returns the number of processes that a path is divided among; None if none is."""
    if (path / "jaxinf.json").exists():
        return 1
    for place in find_members(path):
        member = Manifest.read(place / "jaxinf.json").member
        if member is not None:
            return member.count
    return None
