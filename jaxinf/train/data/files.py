"""Data files: found by name, folder and glob, and read as records.

Invariant: the files found depend on the file system alone, are sorted, and occur once.
A file's format is seen from its suffix and its content; no packed byte, and no byte
order mark, is ever taken for data. A record knows its file and line, so that errors can
name them. A batch of a table is validated in full before its first use, and only
columns that are used are read.
"""

import glob
import json
import os
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxinf.documents import shorten
from jaxinf.train.data.errors import DataError, as_data_error, list_names

PLAIN_TEXT = ""  # the field of a plain text file; users cannot give this name
_ROWS_AT_ONCE = 1024

# Tests and generated tables, which are neither prose nor programs.
_SKIPPED_LIBRARY_DIRS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_SKIPPED_LIBRARY_DIRS |= {"encodings", "pydoc_data"}

_SNIFFED_BYTES = 8192
_FORMATS = {".jsonl": "lines", ".ndjson": "lines", ".parquet": "parquet"}
_FORMATS |= dict.fromkeys((".json", ".csv", ".tsv", ".arrow", ".feather"), "none")
_PARQUET, _UTF_8_MARK = b"PAR1", b"\xef\xbb\xbf"
# gzip, bzip2, UTF-16, UTF-32; others that are no text have a NUL.
_NOT_TEXT = (b"\x1f\x8b", b"BZh", b"\xff\xfe", b"\xfe\xff")


def find_files(patterns: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Resolves the names that a user gives for data.

    A pattern is a file, which is taken as it is; a directory, for all text and Parquet
    files below it but hidden ones; or a glob of files, where `**` crosses directories.

    Returns:
      Resolved paths, sorted, each once; and those of files of directories that are left
      out: files of other formats, unless a directory has no others.
    """
    files: set[Path] = set()
    left_out: set[Path] = set()
    for pattern in patterns:
        path = Path(os.path.expanduser(pattern))
        if path.is_dir():
            below = {file.resolve() for file in _walk(path) if file.is_file()}
            below = {file for file in below if file.stat().st_size}
            matched = {file for file in below if _format_of(file) != "none"} or below
            left_out |= below - matched
        else:
            names = [path] if path.is_file() else glob.iglob(str(path), recursive=True)
            matched = {Path(name).resolve() for name in names if os.path.isfile(name)}
        if not matched:
            raise DataError(
                f"data {pattern!r}: expected a file, a directory that holds text "
                "files, or a glob such as 'src/**/*.py' (quoted from the shell), "
                f"found no file (looked from {Path.cwd()})"
            )
        files |= matched
    return sorted(files), sorted(left_out - files)


def standard_library_files() -> list[Path]:
    """Finds the modules of Python's standard library, some 10 MB on every machine."""
    root = Path(sysconfig.get_path("stdlib")).resolve()
    walked = _walk(root, _SKIPPED_LIBRARY_DIRS)
    return sorted(path for path in walked if path.suffix == ".py" and path.is_file())


def _walk(root: Path, skipped: Collection[str] = ()) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        visible = [name for name in subfolders if not name.startswith(".")]
        subfolders[:] = [name for name in visible if name not in skipped]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _format_of(path: Path) -> str:
    """Returns ``lines`` of JSON, ``parquet``, ``text``, or ``none``."""
    with path.open("rb") as file:
        head = file.read(_SNIFFED_BYTES)
    kind = _FORMATS.get(path.suffix.lower())
    kind = kind or ("parquet" if head.startswith(_PARQUET) else "text")
    is_text = b"\0" not in head and not head.startswith(_NOT_TEXT)
    return kind if is_text or kind == "parquet" else "none"


class Record(NamedTuple):
    """A record of a file and line, or row; a text file is one with a field of bytes.

    The names of a table's other columns are `unread`.
    """

    where: str
    fields: Mapping[str, Any]
    unread: Sequence[str] = ()


def read_records(path: Path, columns: Collection[str]) -> Iterator[Record]:
    """Yields the records of a file, of a table those columns.

    A text file is one record, or none if it is empty.
    """
    kind = _format_of(path)
    if kind == "parquet":
        yield from _parquet_rows(path, columns)
        return
    if read := {".csv": "read_csv", ".tsv": "read_table"}.get(path.suffix.lower()):
        command = f"pandas.{read}({path.name!r}).to_json({path.stem + '.jsonl'!r}"
        raise DataError(
            f"{path}: expected JSON lines or Parquet, found {path.suffix[1:].upper()}, "
            f"which is not read; convert it: {command}, orient='records', lines=True)"
        )
    if kind == "none":
        raise DataError(
            f"{path}: expected text in UTF-8, JSON lines or Parquet, found other JSON, "
            "another table, an archive, UTF-16, or a NUL byte; save records as JSON "
            "lines (.jsonl) or Parquet, unpack an archive (gunzip, unzip), convert "
            "text to UTF-8, or leave it out"
        )
    with path.open("rb") as file:
        if file.read(len(_UTF_8_MARK)) != _UTF_8_MARK:
            file.seek(0)
        if kind == "lines":
            for number, line in enumerate(file, 1):
                yield _parse_line(f"{path}:{number}", line.rstrip(b"\r\n"))
        elif text := file.read():
            yield Record(str(path), {PLAIN_TEXT: text})


def _parse_line(where: str, line: bytes) -> Record:
    with as_data_error(f"{where}: expected a JSON object", "mend or remove the line"):
        fields = json.loads(line)
    if isinstance(fields, dict):
        return Record(where, fields)
    raise DataError(
        f"{where}: expected a JSON object with named fields, found {shorten(fields)}"
    )


def _parquet_rows(path: Path, columns: Collection[str]) -> Iterator[Record]:
    number = 0
    with as_data_error(f"{path}: expected a file of parquet", "save it again"):
        import pyarrow.parquet as parquet

        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            known = [name for name in names if name in columns]
            if len({*known}) < len(known):
                raise DataError(
                    f"{path}: expected each column once, found {list_names(known)}; "
                    "rename one"
                )
            unread = tuple(sorted({*names} - {*known}))
            options: Any = {"columns": known, "use_threads": False}
            for batch in file.iter_batches(_ROWS_AT_ONCE, **options):
                batch.validate(full=True)  # offsets outside it could end the process
                for fields in batch.to_pylist():
                    number += 1
                    yield Record(f"{path}: row {number}", fields, unread)
