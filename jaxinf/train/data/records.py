"""Reads records from files: text, JSON, CSV, Parquet, Arrow, folders of `datasets`.

Invariant: a record knows its file and line, so that errors can name them. Files are
read in parts if their format allows it. A batch of a table is validated in full before
its first use, and only columns that are used are read.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxinf.documents import MOST_BYTES, shown
from jaxinf.train.data.errors import DataError, refusing, shown_names
from jaxinf.train.data.files import format_of, is_saved_dataset, open_file, read_whole

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
        for part in sorted(path.glob("*.arrow")):
            if not part.name.startswith("cache-"):  # of later calls of `map`
                yield from _rows(part, "arrow", used)
        return
    kind = format_of(path)
    if kind in ("csv", "tsv", "parquet", "arrow"):
        yield from _rows(path, kind, used)
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


# --- tables --------------------------------------------------------------------------


def _rows(path: Path, kind: str, used: Collection[str]) -> Iterator[Record]:
    """Yields the rows of a table; those of CSV are text."""
    remedy = "mend it, or save it as JSON lines or Parquet"
    batches, number = _csv if kind in ("csv", "tsv") else _arrow, 0
    with refusing(f"{path}: expected a file of {kind}", remedy):
        for names, batch in batches(path, kind, used):
            columns = [name for name in names if name in used]
            if len(set(columns)) < len(columns):
                raise DataError(
                    f"{path}: expected each column once, found {shown_names(columns)}"
                )
            unread = tuple(sorted(set(names) - set(columns)))
            whole = batch.select(columns)
            whole.validate(full=True)  # offsets outside it could end the process
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                for fields in whole.slice(start, _ROWS_AT_ONCE).to_pylist():
                    number += 1
                    yield Record(f"{path}: row {number}", fields, unread)


def _csv(path: Path, kind: str, used: Collection[str]) -> Iterator[tuple[Any, Any]]:
    """Yields the names in the first line with each batch of rows below it."""
    import pyarrow as pa
    import pyarrow.csv as csv

    delimiter = "," if kind == "csv" else "\t"

    def opened(file: IO[bytes], names: Sequence[str]) -> Any:
        return csv.open_csv(
            file,
            read_options=csv.ReadOptions(use_threads=False, block_size=MOST_BYTES),
            parse_options=csv.ParseOptions(
                delimiter=delimiter, newlines_in_values=True
            ),
            convert_options=csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                strings_can_be_null=False,
            ),
        )

    with open_file(path) as file:
        names = opened(file, ()).schema.names
    with open_file(path) as file:
        for batch in opened(file, names):
            yield names, batch


def _arrow(path: Path, kind: str, used: Collection[str]) -> Iterator[tuple[Any, Any]]:
    """Yields the columns' names with each batch, which may have used columns alone."""
    import pyarrow as pa
    import pyarrow.dataset as dataset

    with path.open("rb") as file:
        is_stream = kind == "arrow" and file.read(6) != b"ARROW1"
    if is_stream:
        with pa.memory_map(str(path)) as file:
            for batch in pa.ipc.open_stream(file):
                yield batch.schema.names, batch
        return
    table = dataset.dataset(str(path), format=kind)
    for batch in table.to_batches(
        columns=[name for name in table.schema.names if name in used],
        batch_size=_ROWS_AT_ONCE,
        batch_readahead=1,
        fragment_readahead=1,
        use_threads=False,
    ):
        yield table.schema.names, batch
