"""Records of files in all formats, and refusals with their places."""

import bz2
import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxinf.train.data.errors import DataError
from jaxinf.train.data.files import PLAIN_TEXT, read_records

USED = ("text",)


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


def test_a_byte_order_mark_is_no_data(write):
    rows = [{"text": f"line {n}\u2028ü"} for n in range(9)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    for name, text, found in (
        ("a.JSONL", lines, rows),
        ("a.txt", "line one\nü\n", [{PLAIN_TEXT: "line one\nü\n".encode()}]),
    ):
        for mark in (b"", b"\xef\xbb\xbf"):
            path = write(name, mark + text.encode())
            assert [one.fields for one in read_records(path, USED)] == found


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.zip", b"PK\3\4\x14\0", "found .* an archive"),
        ("a.jsonl", "{}".encode("utf-16-le"), "a NUL byte"),
        ("a.jsonl.gz", gzip.compress(b"{}\n", mtime=0), "unpack an archive"),
        ("a.jsonl", bz2.compress(b"{}\n"), "unpack an archive"),
        ("a.jsonl.xz", lzma.compress(b"{}\n"), "unpack an archive"),
        ("a.json", b'[{"text": "one"}]', "save records as JSON lines"),
        ("a.txt", "\u4e01".encode("utf-16"), "convert text to UTF-8"),
        ("a.csv", b"text,label\na,1\n", "another table"),
        ("a.parquet", b"PAR1 not really PAR1", "a file of parquet: Arrow"),
        ("a.parquet", gzip.compress(b"PAR1", mtime=0), "file of parquet: ArrowInvalid"),
    ],
    ids=range(10),
)
def test_files_that_are_not_read(write, name, content, found):
    with pytest.raises(DataError, match=f"{name}: expected .*{found}"):
        list(read_records(write(name, content), USED))


def test_nested_columns_and_files_without_a_suffix(tmp_path):
    turns = [[{"role": "user", "content": None}], [{"role": "a", "content": "b"}]]
    table = pa.table({"text": ["one", "two"], "none": pa.nulls(2), "turns": turns})
    pyarrow.parquet.write_table(table, tmp_path / "a.PARQUET", compression="zstd")
    (tmp_path / "by-content").write_bytes((tmp_path / "a.PARQUET").read_bytes())
    for path in tmp_path.iterdir():
        records = list(read_records(path, ("text", "none", "turns")))
        assert [record.fields for record in records] == table.to_pylist()


def test_only_columns_that_are_used_are_converted(tmp_path):
    nanoseconds = pa.array([1, 2], pa.timestamp("ns"))
    table = pa.table({"text": ["one", "two"], "when": nanoseconds})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path)
    assert texts(path) == ["one", "two"]
    assert next(iter(read_records(path, USED))).unread == ("when",)
    with pytest.raises(DataError, match="ValueError: Nanosecond"):
        list(read_records(path, ("when",)))
