"""Bytes and tokenizer.json: ids, special tokens, refusals."""

import json
import re

import numpy as np
import pytest
import tokenizers

from jaxinf.train.data.errors import DataError
from jaxinf.train.data.tokenizers import ByteTokenizer, open_tokenizer


@pytest.fixture
def file(tmp_path):
    """Saves a tokenizer of words with these special tokens; returns its path."""

    def make(*special):
        words = {w: i for i, w in enumerate(["[UNK]", "one", "two", *special])}
        model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(list(special))
        path = tmp_path / "tokenizer.json"
        tokenizer.save(str(path))
        return path

    return make


def test_bytes():
    tokenizer = open_tokenizer(None)
    ids = tokenizer.encode([("a", "aü"), ("b", b"\xff")])
    assert [i.tolist() for i in ids] == [[97, 0xC3, 0xBC], [255]]
    assert tokenizer.decode(ids[0]).decode() == "aü"
    assert tokenizer.decode(np.array([65, 50000])) == b"A\xff"
    assert (tokenizer.end, tokenizer.vocab_size) == (0, 256)


def test_tokenizer_json(file):
    tokenizer = open_tokenizer(file("</s>", "[MASK]", "[PAD]"))
    one, two = tokenizer.encode([("a", "two one nine"), ("b", b"one")])
    assert one.dtype == np.uint16
    assert (one.tolist(), two.tolist()) == ([2, 1, 0], [1])
    assert tokenizer.decode(np.array([1, 2, 9999])) == b"one two"
    assert (tokenizer.end, tokenizer.mask, tokenizer.pad) == (3, 4, 5)
    assert tokenizer.vocab_size == 6


def test_folder_and_its_config(file):
    path = file("<a>", "<b>")
    config = {"eos_token": {"content": "<b>"}, "mask_token": "<a>", "x_token": None}
    (path.parent / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = open_tokenizer(path.parent)
    assert (tokenizer.end, tokenizer.mask) == (4, 3)


def test_no_special_tokens(file):
    tokenizer = open_tokenizer(file())
    assert (tokenizer.end, tokenizer.mask, tokenizer.pad) == (None, None, 0)


def test_truncation_and_padding_of_the_file_do_not_count(file):
    path = file()
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    (ids,) = open_tokenizer(path).encode([("a", "one two one")])
    assert ids.tolist() == [1, 2, 1]


def test_fingerprint_tells_files_apart(file):
    first = open_tokenizer(file()).fingerprint
    assert open_tokenizer(file()).fingerprint == first
    assert open_tokenizer(file("</s>")).fingerprint != first
    assert ByteTokenizer().fingerprint != first


def test_text_that_is_none(file):
    tokenizer = open_tokenizer(file())
    with pytest.raises(DataError, match=r"a.txt: expected UTF-8, found byte 0xff at"):
        tokenizer.encode([("a.txt", b"one\xff")])
    for one in (tokenizer, ByteTokenizer()):
        with pytest.raises(DataError, match=r"a.jsonl:3: expected text, found surrog"):
            one.encode([("a.jsonl:3", "\ud800")])


@pytest.mark.parametrize("content", [None, b"{}", b"not JSON", b"\xff"])
def test_files_that_are_none(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"--tokenizer .*tokenizer.json: expected"):
        open_tokenizer(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {
                "model": {
                    "type": "BPE",
                    "vocab": {"a": 0, "b": 1, "ab": 2},
                    "merges": ["a b"],
                    "continuing_subword_prefix": "#" * 9,
                }
            },
            "expected a tokenizer.json of the tokenizers package: PanicException",
        ),
        (
            {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
            "expected ids of a.txt and what follows: PanicException",
        ),
        (
            {"model": {"type": "WordLevel", "vocab": {"one": 1}, "unk_token": "?"}},
            "expected ids of a.txt and what follows: Exception: WordLevel error",
        ),
    ],
)
def test_a_tokenizer_that_panics(file, changed, message):
    path = file()
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(DataError, match=re.escape(message)):
        open_tokenizer(path).encode([("a.txt", "nine")])
