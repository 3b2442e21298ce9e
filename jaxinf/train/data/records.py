"""Reads records from files: text, JSON, CSV, Parquet, folders saved by `datasets`.

Invariant: a record knows its file and line, so that errors can name them. Files are
read in parts if their format allows it. A batch of a table is validated in full before
its first use, and only columns that are used are read.
"""

import csv
import dataclasses
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinf.documents import MOST_BYTES, DocumentError, parse_json, shown
from jaxinf.errors import StoreIOError
from jaxinf.io import read_bounded
from jaxinf.train.data.errors import DataError, optional_import, refusing, shown_names
from jaxinf.train.data.files import is_saved_dataset

_JSON_SUFFIXES = (".jsonl", ".ndjson")
_TABLE_SUFFIXES = {".csv": ",", ".tsv": "\t"}
_ARRAY_SUFFIXES = (".npz", ".npy")
_MOST_DIGITS = 10
PLAIN_TEXT = ""  # the field of a plain text file; users cannot give this name
_ROWS_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True)
class Record:
    """One record.

    Attributes:
      where: file and line, or file and row, for the beginning of an error.
      fields: fields by name. A plain text file is one record with one field of bytes.
      unread: names of a table's other columns.
    """

    where: str
    fields: Mapping[str, Any]
    unread: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        """Names of all fields, sorted."""
        return sorted({*self.fields, *self.unread})


def read_records(path: Path, used: Collection[str]) -> Iterator[Record]:
    """Yields the records of a file, or of a folder saved by `datasets`, in order.

    A text file is one record, or none if it is empty; a .json file that is no list,
    too.

    Args:
      used: names of the columns to read of a table.

    Raises:
      DataError: the file is malformed; names the line or row.
      OSError: the file cannot be read.
    """
    if is_saved_dataset(path):
        return _saved_rows(path, used)
    if path.suffix in _JSON_SUFFIXES:
        return _json_lines(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path, used)
    if path.suffix in _TABLE_SUFFIXES:
        return _table_rows(path, _TABLE_SUFFIXES[path.suffix])
    if path.suffix in _ARRAY_SUFFIXES:
        raise DataError(
            f"{path}: expected text, JSON, CSV or Parquet, found NumPy's arrays, which "
            "models of images take; leave it out, or give --model vit"
        )
    text = path.read_bytes()
    if path.suffix == ".json" and text.lstrip()[:1] == b"[":
        return _json_items(path, text)
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
        raise DataError(
            f'{listing}: expected {{"splits": [names]}}, found {shown(names)}'
        )
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
            except (ValueError, RecursionError) as error:
                found = "an empty line" if not line.strip() else _found(error)
                raise DataError(
                    f"{where}: expected a JSON object, found {found}; mend or remove "
                    "the line"
                ) from error
            yield _record(where, fields)


def _json_items(path: Path, text: bytes) -> Iterator[Record]:
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: expected a list in JSON, found {_found(error)}; mend or remove "
            "the file"
        ) from error
    for number, fields in enumerate(items, 1):
        yield _record(f"{path}: item {number}", fields)


def _found(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "one that is nested too deep"
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return f"none ({error})"
    digits = sys.get_int_max_str_digits()  # Python's own text advises programmers
    return f"none (a number of more than {digits} digits)"


def _record(where: str, fields: Any) -> Record:
    if isinstance(fields, dict):
        return Record(where, fields)
    raise DataError(
        f"{where}: expected a JSON object with named fields, found {_kind(fields)}"
    )


def _table_rows(path: Path, delimiter: str) -> Iterator[Record]:
    """Yields the rows below a line of names; digits as ``label`` are a number."""
    csv.field_size_limit(max(csv.field_size_limit(), MOST_BYTES))  # of the process
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, delimiter=delimiter, strict=True)
            for number, fields in enumerate(rows, 1):
                where = f"{path}: row {number}"
                if None in fields or None in fields.values():
                    raise DataError(
                        f"{where}: expected {len(rows.fieldnames or ())} columns, as "
                        "the first line names, found another number; mend the row"
                    )
                label = fields.get("label", "")
                is_number = label.isdecimal() and len(label) < _MOST_DIGITS
                yield Record(
                    where, fields | ({"label": int(label)} if is_number else {})
                )
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: expected a table in UTF-8 whose first line names the columns: "
            f"{error}; save it as JSON lines or Parquet"
        ) from error


def _parquet_rows(path: Path, used: Collection[str]) -> Iterator[Record]:
    parquet = optional_import("pyarrow.parquet", what=str(path))
    with (
        refusing(f"{path}: expected a Parquet file"),
        parquet.ParquetFile(path) as file,
    ):
        names = file.schema_arrow.names
        columns = [name for name in names if name in used]
        batches = file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns)
        yield from _rows_of(path, batches, names, used)


def _saved_rows(folder: Path, used: Collection[str]) -> Iterator[Record]:
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
            f"{shown(entries)}"
        ) from error
    for name in names:
        path = folder / name
        what = f"{path}: expected an arrow file"
        with refusing(what), arrow.memory_map(str(path)) as file:
            batches = arrow.ipc.open_stream(file)
            yield from _rows_of(path, batches, batches.schema.names, used)


def _rows_of(
    path: Path, batches: Any, names: Sequence[str], used: Collection[str]
) -> Iterator[Record]:
    columns = [name for name in names if name in used]
    if len(set(columns)) < len(columns):
        raise DataError(
            f"{path}: expected each column once, found {shown_names(columns)}"
        )
    unread = tuple(sorted(set(names) - set(columns)))
    number = 0
    for batch in batches:
        whole = batch.select(columns)
        whole.validate(full=True)  # offsets that lead outside could end the process
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            part = whole.slice(start, _ROWS_AT_ONCE)
            values = [column.to_pylist() for column in part.columns]
            for row in range(min(_ROWS_AT_ONCE, batch.num_rows - start)):
                number += 1
                fields = {n: v[row] for n, v in zip(columns, values, strict=True)}
                yield Record(f"{path}: row {number}", fields, unread)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = parse_json(read_bounded(path, MOST_BYTES))
    except (DocumentError, StoreIOError) as error:
        raise DataError(f"{path}: expected JSON: {error}") from error
    if not isinstance(document, dict):
        raise DataError(f"{path}: expected a JSON object, found {_kind(document)}")
    return document


def _plain_name(name: Any, where: Path) -> str:
    """Checks that an untrusted name stays within the listing's own folder."""
    if not isinstance(name, str) or Path(name).name != name or "\0" in name:
        raise DataError(f"{where}: expected a name in this folder, found {shown(name)}")
    return name


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
    return names.get(type(value), "a number")
