"""A committed step as safetensors files, with the index that others expect beside them.

Invariant: a file is written once, front to back, array by array; memory stays within
the budget however large a leaf is.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.exchange.destination import new_directory
from jaxinf.exchange.portions import box_runs
from jaxinf.exchange.safetensors_format import TensorInfo, encode_header
from jaxinf.exchange.step_files import (
    DEFAULT_MEMORY_BYTES,
    StepFiles,
    StoredArray,
)
from jaxinf.io import write_json_atomically
from jaxinf.io.failures import translated
from jaxinf.layout import DEFAULT_CHUNK_ELEMENTS
from jaxinf.store import MASTER_PARAMS
from jaxinf.typing import ProgressCallback

__all__ = ["DEFAULT_FILE_BYTES", "INDEX_NAME", "export_safetensors"]

DEFAULT_FILE_BYTES = 4 << 30
INDEX_NAME = "model.safetensors.index.json"

_HEADER_BYTES_AN_ARRAY = 512


def export_safetensors(
    step: StepFiles,
    destination: Path,
    *,
    params_only: bool = False,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: ProgressCallback | None = None,
) -> None:
    """Writes a step as safetensors; blocks until it is durable.

    A tensor is named as its array is, ``mu.h0.kernel``; of params alone, as the leaf
    is, ``h0.kernel``. All have the dtypes that the optimizer computes with: what is
    coded is decoded, master params are float32. The manifest and the commit record of
    that lie beside, unless it is params alone.

    Args:
      step: what to export.
      destination: a directory that does not exist yet.
      params_only: leave the optimizer's state out.
      max_file_bytes: begin another file rather than go above; an array is never split.
      memory_bytes: for the data on its way.
      progress: called with the bytes of elements done and those in all.

    Raises:
      FileExistsError: the destination exists.
      ValueError: a limit is too small.
      StoreSpaceError: there is no room; nothing was written.
      StoreCorruptError: a chunk is not as it was written.
      StoreError: the step cannot be read, or the destination not written.
    """
    if min(max_file_bytes, memory_bytes) < 1 << 20:
        raise ValueError(
            f"max_file_bytes={max_file_bytes}, memory_bytes={memory_bytes}: expected "
            f"at least {1 << 20} each"
        )
    commit = step.commit
    arrays = [
        array
        for array in step.arrays()
        if not params_only or array.state.name == MASTER_PARAMS
    ]
    total_bytes = sum(array.num_bytes for array in arrays)
    files = _divide(arrays, max_file_bytes)
    metadata = {"format": "flax", "step": str(commit.step)}
    room_bytes = total_bytes + _HEADER_BYTES_AN_ARRAY * (len(arrays) + 8)
    with new_directory(destination, room_bytes) as directory:
        done_bytes = 0
        for name, members in files.items():
            entries = [(_name(a, params_only), a) for a in members]
            written = _write_file(
                step, directory / name, entries, metadata, memory_bytes
            )
            for num_bytes in written:
                done_bytes += num_bytes
                if progress is not None:
                    progress(done_bytes, total_bytes)
        if len(files) > 1:
            weight_map = {
                _name(array, params_only): name
                for name, members in files.items()
                for array in members
            }
            index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
            write_json_atomically(directory / INDEX_NAME, index)
        if not params_only:
            manifest, commit = step.exported()
            write_json_atomically(directory / "jaxinf.json", manifest.to_json())
            write_json_atomically(directory / "commit.json", commit.to_json())


def _name(array: StoredArray, params_only: bool) -> str:
    if not params_only:
        return array.name
    # A bare array has no path; files have no tensor without a name.
    return array.name.removeprefix(MASTER_PARAMS + ".")


def _divide(
    arrays: Sequence[StoredArray], max_file_bytes: int
) -> dict[str, list[StoredArray]]:
    """Deals arrays to files, in order."""
    files: list[list[StoredArray]] = [[]]
    held_bytes = 0
    for array in arrays:
        if files[-1] and held_bytes + array.num_bytes > max_file_bytes:
            files.append([])
            held_bytes = 0
        files[-1].append(array)
        held_bytes += array.num_bytes
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": members
        for number, members in enumerate(files, start=1)
    }


def _write_file(
    step: StepFiles,
    path: Path,
    entries: Sequence[tuple[str, StoredArray]],
    metadata: dict[str, str],
    memory_bytes: int,
) -> Iterator[int]:
    """Yields the bytes of each portion that has been written."""
    shapes = [(name, array.leaf.shape, array.dtype) for name, array in entries]
    first, header = encode_header(shapes, metadata)
    with translated("write", path), open(path, "xb") as stream:
        stream.write(first)
        stream.flush()
        fd = stream.fileno()
        end = header.data_offset_bytes + sum(a.num_bytes for _, a in entries)
        os.ftruncate(fd, end)
        for name, array in entries:
            info = header.tensors[name]
            max_elements = min(
                DEFAULT_CHUNK_ELEMENTS, memory_bytes // (2 * info.dtype.itemsize)
            )
            for portion, values in step.stream(array, max_elements):
                _write_box(fd, header.data_offset_bytes, info, portion.start, values)
                yield values.nbytes
        os.fsync(fd)


def _write_box(
    fd: int,
    data_offset_bytes: int,
    info: TensorInfo,
    start: tuple[int, ...],
    values: np.ndarray[Any, Any],
) -> None:
    memory = values.reshape(-1).view(np.uint8).data
    done = 0
    for offset, length in box_runs(info.shape, start, values.shape):
        num_bytes = length * info.dtype.itemsize
        place = data_offset_bytes + info.offset_bytes + offset * info.dtype.itemsize
        _write_fully(fd, memory[done : done + num_bytes], place)
        done += num_bytes


def _write_fully(fd: int, memory: memoryview, offset_bytes: int) -> None:
    done = 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], offset_bytes + done)
