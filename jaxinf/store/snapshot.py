"""Links to a step's files; pins a committed step for a reader while the run goes on.

Invariant: a snapshot shows one step, bit for bit, until it is released; making one
moves no data. See docs/format.md, "Hard links".
"""

import contextlib
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxinf.io.failures import translated
from jaxinf.store.carry import link_carry
from jaxinf.store.commit import CarriedArray, CommitRecord
from jaxinf.store.directory import StoreDirectory
from jaxinf.store.links import link_or_copy
from jaxinf.store.lock import LockFile, lock_exclusively
from jaxinf.store.owned import current_store

_OWNER_LOCK = "owner.lock"

_SHARED = ("zarr.json", "_METADATA", "commit_success.txt")  # by all steps of a store
_DOCUMENTS = ("_CHECKPOINT_METADATA", "commit.json")


class PinnedStep(NamedTuple):
    """A committed step that does not change while it is pinned.

    Attributes:
      directory: the store as it was when the step was pinned; since then its chunks may
        have moved to other CSDs.
      path: a directory with a slot's layout: a zarr group, an Orbax checkpoint,
        ``commit.json``.
    """

    directory: StoreDirectory
    path: Path


@contextlib.contextmanager
def pinned_step(directory: StoreDirectory) -> Iterator[PinnedStep]:
    """Pins the committed step until the context ends.

    Any process may do this, beside a running writer.

    Raises:
      StoreFormatError: no step is committed yet; or as `jaxinf.store.read_owned`.
      StoreIOError: the store cannot be written to.
    """
    place = f"snapshots/{uuid.uuid4().hex}"
    root = directory.step_path(place)
    with contextlib.ExitStack() as undo:
        with (
            translated("snapshot of the committed step", root),
            lock_exclusively(directory.publish_lock),
        ):
            directory = current_store(directory)
            slot = directory.need_slot()
            undo.callback(remove_step, directory, place)
            root.mkdir(parents=True)
            owner = LockFile(root / _OWNER_LOCK)
            undo.callback(owner.close)
            owner.hold()
            carry = CommitRecord.read(directory.step_path(slot) / "commit.json").carry
            link_step(directory, slot, place, carry)
            for name in _DOCUMENTS:
                link_or_copy(directory.step_path(slot) / name, root / name)
        yield PinnedStep(directory, root)


def prune_snapshots(directory: StoreDirectory) -> None:
    """Removes snapshots of ended processes; the caller is the store's writer."""
    root = directory.path / "snapshots"
    if not root.is_dir():
        return
    with lock_exclusively(directory.publish_lock):
        for entry in root.iterdir():
            if not entry.is_dir() or entry.is_symlink():
                continue
            # The snapshot's owner may be removing it at this moment.
            with contextlib.suppress(FileNotFoundError):
                owner = LockFile(entry / _OWNER_LOCK)
                with contextlib.closing(owner), contextlib.suppress(BlockingIOError):
                    owner.hold(waits=False)
                    remove_step(directory, f"snapshots/{entry.name}")


def link_step(
    directory: StoreDirectory,
    source: str,
    place: str,
    carry: Sequence[CarriedArray],
    *,
    named: str | None = None,
) -> None:
    """Links a slot's arrays, and those of its documents that all steps share.

    Links lead to real files inside the same CSD root, because a link to a symlink would
    pin nothing, and hard links do not cross file systems.

    Args:
      place: the new place, an existing directory in the store.
      carry: arrays that the step carries.
      named: the name that the place gets when it is complete.
    """
    step, root = directory.step_path(source), directory.step_path(place)
    link_carry(step, root, carry)
    for document in _SHARED:
        link_or_copy(step / document, root / document)
    made: set[Path] = set()
    for leaf, record in enumerate(directory.manifest.leaves):
        for state in record.states:
            name = record.array_name(state.name)
            (root / name).mkdir()
            held = directory.array_path(source, leaf, state.name)
            link_or_copy(held / "zarr.json", root / name / "zarr.json")
            for number in record.held:
                key = f"{name}/{directory.state_chunk(leaf, number, state).key}"
                target = directory.chunk_file(place, leaf, number, state.name)
                for parent in {(root / key).parent, target.parent} - made:
                    parent.mkdir(parents=True, exist_ok=True)
                    made.add(parent)
                old = directory.chunk_file(source, leaf, number, state.name)
                link_or_copy(old, target)
                if directory.manifest.csds:
                    data = directory.data_path(named or place, record.csds[number])
                    (root / key).symlink_to(data / key)


def remove_step(directory: StoreDirectory, place: str) -> None:
    """Removes the result of `link_step` at a place, on every CSD and in the store."""
    paths = [directory.data_path(place, csd) for csd in range(directory.num_csds)]
    for path in (*paths, directory.step_path(place)):
        shutil.rmtree(path, ignore_errors=True)
