"""Stores of an older format version brought to the present one.

Invariant: chunk files are only read; the manifest, which says the version, is replaced
last, so that a migration that was interrupted is simply made again.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxinf.errors import StoreFormatError
from jaxinf.io import write_json_atomically
from jaxinf.store.commit import CommitRecord
from jaxinf.store.directory import StoreDirectory
from jaxinf.store.lock import StoreLock
from jaxinf.store.manifest import FORMAT_VERSION, Manifest
from jaxinf.store.reader import file_checksum
from jaxinf.store.verify import step_bytes
from jaxinf.typing import Array, ProgressCallback

__all__ = ["migrate"]


def migrate(path: Path, progress: ProgressCallback | None = None) -> bool:
    """Brings a store to the present format; blocks.

    From version 1: takes the checksums of the committed step, which it had none of.

    Args:
      path: the store.
      progress: called with the bytes read and in all.

    Returns:
      False if it was of the present format already.

    Raises:
      StoreFormatError: no store, or one that no version of jaxinf wrote.
      StoreLockedError: a run has it open.
    """
    manifest = Manifest.read(path / "jaxinf.json", any_version=True)
    if manifest.format_version == FORMAT_VERSION:
        return False
    lock = StoreLock(path)
    try:
        directory = StoreDirectory(path, manifest)
        slot = directory.committed_slot()
        if slot is None:
            raise StoreFormatError(
                f"{path}: expected a committed step to migrate, found none: the store "
                "was never finished; remove it and start again"
            )
        record_path = directory.step_path(slot) / "commit.json"
        record = CommitRecord.read(record_path, any_version=True)
        checksums = _checksums(directory, slot, progress)
        complete = replace(record, checksums=checksums)
        write_json_atomically(record_path, complete.to_json())
        present = replace(manifest, format_version=FORMAT_VERSION)
        write_json_atomically(path / "jaxinf.json", present.to_json())
    finally:
        lock.release()
    return True


def _checksums(
    directory: StoreDirectory, slot: str, progress: ProgressCallback | None
) -> dict[str, Array]:
    total, done = step_bytes(directory), 0
    result: dict[str, Array] = {}
    for leaf, record in enumerate(directory.manifest.leaves):
        for state in record.states:
            sums = np.zeros(len(record.csds), np.uint32)
            for number in range(len(record.csds)):
                num_bytes = directory.state_bytes(leaf, number, state)
                file = directory.chunk_file(slot, leaf, number, state.name)
                sums[number] = file_checksum(file, num_bytes)
                done += num_bytes
                if progress is not None:
                    progress(done, total)
            result[record.array_name(state.name)] = sums
    return result
