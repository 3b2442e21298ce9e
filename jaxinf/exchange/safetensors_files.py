"""Safetensors files: their tensors, and a step's params as such a file.

Invariant: the library checks a file's header before an element is read, and a leaf is
read when it is used, one at a time. A file that is written is laid out by its header
and filled portion by portion, so that memory stays within the budget for leaves of
any size.
"""

import contextlib
import json
import math
import os
import secrets
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import safetensors

from jaxinf.documents import encode, pattern, shorten
from jaxinf.errors import ExchangeError, StoreError
from jaxinf.exchange.params import ExportOptions, ParamArray, param_arrays
from jaxinf.exchange.sources import SourceArray, path_within, read_json_document
from jaxinf.layout import DEFAULT_CHUNK_ELEMENTS
from jaxinf.store import CommittedStep, check_free_space, dtype_of
from jaxinf.transfer import (
    check_regular,
    fsync_directory,
    sync_filesystem,
    translated,
    write_box,
    write_bytes_atomically,
)
from jaxinf.typing import JsonValue

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_FILE = pattern(
    r"[^./\0][^/\0]*\.safetensors",
    "the name of a safetensors file in the same folder; nothing outside it is read",
    255,
)
_DTYPES = {"BF16": "bfloat16", "BOOL": "bool"}
_DTYPES |= {f"F{n}": f"float{n}" for n in (16, 32, 64)}
_DTYPES |= {f"I{n}": f"int{n}" for n in (8, 16, 32, 64)}
_DTYPES |= {f"U{n}": f"uint{n}" for n in (8, 16, 32, 64)}
_NAMES = {name: code for code, name in _DTYPES.items()}

_SLACK_BYTES, _MIN_ELEMENTS = 1 << 20, 1 << 12
# Copies of a portion: as read, cast, and with its axes in the tensor's order.
_COPIES = 3


class _Index(msgspec.Struct):
    """The part of ``model.safetensors.index.json`` that is read."""

    weight_map: dict[str, Annotated[str, _FILE]]


def read_safetensors(path: Path) -> dict[str, SourceArray]:
    """Reads the headers of a file, or of a directory's: of its index, or the only one.

    In names, ``/`` becomes ``.``.
    """
    if not path.is_dir():
        files = [path]
    elif (path / INDEX_NAME).is_file():
        what, index = "the index of safetensors files", path_within(path, INDEX_NAME)
        places = read_json_document(index, _Index, what, "copy it anew").weight_map
        files = [path_within(path, name) for name in sorted(set(places.values()))]
    else:
        files = [path_within(path, WEIGHTS_NAME)] * (path / WEIGHTS_NAME).exists()
    arrays: dict[str, SourceArray] = {}
    for file in files:
        of_file = _read_file(file)
        if duplicates := of_file.keys() & arrays.keys():
            raise ExchangeError(
                f"{file}: holds {shorten(min(duplicates))}, and so does another file "
                f"of {path}; give one file, or a directory of the files of one model"
            )
        arrays |= of_file
    return arrays


def _read_file(path: Path) -> dict[str, SourceArray]:
    arrays: dict[str, SourceArray] = {}
    try:
        with translated("read", path):
            check_regular(path, path.stat())
        with safetensors.safe_open(path, "numpy") as file, open(path, "rb") as raw:
            # The elements follow the header, tensor by tensor without a gap.
            offset_bytes = 8 + struct.unpack("<Q", raw.read(8))[0]
            for key in file.offset_keys():
                part, name = file.get_slice(key), key.replace("/", ".")
                shape, code = tuple(part.get_shape()), part.get_dtype()
                if code not in _DTYPES:
                    known = ", ".join(_DTYPES)
                    raise ValueError(
                        f"{shorten(key)}: expected one of {known}, found {code}"
                    )
                dtype = dtype_of(_DTYPES[code])
                arrays[name] = SourceArray(path, name, shape, dtype, offset_bytes)
                offset_bytes += math.prod(shape) * dtype.itemsize
    except (safetensors.SafetensorError, ValueError, OSError, StoreError) as error:
        raise ExchangeError(
            f"{path}: expected a safetensors file, found none that can be read "
            f"({error}); check the path, or copy the file anew"
        ) from error
    return arrays


