"""The safetensors file format: its header, and the order of its data.

Eight bytes, the length of the header, little-endian; the header, JSON; the tensors'
elements, little-endian and in C order, one after another without a gap.
(https://huggingface.co/docs/safetensors, "Format".)

Invariant: a header that was read describes a complete file: offsets are within it, do
not overlap, and fit shapes and dtypes.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, TypeAlias

import ml_dtypes
import msgspec
import numpy as np
from msgspec import Meta

from jaxinf.documents import convert, one_of, parse_json, shown
from jaxinf.errors import ExchangeError, StoreError
from jaxinf.io import check_regular
from jaxinf.io.failures import translated

_MAX_HEADER_BYTES = 100_000_000
_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]


class _Tensor(msgspec.Struct):
    dtype: Annotated[str, one_of(*_DTYPES)]
    shape: Annotated[tuple[_Count, ...], Meta(max_length=64)]
    data_offsets: tuple[_Count, _Count]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorsHeader:
    """A file's header."""

    tensors: Mapping[str, TensorInfo]
    data_offset_bytes: int
    metadata: Mapping[str, str] = field(default_factory=dict)


def encode_header(
    tensors: Sequence[tuple[str, tuple[int, ...], np.dtype[Any]]],
    metadata: Mapping[str, str],
) -> tuple[bytes, TensorsHeader]:
    """Returns the first bytes of a file, and the header in them.

    Args:
      tensors: name, shape and dtype, in the order of their data.
    """
    document: dict[str, Any] = {"__metadata__": dict(metadata)}
    infos: dict[str, TensorInfo] = {}
    offset = 0
    for name, shape, dtype in tensors:
        infos[name] = info = TensorInfo(shape, dtype, offset)
        end = offset + info.num_bytes
        document[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data_offset_bytes = 8 + len(text)
    header = TensorsHeader(infos, data_offset_bytes, dict(metadata))
    return struct.pack("<Q", len(text)) + text, header


def read_header(path: Path) -> TensorsHeader:
    """Reads and checks the header of a file.

    Raises:
      ExchangeError: it is no safetensors file, or damaged.
    """
    try:
        with translated("read", path):
            check_regular(path, path.stat())
            with open(path, "rb") as stream:
                num_bytes = path.stat().st_size
                text = _header_text(stream, num_bytes)
        document = parse_json(text, most_bytes=_MAX_HEADER_BYTES)
        entries = convert(document, dict[str, Any])
        metadata = convert(entries.pop("__metadata__", {}), dict[str, str])
        tensors = {name: _read_info(name, entry) for name, entry in entries.items()}
        data_offset_bytes = 8 + len(text)
        _check_offsets(tensors, num_bytes - data_offset_bytes)
    except (ValueError, StoreError) as error:
        raise ExchangeError(
            f"{path}: expected a safetensors file, found none that can be read "
            f"({error}); check the path, or copy the file anew"
        ) from error
    return TensorsHeader(tensors, data_offset_bytes, metadata)


def _header_text(stream: IO[bytes], num_bytes: int) -> bytes:
    if num_bytes < 8:
        raise ValueError(f"expected at least 8 bytes, found {num_bytes}")
    length_bytes = struct.unpack("<Q", stream.read(8))[0]
    if length_bytes > min(_MAX_HEADER_BYTES, num_bytes - 8):
        raise ValueError(f"a header of {length_bytes} bytes does not fit")
    return stream.read(length_bytes)


def _read_info(name: str, entry: Any) -> TensorInfo:
    held = convert(entry, _Tensor, name if name.isidentifier() else f"[{shown(name)}]")
    begin, end = held.data_offsets
    info = TensorInfo(held.shape, _DTYPES[held.dtype], begin)
    if end - begin != info.num_bytes:
        raise ValueError(
            f"{end - begin} bytes for shape {list(info.shape)}, {held.dtype}"
        )
    return info


def _check_offsets(tensors: Mapping[str, TensorInfo], data_bytes: int) -> None:
    end = 0
    for name, info in sorted(
        tensors.items(), key=lambda item: (item[1].offset_bytes, item[1].num_bytes)
    ):
        if info.offset_bytes != end:
            raise ValueError(
                f"{shown(name)} is at byte {info.offset_bytes} of the data, expected "
                f"{end}"
            )
        end += info.num_bytes
    if end != data_bytes:
        raise ValueError(f"{data_bytes} bytes of data, the header describes {end}")
