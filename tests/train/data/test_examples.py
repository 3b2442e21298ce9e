"""Records to examples: fields, learned parts, refusals."""

import pytest

from jaxinf.train.data.errors import DataError
from jaxinf.train.data.examples import Part, read_examples
from jaxinf.train.data.records import Record


def read(*fields, text_field="text", unused=None):
    records = [Record(f"f.jsonl:{n}", f) for n, f in enumerate(fields, 1)]
    unused = set() if unused is None else unused
    return list(read_examples(records, text_field=text_field, unused=unused))


def test_text_and_its_field():
    unused = set()
    (example,) = read({"body": "one", "id": 7}, text_field="body", unused=unused)
    assert example.kind == "text"
    assert example.parts == (Part("one", has_end=True),)
    assert unused == {"id"}


def test_only_the_response_is_learned():
    (example,) = read({"prompt": "1+1=", "response": "2"})
    assert example.kind == "dialogue"
    assert example.parts == (Part("1+1=", is_learned=False), Part("2", has_end=True))


def test_only_what_the_assistant_says_is_learned():
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]
    (example,) = read({"messages": messages, "text": None})
    assert "".join(str(part.text) for part in example.parts) == (
        "<|user|>\n1+1?\n<|assistant|>\n2\n<|user|>\nsure?\n<|assistant|>\nyes\n"
    )
    assert [p.text for p in example.parts if p.is_learned] == ["2", "yes"]
    assert [p.text for p in example.parts if p.has_end] == ["2", "yes"]


def test_labelled_text():
    (example,) = read({"text": "good", "label": 1})
    assert (example.kind, example.label) == ("labelled", 1)


def test_pair_of_texts():
    (example,) = read({"text": "a", "text_pair": "b", "label": 1})
    assert (example.kind, example.label) == ("labelled", 1)
    assert example.parts == (Part("a"), Part("b"))


@pytest.mark.parametrize("order", [1, -1])
def test_pairs_in_some_records_only(order):
    records = [{"text": "a", "text_pair": "b", "label": 1}, {"text": "a", "label": 1}]
    with pytest.raises(DataError, match="expected a field 'text_pair', as"):
        read(*records[::order])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"txt": "one"}, r"a field 'text' \(--text-field\).*found 'txt'"),
        ({}, "found no fields"),
        ({"text": None}, "found no fields"),
        ({"text": ""}, "expected text in field 'text', found an empty one"),
        ({"text": 3}, "expected text in field 'text', found a int"),
        ({"prompt": "a", "responce": "b"}, "found 'prompt', 'responce'"),
        ({"prompt": "a", "response": ""}, "field 'response', found an empty one"),
        ({"prompt": ["a"], "response": "b"}, "field 'prompt', found a list"),
        ({"": 1}, "expected a field 'text'.*found ''"),
        ({"text": "a", "label": 2**31}, "classes from 0, all below 2147483648"),
        ({"text_pair": "a", "label": 1}, "a field 'text' beside 'text_pair'"),
        ({"text": "a", "text_pair": "", "label": 1}, "'text_pair', found an empty one"),
        ({"text": "a", "text_pair": "b"}, "expected a label of 0 or more, found None"),
        ({"text": "a", "label": "x"}, "expected a label of 0 or more, found 'x'"),
        ({"text": "a", "label": -1}, "found -1"),
        ({"text": "a", "label": True}, "found True"),
        ({"messages": []}, "expected a list of messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "a message of the assist"),
        ({"messages": [{"role": "me", "content": "a"}]}, "message 1: expected a role"),
        ({"messages": ["a"]}, "message 1: expected a role"),
        ({"messages": [{"role": "user", "content": None}]}, "text as content, found N"),
    ],
)
def test_records_that_are_none(fields, message):
    with pytest.raises(DataError, match=r"f.jsonl:1.*" + message):
        read(fields)


def test_kinds_do_not_mix():
    with pytest.raises(DataError, match=r"f.jsonl:2: .*one kind.*f.jsonl:1"):
        read({"text": "a"}, {"prompt": "a", "response": "b"})


def test_names_that_a_terminal_would_obey(load, write):
    rows = [{"text": "one two three " * 9, "\x1b[2J\ud800": 1}] * 9
    (note,) = load(write("a.jsonl", rows)).notes
    assert note.endswith(r"not used: '\x1b[2J\ud800'")
    with pytest.raises(DataError) as caught:
        load(write("\x1b[2J.jsonl", "[]"))
    assert r"\x1b[2J.jsonl:1: expected a JSON object" in str(caught.value)
