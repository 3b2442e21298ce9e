"""Gives the space of a store's spare slot back, until a run writes its next step.

Invariant: the committed step, checkpoints and snapshots stay as they are.
"""

import os
from pathlib import Path

from jaxinf.io import opened_to_write
from jaxinf.io.failures import translated
from jaxinf.store.directory import other_slot
from jaxinf.store.owned import hold_store

_BLOCK_BYTES = 512  # of st_blocks, on every file system


def trim_store(path: Path) -> int:
    """Empties the chunk files of the spare slot; blocks; returns the bytes freed.

    The next step of a run gives each file its length back when it writes it. A file
    that a checkpoint or the committed step shares keeps its content.

    Raises:
      StoreLockedError: a process has the store open.
      StoreFormatError: the store has no step.
      StoreIOError: the operating system refused something.
    """
    num_bytes = 0
    with hold_store(path) as directory:
        spare = other_slot(directory.need_slot())
        directory.unpublish(spare)
        for number, _, state, chunk in directory.held():
            file = directory.chunk_file(spare, number, chunk, state.name)
            num_bytes += _emptied(file)
        directory.sync()
    return num_bytes


def _emptied(file: Path) -> int:
    """Empties a file with a single link; returns its bytes on the drive."""
    with translated("truncation", file), opened_to_write(file) as fd:
        status = os.fstat(fd)
        if status.st_nlink > 1:
            return 0
        os.ftruncate(fd, 0)
    return status.st_blocks * _BLOCK_BYTES
