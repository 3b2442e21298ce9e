"""A committed step as an Orbax checkpoint: compressed zarr v3 arrays in OCDBT.

Invariant: the files are those that stock Orbax writes with ``StandardCheckpointer``;
  memory stays within the budget for leaves of any size.
"""

import contextlib
import json
import time
from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Any

import tensorstore

from jaxinf.exchange.destination import new_directory
from jaxinf.exchange.step_files import (
    DEFAULT_MEMORY_BYTES,
    StepFiles,
    StoredArray,
)
from jaxinf.layout import DEFAULT_CHUNK_ELEMENTS, portion_shape
from jaxinf.store.zarr_metadata import (
    COMMIT_SUCCESS_TEXT,
    orbax_checkpoint_metadata,
    orbax_tree_metadata,
)
from jaxinf.typing import ProgressCallback

__all__ = ["export_orbax"]

# Copies of a portion in flight: as read, in tensorstore, encoded, in OCDBT's buffer.
_COPIES = 4
_MIN_PORTIONS_IN_FLIGHT = 4
_ZSTD_LEVEL = 1
# Small: each batch of writes writes the nodes above it anew.
_NODE_BYTES = 64 << 10


def export_orbax(
    step: StepFiles,
    destination: Path,
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: ProgressCallback | None = None,
) -> None:
    """Writes a step as an Orbax checkpoint; blocks until it is durable.

    The tree is that of the step itself: a dict of states, including ``params``, each a
    tree of dicts. Coded state is written as float32. The manifest and the commit record
    of the export are beside it, so that it can be imported again. An average is
    ``params``, alone.

    Args:
      step: the step to export.
      destination: a directory that does not exist yet.
      memory_bytes: memory for data in transit.
      progress: called with the bytes of elements done and those in all.

    Raises:
      FileExistsError: the destination exists.
      ValueError: too little memory.
      StoreSpaceError: there may be no room; nothing was written.
      StoreCorruptError: a chunk is damaged.
      StoreError: the step cannot be read, or the destination not written.
    """
    if memory_bytes < 1 << 20:
        raise ValueError(
            f"memory_bytes={memory_bytes}: an export needs at least {1 << 20}"
        )
    total_bytes = step.num_bytes
    with new_directory(destination, total_bytes + total_bytes // 64) as directory:
        started_ns = time.time_ns()
        done_bytes = 0
        with contextlib.closing(_write_arrays(step, directory, memory_bytes)) as sizes:
            for num_bytes in sizes:
                done_bytes += num_bytes
                if progress is not None:
                    progress(done_bytes, total_bytes)
        keys = [(a.state_name, *a.leaf.path) for a in step.arrays()]
        tree = {**orbax_tree_metadata(keys), "use_ocdbt": True}
        _write_json(directory / "_METADATA", tree)
        _write_json(
            directory / "_CHECKPOINT_METADATA", orbax_checkpoint_metadata(started_ns)
        )
        if not step.average:
            manifest, commit = step.exported()
            manifest.write(directory / "jaxinf.json")
            commit.write(directory / "commit.json")
        (directory / "commit_success.txt").write_text(COMMIT_SUCCESS_TEXT)


def _write_arrays(
    step: StepFiles, directory: Path, memory_bytes: int
) -> Generator[int, None, None]:
    """Yields the bytes of each portion written; the caller closes the generator."""
    context = tensorstore.Context({"file_io_sync": False})
    portion_bytes = memory_bytes // (_COPIES * _MIN_PORTIONS_IN_FLIGHT)
    in_flight: deque[tuple[Any, int]] = deque()
    held_bytes = 0
    try:
        for array in step.arrays():
            max_elements = min(
                DEFAULT_CHUNK_ELEMENTS, max(1, portion_bytes // array.dtype.itemsize)
            )
            target = _create(directory, array, max_elements, context)
            for portion, values in step.stream(array, max_elements):
                # No one else has these values, so tensorstore need not copy them.
                write = target[portion.slices].write(
                    values, can_reference_source_data_indefinitely=True
                )
                in_flight.append((write, values.nbytes))
                held_bytes += values.nbytes
                while held_bytes > memory_bytes // _COPIES - portion_bytes:
                    written_bytes = _finish(in_flight)
                    held_bytes -= written_bytes
                    yield written_bytes
        while in_flight:
            yield _finish(in_flight)
    finally:
        # After a failure the directory is removed, so no write may still be under way.
        while in_flight:
            with contextlib.suppress(Exception):
                _finish(in_flight)


def _finish(in_flight: deque[tuple[Any, int]]) -> int:
    future, num_bytes = in_flight.popleft()
    future.result()
    return num_bytes


def _create(
    directory: Path, array: StoredArray, max_elements: int, context: Any
) -> Any:
    chunk_shape = portion_shape(array.leaf.grid, max_elements)
    spec = {
        "driver": "zarr3",
        "kvstore": {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{directory}/"},
            "path": f"{array.name}/",
            "config": {
                "compression": {"id": "zstd"},
                "max_decoded_node_bytes": _NODE_BYTES,
            },
        },
        "metadata": {
            "shape": list(array.leaf.shape),
            "data_type": array.dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": list(chunk_shape)},
            },
            "chunk_key_encoding": {"name": "default"},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "zstd", "configuration": {"level": _ZSTD_LEVEL}},
            ],
        },
        # Like Orbax, write chunks of zeros instead of leaving them out.
        "store_data_equal_to_fill_value": True,
    }
    return tensorstore.open(
        spec, create=True, delete_existing=False, context=context
    ).result()


def _write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document) + "\n")