def export_safetensors(
    step: CommittedStep,
    destination: Path,
    options: ExportOptions | None = None,
    *,
    average: bool = False,
) -> None:
    """Writes the params of a step as safetensors; blocks until it is durable.

    A tensor has the name of its leaf, ``h0.kernel``. Master params are float32.
    Adapters of ``jaxinf.train --lora`` are added to their matrices.

    Args:
      destination: A directory that does not exist yet.
      options: Memory and progress; by default 256 MiB.
      average: Whether the params' average is written in their place.

    Raises:
      FileExistsError: The destination exists.
      ExchangeError: The step has no average.
      StoreError: There is no room, a chunk is damaged, the step cannot be read, or the
        destination not written.
    """
    tensors = param_arrays(step, average=average)
    metadata = {"format": "flax", "step": str(step.commit.step)}
    write_tensors(destination, tensors, metadata, {}, options or ExportOptions())


def write_tensors(
    destination: Path,
    tensors: Sequence[ParamArray],
    metadata: Mapping[str, str],
    beside: Mapping[str, JsonValue | bytes],
    options: ExportOptions,
) -> None:
    """Makes a directory with a safetensors file, and further files beside it."""
    header, num_bytes = _header(tensors, metadata)
    with _new_directory(destination, len(header) + num_bytes) as directory:
        path = directory / WEIGHTS_NAME
        with translated("write", path), open(path, "xb") as stream:
            stream.write(header)
            stream.flush()
            os.ftruncate(stream.fileno(), len(header) + num_bytes)
            _write_elements(stream.fileno(), len(header), tensors, options)
            os.fsync(stream.fileno())
        for name, document in beside.items():
            raw = document if isinstance(document, bytes) else encode(document)
            write_bytes_atomically(directory / name, raw)


@contextlib.contextmanager
def _new_directory(destination: Path, num_bytes: int) -> Iterator[Path]:
    """Yields a temporary directory, which gets its name when all of it is durable."""
    if os.path.lexists(destination):
        raise FileExistsError(
            f"{destination}: expected a name that is free, found something there; "
            "remove it, or export to another name"
        )
    with translated("creation", destination.parent):
        destination.parent.mkdir(parents=True, exist_ok=True)
    check_free_space(
        {destination.parent: num_bytes + _SLACK_BYTES},
        "the export takes up to",
        "free some, or export to another directory",
    )
    name = f".{destination.name}.{secrets.token_hex(4)}.partial"
    temporary = destination.with_name(name)
    with translated("creation", temporary):
        temporary.mkdir()
    try:
        yield temporary
        sync_filesystem(temporary)
        with translated("renaming", destination):
            os.rename(temporary, destination)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_directory(destination.parent)


def _header(
    tensors: Sequence[ParamArray], metadata: Mapping[str, str]
) -> tuple[bytes, int]:
    """Returns a file's header, and the bytes of the elements after it."""
    # The library writes only what is in memory as a whole.
    document: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        document[tensor.name] = {
            "dtype": _NAMES[tensor.dtype.name],
            "shape": tensor.shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, end


def _write_elements(
    fd: int, offset_bytes: int, tensors: Sequence[ParamArray], options: ExportOptions
) -> None:
    max_elements = min(DEFAULT_CHUNK_ELEMENTS, options.memory_bytes // (_COPIES * 4))
    max_elements = max(max_elements, _MIN_ELEMENTS)
    done_bytes, total_bytes = 0, sum(tensor.num_bytes for tensor in tensors)
    for tensor in tensors:
        for portion, values in tensor.stream(max_elements):
            start = portion.start
            values = values.astype(tensor.dtype, copy=False)
            if tensor.axes:
                start = tuple(start[a] for a in tensor.axes)
                values = np.ascontiguousarray(values.transpose(tensor.axes))
            write_box(fd, tensor.shape, start, values, offset_bytes)
            done_bytes += values.nbytes
            options.progress(done_bytes, total_bytes)
        offset_bytes += tensor.num_bytes
