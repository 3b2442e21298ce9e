"""Records of files in all formats, and refusals with their places."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxinf.train.data import errors, records
from jaxinf.train.data.errors import DataError
from jaxinf.train.data.records import PLAIN_TEXT, read_records, saved_splits

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
        (b"[" * 100_000, "found one that is nested too deep; mend or remove the file"),
        (
            b"[" + b"9" * 5000 + b"]",
            r"found none \(a number of more than 4300 digits\)",
        ),
    ):
        with pytest.raises(DataError, match=found):
            list(read_records(write("c.json", content), USED))


def test_tables(write):
    path = write("a.csv", '\ufefftext,label\n"one, two\n",3\nb,many\n')
    rows = read_records(path, USED)
    assert [row.fields for row in rows] == [
        {"text": "one, two\n", "label": 3},
        {"text": "b", "label": "many"},
    ]
    assert texts(write("a.tsv", "text\tn\none\t1\n")) == ["one"]
    assert texts(write("c.csv", "text\n" + "a" * 200_000)) == ["a" * 200_000]
    for content, found in (
        (b"text,label\na\n", "row 1: expected 2 columns"),
        (b"text\na,b\n", "row 1: expected 1 columns"),
        (b'text\n"a', "expected a table in UTF-8"),
        (b"text\n\xff\n", "expected a table in UTF-8"),
    ):
        with pytest.raises(DataError, match=found):
            list(read_records(write("b.csv", content), USED))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"", "found an empty line"),
        (b'{"text": "cut', r"found none \(Unterminated"),
        (b'{"text": "\xff"}', r"found none \("),
        (b'["text"]', "found a list"),
        (b"null", "found null"),
        (b"3", "found a number"),
        (b'{"text":' + b"[" * 100_000, "found one that is nested too deep"),
        (b'{"text":' + b"9" * 5000, r"found none \(a number of .* digits\); mend"),
    ],
)
def test_malformed_lines_are_named(write, line, found):
    path = write("a.jsonl", b'{"text": "one"}\n' + line + b'\n{"text": "two"}\n')
    with pytest.raises(DataError, match=f"a.jsonl:2: expected a JSON object.*{found}"):
        list(read_records(path, USED))


@pytest.mark.parametrize("name", ["a.npz", "images.npy"])
def test_arrays_are_no_text(write, name):
    with pytest.raises(DataError, match=f"{name}: expected text.*; leave it out"):
        read_records(write(name, b"PK"), USED)


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"text {n}" for n in range(3000)]})
    pyarrow.parquet.write_table(table, path, row_group_size=700)
    assert texts(path) == [f"text {n}" for n in range(3000)]
    assert list(read_records(path, USED))[-1].where == f"{path}: row 3000"


def test_parquet_that_is_none(write):
    with pytest.raises(DataError, match=r"a.parquet: expected a Parquet file"):
        list(read_records(write("a.parquet", b"PAR1 not really PAR1"), USED))


def test_saved_dataset():
    splits = saved_splits(SAVED)
    assert sorted(splits) == ["test", "train"]
    assert texts(splits["train"]) == [f"text {n}" for n in range(5)]
    assert texts(splits["test"]) == [f"text {n}" for n in range(5, 8)]
    assert saved_splits(splits["train"]) == {}


def saved(write, state, splits=None):
    root = write("saved/state.json", json.dumps(state)).parent
    write("saved/dataset_info.json", "{}")
    if splits is not None:
        write("saved/dataset_dict.json", json.dumps(splits))
    return root


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({}, "found None"),
        ({"_data_files": [{}]}, "found a list of 1"),
        ({"_data_files": [{"filename": "../x.arrow"}]}, "a name in this folder"),
        ({"_data_files": [{"filename": "no.arrow"}]}, "expected an arrow file"),
        ([], "found a list"),
    ],
)
def test_saved_dataset_that_is_damaged(write, state, found):
    with pytest.raises(DataError, match=found):
        list(read_records(saved(write, state), USED))


@pytest.mark.parametrize(
    ("splits", "found"),
    [
        ({"splits": ["train"]}, "'train': found no data"),
        ({"splits": ["../saved"]}, "a name in this folder"),
        ({}, "found None"),
    ],
)
def test_splits_that_are_not_there(write, splits, found):
    with pytest.raises(DataError, match=found):
        saved_splits(saved(write, {}, splits))


def test_missing_package_names_its_extra(write, monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(errors.importlib, "import_module", missing)
    path = write("a.parquet", b"")
    with pytest.raises(
        DataError, match=r"a.parquet: needs pyarrow.*pip install '.\[data\]'"
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
    root = saved(write, {"_data_files": [{"filename": "a.arrow"}]})
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
    with pytest.raises(DataError, match=r"a.arrow: expected an arrow file: ArrowInv"):
        list(read_records(root, USED))


def test_only_columns_that_are_used_are_converted(write, tmp_path):
    nanoseconds = pa.array([1, 2], pa.timestamp("ns"))
    table = pa.table({"text": ["one", "two"], "when": nanoseconds})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for path in (tmp_path / "a.parquet", saved_batch(write, table.to_batches()[0])):
        records = list(read_records(path, USED))
        assert [r.fields for r in records] == [{"text": "one"}, {"text": "two"}]
        assert records[0].names == ["text", "when"]
        with pytest.raises(DataError, match="ValueError: Nanosecond"):
            list(read_records(path, ("when",)))
