"""Files to rows, for every kind of data and task: learned parts and refusals."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers
from small_tokenizers import word_level

from jaxinf.train.data.errors import DataError
from jaxinf.train.data.examples import parse_example
from jaxinf.train.data.files import PLAIN_TEXT, Record, find_files, read_records

PAIRS = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(40)]


def tokens_of(rows):
    return np.concatenate([rows[n]["tokens"] for n in range(len(rows))])


def test_the_tail_of_a_text_is_held_out(load, write):
    path = write("a.txt", bytes(range(1, 201)))
    data = load(path, seq_len=4, validation=("0.25",))
    train, held = tokens_of(data.train), tokens_of(data.validation)
    assert not set(train) & set(held)
    assert held.tolist() == [*range(152, 200)][-held.size :]


@pytest.mark.parametrize("begins", [False, True])
def test_documents_begin_and_end_as_their_tokenizer_has_it(
    load, write, tmp_path, begins
):
    processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>",
        special_tokens=[("<s>", 43), ("</s>", 44)],
    ) if begins else None  # fmt: skip
    special = {"bos_token": "<s>", "eos_token": "</s>", "processor": processor}
    words = ["text", "number", *map(str, range(40))]
    folder = word_level(tmp_path / "t", words, "<s>", "</s>", **special)
    start, end = ([43], [44]) if begins else ([], [])

    def first(records, **options):
        path = write("a.jsonl", records * 80)
        return load(path, tokenizer=folder, **{"seq_len": 6, **options}).train[0]

    row = first([{"text": "text 1"}])
    whole = [*start, 1, 4, 44]
    assert row["tokens"].tolist() == (whole * 3)[:6]
    row = first([{"prompt": "text 1", "response": "2"}], loss_on="all")
    assert row["tokens"][: 3 + 2 * begins].tolist() == [*start, 1, 4, *end, 5]
    assert row["targets"][2 + 2 * begins] == 44
    row = first([{"prompt": "text 1", "response": "2"}], task="seq2seq")
    source = [*start, 1, 4, *end]
    assert row["tokens"][row["segments"] > 0].tolist() == source
    assert row["targets"][row["weights"] > 0].tolist() == [*start, 5, 44]


def test_validation_of_its_own(load, write):
    train, held = write("a.txt", "abcd" * 9), write("b.txt", "wxyz" * 5)
    data = load(train, seq_len=4, validation=(str(held),))
    assert (len(data.train), data.description[:16]) == (9, "1 text, 37 bytes")
    assert set(tokens_of(data.validation)) == {*b"wxyz"}
    other = str(write("p.jsonl", PAIRS))
    with pytest.raises(DataError, match=r"p.jsonl:1: expected records of one kind"):
        load(train, seq_len=4, validation=(other,))


def test_long_examples_are_cut_and_said(load, write):
    records = [*PAIRS, {"prompt": "x" * 50, "response": "y"}]
    records += [{"prompt": "z", "response": "y" * 50}]
    data = load(write("a.jsonl", records), seq_len=8)
    assert data.notes == (
        "2 examples reach --seq-len 8; longer ones are cut there",
        "1 of those have no answer before the cut and are left out",
    )
    path = write("a.jsonl", [{"prompt": "p" * 30, "response": "r"}] * 5)
    with pytest.raises(DataError, match=r"5 examples whose .* after 30 tokens; give a"):
        load(path, seq_len=8)
    assert len(load(path, seq_len=31).train)


def test_order_of_files_does_not_count(load, write):
    one, two = write("a.txt", "first text " * 29), write("b.txt", "second text " * 29)
    moved = write("0/c.txt", "second text " * 29)
    identity = load(one, two).identity
    assert load(two, one).identity == identity
    assert load(one, moved).identity == identity
    assert load(one, two, validation=("0.2",)).identity != identity
    assert load(one).identity != identity


# --- examples -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "kind", "found"),
    [
        ({"text": "one", "id": 7}, "text", ("one",)),
        ({"prompt": "1+1=", "response": "2"}, "dialogue", ("1+1=", "2")),
        ({"text": "1", "text_pair": "2", "label": 0}, "labelled", ("1", "2")),
        ({"text": "1", "label": 1, "prompt": None}, "labelled", ("1",)),
    ],
)
def test_forms_of_records(record, kind, found):
    unused = set()
    example = parse_example(Record("f.jsonl:1", record, ("when",)), unused)
    assert (example.kind, example.texts) == (kind, found)
    assert unused == {"when", *({"id"} & {*record})}


def test_names_that_a_terminal_would_obey(load, write):
    rows = [{"text": "one two three " * 9, "\x1b[2J\ud800": 1}] * 9
    (note,) = load(write("a.jsonl", rows)).notes
    assert note.endswith(r"not used: '\x1b[2J\ud800'")


# --- records --------------------------------------------------------------------------


USED = ("text",)


def texts(path):
    return [record.fields["text"] for record in read_records(path, USED)]


def test_a_byte_order_mark_is_no_data(write):
    rows = [{"text": f"line {n}\u2028ü"} for n in range(9)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    for name, text, found in (
        ("a.JSONL", lines, rows),
        ("a.txt", "line one\nü\n", [{PLAIN_TEXT: "line one\nü\n".encode()}]),
        ("empty.txt", "", []),
    ):
        for mark in (b"", b"\xef\xbb\xbf"):
            path = write(name, mark + text.encode())
            assert [one.fields for one in read_records(path, USED)] == found


def test_nested_columns_and_files_without_a_suffix(tmp_path):
    turns = [[{"role": "user", "content": None}], [{"role": "a", "content": "b"}]]
    table = pa.table({"text": ["one", "two"], "none": pa.nulls(2), "turns": turns})
    table, many = pa.concat_tables([table] * 900), {"row_group_size": 700}
    path = tmp_path / "a.PARQUET"
    pyarrow.parquet.write_table(table, path, compression="zstd", **many)
    (tmp_path / "by-content").write_bytes(path.read_bytes())
    for path in tmp_path.iterdir():
        records = list(read_records(path, ("text", "none", "turns")))
        assert [record.fields for record in records] == table.to_pylist()
        assert records[-1].where == f"{path}: row 1800"


def test_only_columns_that_are_used_are_converted(tmp_path):
    nanoseconds = pa.array([1, 2], pa.timestamp("ns"))
    table = pa.table({"text": ["one", "two"], "when": nanoseconds})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path)
    assert texts(path) == ["one", "two"]
    assert next(iter(read_records(path, USED))).unread == ("when",)
    with pytest.raises(DataError, match="ValueError: Nanosecond"):
        list(read_records(path, ("when",)))


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"])
    pyarrow.parquet.write_table(table, path := tmp_path / "a.parquet")
    with pytest.raises(DataError, match="each column once, found 'text', 'text'"):
        list(read_records(path, USED))


# --- files ----------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path, write):
    """A directory with text, binary, empty and hidden files."""
    write("a.txt", "first text\n")
    write("sub/b.py", "print('b')\n")
    write("sub/deep/c.py", "print('c')\n")
    write("sub/binary.dat", b"\x7fELF\0\0\0")
    write("empty.txt", "")
    write(".git/config", "hidden\n")
    write(".hidden", "hidden\n")
    return tmp_path.resolve()


def names(root, files):
    return [str(file.relative_to(root)) for file in files]


def test_directory_gives_text_files_and_names_what_is_left_out(tree):
    (tree / "d.gz").write_bytes(gzip.compress(b"text"))
    for name in ("rows.CSV", "rows.json", "rows.arrow"):
        (tree / name).write_text("text")
    (tree / "e.TXT").write_text("text", encoding="utf-16")
    (tree / "f.jsonl").write_text("{}", encoding="utf-16")
    files, left_out = find_files([str(tree)])
    assert names(tree, files) == ["a.txt", "sub/b.py", "sub/deep/c.py"]
    found = ["d.gz", "e.TXT", "f.jsonl", "rows.CSV", "rows.arrow", "rows.json"]
    assert names(tree, left_out) == [*found, "sub/binary.dat"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["sub/binary.dat", ".hidden"], [".hidden", "sub/binary.dat"]),
        (["**/*.py"], ["sub/b.py", "sub/deep/c.py"]),
        (["sub/*"], ["sub/b.py", "sub/binary.dat"]),
        (["?.txt"], ["a.txt"]),
        (["notes[1].txt"], ["notes[1].txt"]),
    ],
)
def test_names_and_globs(tree, patterns, expected):
    (tree / "notes[1].txt").write_text("text")
    files, _ = find_files([str(tree / pattern) for pattern in patterns])
    assert names(tree, files) == expected


def test_duplicates_and_links_count_once(tree):
    (tree / "link.txt").symlink_to(tree / "a.txt")
    (tree / "dangling.txt").symlink_to(tree / "nowhere")
    patterns = [str(tree), str(tree / "a.txt"), str(tree / "sub/../a.txt")]
    assert names(tree, find_files(patterns)[0])[:2] == ["a.txt", "sub/b.py"]
    assert len(find_files(patterns)[0]) == 3
