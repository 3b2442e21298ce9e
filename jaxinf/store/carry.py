"""Arrays that a step carries beside the optimizer's, in its directory.

    commit.json: path, shape, dtype, CRC-32C    carry.PATH/zarr.json, c/0/0: one chunk

Invariant: files of a step with a record are replaced, and never written. A store whose
steps carry nothing has nothing of this.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxinf.documents import encode
from jaxinf.errors import StoreCorruptError, StoreError
from jaxinf.store.commit import CARRY, CarriedArray
from jaxinf.store.links import link_or_copy
from jaxinf.store.manifest import Manifest
from jaxinf.store.stock_documents import array_metadata, tree_document
from jaxinf.transfer import check_holds, crc32c, read_beneath, write_bytes_atomically
from jaxinf.transfer.failures import translated


def make_carry(
    step: Path,
    manifest: Manifest,
    carry: Sequence[CarriedArray],
    *,
    is_listed: bool = False,
) -> None:
    """Gives a step without a record the directories of these arrays, and no others.

    Args:
      step: a slot, or a checkpoint that is being made.
      is_listed: whether its ``_METADATA`` may list others, whatever is there.
    """
    if CARRY in manifest.state_names:  # whose arrays have such names
        return
    found = [
        entry
        for entry in os.scandir(step)
        if entry.name == CARRY or entry.name.startswith(f"{CARRY}.")
    ]
    with translated("carried arrays", step):
        if found or is_listed:
            write_bytes_atomically(step / "_METADATA", tree_document(manifest))
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        for one in carry:
            (step / one.chunk).parent.mkdir(parents=True)
            (step / one.document).write_bytes(_array_document(one))
        if carry:
            document = tree_document(manifest, carry)
            write_bytes_atomically(step / "_METADATA", document)


def tree_checksum(manifest: Manifest, carry: Sequence[CarriedArray]) -> str:
    """Returns the CRC-32C of ``_METADATA`` of a step with these arrays."""
    raw = np.frombuffer(tree_document(manifest, carry), np.uint8)
    return f"{crc32c(raw):08x}"


def write_carry(
    step: Path, carry: Sequence[CarriedArray], values: Sequence[bytes]
) -> None:
    """Writes the arrays, where `make_carry` has made room; the caller syncs them."""
    for one, value in zip(carry, values, strict=True):
        with translated("write", step / one.chunk):
            (step / one.chunk).unlink(missing_ok=True)  # a checkpoint may have it, too
            (step / one.chunk).write_bytes(value)


def link_carry(source: Path, target: Path, carry: Sequence[CarriedArray]) -> None:
    """Links the arrays of a step into another one, without a record."""
    for one in carry:
        (target / one.chunk).parent.mkdir(parents=True, exist_ok=True)
        for name in (one.document, one.chunk):
            check_holds(source, name, 0)  # no link leads there
            (target / name).unlink(missing_ok=True)
            link_or_copy(source / name, target / name)


def read_carry(step: Path, carry: Sequence[CarriedArray]) -> list[bytes]:
    """Returns the arrays of a step.

    Raises:
      StoreCorruptError: one differs from its checksum.
      StoreError: one is missing, or cannot be read.
    """
    return [
        checked_carry(one, read_beneath(step, one.chunk, one.num_bytes), step)
        for one in carry
    ]


def checked_carry(one: CarriedArray, raw: bytes, where: object) -> bytes:
    """Returns an array that was read; refuses one that differs from its checksum."""
    found = crc32c(np.frombuffer(raw, np.uint8))
    if len(raw) != one.num_bytes or f"{found:08x}" != one.crc32c:
        raise StoreCorruptError(
            f"{where}: {one.chunk}: expected {one.num_bytes} bytes with CRC-32C "
            f"{one.crc32c}, found {len(raw)} with {found:08x}; restore a checkpoint or "
            "a backup"
        )
    return raw


def carry_files(
    carry: Sequence[CarriedArray], values: Sequence[bytes]
) -> Mapping[str, bytes]:
    """Returns all files of the arrays, by name in a step."""
    found = {one.chunk: value for one, value in zip(carry, values, strict=True)}
    return found | {one.document: _array_document(one) for one in carry}


def carry_problems(
    step: Path, carry: Sequence[CarriedArray]
) -> Iterator[tuple[str, str]]:
    """Yields the name and the problem of each file that is not as the record has it."""
    for one in carry:
        try:
            read_carry(step, [one])
        except StoreError as error:
            yield one.chunk, str(error)
        try:
            expected = _array_document(one)
            if read_beneath(step, one.document, 2 * len(expected)) != expected:
                yield (
                    one.document,
                    "expected the record's shape and dtype, found others",
                )
        except StoreError as error:
            yield one.document, str(error)


def _array_document(one: CarriedArray) -> bytes:
    chunk_shape = [max(1, length) for length in one.shape]
    return encode(array_metadata(one.shape, chunk_shape, one.dtype))
