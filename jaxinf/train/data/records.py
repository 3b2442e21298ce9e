"""Reads records from files: text, JSON lines, Parquet, folders saved by `datasets`.

Invariant: a record knows its file and line, so that errors can name them. Files are
read in parts if their format allows it.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxinf.train.data.errors import DataError, optional_import
from jaxinf.train.data.files import is_saved_dataset

__all__ = ["PLAIN_TEXT", "Record", "read_records", "saved_splits"]

_JSON_SUFFIXES = (".jsonl", ".ndjson")
PLAIN_TEXT = ""  # the field of a plain text file; users cannot give this name
_ROWS_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True)
class Record:
    """One record.

    Attributes:
      where: file and line, or file and row, for the beginning of an error.
      fields: fields by name. A plain text file is one record with one field of bytes.
    """

    where: str
    fields: Mapping[str, Any]


def read_records(path: Path) -> Iterator[Record]:
    """Yields the records of a file, or of a folder saved by `datasets`, in order.

    A text file is one record, or none if it is empty.

    Raises:
      DataError: the file is malformed; names the line or row.
      OSError: the file cannot be read.
    """
    if is_saved_dataset(path):
        return _saved_rows(path)
    if path.suffix in _JSON_SUFFIXES:
        return _json_lines(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    text = path.read_bytes()
    return iter((Record(str(path), {PLAIN_TEXT: text}),) if text else ())


def saved_splits(path: Path) -> dict[str, Path]:
    """Returns the splits of a saved `DatasetDict` by name; none for a `Dataset`.

    Raises:
      DataError: it lists splits that do not exist.
    """
    listing = path / "dataset_dict.json"
    if not listing.is_file():
        return {}
    names = _read_json(listing).get("splits")
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise DataError(f'{listing}: expected {{"splits": [names]}}, found {names!r}')
    splits = {name: path / _plain_name(name, listing) for name in names}
    for name, folder in splits.items():
        if not is_saved_dataset(folder):
            raise DataError(f"{listing}: split {name!r}: found no data in {folder}")
    return splits


def _json_lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                fields = json.loads(line.rstrip(b"\r\n"))
            except ValueError as error:  # also for bytes that are not UTF-8
                found = "an empty line" if not line.strip() else f"none ({error})"
                raise DataError(
                    f"{where}: expected a JSON object, found {found}; mend or remove "
                    "the line"
                ) from error
            if not isinstance(fields, dict):
                raise DataError(
                    f"{where}: expected a JSON object with named fields, found "
                    f"{_kind(fields)}"
                )
            yield Record(where, fields)


def _parquet_rows(path: Path) -> Iterator[Record]:
    parquet = optional_import("pyarrow.parquet", what=str(path))
    arrow = optional_import("pyarrow", what=str(path))
    try:
        with parquet.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=_ROWS_AT_ONCE)
            yield from _rows_of(path, batches)
    except arrow.ArrowException as error:
        raise DataError(f"{path}: expected a Parquet file: {error}") from error


def _saved_rows(folder: Path) -> Iterator[Record]:
    arrow = optional_import("pyarrow", what=str(folder))
    listing = folder / "state.json"
    if not listing.is_file():
        raise DataError(f"{folder}: expected a saved dataset, found no state.json")
    entries: Any = _read_json(listing).get("_data_files")
    try:
        names = [_plain_name(entry["filename"], listing) for entry in entries]
    except (TypeError, KeyError) as error:
        raise DataError(
            f"{listing}: expected the names of arrow files under _data_files, found "
            f"{entries!r}"
        ) from error
    for name in names:
        path = folder / name
        try:
            with arrow.memory_map(str(path)) as file:
                yield from _rows_of(path, arrow.ipc.open_stream(file))
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: expected an arrow file: {error}") from error


def _rows_of(path: Path, batches: Any) -> Iterator[Record]:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            for fields in batch.slice(start, _ROWS_AT_ONCE).to_pylist():
                number += 1
                yield Record(f"{path}: row {number}", fields)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: expected JSON: {error}") from error
    if not isinstance(document, dict):
        raise DataError(f"{path}: expected a JSON object, found {_kind(document)}")
    return document


def _plain_name(name: Any, where: Path) -> str:
    """Checks that an untrusted name stays within the listing's own folder."""
    if not isinstance(name, str) or Path(name).name != name:
        raise DataError(f"{where}: expected a name in this folder, found {name!r}")
    return name


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
    return names.get(type(value), "a number")
