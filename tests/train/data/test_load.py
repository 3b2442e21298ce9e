"""Files to rows, for every kind of data and task: learned parts and refusals."""

import numpy as np
import pytest
import tokenizers
from small_tokenizers import word_level

from jaxinf.train.data.errors import DataError

PAIRS = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(40)]
LABELLED = [{"text": f"number {n}", "label": n % 3} for n in range(40)]
TEXTS = [{"text": f"text number {n}, all of it.", "id": n} for n in range(40)]


def word_tokenizer(folder, *special, **config):
    words = ["text", "number", *map(str, range(40))]
    return word_level(folder, words, *special, **config)


def tokens_of(rows):
    return np.concatenate([rows[n]["tokens"] for n in range(len(rows))])


def test_the_tail_of_a_text_is_held_out(load, write):
    path = write("a.txt", bytes(range(1, 201)))
    data = load(path, seq_len=4, validation=("0.25",))
    train, held = tokens_of(data.train), tokens_of(data.validation)
    assert not set(train) & set(held)
    assert held.tolist() == [*range(152, 200)][-held.size :]


def test_labels_are_numbers(load, write):
    data = load(write("a.jsonl", LABELLED), task="classification", seq_len=16)
    assert data.num_labels == 3
    assert data.example == "number 0\\x00 → «0»"


@pytest.mark.parametrize("begins", [False, True])
def test_documents_begin_and_end_as_their_tokenizer_has_it(
    load, write, tmp_path, begins
):
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>",
        special_tokens=[("<s>", 43), ("</s>", 44)],
    ) if begins else None  # fmt: skip
    folder = word_tokenizer(
        tmp_path / "t", "<s>", "</s>", processor=processor, **special
    )
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
    assert len(data.train) == 9
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


@pytest.mark.parametrize(
    ("records", "task", "message"),
    [
        (TEXTS, "seq2seq", r"a.jsonl:1: --task seq2seq expects prompts.* has text"),
        (TEXTS, "classification", "expects a text and its label, --data has text"),
        (PAIRS, "masked-lm", "--task masked-lm expects text, --data has prompts"),
        (LABELLED, "causal-lm", "expects text or prompts .*has a text and its label"),
        ([], "causal-lm", r"expected text, found 1 file\(s\) without a record"),
        (PAIRS[:1], "causal-lm", "expected at least one validation example"),
        (TEXTS[:1], "causal-lm", r"seq_len \+ 1 = 9 tokens of validation text, got 1"),
        ([{"text": "a", "label": 7}] * 3, "classification", "labels of 0 to 2"),
    ],
    ids=range(8),
)
def test_records_that_do_not_suit_the_task(load, write, records, task, message):
    with pytest.raises(DataError, match=message):
        load(write("a.jsonl", records), task=task)


def test_pairs_of_bytes_are_refused(load, write):
    record = {"text": "abcdef", "text_pair": "xy", "label": 1}
    with pytest.raises(DataError, match=r"a.jsonl:1: expected one text, found two"):
        load(write("a.jsonl", [record] * 2), task="classification")
