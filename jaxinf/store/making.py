"""New stores with a first step that is written at once, not by a run.

Invariant: the store appears with its first commit, or is removed completely.
"""

import contextlib
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from jaxinf.errors import StoreError, StoreFormatError, StoreSpaceError
from jaxinf.layout import assign_csds, assign_owners, reassign_csds
from jaxinf.store.contents import StoreContents
from jaxinf.store.creation import check_space, create_store, discard_store
from jaxinf.store.directory import StoreDirectory
from jaxinf.store.lock import StoreLock
from jaxinf.store.manifest import LeafRecord, Manifest, Member
from jaxinf.store.owned import read_owned
from jaxinf.store.space import stored_bytes
from jaxinf.terminal import format_bytes

__all__ = [
    "chunk_holders",
    "csd_bytes",
    "csd_shares",
    "deal_by_shares",
    "deal_to_members",
    "is_dealt_by",
    "is_unfinished",
    "lay_out",
    "making_store",
]

_LOCKS = ("lock", "publish.lock")

_MOST_FILES = 2 << 20
"""Limit of a slot's chunk files, as its record names each (`schema.MOST_BYTES`)."""


def lay_out(
    contents: StoreContents,
    chunk_shapes: Sequence[tuple[int, ...]],
    csd_roots: Sequence[str],
    *,
    held: Manifest | None = None,
    shares: Sequence[float] = (),
    room: Sequence[int] = (),
) -> Manifest:
    """Assigns places to the chunks of a store; every new manifest is made here.

    Args:
      contents: the store's leaves; the places in a manifest are ignored.
      chunk_shapes: chunk shape of each leaf.
      csd_roots: CSD roots for the chunks; empty for the store itself.
      held: an existing store with these contents, to be rebalanced: it keeps its id,
        and chunks keep their CSDs as far as the loads allow. By default the store is
        new and gets a new id.
      shares, room: as for `assign_csds`; by default bytes are dealt evenly.

    Raises:
      StoreSpaceError: there are too many chunks for a store's record.
    """
    leaves = [
        LeafRecord.of(leaf, shape, ())
        for leaf, shape in zip(contents.leaves, chunk_shapes, strict=True)
    ]
    _check_count(leaves)  # before so many are listed
    chunk_bytes = [
        [
            sum(stored_bytes(chunk, state) for state in leaf.states)
            for chunk in leaf.grid.chunks()
        ]
        for leaf in leaves
    ]
    flat = [n for own in chunk_bytes for n in own]
    csds = iter(_csds(flat, csd_roots, held, shares, room))
    return Manifest(
        kernels=contents.kernels,
        leaves=tuple(
            replace(leaf, csds=tuple(next(csds) for _ in own))
            for leaf, own in zip(leaves, chunk_bytes, strict=True)
        ),
        created_by=contents.created_by,
        store_id=uuid.uuid4().hex if held is None else held.store_id,
        csds=tuple(csd_roots),
    )


def deal_by_shares(
    manifest: Manifest, shares: Sequence[float], room: Sequence[int] = ()
) -> Manifest:
    """Returns a new store's manifest with its chunks dealt to CSDs by their shares.

    Args:
      manifest: a result of `lay_out` or `deal_to_members`.
      shares, room: as for `assign_csds`.
    """
    held = _held_bytes(manifest)
    csds = iter(assign_csds([n for _, n in held], len(manifest.csds), shares, room))
    leaves = []
    for leaf in manifest.leaves:
        places = dict.fromkeys(range(len(leaf.csds)), 0)
        places |= {chunk: next(csds) for chunk in leaf.held}
        leaves.append(replace(leaf, csds=tuple(places.values())))
    return replace(manifest, leaves=tuple(leaves))


def csd_bytes(manifest: Manifest) -> list[int]:
    """Returns the bytes of each CSD's chunks, in one slot."""
    found = [0] * max(1, len(manifest.csds))
    for csd, num_bytes in _held_bytes(manifest):
        found[csd] += num_bytes
    return found


def csd_shares(manifest: Manifest) -> list[float]:
    """Returns the shares by which chunks are dealt to the CSDs: all 1 if evenly."""
    found = csd_bytes(manifest)
    even = [1.0] * len(found)
    return even if is_dealt_by(manifest, even) else [float(n) for n in found]


def is_dealt_by(manifest: Manifest, shares: Sequence[float]) -> bool:
    """Whether the bytes of each CSD are by its share, as far as chunks allow."""
    found, whole = csd_bytes(manifest), sum(shares)
    total = sum(found)
    over = [n - total * share / whole for n, share in zip(found, shares, strict=True)]
    largest = max((num_bytes for _, num_bytes in _held_bytes(manifest)), default=0)
    return max(over) - min(over) <= largest


def _held_bytes(manifest: Manifest) -> list[tuple[int, int]]:
    """Returns CSD and bytes of each chunk that the store holds, in order."""
    found = []
    for leaf in manifest.leaves:
        chunks = leaf.grid.chunks()
        for number in leaf.held:
            sizes = [stored_bytes(chunks[number], state) for state in leaf.states]
            found.append((leaf.csds[number], sum(sizes)))
    return found


