"""Moves chunks to other CSDs: adds drives to a store, or removes them.

      journal ─► link or copy, checked ─► sync ─► jaxinf.json ─► links, old files ─► end
               the store is as it was          │   the store is the new one

Invariant: until the manifest is replaced, no file in use changes; after that the old
  places are not used. An interrupted rebalance continues from the journal: before the
  replacement by the next call, afterwards also at the next opening.
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxinf.errors import StoreCorruptError, StoreFormatError, StoreMismatchError
from jaxinf.io import (
    BufferPool,
    allocate_file,
    fsync_directory,
    page_ceil,
    write_from,
)
from jaxinf.io.failures import translated
from jaxinf.store.checkpoint import checkpoint_names
from jaxinf.store.directory import (
    SLOTS,
    StoreDirectory,
)
from jaxinf.store.journal import JOURNAL, read_journal, write_journal
from jaxinf.store.links import link_or_copy
from jaxinf.store.lock import lock_exclusively
from jaxinf.store.making import csd_bytes, lay_out
from jaxinf.store.manifest import Manifest
from jaxinf.store.owned import hold_store
from jaxinf.store.owners import check_owners, make_csds
from jaxinf.store.reader import PIECE_BYTES, file_checksum, stored_pieces
from jaxinf.store.space import check_free_space
from jaxinf.typing import ProgressCallback


@dataclass(frozen=True)
class Rebalanced:
    """The result of a rebalance.

    Attributes:
      num_chunks: number of the leaves' chunks with a new place.
      num_bytes: bytes of their state, in one step.
    """

    num_chunks: int
    num_bytes: int


@dataclass(frozen=True)
class Move:
    """The move of a step's chunk file.

    Attributes:
      place: a slot or a checkpoint.
      num_bytes: bytes of its elements; the rest is padding.
      expected: its checksum; None in a slot without a step.
    """

    place: str
    source: Path
    target: Path
    num_bytes: int
    expected: int | None
    link: Path


def rebalance(
    path: Path,
    csd_roots: Sequence[Path],
    progress: ProgressCallback | None = None,
    *,
    shares: Sequence[float] = (),
) -> Rebalanced:
    """Spreads a store over these CSD roots instead of its present ones; blocks.

    No bit of a committed step or a checkpoint changes; copies to other file systems are
    verified by their checksums. Chunks stay on their CSDs as far as the loads allow.
    Files that stay on their file system are not copied. After an interruption the store
    is valid, with the old or the new roots; call it again with the same roots.

    Args:
      path: the store.
      csd_roots: existing absolute directories, each on a different drive. A root that
        the store has already is accepted even without a note of its owner.
      progress: called with the bytes of files done and in all.
      shares: for each root its share of the chunks' bytes, as far as it has room; by
        default all are equal.

    Raises:
      ValueError: a root is missing, or given twice.
      StoreLockedError: a run has the store open.
      StoreFormatError: the path is not a store, or no step is committed.
      StoreMismatchError: a checkpoint has other arrays than the store.
      StoreSpaceError: a drive has too little room; nothing was moved.
      StoreCorruptError: a chunk is damaged; nothing was changed.
      StoreIOError: a drive failed.
    """
    _check_roots(csd_roots)
    with hold_store(path, csd_roots) as old:
        finish_rebalance(old)
        new = StoreDirectory(path, _target(old, csd_roots, shares), old.lock)
        _abandon(old, new)
        if new.manifest == old.manifest:
            return Rebalanced(0, 0)
        check_owners(new, csd_roots, unmade=True)
        moves = list(_moves(old, new))
        check_free_space(
            space_needs(moves, new),
            "the chunks to come need",
            "free some, remove checkpoints, or give more CSD roots",
        )
        write_journal(old, new)
        bring_all(moves, new, progress)
        _switch(old, new)
        finish_rebalance(new)
        return _report(old, new)


def finish_rebalance(directory: StoreDirectory) -> None:
    """Completes a rebalance that was interrupted after it had replaced the manifest.

    Removes the files at the chunks' old places. The caller is the store's writer, and
    holds the lock of the checkpoints. Without such a rebalance it does nothing.
    """
    journal = read_journal(directory)
    if journal is None or journal[1] != directory.manifest:
        return
    old, new = (StoreDirectory(directory.path, manifest) for manifest in journal)
    moves = list(_moves(old, new, is_done=True))
    with translated("rebalance", directory.path):
        for move in moves:
            point(move.link, move.target)
        for name in checkpoint_names(new):
            manifest = Manifest.read(new.step_path(f"checkpoints/{name}/jaxinf.json"))
            if manifest.leaves == old.manifest.leaves:
                moved = replace(
                    manifest, csds=new.manifest.csds, leaves=new.manifest.leaves
                )
                file = new.step_path(f"checkpoints/{name}/jaxinf.json")
                moved.write(file)
        new.sync()
        if old.manifest.csds:  # without CSDs, links have replaced the files
            for move in moves:
                move.source.unlink(missing_ok=True)
        remove_csds(old, keep=new.manifest)
        (directory.path / JOURNAL).unlink()
        fsync_directory(directory.path)


# --- the moves -----------------------------------------------------------------------


def _check_roots(roots: Sequence[Path]) -> None:
    if not roots:
        raise ValueError("expected at least one CSD root to spread the store over")
    if len(set(roots)) != len(roots):
        raise ValueError(f"the same CSD root is given twice: {list(map(str, roots))}")
    for root in roots:
        if not root.is_dir():
            raise ValueError(
                f"CSD root {root}: expected a directory on a mounted drive, found "
                f"{'a file' if root.exists() else 'nothing'}; create or mount it"
            )


def _target(
    old: StoreDirectory, csd_roots: Sequence[Path], shares: Sequence[float]
) -> Manifest:
    """Returns the store with its chunks on these CSDs."""
    if old.committed_slot() is None:
        raise StoreFormatError(
            f"{old.path}: expected a committed step, found a store whose making was "
            "interrupted; remove it and start again, with the CSD roots wanted"
        )
    names = checkpoint_names(old)
    for name in names:
        held = Manifest.read(old.step_path(f"checkpoints/{name}/jaxinf.json"))
        if held.leaves != old.manifest.leaves:
            raise StoreMismatchError(
                f"{old.path}: the checkpoint {name} holds other arrays than the store "
                "does now; export it, and remove it from the store"
            )
    shapes = [leaf.chunk_shape for leaf in old.manifest.leaves]
    roots = [str(root) for root in csd_roots]
    room = _room(old.manifest, csd_roots, len(SLOTS) + len(names)) if shares else ()
    return lay_out(
        old.manifest, shapes, roots, held=old.manifest, shares=shares, room=room
    )


def _room(old: Manifest, csd_roots: Sequence[Path], num_copies: int) -> list[int]:
    """Returns the most bytes of chunks on each root: those there, and as many free."""
    held = dict(zip(old.csds, csd_bytes(old), strict=False))
    status = [os.statvfs(root) for root in csd_roots]
    free = [one.f_bavail * one.f_frsize // num_copies for one in status]
    return [
        held.get(str(root), 0) + num_bytes
        for root, num_bytes in zip(csd_roots, free, strict=True)
    ]


def _moves(
    old: StoreDirectory, new: StoreDirectory, *, is_done: bool = False
) -> Iterator[Move]:
    """Yields the files whose place changes, those of committed steps first.

    Args:
      old, new: the store before and after.
      is_done: whether they have moved already; then no checksums are read.
    """
    committed = old.committed_slot()
    steps = [committed, *(f"checkpoints/{name}" for name in checkpoint_names(old))]
    for place in [*filter(None, steps), *(s for s in SLOTS if s != committed)]:
        sums = None
        if place in steps and not is_done:
            sums = old.read_record(place).checksums
        for leaf, record, state, chunk in old.held():
            source = old.chunk_file(place, leaf, chunk, state.name)
            target = new.chunk_file(place, leaf, chunk, state.name)
            if source != target:
                name = record.array_name(state.name)
                yield Move(
                    place,
                    source,
                    target,
                    old.state_bytes(leaf, chunk, state),
                    None if sums is None else int(sums[name][chunk]),
                    old.chunk_name(place, leaf, chunk, state.name),
                )


def _report(old: StoreDirectory, new: StoreDirectory) -> Rebalanced:
    num_chunks = num_bytes = 0
    for leaf, record in enumerate(old.manifest.leaves):
        for chunk in range(len(record.csds)):
            name = record.states[0].name
            files = {d.chunk_file("a", leaf, chunk, name) for d in (old, new)}
            if len(files) == 2:
                num_chunks += 1
                num_bytes += sum(
                    old.state_bytes(leaf, chunk, state) for state in record.states
                )
    return Rebalanced(num_chunks, num_bytes)


def space_needs(moves: Sequence[Move], new: StoreDirectory) -> dict[Path, int]:
    """Returns bytes of copies to other file systems; shared files count once."""
    needs: dict[Path, int] = defaultdict(int)
    seen: set[tuple[int, int]] = set()
    roots = {new.csd_directory(csd) for csd in range(new.num_csds)}
    for move in moves:
        root = next(root for root in roots if move.target.is_relative_to(root))
        status = move.source.stat()
        inode = (status.st_dev, status.st_ino)
        if status.st_dev != root.parent.stat().st_dev and inode not in seen:
            seen.add(inode)
            needs[root] += page_ceil(move.num_bytes)
    return needs


def _abandon(old: StoreDirectory, new: StoreDirectory) -> None:
    """Removes files that an interrupted call has made at other places."""
    journal = read_journal(old)
    if journal is None:
        return
    former = StoreDirectory(old.path, journal[1])
    if former.manifest == new.manifest:
        return
    with translated("rebalance", old.path):
        wanted = {move.target for move in _moves(old, new, is_done=True)}
        for move in _moves(old, former, is_done=True):
            if move.target not in wanted:
                move.target.unlink(missing_ok=True)
        kept = replace(new.manifest, csds=(*new.manifest.csds, *old.manifest.csds))
        remove_csds(former, keep=kept)
        (old.path / JOURNAL).unlink()
        fsync_directory(old.path)


def remove_csds(directory: StoreDirectory, keep: Manifest) -> None:
    """Removes the store's directories on CSDs that it no longer has."""
    directory.prune_replacements()
    for csd, root in enumerate(directory.manifest.csds):
        if root in keep.csds:
            continue
        data = directory.csd_directory(csd)
        for name in (*SLOTS, "checkpoints"):
            shutil.rmtree(data / name, ignore_errors=True)
        for file in data.glob("*store.json*"):  # with what a kill has left beside it
            file.unlink()
        for folder in (data / "snapshots", data):  # a snapshot may still be there
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


