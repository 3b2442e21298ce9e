"""The error for a damaged chunk.

Invariant: it names leaf, state, chunk, file, CSD and the remedy.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from jaxinf.errors import StoreCorruptError
from jaxinf.store.manifest import LeafRecord


@dataclass(frozen=True)
class Damage:
    """A damaged chunk, document or link of a step.

    Attributes:
      step_path: the slot or the checkpoint.
      file: the real file, even if it is missing.
      what: leaf, state, chunk and CSD, or the document.
      problem: the expected and the found value.
    """

    step_path: Path
    file: Path
    what: str
    problem: str


def corrupt_chunk(
    file: Path,
    leaf: LeafRecord,
    state: str,
    chunk: int,
    expected: int | None,
    found: int,
    *,
    when: str = "as written",
    store: str = "STORE",
) -> StoreCorruptError:
    """Makes the error for a chunk whose checksum differs from the committed one.

    Args:
      file: the chunk's name in the step.
      leaf, state, chunk: the chunk.
      expected, found: CRC-32C; None if the record has none.
      when: the origin of the expected checksum.
      store: the store's path.
    """
    wanted = "none" if expected is None else f"{expected:08x}"
    return StoreCorruptError(
        f"{os.path.realpath(file)}: leaf {leaf.name}, {state}, chunk {chunk} of "
        f"{len(leaf.csds)}, on CSD {leaf.csds[chunk]}: expected CRC-32C {wanted} "
        f"{when}, found {found:08x}; nothing was made of it. Check the drive (dmesg, "
        f'smartctl), see "jaxinf verify {store}" for all that is damaged, and restore '
        "a checkpoint or a backup"
    )
