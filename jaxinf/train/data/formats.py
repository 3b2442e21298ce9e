"""What a file is by its content: its bytes, unpacked, in UTF-8 and without a mark.

Invariant: no packed byte, and no byte order mark, is ever taken for data.
"""

import bz2
import codecs
import gzip
import io
import lzma
from pathlib import Path
from typing import IO, Any

from jaxinf.io import MACHINE_MEMORY_BYTES
from jaxinf.train.data.errors import DataError, optional_import

_SNIFFED_BYTES = 8192
_PACKED = {
    b"\x1f\x8b": "gzip",
    **{b"BZh%d1AY" % level: "bz2" for level in range(1, 10)},
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zstd", ".lz4")
_OTHERS = {
    b"PK\3\4": "a zip archive, or arrays of NumPy",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!\x1a": "a RAR archive",
    b"\x93NUMPY": "an array of NumPy",
}
_TABLES = {b"PAR1\x15": "parquet", b"ARROW1\0": "arrow"}
_SUFFIXES = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
# UTF-32 first: its mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def format_of(path: Path) -> str:
    """Returns the format: ``lines`` of JSON, ``json``, ``csv``, ``text`` and others.

    Raises:
      DataError: the file is of a kind that is not read, such as an archive.
    """
    name = Path(path.name.lower())
    if name.suffix in _PACKED_SUFFIXES:
        name = name.with_suffix("")
    head = _head(path)
    found = _SUFFIXES.get(name.suffix) or _first(_TABLES, head) or "text"
    other = _first(_OTHERS, head)
    if name.suffix in (".tar", ".tgz", ".tbz2", ".txz"):
        other = "a tar archive"
    if other or (found in _TABLES.values() and _first(_PACKED, head)):
        raise DataError(
            f"{path}: expected text, JSON, CSV, Parquet or Arrow, found "
            f"{other or 'a packed table'}; unpack it, or leave it out"
        )
    return found


def is_data(path: Path) -> bool:
    """Whether a file of a folder is text, a table, or one of these in packed form."""
    if not path.is_file():  # a socket, a pipe, a dangling link
        return False
    head = _head(path)
    if _first({**_PACKED, **_TABLES, **dict(_MARKS)}, head):
        return True
    if path.suffix.lower() in (".parquet", ".arrow", ".feather"):
        return True
    return bool(head) and b"\0" not in head


def open_file(path: Path) -> IO[bytes]:
    """Opens a file: unpacked, in UTF-8, without a byte order mark.

    Raises:
      DataError: a package that unpacks it is missing.
      UnicodeError: it has the mark of an encoding that it is not in.
    """
    file = io.BufferedReader(_unpacked(path, _first(_PACKED, _head(path))))
    encoding = _first(dict(_MARKS), file.peek(4)[:4])
    if encoding == "utf-8-sig":
        file.read(len(codecs.BOM_UTF8))
    elif encoding is not None:
        with file:
            return io.BytesIO(read_whole(path, file).decode(encoding).encode())
    return file


def read_whole(path: Path, file: IO[bytes]) -> bytes:
    """Reads the rest of a file.

    Raises:
      DataError: it has more bytes than the machine's memory.
    """
    content = bytearray()
    while chunk := file.read(1 << 24):
        content += chunk
        if len(content) > MACHINE_MEMORY_BYTES:
            raise DataError(
                f"{path}: expected at most {MACHINE_MEMORY_BYTES} bytes once unpacked, "
                "as this machine has, found more; divide it, or give JSON lines"
            )
    return bytes(content)


def _unpacked(path: Path, packing: str | None) -> Any:
    if packing is None:
        return open(path, "rb", buffering=0)
    if packing in ("zstd", "lz4"):
        arrow = optional_import("pyarrow", what=str(path))
        return arrow.input_stream(str(path), compression=packing)
    return {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}[packing](path)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_SNIFFED_BYTES)


def _first(kinds: dict[bytes, str], head: bytes) -> str | None:
    return next((kind for mark, kind in kinds.items() if head.startswith(mark)), None)
