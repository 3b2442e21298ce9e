"""Resolves names, directories and globs to data files; finds the default text.

Invariant: the result depends on the file system alone; it is sorted, and each file
occurs once.
"""

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxinf.train.data.errors import DataError

_SNIFF_BYTES = 8192
_MIN_LIBRARY_BYTES = 5_000_000
# Tests and generated tables, which are neither prose nor programs.
_SKIPPED_LIBRARY_DIRS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    | {"encodings", "pydoc_data"}
)
# Data files that are not text.
_BINARY_SUFFIXES = (".parquet",)
# Files that `datasets` leaves in its folders.
_SAVED_MARKS = ("dataset_dict.json", "dataset_info.json")


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Resolves the names that a user gives for data.
        patterns: each a file (taken as it is), a directory (every Parquet and text file
            below it, hidden ones left out; text means: not empty, and no NUL among the
            first 8,192 bytes; a folder that `datasets` saved counts as one file), or a
            glob, where `**` crosses directories (files only).

    Returns:
        Resolved paths, sorted, each once.

    Raises:
        DataError: a pattern matches no file.
    """
    found: set[Path] = set()
    for pattern in patterns:
        matched = {path.resolve() for path in _matches(os.path.expanduser(pattern))}
        if not matched:
            raise DataError(
                f"data {pattern!r}: expected a file, a directory that holds text "
                "files, or a glob such as 'src/**/*.py' (quoted from the shell), "
                f"found no file (looked from {Path.cwd()})"
            )
        found |= matched
    return sorted(found)


def _matches(pattern: str) -> Iterator[Path]:
    path = Path(pattern)
    if path.is_dir():
        yield from (file for file in _walk(path) if _looks_like_data(file))
    elif path.is_file():
        yield path
    else:
        names = glob.iglob(pattern, recursive=True)
        yield from (Path(name) for name in names if os.path.isfile(name))


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        if is_saved_dataset(Path(folder)):
            subfolders.clear()
            yield Path(folder)
            continue
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".") and name not in skipped
        ]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def is_saved_dataset(path: Path) -> bool:
    """Whether a path is a folder made by `save_to_disk` of `datasets`."""
    return any((path / name).is_file() for name in _SAVED_MARKS)


def _looks_like_data(path: Path) -> bool:
    if is_saved_dataset(path):
        return True
    if not path.is_file():  # a socket, a pipe, a dangling link
        return False
    if path.suffix in _BINARY_SUFFIXES:
        return True
    with path.open("rb") as file:
        head = file.read(_SNIFF_BYTES)
    return bool(head) and b"\0" not in head


def standard_library_files() -> list[Path]:
    """Finds the sources of Python's standard library, some 10 MB on every machine.

    Returns:
        Its `*.py` files, sorted, without installed packages, tests, and the tables in
        `encodings` and `pydoc_data`.

    Raises:
        DataError: this Python ships less than 5 MB of library source.
    """
    root = Path(sysconfig.get_path("stdlib")).resolve()
    walked = _walk(root, _SKIPPED_LIBRARY_DIRS)
    files = sorted(path for path in walked if path.suffix == ".py" and path.is_file())
    found_bytes = sum(path.stat().st_size for path in files)
    if found_bytes < _MIN_LIBRARY_BYTES:
        raise DataError(
            f"standard library at {root}: expected at least {_MIN_LIBRARY_BYTES} bytes "
            f"of *.py to train on, found {found_bytes}; name other text with --data"
        )
    return files