# --- moving --------------------------------------------------------------------------


def bring_all(
    moves: Sequence[Move], new: StoreDirectory, progress: ProgressCallback | None
) -> None:
    """Makes every new file durably, beside the files in use."""
    make_csds(new)
    made: dict[tuple[int, int], Path] = {}
    total, done = sum(move.num_bytes for move in moves), 0
    pool = BufferPool(PIECE_BYTES)
    for move in moves:
        with translated("rebalance", move.target):
            _bring(move, made, pool)
        done += move.num_bytes
        if progress is not None:
            progress(done, total)
    new.sync()


def _bring(move: Move, made: dict[tuple[int, int], Path], pool: BufferPool) -> None:
    status = move.source.stat()
    inode = (status.st_dev, status.st_ino)
    if not _is_there(move, inode, made):
        move.target.parent.mkdir(parents=True, exist_ok=True)
        temporary = move.target.with_name(move.target.name + ".new")
        temporary.unlink(missing_ok=True)
        there = move.target.parent.stat().st_dev
        shared = made.get(inode)
        if there == status.st_dev:
            link_or_copy(move.source, temporary)
        elif shared is not None and shared.stat().st_dev == there:
            link_or_copy(shared, temporary)
        else:
            _copy(move, temporary, status.st_size, pool)
        temporary.rename(move.target)
    made[inode] = move.target


