"""Data files: by name, folder and glob, their splits, their formats and their bytes.

Invariant: the files found depend on the file system alone, are sorted, and occur once.
A file's format is seen from its content; no packed byte, and no byte order mark, is
ever taken for data.
"""

import bz2
import glob
import gzip
import io
import lzma
import os
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from jaxinf.train.data.errors import DataError
from jaxinf.transfer import MACHINE_MEMORY_BYTES

_HELD_OUT_SPLITS = ("validation", "valid", "val", "dev", "test")
_SAVED_MARKS = ("dataset_dict.json", "dataset_info.json")
# Tests and generated tables, which are neither prose nor programs.
_SKIPPED_LIBRARY_DIRS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_SKIPPED_LIBRARY_DIRS |= {"encodings", "pydoc_data"}

_SNIFFED_BYTES = 8192
_TABLES = ("parquet", "arrow")
_BEGINNINGS = {
    b"\x1f\x8b": "gzip",
    **{b"BZh%d1AY" % level: "bz2" for level in range(1, 10)},
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"PAR1\x15": "parquet",
    b"ARROW1\0": "arrow",
    b"\xef\xbb\xbf": "utf-8-sig",
    b"\xff\xfe\0\0": "utf-32",  # before utf-16, with which it begins
    b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
_PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zstd", ".lz4")
_SUFFIXES = {".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".csv": "csv"}
_SUFFIXES |= {".tsv": "tsv", ".parquet": "parquet"}
_SUFFIXES |= {".arrow": "arrow", ".feather": "arrow"}


def find_files(patterns: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Resolves the names that a user gives for data.

    Args:
      patterns: each a file (taken as it is), a directory (every table and text file
        below it, packed ones too, hidden ones not; text has no NUL among the first
        8,192 bytes; a folder that `datasets` saved counts as one file), or a glob,
        where `**` crosses directories (files only).

    Returns:
      Resolved paths, sorted, each once; and those of directories that are left out,
      because they are none of these and not empty.

    Raises:
      DataError: a pattern matches no file.
    """
    found: set[Path] = set()
    left_out: set[Path] = set()
    for pattern in patterns:
        path = Path(os.path.expanduser(pattern))
        if path.is_dir():
            below = {file.resolve() for file in _walk(path)}
            matched = {f for f in below if is_saved_dataset(f) or _is_data(f)}
            left_out |= {f for f in below - matched if f.is_file() and f.stat().st_size}
        else:
            names = [path] if path.is_file() else glob.iglob(str(path), recursive=True)
            matched = {Path(name).resolve() for name in names if os.path.isfile(name)}
        if not matched:
            raise DataError(
                f"data {pattern!r}: expected a file, a directory that holds text "
                "files, or a glob such as 'src/**/*.py' (quoted from the shell), "
                f"found no file (looked from {Path.cwd()})"
            )
        found |= matched
    return sorted(found), sorted(left_out - found)


def is_saved_dataset(path: Path) -> bool:
    """Whether a path is a folder made by `save_to_disk` of `datasets`."""
    return any((path / name).is_file() for name in _SAVED_MARKS)


def by_split(
    paths: Sequence[Path], *, is_validation: bool = False
) -> tuple[list[Path], list[Path]]:
    """Returns the paths to read, and those to hold out: a split of each with splits.

    Splits are those of a saved `DatasetDict`, or of a folder with a folder `train`.

    Raises:
      DataError: there are splits, but none for training, or for validation.
    """
    found: list[Path] = []
    held: list[Path] = []
    wanted = _HELD_OUT_SPLITS if is_validation else ("train",)
    for path in paths:
        has_train = (path / "train").is_dir() and not is_saved_dataset(path)
        if not has_train and not (path / "dataset_dict.json").is_file():
            found.append(path)
            continue
        splits = {folder.name: folder for folder in path.iterdir() if folder.is_dir()}
        own = [splits[name] for name in wanted if name in splits]
        if not own:
            raise DataError(
                f"{path}: expected a split named {' or '.join(wanted)}, found "
                f"{sorted(splits)}; name the folder of one of them"
            )
        found.append(own[0])
        held += [splits[name] for name in _HELD_OUT_SPLITS if name in splits][:1]
    return found, held


def standard_library_files() -> list[Path]:
    """Finds the sources of Python's standard library, some 10 MB on every machine.

    Returns:
      Its `*.py` files, sorted, without installed packages, tests and tables.
    """
    root = Path(sysconfig.get_path("stdlib")).resolve()
    walked = _walk(root, _SKIPPED_LIBRARY_DIRS)
    return sorted(path for path in walked if path.suffix == ".py" and path.is_file())


def _walk(root: Path, skipped: Collection[str] = ()) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        if is_saved_dataset(Path(folder)):
            subfolders.clear()
            yield Path(folder)
            continue
        shown = [name for name in subfolders if not name.startswith(".")]
        subfolders[:] = [name for name in shown if name not in skipped]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


# --- what a file is ------------------------------------------------------------------


def format_of(path: Path) -> str:
    """Returns the format: ``lines`` of JSON, ``json``, ``csv``, ``text`` and others."""
    name = Path(path.name.lower())
    if name.suffix in _PACKED_SUFFIXES:
        name = name.with_suffix("")
    kind = _kind(_head(path))
    return _SUFFIXES.get(name.suffix) or (kind if kind in _TABLES else "text")


def _is_data(path: Path) -> bool:
    """Whether a file of a folder is text, a table, or one of these in packed form."""
    if not path.is_file():  # a socket, a pipe, a dangling link
        return False
    head = _head(path)
    if _SUFFIXES.get(path.suffix.lower()) in _TABLES or _kind(head):
        return True
    return bool(head) and b"\0" not in head


def open_file(path: Path) -> IO[bytes]:
    """Opens a file: unpacked, in UTF-8, without a byte order mark.

    Raises:
      DataError: it is no text.
      ImportError: pyarrow, which unpacks it, is missing.
      UnicodeError: it has the mark of an encoding that it is not in.
    """
    file = io.BufferedReader(_unpacked(path, _kind(_head(path))))
    head = file.peek()
    encoding = _kind(head)
    if encoding in ("utf-16", "utf-32"):
        with file:
            return io.BytesIO(read_whole(path, file).decode(encoding).encode())
    if b"\0" in head:
        file.close()
        raise DataError(
            f"{path}: expected text, JSON, CSV, Parquet or Arrow, found a NUL byte, as "
            "in archives and other binary files; unpack it, or leave it out"
        )
    if encoding == "utf-8-sig":
        file.read(3)
    return file


def _unpacked(path: Path, packing: str | None) -> Any:
    if packing in ("zstd", "lz4"):
        import pyarrow

        return pyarrow.input_stream(str(path), compression=packing)
    opening = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}.get(packing or "")
    return opening(path) if opening else open(path, "rb", buffering=0)


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


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_SNIFFED_BYTES)


def _kind(head: bytes) -> str | None:
    found = (kind for mark, kind in _BEGINNINGS.items() if head.startswith(mark))
    return next(found, None)
