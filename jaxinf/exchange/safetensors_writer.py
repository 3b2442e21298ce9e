"""Arrays of a committed step as tensors of safetensors files, and an index of them.

Invariant: a file is laid out by its header, and filled array by array; memory stays
within the budget for leaves of any size.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.documents import encode
from jaxinf.exchange.adapters import Change
from jaxinf.exchange.destination import new_directory
from jaxinf.exchange.safetensors_format import TensorInfo, encode_header
from jaxinf.exchange.step_files import StepFiles, StoredArray
from jaxinf.io import write_bytes_atomically
from jaxinf.io.failures import translated
from jaxinf.layout import DEFAULT_CHUNK_ELEMENTS, box_runs
from jaxinf.typing import JsonValue, ProgressCallback

DEFAULT_FILE_BYTES = 4 << 30
INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "model.safetensors"

_HEADER_BYTES_AN_ARRAY = 512
# Copies of a portion: as read, cast, and with its axes in the tensor's order.
_COPIES = 3


@dataclass(frozen=True)
class Tensor:
    """A stored array as a tensor of a file.

    Attributes:
      name: the tensor's name in the file.
      dtype: dtype that its elements are rounded to, to nearest even.
      axes: order of the array's axes in the tensor; empty for no change.
      change: what adds an adapter to its elements, if anything does.
    """

    name: str
    array: StoredArray
    dtype: np.dtype[Any]
    axes: tuple[int, ...] = ()
    change: Change | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.array.leaf.shape
        return tuple(shape[a] for a in self.axes) if self.axes else tuple(shape)

    @property
    def num_bytes(self) -> int:
        return self.array.leaf.grid.num_elements * self.dtype.itemsize


def write_tensors(
    step: StepFiles,
    destination: Path,
    tensors: Sequence[Tensor],
    metadata: Mapping[str, str],
    documents: Callable[[], Mapping[str, JsonValue | bytes]],
    *,
    max_file_bytes: int,
    memory_bytes: int,
    file_name: str = WEIGHTS_NAME,
    progress: ProgressCallback | None = None,
) -> None:
    """Makes a directory of safetensors files; blocks until it is durable.

    Args:
      destination: a directory that does not exist yet.
      tensors: the tensors in the order of the files.
      metadata: texts for each file's header.
      documents: called when all has been read; returns further files by name, as JSON
        or bytes.
      max_file_bytes: size at which another file begins; a tensor is never split.
      memory_bytes: memory for data in transit.
      file_name: name of the file, if one is enough.
      progress: called with the bytes of elements done and those in all.

    Raises:
      FileExistsError: the destination exists.
      ValueError: a limit is too small.
      StoreSpaceError: there is no room; nothing was written.
      StoreCorruptError: a chunk is damaged.
      StoreError: the step cannot be read, or the destination not written.
    """
    if min(max_file_bytes, memory_bytes) < 1 << 20:
        raise ValueError(
            f"max_file_bytes={max_file_bytes}, memory_bytes={memory_bytes}: expected "
            f"at least {1 << 20} each"
        )
    total_bytes = sum(tensor.num_bytes for tensor in tensors)
    files = _divide(tensors, max_file_bytes, file_name)
    room_bytes = total_bytes + _HEADER_BYTES_AN_ARRAY * (len(tensors) + 8)
    with new_directory(destination, room_bytes) as directory:
        done_bytes = 0
        for name, members in files.items():
            path = directory / name
            for num_bytes in _write_file(step, path, members, metadata, memory_bytes):
                done_bytes += num_bytes
                if progress is not None:
                    progress(done_bytes, total_bytes)
        beside = dict(documents())
        if len(files) > 1:
            beside[INDEX_NAME] = _index(files, total_bytes)
        for name, document in beside.items():
            raw = document if isinstance(document, bytes) else encode(document)
            write_bytes_atomically(directory / name, raw)


def _index(files: Mapping[str, Sequence[Tensor]], total_bytes: int) -> JsonValue:
    places = {tensor.name: name for name, held in files.items() for tensor in held}
    return {"metadata": {"total_size": total_bytes}, "weight_map": places}


def _divide(
    tensors: Sequence[Tensor], max_file_bytes: int, file_name: str
) -> dict[str, list[Tensor]]:
    files: list[list[Tensor]] = [[]]
    held_bytes = 0
    for tensor in tensors:
        if files[-1] and held_bytes + tensor.num_bytes > max_file_bytes:
            files.append([])
            held_bytes = 0
        files[-1].append(tensor)
        held_bytes += tensor.num_bytes
    if len(files) == 1:
        return {file_name: files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": members
        for number, members in enumerate(files, start=1)
    }


def _write_file(
    step: StepFiles,
    path: Path,
    tensors: Sequence[Tensor],
    metadata: Mapping[str, str],
    memory_bytes: int,
) -> Iterator[int]:
    """Yields the bytes of each portion written."""
    shapes = [(tensor.name, tensor.shape, tensor.dtype) for tensor in tensors]
    first, header = encode_header(shapes, metadata)
    with translated("write", path), open(path, "xb") as stream:
        stream.write(first)
        stream.flush()
        fd = stream.fileno()
        os.ftruncate(fd, header.data_offset_bytes + sum(t.num_bytes for t in tensors))
        for tensor in tensors:
            info = header.tensors[tensor.name]
            itemsize = tensor.array.dtype.itemsize
            max_elements = min(
                DEFAULT_CHUNK_ELEMENTS, memory_bytes // (_COPIES * itemsize)
            )
            for portion, values in step.stream(tensor.array, max_elements):
                start = portion.start
                if (change := tensor.change) is not None:
                    values = change(portion, values)
                values = values.astype(tensor.dtype, copy=False)
                if tensor.axes:
                    start = tuple(start[a] for a in tensor.axes)
                    values = np.ascontiguousarray(values.transpose(tensor.axes))
                _write_box(fd, header.data_offset_bytes, info, start, values)
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
