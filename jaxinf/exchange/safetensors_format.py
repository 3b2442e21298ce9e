"""The safetensors file format: its header, and the order of its data.

Eight bytes, the length of the header, little-endian; the header, JSON; the tensors'
elements, little-endian and in C order, one after another without a gap.
(https://huggingface.co/docs/safetensors, "Format".)

Invariant: a header that is read describes a file that is whole: offsets are within it,
do not overlap, and fit shapes and dtypes.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxinf.errors import ExchangeError

__all__ = ["TensorInfo", "TensorsHeader", "encode_header", "read_header"]

_MAX_HEADER_BYTES = 100_000_000
_UNREADABLE = (
    *(OSError, struct.error, ValueError, KeyError, TypeError, AttributeError),
    RecursionError,
)
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


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file.

    Attributes:
      shape: () for a scalar.
      dtype: of its elements.
      offset_bytes: from the beginning of the data.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorsHeader:
    """What a file says of itself.

    Attributes:
      tensors: by name.
      data_offset_bytes: where in the file the data begins.
      metadata: texts of the writer's.
    """

    tensors: Mapping[str, TensorInfo]
    data_offset_bytes: int
    metadata: Mapping[str, str] = field(default_factory=dict)


def encode_header(
    tensors: Sequence[tuple[str, tuple[int, ...], np.dtype[Any]]],
    metadata: Mapping[str, str],
) -> tuple[bytes, TensorsHeader]:
    """The first bytes of a file, and the header that they hold.

    Args:
      tensors: name, shape and dtype, in the order of their data.
      metadata: for ``__metadata__``.
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
        with open(path, "rb") as stream:
            num_bytes = path.stat().st_size
            length_bytes = struct.unpack("<Q", stream.read(8))[0]
            if length_bytes > min(_MAX_HEADER_BYTES, num_bytes - 8):
                raise ValueError(f"a header of {length_bytes} bytes does not fit")
            text = stream.read(length_bytes)
        document = json.loads(text, object_pairs_hook=_without_repetition)
        metadata = dict(document.pop("__metadata__", {}))
        tensors = {name: _read_info(entry) for name, entry in document.items()}
        data_offset_bytes = 8 + length_bytes
        _check_offsets(tensors, num_bytes - data_offset_bytes)
    except _UNREADABLE as error:
        raise ExchangeError(
            f"{path}: expected a safetensors file, found none that can be read "
            f"({type(error).__name__}: {error}); check the path, or copy the file anew"
        ) from error
    return TensorsHeader(tensors, data_offset_bytes, metadata)


def _without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a name comes twice in the header")
    return document


def _read_info(entry: Mapping[str, Any]) -> TensorInfo:
    shape = tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not all(type(n) is int for n in (*shape, begin, end)):
        raise ValueError(f"expected whole numbers, found {entry}")
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {entry['dtype']} is not known here")
    info = TensorInfo(shape, _DTYPES[entry["dtype"]], begin)
    if min(shape, default=0) < 0 or end - begin != info.num_bytes:
        raise ValueError(f"{end - begin} bytes for shape {shape}, {entry['dtype']}")
    return info


def _check_offsets(tensors: Mapping[str, TensorInfo], data_bytes: int) -> None:
    end = 0
    for name, info in sorted(
        tensors.items(), key=lambda item: (item[1].offset_bytes, item[1].num_bytes)
    ):
        if info.offset_bytes != end:
            raise ValueError(
                f"{name} is at byte {info.offset_bytes} of the data, expected {end}"
            )
        end += info.num_bytes
    if end != data_bytes:
        raise ValueError(f"{data_bytes} bytes of data, the header describes {end}")
