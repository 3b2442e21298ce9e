"""Reads records from files: text, JSON, CSV, Parquet, Arrow, folders of `datasets`.

Invariant: a record knows its file and line, so that errors can name them. Files are
read in parts if their format allows it. A batch of a table is validated in full before
its first use, and only columns that are used are read.
"""

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from jaxinf.documents import MOST_BYTES, shown
from jaxinf.train.data.errors import DataError, optional_import, refusing, shown_names
from jaxinf.train.data.files import format_of, is_saved_dataset, open_file, read_whole

PLAIN_TEXT = ""  # the field of a plain text file; users cannot give this name
_ROWS_AT_ONCE = 1024
_DELIMITERS = {"csv": ",", "tsv": "\t"}


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
      DataError: the file is malformed, or not of a kind that is read; names the line
        or row.
      OSError: the file cannot be read.
    """
    if is_saved_dataset(path):
        parts = sorted(path.glob("*.arrow"))  # but those of later calls of `map`
        for part in (part for part in parts if not part.name.startswith("cache-")):
            yield from _stream_rows(part, used)
        return
    kind = format_of(path)
    if kind in ("parquet", "arrow"):
        yield from _table_rows(path, kind, used)
        return
    with refusing(f"{path}: expected a whole file of {kind}"), open_file(path) as file:
        if kind == "lines":
            for number, line in enumerate(file, 1):
                where = f"{path}:{number}"
                yield _record(where, _parsed(line.rstrip(b"\r\n"), where, "line"))
        elif kind in _DELIMITERS:
            yield from _csv_rows(path, file, _DELIMITERS[kind], used)
        elif text := read_whole(path, file):
            if kind == "json" and text.lstrip()[:1] == b"[":
                items = _parsed(text, str(path), "file")
                for number, fields in enumerate(items, 1):
                    yield _record(f"{path}: item {number}", fields)
            else:
                yield Record(str(path), {PLAIN_TEXT: text})


def _parsed(text: bytes, where: str, part: str) -> Any:
    wanted = "a JSON object" if part == "line" else "a list in JSON"
    with refusing(f"{where}: expected {wanted}", f"mend or remove the {part}"):
        return json.loads(text)


def _record(where: str, fields: Any) -> Record:
    if isinstance(fields, dict):
        return Record(where, fields)
    raise DataError(
        f"{where}: expected a JSON object with named fields, found {shown(fields)}"
    )


def _csv_rows(
    path: Path, file: IO[bytes], delimiter: str, used: Collection[str]
) -> Iterator[Record]:
    """Yields the rows below a line of names, as text."""
    csv = optional_import("pyarrow.csv", what=str(path))
    text = optional_import("pyarrow", what=str(path)).string()

    def opened(file: IO[bytes], names: Sequence[str]) -> Any:
        types = dict.fromkeys(names, text)
        return csv.open_csv(
            file,
            csv.ReadOptions(use_threads=False, block_size=MOST_BYTES),
            csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            csv.ConvertOptions(column_types=types, strings_can_be_null=False),
        )

    what = f"{path}: expected a table in UTF-8 whose first line names the columns"
    with refusing(what, "mend it, or save it as JSON lines or Parquet"):
        with open_file(path) as head:
            names = opened(head, ()).schema.names
        yield from _rows_of(path, opened(file, names), names, used)


def _table_rows(path: Path, kind: str, used: Collection[str]) -> Iterator[Record]:
    with path.open("rb") as file:
        is_stream = kind == "arrow" and file.read(6) != b"ARROW1"
    if is_stream:
        yield from _stream_rows(path, used)
        return
    dataset = optional_import("pyarrow.dataset", what=str(path))
    with refusing(f"{path}: expected a file of {kind.capitalize()}"):
        table = dataset.dataset(str(path), format=kind)
        names = table.schema.names
        batches = table.to_batches(
            columns=[name for name in names if name in used],
            batch_size=_ROWS_AT_ONCE,
            batch_readahead=1,
            fragment_readahead=1,
            use_threads=False,
        )
        yield from _rows_of(path, batches, names, used)


def _stream_rows(path: Path, used: Collection[str]) -> Iterator[Record]:
    arrow = optional_import("pyarrow", what=str(path))
    with (
        refusing(f"{path}: expected an arrow file"),
        arrow.memory_map(str(path)) as file,
    ):
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
