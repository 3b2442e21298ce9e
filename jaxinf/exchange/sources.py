"""Arrays of another tool's checkpoint, read block by block.

Invariant: no element is read before `SourceArray.blocks` is iterated. Blocks in memory
stay within the given limit, or are one chunk of the file if that is larger.
"""

import abc
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.errors import ExchangeError
from jaxinf.io.failures import translated
from jaxinf.layout import DEFAULT_CHUNK_ELEMENTS, LeafGrid, portions
from jaxinf.typing import Array

_MAX_READS_IN_FLIGHT = 4


class SourceArray(abc.ABC):
    """An array that can be imported.

    Attributes:
      name: keys joined by ``.``, percent-encoded as in a store.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @abc.abstractmethod
    def blocks(self, memory_bytes: int) -> Iterator[tuple[tuple[int, ...], Array]]:
        """Yields boxes that partition the array.

        Args:
          memory_bytes: limit for all boxes read ahead.

        Yields:
          The index of a box's first element, and its elements.

        Raises:
          ExchangeError: the file is damaged.
        """


class FileArray(SourceArray):
    """Raw elements in C order in a part of a file."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        path: Path,
        offset_bytes: int,
    ) -> None:
        super().__init__(name, shape, dtype)
        self.path = path
        self.offset_bytes = offset_bytes

    def blocks(self, memory_bytes: int) -> Iterator[tuple[tuple[int, ...], Array]]:
        grid = LeafGrid(self.shape, tuple(max(1, n) for n in self.shape))
        max_elements = max(1, memory_bytes // self.dtype.itemsize)
        max_elements = min(max_elements, DEFAULT_CHUNK_ELEMENTS)
        with translated("read", self.path), open(self.path, "rb") as stream:
            for portion in portions(grid, max_elements):
                values = np.empty(portion.num_elements, self.dtype)
                offset = portion.offset_elements * self.dtype.itemsize
                stream.seek(self.offset_bytes + offset)
                if stream.readinto(values.view(np.uint8).data) < values.nbytes:
                    raise ExchangeError(
                        f"{self.path}: truncated in {self.name} while it was read; "
                        "copy the file anew"
                    )
                os.posix_fadvise(
                    stream.fileno(), 0, stream.tell(), os.POSIX_FADV_DONTNEED
                )
                yield portion.start, values.reshape(portion.extent)


class TensorstoreArray(SourceArray):
    """An array that tensorstore has opened."""

    def __init__(self, name: str, store: Any, where: Path) -> None:
        super().__init__(name, tuple(store.shape), np.dtype(store.dtype.numpy_dtype))
        self._store = store
        self.where = where

    def blocks(self, memory_bytes: int) -> Iterator[tuple[tuple[int, ...], Array]]:
        max_elements = max(1, memory_bytes // self.dtype.itemsize)
        layout = self._store.chunk_layout
        extent = _block_shape(
            self.shape,
            layout.write_chunk.shape or self.shape,
            layout.read_chunk.shape or self.shape,
            max_elements,
        )
        at_once = max(1, min(_MAX_READS_IN_FLIGHT, max_elements // math.prod(extent)))
        reads: deque[tuple[tuple[int, ...], Any]] = deque()
        for start in itertools.product(
            *(range(0, n, e) for n, e in zip(self.shape, extent, strict=True))
        ):
            box = tuple(
                slice(s, min(s + e, n))
                for s, e, n in zip(start, extent, self.shape, strict=True)
            )
            reads.append((start, self._store[box].read()))
            if len(reads) >= at_once:
                yield self._finish(reads)
        while reads:
            yield self._finish(reads)

    def _finish(
        self, reads: deque[tuple[tuple[int, ...], Any]]
    ) -> tuple[tuple[int, ...], Array]:
        start, future = reads.popleft()
        return start, _or_explain(future.result, self.where, self.name)


def _or_explain(read: Callable[[], Any], where: Path, name: str) -> Any:
    try:
        return read()
    except (ValueError, OSError, RuntimeError) as error:
        raise ExchangeError(
            f"{where}: cannot read {name}: {error}; copy the checkpoint anew, or "
            "import another one"
        ) from error


def _block_shape(
    shape: Sequence[int],
    write_chunk: Sequence[int],
    read_chunk: Sequence[int],
    max_elements: int,
) -> list[int]:
    """Returns a shape of whole chunks of the file: one, or several small ones."""
    whole = [max(1, n) for n in shape]
    block = [max(1, min(c, n)) for c, n in zip(write_chunk, whole, strict=True)]
    if math.prod(block) > max_elements:
        block = [max(1, min(c, n)) for c, n in zip(read_chunk, whole, strict=True)]
    limit = min(max_elements, DEFAULT_CHUNK_ELEMENTS)
    for dim in reversed(range(len(block))):
        room = limit // math.prod(block)
        if room > 1:
            block[dim] = min(block[dim] * room, whole[dim])
    return block


def within(folder: Path, name: str) -> Path:
    """Returns the path of a file in a folder whose links are a stranger's.

    A link may lead to another file of the folder. In a hub's cache, where the folder is
    ``snapshots/REVISION``, it may lead to a file of ``blobs``, too.

    Raises:
      ExchangeError: the name is a link, or behind one, that leads elsewhere.
    """
    path, root = folder / name, Path(os.path.realpath(folder))
    target = Path(os.path.realpath(path))
    is_blob = root.parent.name == "snapshots" and (
        target.parent == root.parent.parent / "blobs"
    )
    if not (is_blob or target.is_relative_to(root)):
        raise ExchangeError(
            f"{path}: expected a file in this folder, found a link to {target}, which "
            "is not followed; copy the file into the folder if it belongs there"
        )
    return path