def deal_to_members(
    manifest: Manifest, member: Member, holders: Sequence[Sequence[Sequence[int]]]
) -> Manifest:
    """Returns a new store's manifest as a member's, which holds a part of the chunks.

    Args:
      manifest: a result of `lay_out`, the same in all members except for its roots.
      member: the member.
      holders: by leaf, and then by shard in C order, the numbers of the processes whose
        JAX devices have the shard. Chunks of shards that several have are divided.
    """
    chunk_bytes, places = [], []
    for leaf, own in zip(manifest.leaves, holders, strict=True):
        places += chunk_holders(leaf, leaf.shard_counts, own)
        for chunk in leaf.grid.chunks():
            chunk_bytes.append(sum(stored_bytes(chunk, s) for s in leaf.states))
    owners = assign_owners(chunk_bytes, places, member.count)
    held = [n for n, owner in enumerate(owners) if owner == member.number]
    num_csds = max(1, len(manifest.csds))
    own_csds = assign_csds([chunk_bytes[n] for n in held], num_csds)
    csds = dict(zip(held, own_csds, strict=True))
    numbers = iter(range(len(owners)))
    chunks = [[next(numbers) for _ in leaf.csds] for leaf in manifest.leaves]
    return manifest.as_member(
        member,
        [[owners[n] for n in own] for own in chunks],
        [[csds.get(n, 0) for n in own] for own in chunks],
    )


def chunk_holders(
    leaf: LeafRecord, shard_counts: Sequence[int], holders: Sequence[Sequence[int]]
) -> list[Sequence[int]]:
    """Returns the processes that have each chunk of a leaf.

    Args:
      leaf: the leaf.
      shard_counts: number of shards along each dimension.
      holders: the processes that have each shard, in C order.
    """
    extents = [
        max(1, length // count)
        for length, count in zip(leaf.shape, shard_counts, strict=True)
    ]
    found = []
    for chunk in leaf.grid.chunks():
        shard = 0
        for start, extent, count in zip(
            chunk.start, extents, shard_counts, strict=True
        ):
            shard = shard * count + start // extent
        found.append(holders[shard])
    return found


def _check_count(leaves: Sequence[LeafRecord]) -> None:
    num_files = sum(leaf.grid.num_chunks * len(leaf.states) for leaf in leaves)
    if num_files > _MOST_FILES:
        num_bytes = sum(
            state.num_elements(leaf.grid.num_elements) * state.itemsize
            for leaf in leaves
            for state in leaf.states
        )
        raise StoreSpaceError(
            f"a store's two slots: expected at most {_MOST_FILES:,} chunk files in "
            f"each, found {num_files:,} with {num_bytes:,} bytes "
            f"({format_bytes(num_bytes)}); take a smaller model, or larger "
            "chunks (open_store(…, chunk_elements=…))"
        )


def _csds(
    chunk_bytes: Sequence[int],
    csd_roots: Sequence[str],
    held: Manifest | None,
    shares: Sequence[float],
    room: Sequence[int],
) -> Sequence[int]:
    """Returns the CSD of each chunk."""
    num_csds = max(1, len(csd_roots))
    if held is None:
        return assign_csds(chunk_bytes, num_csds, shares, room)
    numbers = [
        csd_roots.index(root) if root in csd_roots else None for root in held.csds
    ] or [None]
    held_by = [numbers[csd] for leaf in held.leaves for csd in leaf.csds]
    return reassign_csds(chunk_bytes, held_by, num_csds, shares, room)


@contextlib.contextmanager
def making_store(path: Path, manifest: Manifest) -> Iterator[StoreDirectory]:
    """Makes a store for the body to fill and publish; removes it if that fails.

    An unfinished store of a killed process is removed first, also from its CSDs.

    Args:
      path: missing, an empty directory, or a store whose creation was interrupted.
      manifest: a result of `lay_out`.

    Yields:
      The store's files, preallocated, under its lock.

    Raises:
      StoreFormatError: the path is in use.
      StoreSpaceError: there is no room; nothing was written.
      StoreLockedError: another process makes a store there.
      StoreIOError: the operating system refused something.
    """
    directory = StoreDirectory(path, manifest)
    _check_unused(path)
    if not is_unfinished(path):  # its removal will make room
        check_space(directory)
    path.mkdir(parents=True, exist_ok=True)
    lock = directory.lock = StoreLock(path)
    try:
        _check_unused(path)  # another process may have been faster
        if is_unfinished(path):
            _discard_leftover(path, manifest)
            check_space(directory)
        try:
            create_store(directory)
            yield directory
        except BaseException:
            with contextlib.suppress(StoreError):
                discard_store(directory)
            raise
    finally:
        lock.release()


def _discard_leftover(path: Path, manifest: Manifest) -> None:
    """Removes a store that was never finished, and whose lock is held."""
    named = [Path(root) for root in manifest.csds]
    discard_store(read_owned(path, named, unmade=True), named)


def is_unfinished(path: Path) -> bool:
    """Whether a path has a store whose creation was interrupted; opens no file."""
    is_made = os.path.lexists(path / "current")
    return not is_made and os.path.lexists(path / "jaxinf.json")


def _check_unused(path: Path) -> None:
    """Refuses a path in use; an unfinished store does not count."""
    if not path.exists() or is_unfinished(path):
        return
    found = ["a file"]
    if path.is_dir():
        found = [entry.name for entry in path.iterdir() if entry.name not in _LOCKS]
    if found:
        raise StoreFormatError(
            f"{path}: expected nothing there, or an empty directory, for a new store, "
            f"found {', '.join(sorted(found)[:3])}; give another path"
        )
