"""Reads records from files: text, JSON and Parquet.

Invariant: a record knows its file and line, so that errors can name them. Files are
read in parts if their format allows it. A batch of a table is validated in full before
its first use, and only columns that are used are read.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxinf.documents import shown
from jaxinf.train.data.errors import DataError, refusing, shown_names
from jaxinf.train.data.files import format_of, open_file, read_whole

PLAIN_TEXT = ""  # the field of a plain text file; users cannot give this name
_ROWS_AT_ONCE = 1024


class Record(NamedTuple):
    """One record.

    Attributes:
      where: file and line, or file and row, for the beginning of an error.
      fields: fields by name. A plain text file is one record with one field of bytes.
      unread: names of a table's other columns.
    """

    where: str
    fields: Mapping[str, Any]
    unread: Sequence[str] = ()


def read_records(path: Path, used: Collection[str]) -> Iterator[Record]:
    """Yields the records of a file, in order.

    A text file is one record, or none if it is empty; a .json file that is no list,
    too.

    Args:
      used: names of the columns to read of a table.

    Raises:
      DataError: the file is malformed, or not of a kind that is read; names the line
        or row.
      OSError: the file cannot be read.
    """
    kind = format_of(path)
    if kind == "parquet":
        yield from _rows(path, used)
        return
    with refusing(f"{path}: expected a whole file of {kind}"), open_file(path) as file:
        if kind == "lines":
            for number, line in enumerate(file, 1):
                where = f"{path}:{number}"
                yield _record(where, _parsed(line.rstrip(b"\r\n"), where, "line"))
        elif text := read_whole(path, file):
            if kind == "json" and text.lstrip()[:1] == b"[":
                for number, fields in enumerate(_parsed(text, str(path), "file"), 1):
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


def _rows(path: Path, used: Collection[str]) -> Iterator[Record]:
    """Yields the rows of a Parquet file."""
    number = 0
    with refusing(f"{path}: expected a file of parquet", "save it again"):
        import pyarrow.dataset as dataset

        table = dataset.dataset(str(path), format="parquet")
        columns = [name for name in table.schema.names if name in used]
        if len(set(columns)) < len(columns):
            raise DataError(
                f"{path}: expected each column once, found {shown_names(columns)}"
            )
        unread = tuple(sorted(set(table.schema.names) - set(columns)))
        for batch in table.to_batches(
            columns=columns,
            batch_size=_ROWS_AT_ONCE,
            batch_readahead=1,
            fragment_readahead=1,
            use_threads=False,
        ):
            batch.validate(full=True)  # offsets outside it could end the process
            for fields in batch.to_pylist():
                number += 1
                yield Record(f"{path}: row {number}", fields, unread)
