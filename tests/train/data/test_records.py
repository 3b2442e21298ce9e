"""Records of files in all formats, and refusals with their places."""

import bz2
import gzip
import io
import json
import lzma
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from jaxinf.train.data import records
from jaxinf.train.data.errors import DataError
from jaxinf.train.data.files import by_split
from jaxinf.train.data.records import PLAIN_TEXT, read_records

USED = ("text",)
SAVED = Path(__file__).parents[2] / "golden" / "saved_dataset"
"""Made by `datasets`, version 5.2; to make it again:

python -c "
from datasets import Dataset, DatasetDict
rows = lambda a, b: Dataset.from_dict({'text': [f'text {n}' for n in range(a, b)]})
DatasetDict(train=rows(0, 5), test=rows(5, 8)).save_to_disk(
    'tests/golden/saved_dataset', num_shards={'train': 2, 'test': 1})"
"""


def texts(path):
    return [record.fields["text"] for record in read_records(path, USED)]


def test_plain_text(write):
    (record,) = read_records(write("a.txt", b"one\ntwo\xff"), USED)
    assert record.fields == {PLAIN_TEXT: b"one\ntwo\xff"}
    assert list(read_records(write("empty.txt", ""), USED)) == []


def test_json_lines(write):
    path = write("a.jsonl", [{"text": "one"}, {"text": "zwei\nü"}])
    assert texts(path) == ["one", "zwei\nü"]
    assert [r.where for r in read_records(path, USED)] == [f"{path}:1", f"{path}:2"]


def test_last_line_needs_no_end(write):
    assert texts(write("a.ndjson", b'{"text": "one"}\n{"text": "two"}')) == [
        "one",
        "two",
    ]


def test_a_list_in_json(write):
    path = write("a.json", b' [{"text": "one"}, {"text": "two"}]')
    assert texts(path) == ["one", "two"]
    assert [r.where for r in read_records(path, USED)] == [
        f"{path}: item 1",
        f"{path}: item 2",
    ]
    (record,) = read_records(write("b.json", b'{"name": "one"}'), USED)
    assert record.fields == {PLAIN_TEXT: b'{"name": "one"}'}
    for content, found in (
        (b"[1]", "item 1: expected a JSON object"),
        (b"[{", r"Expecting.*; mend or remove the file"),
        (b"[" * 100_000, "RecursionError: .*; mend or remove the file"),
        (b"[" + b"9" * 5000 + b"]", "Exceeds the limit"),
    ):
        with pytest.raises(DataError, match=found):
            list(read_records(write("c.json", content), USED))


def test_tables(write):
    path = write("a.csv", '\ufefftext,label\n"one, two\n",3\nb,many\n')
    rows = read_records(path, USED)
    assert [row.fields for row in rows] == [{"text": "one, two\n"}, {"text": "b"}]
    rows = list(read_records(path, ("label", "text")))
    assert [row.fields["label"] for row in rows] == ["3", "many"]
    assert rows[1].where == f"{path}: row 2"
    assert texts(write("a.tsv", "text\tn\none\t1\n")) == ["one"]
    assert texts(write("c.csv", "text\n" + "a" * 200_000)) == ["a" * 200_000]
    for content, found in (
        (b"text,label\na\n", "Row #2: Expected 2 columns, got 1: a; mend it"),
        (b"text\na,b\n", "Row #2: Expected 1 columns, got 2: a,b"),
        (b"text,text\na,b\n", "expected each column once, found 'text', 'text'"),
        (b"text\n\xff\n", "expected a file of csv.*UTF8"),
    ):
        with pytest.raises(DataError, match=found):
            list(read_records(write("b.csv", content), USED))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"", "Expecting value.*; mend or remove the line"),
        (b'{"text": "cut', "Unterminated"),
        (b'{"text": "\xff"}', "UnicodeDecodeError"),
        (b'["text"]', "found a list"),
        (b"null", "found None"),
        (b"3", "found 3"),
        (b'{"text":' + b"[" * 100_000, "RecursionError"),
        (b'{"text":' + b"9" * 5000, "Exceeds the limit.*; mend"),
    ],
)
def test_malformed_lines_are_named(write, line, found):
    path = write("a.jsonl", b'{"text": "one"}\n' + line + b'\n{"text": "two"}\n')
    with pytest.raises(DataError, match=f"a.jsonl:2: expected a JSON object.*{found}"):
        list(read_records(path, USED))


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"text {n}" for n in range(3000)]})
    pyarrow.parquet.write_table(table, path, row_group_size=700)
    assert texts(path) == [f"text {n}" for n in range(3000)]
    assert list(read_records(path, USED))[-1].where == f"{path}: row 3000"


def test_parquet_that_is_none(write):
    with pytest.raises(
        DataError, match=r"a.parquet: expected a file of parquet: Arrow"
    ):
        list(read_records(write("a.parquet", b"PAR1 not really PAR1"), USED))


def test_saved_dataset():
    train, held = by_split([SAVED])
    assert (train, held) == ([SAVED / "train"], [SAVED / "test"])
    assert by_split([SAVED], is_validation=True)[0] == held
    assert texts(SAVED / "train") == [f"text {n}" for n in range(5)]
    assert texts(SAVED / "test") == [f"text {n}" for n in range(5, 8)]
    assert by_split([SAVED / "train"]) == ([SAVED / "train"], [])


def test_what_map_left_beside_a_saved_dataset_is_no_part_of_it(write, tmp_path):
    root = saved_batch(write, pa.record_batch({"text": ["one"]}))
    (root / "cache-1234.arrow").write_bytes((root / "a.arrow").read_bytes())
    assert texts(root) == ["one"]
    (root / "b.arrow").write_bytes(b"no arrow")
    with pytest.raises(DataError, match=r"b.arrow: expected a file of arrow"):
        texts(root)


