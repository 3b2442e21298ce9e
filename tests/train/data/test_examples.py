"""Records to examples: fields, learned parts, refusals."""

import pytest

from jaxinf.train.data.errors import DataError
from jaxinf.train.data.examples import example_of
from jaxinf.train.data.files import Record


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
    example = example_of(Record("f.jsonl:1", record, ("when",)), unused)
    assert (example.kind, example.texts) == (kind, found)
    assert unused == {"when", *({"id"} & {*record})}


def test_pairs_in_some_records_only(load, write):
    records = [{"text": "a", "label": 1}, {"text": "a", "text_pair": "b", "label": 1}]
    path = write("f.jsonl", records)
    with pytest.raises(DataError, match=r":2: expected 'text_pair' in all.*:1"):
        load(path, task="classification")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"txt": "one"}, r"a field 'text'.*found 'txt'; rename"),
        ({}, "found no fields"),
        ({"text": None}, "found no fields"),
        ({"text": ""}, "expected text in field 'text', found an empty one"),
        ({"text": 3}, "expected text in field 'text', found a int"),
        ({"prompt": "a", "responce": "b"}, "found 'prompt', 'responce'"),
        ({"prompt": "a", "response": ""}, "field 'response', found an empty one"),
        ({"prompt": ["a"], "response": "b"}, "field 'prompt', found a list"),
        ({"text": "a", "label": 2**31}, "label from 0 to 2147483647"),
        (
            {"text_pair": "a", "label": 1},
            "a field 'text', .*found 'label', 'text_p",
        ),
        ({"text": "a", "label": "good"}, "found 'good'; number the classes"),
        ({"text": "a", "label": True}, "found True"),
        ({"messages": []}, "expected a list of messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "a message of the assist"),
        ({"messages": ["a"]}, "messages, each an object with a role of"),
    ],
)
def test_records_that_are_none(fields, message):
    with pytest.raises(DataError, match=r"f.jsonl:1.*" + message):
        example_of(Record("f.jsonl:1", fields), set())


def test_kinds_do_not_mix(load, write):
    path = write("f.jsonl", [{"text": "a"}, {"prompt": "a", "response": "b"}])
    with pytest.raises(DataError, match=r"f.jsonl:2: .*one kind.*f.jsonl:1"):
        load(path)


def test_names_that_a_terminal_would_obey(load, write):
    rows = [{"text": "one two three " * 9, "\x1b[2J\ud800": 1}] * 9
    (note,) = load(write("a.jsonl", rows)).notes
    assert note.endswith(r"not used: '\x1b[2J\ud800'")
    with pytest.raises(DataError) as caught:
        load(write("\x1b[2J.jsonl", "[]"))
    assert r"\x1b[2J.jsonl:1: expected a JSON object" in str(caught.value)
