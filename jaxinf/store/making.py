"""New stores whose first step is written at once, rather than by a run.

Invariant: the store appears with its first commit, or nothing of it is left.
"""

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from jaxinf.errors import StoreError, StoreFormatError
from jaxinf.layout import assign_csds
from jaxinf.store.creation import check_space, create_store, discard_store
from jaxinf.store.directory import StoreDirectory
from jaxinf.store.lock import StoreLock
from jaxinf.store.manifest import Manifest
from jaxinf.store.space import stored_bytes

__all__ = ["deal_chunks", "making_store"]

_LOCKS = ("lock", "publish.lock")


def deal_chunks(manifest: Manifest, csd_roots: Sequence[str]) -> Manifest:
    """The same leaves in a new store, under an id of its own.

    Args:
      manifest: leaves with their grids; which CSDs it names does not matter.
      csd_roots: where chunks go, evenly by bytes; empty for the store itself.
    """
    chunk_bytes = [
        [
            sum(stored_bytes(chunk, s) for s in leaf.states)
            for chunk in leaf.grid.chunks()
        ]
        for leaf in manifest.leaves
    ]
    all_bytes = [num_bytes for own in chunk_bytes for num_bytes in own]
    owners = iter(assign_csds(all_bytes, max(1, len(csd_roots))))
    leaves = [
        replace(leaf, csds=tuple(next(owners) for _ in own))
        for leaf, own in zip(manifest.leaves, chunk_bytes, strict=True)
    ]
    return replace(
        manifest,
        store_id=uuid.uuid4().hex,
        csds=tuple(csd_roots),
        leaves=tuple(leaves),
    )


@contextlib.contextmanager
def making_store(path: Path, manifest: Manifest) -> Iterator[StoreDirectory]:
    """Makes a store that the body fills and publishes; removes it if that fails.

    Args:
      path: missing or empty.
      manifest: as of `deal_chunks`.

    Yields:
      The store's files, preallocated, under its lock.

    Raises:
      StoreFormatError: there is something in its place.
      StoreSpaceError: there is no room; nothing was written.
      StoreLockedError: another process makes one there.
      StoreIOError: the operating system refused something.
    """
    directory = StoreDirectory(path, manifest)
    _check_unused(path)
    check_space(directory)
    path.mkdir(parents=True, exist_ok=True)
    lock = StoreLock(path)
    try:
        _check_unused(path)  # another process may have been faster
        try:
            create_store(directory)
            yield directory
        except BaseException:
            with contextlib.suppress(StoreError):
                discard_store(directory)
            raise
    finally:
        lock.release()


def _check_unused(path: Path) -> None:
    """Refuses where something is; the locks of a making that failed are nothing."""
    if not path.exists():
        return
    found = ["a file"]
    if path.is_dir():
        found = [entry.name for entry in path.iterdir() if entry.name not in _LOCKS]
    if found:
        raise StoreFormatError(
            f"{path}: expected nothing there, or an empty directory, for a new store, "
            f"found {', '.join(sorted(found)[:3])}; give another path"
        )
