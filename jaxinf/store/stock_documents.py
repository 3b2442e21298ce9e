"""Checksums of the documents that other tools read beside the chunks of a step.

Invariant: they are checksums of the files' bytes, so a file with another checksum was
not written by jaxinf.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxinf.documents import MOST_BYTES
from jaxinf.io import crc32c, read_beneath
from jaxinf.store.manifest import Manifest

ARRAYS = "*/zarr.json"
"""The common name of all arrays' metadata."""

_NAMES = ("zarr.json", "_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt")

STOCK_DOCUMENTS = (*_NAMES, ARRAYS)
"""All names of `stock_documents`."""


def document_names(manifest: Manifest) -> list[str]:
    """Returns the names of a step's documents in other formats."""
    return [*_NAMES, *_arrays(manifest)]


def stock_documents(step: Path, manifest: Manifest) -> dict[str, str]:
    """Returns CRC-32Cs of a step's documents in other formats, 8 hex digits, by name.

    The arrays' ``zarr.json`` are one entry, as if they were one file, in the manifest's
    order of leaves and states.

    Args:
      step: a slot or a checkpoint.
      manifest: manifest of the store.

    Raises:
      StoreIOError: a document is missing, or the drive failed.
    """
    return {name: document_checksum(step, manifest, name) for name in STOCK_DOCUMENTS}


def document_checksum(step: Path, manifest: Manifest, name: str) -> str:
    names = _arrays(manifest) if name == ARRAYS else [name]
    raw = b"".join(read_beneath(step, name, MOST_BYTES) for name in names)
    return f"{crc32c(np.frombuffer(raw, np.uint8)):08x}"


def _arrays(manifest: Manifest) -> Iterator[str]:
    for leaf in manifest.leaves:
        for state in leaf.states:
            yield f"{leaf.array_name(state.name)}/zarr.json"