def _is_there(
    move: Move, inode: tuple[int, int], made: dict[tuple[int, int], Path]
) -> bool:
    """Whether an earlier call has made this file, and the file is still valid."""
    target = move.target
    if not target.exists():
        return False
    if target.samefile(move.source):
        return True
    shared = made.get(inode)
    if shared is not None:
        return target.samefile(shared)
    is_whole = target.stat().st_size == move.source.stat().st_size
    is_right = move.expected is not None and is_whole and target.stat().st_nlink == 1
    return is_right and file_checksum(target, move.num_bytes) == move.expected


def _copy(move: Move, target: Path, file_bytes: int, pool: BufferPool) -> None:
    """Copies a chunk to another file system; without a step, only allocates it."""
    allocate_file(target, file_bytes, min(page_ceil(move.num_bytes), file_bytes))
    if move.expected is None:
        return

    def check(found: int) -> None:
        if found != move.expected:
            raise StoreCorruptError(
                f"{move.source}: expected CRC-32C {move.expected:08x} as written, "
                f'found {found:08x}; nothing was moved. See "jaxinf verify" for all '
                "that is damaged, and restore a checkpoint, or remove the one that it "
                "is of"
            )

    offset = 0
    source = move.source
    for piece in stored_pieces(source.parent, source.name, move.num_bytes, pool, check):
        write_from(target, piece, offset, len(piece))
        offset += len(piece)


def _switch(old: StoreDirectory, new: StoreDirectory) -> None:
    """Replaces the manifest, which makes the new places valid."""
    with lock_exclusively(old.publish_lock):
        if old.lock is not None:
            old.lock.check()
        new.manifest.write(old.path / "jaxinf.json")


def point(link: Path, target: Path) -> None:
    """Makes a chunk's name in the store a symlink to its file, atomically."""
    if link.is_symlink() and os.readlink(link) == str(target):
        return
    temporary = link.with_name(link.name + ".new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.rename(link)
