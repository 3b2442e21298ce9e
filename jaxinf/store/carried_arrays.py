"""Arrays that a step carries beside its states, each of one chunk.

Invariant: an array that differs from the checksum in its record is never returned.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from jaxinf.documents import Document
from jaxinf.errors import StoreCorruptError
from jaxinf.store.documents import Checksum, Dtype, Lengths
from jaxinf.store.manifest import dtype_of
from jaxinf.store.names import array_name, check_leaf_paths
from jaxinf.transfer import crc32c, read_beneath, translated

CARRY = "carry"
"""The first part of the names of arrays that a step carries."""

_MAX_BYTES = 64 << 20  # of all arrays of a step


class CarriedArray(Document, frozen=True):
    """The record of an array that a step carries."""

    path: tuple[str, ...]  # keys in the tree that the caller gave
    shape: Lengths
    dtype: Dtype  # of typed PRNG keys that of their numbers
    crc32c: Checksum  # of the elements in C order

    @classmethod
    def of(cls, path: tuple[str, ...], shape: Any, dtype: str, raw: bytes) -> Self:
        return cls(path, tuple(shape), dtype, f"{crc32c(raw):08x}")

    @property
    def name(self) -> str:
        """The array's directory, relative to a step."""
        return array_name(CARRY, self.path)

    @property
    def chunk(self) -> str:
        """The file of the only chunk, relative to a step."""
        return "/".join((self.name, "c", *("0" for _ in self.shape)))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


def check_carry(carry: Sequence[CarriedArray]) -> None:
    """Raises ValueError for names that collide or are none, or for too many bytes."""
    check_leaf_paths([array.path for array in carry], {CARRY})
    num_bytes = sum(array.num_bytes for array in carry)
    if num_bytes > _MAX_BYTES:
        raise ValueError(
            f"expected at most {_MAX_BYTES} bytes (64 MiB) together, found "
            f"{num_bytes}; keep large arrays among the params, or in a checkpoint of "
            "your own"
        )


def write_carry(
    step: Path, carry: Sequence[CarriedArray], contents: Sequence[bytes]
) -> None:
    """Writes the arrays' chunks into a step without a record; the caller syncs them."""
    for array, content in zip(carry, contents, strict=True):
        chunk = step / array.chunk
        with translated("write", chunk):
            chunk.parent.mkdir(parents=True, exist_ok=True)
            chunk.unlink(missing_ok=True)  # a checkpoint may have it, too
            chunk.write_bytes(content)


def read_carry(
    step: Path,
    carry: Sequence[CarriedArray],
    fetch: Callable[[str], bytes] | None = None,
) -> list[bytes]:
    """Returns the contents of a step's arrays; `fetch` reads chunks that are no files.

    Raises StoreError for an array that is missing, or differs from its checksum.
    """
    contents = []
    for array in carry:
        read = fetch or partial(read_beneath, step, limit_bytes=array.num_bytes)
        raw = read(array.chunk)
        checksum = f"{crc32c(raw):08x}"
        if len(raw) != array.num_bytes or checksum != array.crc32c:
            raise StoreCorruptError(
                f"{step}: {array.chunk}: expected {array.num_bytes} bytes with CRC-32C "
                f"{array.crc32c}, found {len(raw)} with {checksum}; restore a "
                "checkpoint or a backup"
            )
        contents.append(raw)
    return contents
