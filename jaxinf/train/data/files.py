"""Finds data files by name, folder and glob, their splits, and the default text.

Invariant: the result depends on the file system alone; it is sorted, and each file
occurs once.
"""

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxinf.train.data.errors import DataError
from jaxinf.train.data.formats import is_data
from jaxinf.train.data.records import is_saved_dataset

_MIN_LIBRARY_BYTES = 5_000_000
# Tests and generated tables, which are neither prose nor programs.
_SKIPPED_LIBRARY_DIRS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    | {"encodings", "pydoc_data"}
)
_HELD_OUT_SPLITS = ("validation", "valid", "val", "dev", "test")


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
            below = [file.resolve() for file in _walk(path)]
            matched = {f for f in below if is_saved_dataset(f) or is_data(f)}
            others = [f for f in {*below} - matched if f.is_file()]
            left_out |= {f for f in others if f.stat().st_size}
        else:
            names = (
                [str(path)] if path.is_file() else glob.iglob(str(path), recursive=True)
            )
            matched = {Path(name).resolve() for name in names if os.path.isfile(name)}
        if not matched:
            raise DataError(
                f"data {pattern!r}: expected a file, a directory that holds text "
                "files, or a glob such as 'src/**/*.py' (quoted from the shell), "
                f"found no file (looked from {Path.cwd()})"
            )
        found |= matched
    return sorted(found), sorted(left_out - found)


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


def by_split(
    paths: Sequence[Path], *, is_validation: bool = False
) -> tuple[list[Path], list[Path]]:
    """Returns the paths to read, and those to hold out: a split of each with splits.

    Raises:
      DataError: there are splits, but none for training, or for validation.
    """
    found: list[Path] = []
    held: list[Path] = []
    wanted = _HELD_OUT_SPLITS if is_validation else ("train",)
    for path in paths:
        splits = _splits(path)
        own = [splits[name] for name in wanted if name in splits]
        if splits and not own:
            raise DataError(
                f"{path}: expected a split named {' or '.join(wanted)}, found "
                f"{sorted(splits)}; name the folder of one of them"
            )
        found += own[:1] or [path]
        held += [splits[name] for name in _HELD_OUT_SPLITS if name in splits][:1]
    return found, held


def _splits(path: Path) -> dict[str, Path]:
    """Returns the splits of a saved `DatasetDict`, or of a folder with `train`."""
    is_dict = (path / "dataset_dict.json").is_file()
    if not is_dict and (is_saved_dataset(path) or not (path / "train").is_dir()):
        return {}
    names = [folder.name for folder in path.iterdir() if folder.is_dir()]
    return {name: path / name for name in names}


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