FORMS = {
    "plain": lambda raw: raw,
    "gzip": gzip.compress,
    "two members": lambda raw: gzip.compress(raw[:40]) + gzip.compress(raw[40:]),
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zstd": lambda raw: pa.Codec("zstd").compress(raw, asbytes=True),
    "lz4": lambda raw: pa.Codec("lz4").compress(raw, asbytes=True),
    "mark": lambda raw: b"\xef\xbb\xbf" + raw,
    "utf-16": lambda raw: raw.decode().encode("utf-16"),
    "utf-16-be": lambda raw: b"\xfe\xff" + raw.decode().encode("utf-16-be"),
    "utf-32": lambda raw: raw.decode().encode("utf-32"),
    "packed mark": lambda raw: gzip.compress(b"\xef\xbb\xbf" + raw),
}
ROWS = [{"text": f"line {n}\u2028ü"} for n in range(9)]
WHOLE = {
    ".jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS),
    ".JSON": json.dumps(ROWS),
    ".csv": "text\n" + "".join(f"{row['text']}\n" for row in ROWS),
    ".txt": "line one\nü\n" * 9,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suffix", WHOLE)
def test_the_same_text_in_each_form(write, suffix, form):
    raw = WHOLE[suffix].encode()
    for name in (f"a{suffix}", f"a{suffix.upper()}.gz"):
        path = write(name, FORMS[form](raw))
        found = [record.fields for record in read_records(path, USED)]
        assert found == (ROWS if suffix != ".txt" else [{PLAIN_TEXT: raw}])


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.zip", b"PK\3\4\x14\0", "found a NUL byte, as in archives"),
        (
            "a.tar.gz",
            gzip.compress(b"name" + b"\0" * 99, mtime=0),
            "found a NUL byte, as in",
        ),
        ("a.jsonl", "{}".encode("utf-16-le"), "found a NUL byte, as in archives"),
        ("a.parquet", gzip.compress(b"PAR1", mtime=0), "file of parquet: ArrowInvalid"),
        ("a.jsonl.gz", gzip.compress(b"{}\n" * 99, mtime=0)[:-9], "EOFError"),
        ("a.jsonl.xz", lzma.compress(b"{}\n" * 99)[:-9], "EOFError"),
        ("a.txt", b"\xff\xfea", "UnicodeDecodeError: 'utf-16"),
    ],
    ids=["zip", "tar", "utf-16", "parquet", "gzip", "xz", "text"],
)
def test_files_that_are_not_read(write, name, content, found):
    with pytest.raises(DataError, match=f"{name}: expected .*{found}"):
        list(read_records(write(name, content), USED))


def test_tables_that_are_packed_or_of_arrow(tmp_path):
    turns = [[{"role": "user", "content": None}], [{"role": "a", "content": "b"}]]
    table = pa.table({"text": ["one", "two"], "none": pa.nulls(2), "turns": turns})
    pyarrow.feather.write_feather(table, tmp_path / "a.Feather", compression="zstd")
    pyarrow.parquet.write_table(table, tmp_path / "a.PARQUET", compression="zstd")
    (tmp_path / "by-content").write_bytes((tmp_path / "a.PARQUET").read_bytes())
    for path in tmp_path.iterdir():
        records = list(read_records(path, ("text", "none", "turns")))
        assert [record.fields for record in records] == table.to_pylist()


def test_missing_package_names_its_extra(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = write("a.parquet", b"")
    with pytest.raises(
        DataError, match=r"a.parquet: .*pyarrow.*pip install '.\[data\]'"
    ):
        list(read_records(path, USED))


def test_rows_of_one_batch_are_read_a_part_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_ROWS_AT_ONCE", 2)
    path = tmp_path / "a.parquet"
    numbers = np.arange(5)
    pyarrow.parquet.write_table(pa.table({"text": numbers}), path)
    assert texts(path) == numbers.tolist()


def saved_batch(write, batch):
    file = io.BytesIO()
    with pa.ipc.new_stream(file, batch.schema) as out:
        out.write_batch(batch)
    root = write("saved/dataset_info.json", "{}").parent
    (root / "a.arrow").write_bytes(file.getvalue())
    return root


@pytest.mark.parametrize("end", [2**28, 2**31 - 1, -1, 3])
def test_offsets_outside_the_data_are_refused(write, end):
    """Read as they were, they ended the process, or gave bytes from elsewhere."""
    text = b"one two"
    offsets = np.array([0, end, len(text)], np.int32)
    column = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(text)]
    )
    root = saved_batch(write, pa.RecordBatch.from_arrays([column], names=["text"]))
    if end == 3:
        assert texts(root) == ["one", " two"]
        return
    with pytest.raises(DataError, match=r"a.arrow: expected a file of arrow: ArrowInv"):
        list(read_records(root, USED))


def test_only_columns_that_are_used_are_converted(write, tmp_path):
    nanoseconds = pa.array([1, 2], pa.timestamp("ns"))
    table = pa.table({"text": ["one", "two"], "when": nanoseconds})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for path in (tmp_path / "a.parquet", saved_batch(write, table.to_batches()[0])):
        records = list(read_records(path, USED))
        assert [r.fields for r in records] == [{"text": "one"}, {"text": "two"}]
        assert records[0].unread == ("when",)
        with pytest.raises(DataError, match="ValueError: Nanosecond"):
            list(read_records(path, ("when",)))
