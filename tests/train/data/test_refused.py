"""Data that is refused, with its place: files, records, tasks; before a run begins."""

import bz2
import gzip
import lzma

import pytest

from jaxinf.train.data.errors import DataError
from jaxinf.train.data.files import find_files

DEEP, LONG = b"[" * 100_000, b"9" * 5000
PAIRS = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(40)]
LABELLED = [{"text": f"number {n}", "label": n % 3} for n in range(40)]
TEXTS = [{"text": f"text number {n}, all of it.", "id": n} for n in range(40)]
ONE, TWO = {"text": "a", "label": 1}, {"text": "a", "text_pair": "b", "label": 1}

RECORDS = [
    ({"txt": "one"}, r"a field 'text'.*found 'txt'; rename"),
    ({}, "found none"),
    ({"text": None}, "found none"),
    ({"text": ""}, "expected text in field 'text', found an empty one"),
    ({"text": 3}, "expected text in field 'text', found a int"),
    ({"prompt": "a", "responce": "b"}, "found 'prompt', 'responce'"),
    ({"prompt": "a", "response": ""}, "field 'response', found an empty one"),
    ({"prompt": ["a"], "response": "b"}, "field 'prompt', found a list"),
    ({"text": "a", "label": 2**31}, "label from 0 to 2147483647"),
    ({"text_pair": "a", "label": 1}, "a field 'text', .*found 'label', 'text_p"),
    ({"text": "a", "label": "good"}, "found 'good'; number the classes"),
    ({"text": "a", "label": True}, "found True"),
    ({"messages": []}, "expected a list of messages"),
    ({"messages": [{"role": "user", "content": "a"}]}, "a message of the assist"),
    ({"messages": ["a"]}, "messages, each an object with a 'role' of"),
    ({"messages": [{"from": "human", "value": "a"}]}, "message 1 with 'from', 'val"),
    ({"messages": [{"role": "assistant"}]}, "message 1 with 'role'"),
]
LINES = [
    (b"", "Expecting value.*; mend or remove the line"),
    (b'{"text": "cut', "Unterminated"),
    (b'{"text": "\xff"}', "UnicodeDecodeError"),
    (b'["text"]', "found a list"),
    (b"null", "found None"),
    (b"3", "found 3"),
    (b'{"text":' + DEEP, "RecursionError"),
    (b'{"text":' + LONG, "Exceeds the limit.*; mend"),
]
FILES = [
    ("a.json", b'[{"text": "one"}]', "save records as JSON lines"),
    ("a.zip", b"PK\3\4\x14\0", r"a.zip: expected .*found .* an archive"),
    ("a.jsonl", "{}".encode("utf-16-le"), "a.jsonl: expected .*a NUL byte"),
    ("a.jsonl", bz2.compress(b"{}\n"), "unpack an archive"),
    ("a.jsonl.gz", gzip.compress(b"{}\n", mtime=0), "unpack an archive"),
    ("a.jsonl.xz", lzma.compress(b"{}\n"), "unpack an archive"),
    ("a.txt", "\u4e01".encode("utf-16"), "convert text to UTF-8"),
    ("a.csv", b"text,label\na,1\n", "found CSV.*read_csv.'a.csv'.*'a.jsonl'"),
    ("a.tsv", b"text\tlabel\n", "found TSV.*read_table.'a.tsv'.*'a.jsonl'"),
    ("a.parquet", b"PAR1 not really PAR1", "a file of parquet: Arrow"),
    ("a.parquet", gzip.compress(b"PAR1", mtime=0), "file of parquet: ArrowInvalid"),
    ("\x1b[2J.jsonl", "[]", r"\\x1b\[2J.jsonl:1: expected a JSON object"),
]
TASKS = [
    (TEXTS, "seq2seq", r"a.jsonl:1: --task seq2seq expects prompts.* has text"),
    (TEXTS, "classification", "expects a text and its label, --data has text"),
    (PAIRS, "masked-lm", "--task masked-lm expects text, --data has prompts"),
    (LABELLED, "causal-lm", "text or prompts .*has a text and its label; give --ta"),
    ([], "causal-lm", r"expected text, found 1 file\(s\) without a record"),
    (PAIRS[:1], "causal-lm", "expected at least one validation example"),
    (TEXTS[:1], "causal-lm", r"seq_len \+ 1 = 9 tokens of validation text, got 1"),
    ([{"text": "a", "label": 7}] * 3, "classification", "labels of 0 to 2"),
    (TEXTS[:1] + PAIRS[:1], "causal-lm", r"a.jsonl:2: .*one kind.*a.jsonl:1"),
    ([ONE, TWO], "classification", r":2: expected 'text_pair' in all.*:1"),
    ([TWO, TWO], "classification", r"a.jsonl:1: expected one text, found two"),
]
ROWS = [("a.jsonl", [one], "causal-lm", f"a.jsonl:1.*{m}") for one, m in RECORDS]
for one, message in LINES:
    content = b'{"text": "one"}\n' + one + b"\n"
    ROWS.append(("a.jsonl", content, "causal-lm", f"a.jsonl:2: .*{message}"))
ROWS += [(name, content, "causal-lm", message) for name, content, message in FILES]
ROWS += [("a.jsonl", *row) for row in TASKS]


@pytest.mark.parametrize(
    ("name", "content", "task", "message"), ROWS, ids=range(len(ROWS))
)
def test_what_is_no_data_of_a_task(load, write, name, content, task, message):
    with pytest.raises(DataError, match=message):
        load(write(name, content), task=task)


def test_a_folder_without_a_file_that_is_read_is_refused_as_a_file_of_it(load, write):
    with pytest.raises(DataError, match=r"tables/a.csv: .*read_csv.'a.csv'"):
        load(write("tables/a.csv", b"text\none\n").parent)


@pytest.mark.parametrize("pattern", ["nothing.txt", "**/*.rs", "void"])
def test_pattern_without_a_match_is_named(write, pattern):
    tree = write("a.txt", "text").parent
    (tree / "void").mkdir()
    with pytest.raises(DataError, match="expected a file, a directory") as refused:
        find_files([str(tree), str(tree / pattern)])
    assert pattern in str(refused.value)
