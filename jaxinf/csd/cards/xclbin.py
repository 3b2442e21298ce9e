"""The names of the kernels in an xclbin, from the file itself.

Invariant: the file is only read, and a file of another kind is a ValueError.

The layout (``axlf`` in XRT's ``xrt/detail/xclbin.h``): a header of 456 bytes that
begins with ``xclbin2`` and ends with the number of sections, then a header of 40 bytes
for each.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree

_MAGIC = b"xclbin2\0"
_HEADER_BYTES, _COUNT_OFFSET = 456, 448
_SECTION = struct.Struct("<I16s4xQQ")  # kind, name, offset, length
_EMBEDDED_METADATA = 2
_MOST_SECTIONS = 0x10000


def kernel_names(path: Path) -> list[str]:
    """Returns the names of the kernels in an xclbin's metadata, in its order.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is no xclbin, or damaged.
    """
    with path.open("rb") as file:
        for kind, offset, length in _sections(file, path):
            if kind == _EMBEDDED_METADATA:
                file.seek(offset)
                return _names(file.read(length), path)
    raise ValueError(
        f"{path}: expected an xclbin with kernels, found no metadata in it"
    )


def _sections(file: BinaryIO, path: Path) -> Iterator[tuple[int, int, int]]:
    num_bytes = os.fstat(file.fileno()).st_size
    header = file.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
        raise ValueError(f"{path}: expected an xclbin, found another kind of file")
    (count,) = struct.unpack_from("<I", header, _COUNT_OFFSET)
    table = file.read(_SECTION.size * min(count, _MOST_SECTIONS))
    if len(table) < _SECTION.size * count:
        raise ValueError(f"{path}: expected {count} sections, found the file's end")
    for kind, _, offset, length in _SECTION.iter_unpack(table):
        if offset + length > num_bytes:
            raise ValueError(f"{path}: expected a section at byte {offset}, found none")
        yield kind, offset, length


def _names(xml: bytes, path: Path) -> list[str]:
    try:
        root = ElementTree.fromstring(xml.rstrip(b"\0"))
    except ElementTree.ParseError as error:
        raise ValueError(f"{path}: its metadata is damaged: {error}") from error
    return [kernel.get("name", "") for kernel in root.iter("kernel")]
