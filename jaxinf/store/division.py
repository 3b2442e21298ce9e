"""What a division among processes begins with, and what it is to be.

     members, or a store ─► steps with all their chunks ─► grids, owners of each chunk

Invariant: nothing is written, but for members that were at different steps: they go to
  the common one, as a run does.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxinf.errors import StoreFormatError, StoreMismatchError
from jaxinf.layout import reassign_csds
from jaxinf.store.checkpoint import checkpoint_names, find_checkpoint
from jaxinf.store.commit import CommitRecord
from jaxinf.store.directory import StoreDirectory, next_slot
from jaxinf.store.making import chunk_holders, is_unfinished
from jaxinf.store.manifest import LeafRecord, Manifest
from jaxinf.store.owned import hold_store, look_at_store
from jaxinf.store.rebalancing import finish_rebalance
from jaxinf.store.regridding import (
    ShardsOf,
    check_blocks,
    fits,
    in_line,
    with_grid,
)
from jaxinf.store.snapshot import PinnedStep
from jaxinf.store.space import stored_bytes
from jaxinf.store.whole import (
    agreed_of,
    all_members,
    find_members,
    hold_members,
    to_step,
)
from jaxinf.store.whole_step import WholeStep, joined_step

_NOBODY = -1


@dataclass(frozen=True)
class Source:
    """A store or a run as it is, held by this process.

    Attributes:
      parts: the members by number, or the store alone.
      steps: the committed step as slot ``a``, and the checkpoints, by place.
      spares: directories of the other slot's chunks, as `WholeStep.places`.
      dropped: checkpoints that are not of all parts.
    """

    path: Path
    parts: Sequence[StoreDirectory]
    steps: Mapping[str, WholeStep]
    spares: Sequence[Path]
    dropped: tuple[str, ...]

    @property
    def is_run(self) -> bool:
        """Whether it is divided among processes."""
        return self.parts[0].manifest.member is not None

    @property
    def whole(self) -> Manifest:
        return self.steps["a"].manifest

    @property
    def owners(self) -> list[Sequence[int]]:
        leaves = self.parts[0].manifest.leaves
        return [leaf.owners or (0,) * len(leaf.csds) for leaf in leaves]

    def has_other_grid(self, number: int, target: StoreDirectory) -> bool:
        """Whether a leaf's chunks are to be written anew."""
        leaf = target.manifest.leaves[number]
        return leaf.chunk_shape != self.whole.leaves[number].chunk_shape


@contextlib.contextmanager
def held_source(path: Path, *, is_held: bool = False) -> Iterator[Source]:
    """Holds a store or all members of a run, at one step.

    Args:
      path: the store or the run.
      is_held: whether another process that divides it holds it.
    """
    with contextlib.ExitStack() as stack:
        is_whole = (path / "jaxinf.json").exists() or not find_members(path)
        if is_held:
            parts = [look_at_store(path)] if is_whole else all_members(path)
        elif is_whole:
            parts = [stack.enter_context(hold_store(path))]
        else:
            parts = stack.enter_context(hold_members(path))
            to_step(parts, agreed_of(all_members(path)))
        for one in () if is_held else parts:
            finish_rebalance(one)
        parts = [
            StoreDirectory(p.path, Manifest.read(p.path / "jaxinf.json"), p.lock)
            for p in parts
        ]
        slots = [one.committed_slot() for one in parts]
        current = [
            d.step_path(slot) for d, slot in zip(parts, slots, strict=True) if slot
        ]
        if len(current) < len(parts):
            raise StoreFormatError(
                f"{path}: expected a committed step, found a store whose making was "
                "interrupted; start its run again first"
            )
        steps = {"a": _step([*map(PinnedStep, parts, current)])}
        kept = _common_checkpoints(parts)
        for name in kept:
            place = f"checkpoints/{name}"
            steps[place] = _step([PinnedStep(d, d.step_path(place)) for d in parts])
        spares = [
            d.data_paths(d.step_path(next_slot(d.committed_slot()))) for d in parts
        ]
        dropped = {name for one in parts for name in checkpoint_names(one)} - set(kept)
        yield Source(
            path,
            parts,
            steps,
            [place for own in spares for place in own],
            tuple(sorted(dropped)),
        )


def _step(parts: Sequence[PinnedStep]) -> WholeStep:
    records = [CommitRecord.read(part.path / "commit.json") for part in parts]
    for part, record in zip(parts, records, strict=True):
        record.check_fits(part.path / "commit.json", part.directory.manifest)
    if parts[0].directory.manifest.member is not None:
        return joined_step(parts, records)
    places = tuple(parts[0].directory.data_paths(parts[0].path))
    return WholeStep(parts[0].path, parts[0].directory.manifest, records[0], places)


def _common_checkpoints(parts: Sequence[StoreDirectory]) -> list[str]:
    """Returns the checkpoints that all parts have of one commit.

    Raises:
      StoreMismatchError: one has other arrays than the store.
    """
    names = set(checkpoint_names(parts[0])).intersection(*map(checkpoint_names, parts))
    found = []
    for name in sorted(names):
        if len({find_checkpoint(one, name).commit for one in parts}) > 1:
            continue
        for one in parts:
            place = one.step_path(f"checkpoints/{name}")
            held = Manifest.read(place / "jaxinf.json")
            if held.leaves != one.manifest.leaves:
                raise StoreMismatchError(
                    f"{one.path}: the checkpoint {name} holds other arrays than the "
                    "store does now; export it, and remove it from the store"
                )
        found.append(name)
    return found


@dataclass(frozen=True)
class Division:
    """What is to be: the leaves with their grids, and the owner of each chunk."""

    leaves: Sequence[LeafRecord]
    owners: Sequence[Sequence[int]]


def division_for(source: Source, count: int, shards_of: ShardsOf | None) -> Division:
    """Returns the division that shards need, as near to the present one as may be.

    Raises:
      StoreMismatchError: as `check_blocks`.
    """
    most = max((math.prod(n.chunk_shape) for n in source.whole.leaves), default=1)
    keeps = count == len(source.parts)
    sizes, held, leaves, owners = [], [], [], []
    for leaf, own in zip(source.whole.leaves, source.owners, strict=True):
        shards = shards_of(leaf) if shards_of else in_line(leaf, count)
        new = with_grid(leaf, shards.counts, most)
        if new is not leaf:
            check_blocks(source.path, leaf, new)
            own = (_NOBODY,) * len(new.csds)
        leaves.append(new)
        if math.prod(shards.counts) > 1:
            places = chunk_holders(new, shards.counts, shards.holders_in(count))
            pairs = zip(own, places, strict=True)
            owners.append(tuple(_owner_of(n, *pair) for n, pair in enumerate(pairs)))
            continue
        owners.append(own if keeps else None)
        if not keeps:
            for chunk in leaf.grid.chunks():
                sizes.append(sum(stored_bytes(chunk, state) for state in leaf.states))
            held += [owner if owner < count else None for owner in own]
    dealt = iter(reassign_csds(sizes, held, count))
    return Division(
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
    is_whole = (path / "jaxinf.json").exists()
    first = path if is_whole else find_members(path)[0]
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
