"""Files to rows, for every kind of data and task: learned parts and refusals."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers

from jaxinf.train.data.errors import DataError
from jaxinf.train.data.loader import Batches
from jaxinf.train.data.options import DataOptions, check_options

SAVED = Path(__file__).parents[2] / "golden" / "saved_dataset"
PAIRS = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(40)]
LABELLED = [{"text": f"number {n}", "label": n % 3} for n in range(40)]
TEXTS = [{"text": f"text number {n}, all of it.", "id": n} for n in range(40)]


PAIRED = [{**record, "text_pair": f"is it {n}?"} for n, record in enumerate(LABELLED)]


def word_tokenizer(path, *special):
    words = ["[UNK]", "text", "number", *map(str, range(40)), *special]
    model = tokenizers.models.WordLevel(
        {word: n for n, word in enumerate(words)}, unk_token="[UNK]"
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(path))
    return path


def picture_folder(root):
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for n in range(8):
            pixels = rng.integers(0, 256, (5, 7, 3), np.uint8)
            Image.fromarray(pixels).save(root / name / f"{n}.png")
    return root


def picture_arrays(path):
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (20, 6, 6), np.uint8)
    np.savez(path, images=images, labels=np.arange(20) % 4)
    return path


@pytest.fixture
def source(tmp_path, write):
    """Writes one of the kinds of data; returns the arguments of `load`."""
    makers = {
        "text": lambda: ([write("a.txt", "some text\n" * 40)], {}),
        "records": lambda: ([write("a.jsonl", TEXTS)], {}),
        "parquet": lambda: ([parquet(tmp_path / "a.parquet", TEXTS)], {}),
        "saved": lambda: ([SAVED], {}),
        "tokens": lambda: (
            [write("a.jsonl", TEXTS)],
            {"tokenizer": word_tokenizer(tmp_path / "t.json", "</s>", "[MASK]")},
        ),
        "pairs": lambda: ([write("a.jsonl", PAIRS)], {}),
        "labelled": lambda: ([write("a.jsonl", LABELLED)], {}),
        "paired": lambda: ([write("a.jsonl", PAIRED)], {"num_token_types": 2}),
        "folder": lambda: (
            [picture_folder(tmp_path / "pictures")],
            {"image_shape": (8, 8, 3)},
        ),
        "arrays": lambda: (
            [picture_arrays(tmp_path / "a.npz")],
            {"image_shape": (6, 6, 1)},
        ),
    }
    return lambda kind: makers[kind]()


def parquet(path, records):
    pyarrow.parquet.write_table(pa.Table.from_pylist(records), path, row_group_size=7)
    return path


TASKS_OF = {
    "text": ("causal-lm", "masked-lm"),
    "records": ("causal-lm", "masked-lm"),
    "parquet": ("causal-lm", "masked-lm"),
    "saved": ("causal-lm", "masked-lm"),
    "tokens": ("causal-lm", "masked-lm"),
    "pairs": ("causal-lm", "seq2seq"),
    "labelled": ("classification",),
    "paired": ("classification",),
    "folder": ("classification",),
    "arrays": ("classification",),
}
CASES = [(kind, task) for kind, tasks in TASKS_OF.items() for task in tasks]


@pytest.mark.parametrize(("kind", "task"), CASES, ids="-".join)
def test_resumes_at_the_very_next_example(source, load, kind, task):
    """As after a crash, everything is read anew, and only the position is kept."""
    paths, options = source(kind)

    def batches_from(position):
        data = load(*paths, task=task, **options)
        batches = Batches(data.train, batch_size=3, seed=7, row_map=data.row_map)
        return data.identity, batches.starting_at(json.loads(position))

    identity, uninterrupted = batches_from('{"next_index": 0}')
    seen = [
        next(uninterrupted) for _ in range(9)
    ]  # of several epochs where it is small
    for number in (1, 4, 8):
        same, resumed = batches_from(json.dumps(Batches.position_of(number)))
        assert same == identity
        for expected in seen[number:]:
            batch = next(resumed)
            assert set(batch) == set(expected)
            for name in expected:
                assert batch[name].dtype == expected[name].dtype
                np.testing.assert_array_equal(batch[name], expected[name])
    assert len({hashlib.sha256(repr(batch).encode()).digest() for batch in seen}) > 1


@pytest.mark.parametrize(("kind", "task"), CASES, ids="-".join)
def test_nothing_held_out_is_learned(source, load, kind, task):
    paths, options = source(kind)
    data = load(*paths, task=task, seq_len=8, **options)
    name = "images" if "images" in data.train[0] else "tokens"
    assert len(data.validation) >= 1
    assert data.description
    for rows in (data.train, data.validation):
        shapes = {n: rows[0][n].shape for n in rows[0]}
        for number in range(len(rows)):
            row = rows[number]
            assert {n: row[n].shape for n in row} == shapes
            assert row[name].dtype in (np.int32, np.float32)


def test_the_tail_of_a_text_is_held_out(load, write):
    path = write("a.txt", bytes(range(1, 201)))
    data = load(path, seq_len=4, validation_fraction=0.25)
    train = np.concatenate([data.train[n]["tokens"] for n in range(len(data.train))])
    held = data.held_out_tokens
    assert not set(train) & set(held)
    assert held.tolist() == [*range(152, 201), 0][-held.size :]


def test_validation_of_its_own(load, write):
    train, held = write("a.txt", "abcd" * 9), write("b.txt", "wxyz" * 5)
    data = load(train, seq_len=4, validation=(str(held),))
    assert len(data.train) == 9
    assert set(data.held_out_tokens) == {*b"wxyz", 0}
    with pytest.raises(DataError, match="--validation: expected text as in --data"):
        load(train, seq_len=4, validation=(str(write("p.jsonl", PAIRS)),))


def test_validation_split_of_saved_data_is_held_out(load):
    data = load(SAVED, seq_len=4)
    assert bytes(data.held_out_tokens).split(b"\0")[:-1] == sorted(
        (f"text {n}".encode() for n in range(5, 8)), key=digest_of_text
    )
    again = load(SAVED / "train", seq_len=4, validation=(str(SAVED),))
    assert again.identity == data.identity


def digest_of_text(text):
    from jaxinf.train.data.sequences import Encoded

    ids = np.frombuffer(text + b"\0", np.uint8)
    return Encoded("", ids, np.ones(ids.size, np.bool_), -1).digest()


def test_only_answers_are_learned(load, write):
    data = load(write("a.jsonl", PAIRS), seq_len=16)
    targets = set()
    for number in range(len(data.train)):
        row = data.train[number]
        targets |= {chr(t) for t in row["targets"][row["weights"] > 0]}
    assert targets == {*"0123456789", "\0"}
    everything = load(write("a.jsonl", PAIRS), seq_len=16, loss_on="all")
    row = everything.train[0]
    assert ord("+") in row["targets"][row["weights"] > 0]


def test_long_examples_are_cut_and_said(load, write):
    records = [*PAIRS, {"prompt": "x" * 50, "response": "y"}]
    records += [{"prompt": "z", "response": "y" * 50}]
    data = load(write("a.jsonl", records), seq_len=8)
    assert data.notes == (
        "2 examples are longer than --seq-len 8 and are cut there",
        "1 of those have no answer before the cut and are left out",
    )


def test_fields_without_a_use_are_said(load, write):
    data = load(write("a.jsonl", TEXTS))
    assert data.notes == ("fields of records that are not used: 'id'",)


def test_answers_that_all_begin_after_the_cut(load, write):
    path = write("a.jsonl", [{"prompt": "p" * 30, "response": "r"}] * 5)
    with pytest.raises(DataError, match=r"5 examples whose .* after 30 tokens; give a"):
        load(path, seq_len=8)
    assert load(path, seq_len=31).prompt.size


def test_usual_length_of_rows_and_prompt(load, write):
    pairs = [{"prompt": "ab", "response": "c" * n} for n in (3, 60)] * 20
    data = load(write("a.jsonl", pairs), seq_len=None, most_tokens=1000)
    assert (data.seq_len, data.train[0]["tokens"].size) == (64, 64)
    assert data.prompt.tobytes() == b"ab"
    assert load(write("b.jsonl", pairs), seq_len=None, most_tokens=32).seq_len == 32
    assert load(write("a.txt", "text " * 400), seq_len=None).seq_len == 50


def test_json_that_is_read_as_text_is_said(load, write):
    data = load(write("a.json", json.dumps({"key": "value" * 99})))
    assert "1 .json files that are no list of records, read as text" in data.notes


def test_field_of_the_text(load, write):
    path = write("a.jsonl", [{"body": record["text"]} for record in TEXTS])
    assert (
        load(path, text_field="body").identity == load(write("b.jsonl", TEXTS)).identity
    )
    for data in (write("a.txt", "text " * 99), write("c.jsonl", PAIRS)):
        with pytest.raises(
            DataError, match="--text-field body: the data has no record"
        ):
            load(data, text_field="body")


def test_order_of_files_does_not_count(load, write):
    one, two = write("a.txt", "first text " * 29), write("b.txt", "second text " * 29)
    moved = write("0/c.txt", "second text " * 29)
    identity = load(one, two).identity
    assert load(two, one).identity == identity
    assert load(one, moved).identity == identity
    assert load(one, two, validation_fraction=0.2).identity != identity
    assert load(one).identity != identity


def test_masked_lm_needs_a_mask(load, write, tmp_path):
    path = word_tokenizer(tmp_path / "t.json", "</s>")
    with pytest.raises(DataError, match="masked-lm needs a mask token"):
        load(write("a.jsonl", TEXTS), task="masked-lm", tokenizer=path)


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
        (
            [{"messages": [{"role": "assistant", "content": "a"}]}],
            "seq2seq",
            "a prompt and a response, found messages",
        ),
    ],
)
def test_records_that_do_not_suit_the_task(load, write, records, task, message):
    with pytest.raises(DataError, match=message):
        load(write("a.jsonl", records), task=task)


def test_labels_out_of_range(load, write):
    path = write("a.jsonl", LABELLED)
    assert load(path, task="classification").num_labels == 3
    assert load(path, task="classification", num_labels=5).num_labels == 5
    with pytest.raises(DataError, match=r"labels of 0 to 1 \(2 classes\), found 2"):
        load(path, task="classification", num_labels=2)


@pytest.mark.parametrize(
    ("options", "task", "message"),
    [
        (
            {"validation_fraction": 1.0},
            "causal-lm",
            "--validation-fraction: expected m",
        ),
        ({"mask_rate": 0.0}, "masked-lm", "--mask-rate: expected more than 0"),
        ({"mask_rate": 0.3}, "causal-lm", "--mask-rate: --task causal-lm hides no"),
        ({"loss_on": "all"}, "seq2seq", "--loss-on: --task seq2seq learns no prompts"),
        ({"num_labels": 3}, "causal-lm", "--num-labels: --task causal-lm has no cl"),
        ({"num_labels": 1}, "classification", "--num-labels: expected at least 2"),
        (
            {"validation": ("a",), "validation_fraction": 0.5},
            "causal-lm",
            "--validation-fraction: --validation says what to hold out",
        ),
    ],
)
def test_options_that_mean_nothing(options, task, message):
    with pytest.raises(DataError, match=message):
        check_options(DataOptions(**options), task)


def test_images_have_no_tokenizer():
    with pytest.raises(DataError, match="--tokenizer: the model takes images"):
        check_options(
            DataOptions(tokenizer=Path("t.json")), "classification", takes_images=True
        )


def pair(load, path, **options):
    """Loads two equal pairs; returns a row of them, and the notes."""
    data = load(path, task="classification", validation_fraction=0.5, **options)
    return data.train[0], data.notes


@pytest.mark.parametrize("cut_first", [True, False])
def test_pairs_of_bytes(load, write, cut_first):
    texts = ["abcdef", "xy"] if cut_first else ["xy", "abcdef"]
    record = {"text": texts[0], "text_pair": texts[1], "label": 1}
    path = write("a.jsonl", [record] * 2)
    row, notes = pair(load, path, num_token_types=2)
    first, second = ("abcd", "xy") if cut_first else ("xy", "abcd")
    assert bytes(row["tokens"].astype(np.uint8)) == f"{first}\0{second}\0".encode()
    types = [0] * (len(first) + 1) + [1] * (len(second) + 1)
    assert row["token_types"].tolist() == types
    assert notes[0].startswith("2 pairs of texts are longer than --seq-len 8; the long")
    row, notes = pair(load, path, seq_len=12)
    assert bytes(row["tokens"].astype(np.uint8)) == "".join(texts).encode() + bytes(4)
    assert row["segments"].sum() == 9
    assert "token_types" not in row
    assert notes == ()


@pytest.mark.parametrize("sizes", [(2, 3), (9, 2), (2, 9), (9, 8), (8, 9), (9, 9)])
def test_pairs_are_as_their_tokenizer_has_them(load, write, tmp_path, sizes):
    path = word_tokenizer(tmp_path / "t.json", "[CLS]", "[SEP]", "[PAD]")
    whole = tokenizers.Tokenizer.from_file(str(path))
    special = [(name, whole.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    whole.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=special,
    )
    whole.save(str(path))
    texts = [" ".join(map(str, range(size))) for size in sizes]
    record = {"text": texts[0], "text_pair": texts[1], "label": 1}
    records = write("a.jsonl", [record] * 2)
    options = {"num_token_types": 2, "tokenizer": path, "seq_len": 12}
    row, _ = pair(load, records, **options)
    whole.enable_truncation(12, strategy="longest_first")
    expected = whole.encode(*texts)
    used = row["segments"].astype(bool)
    assert row["tokens"][used].tolist() == expected.ids
    assert row["token_types"][used].tolist() == expected.type_ids
    single = write("b.jsonl", [{"text": texts[0], "label": 1}] * 2)
    row, _ = pair(load, single, **options | {"seq_len": 8})
    whole.enable_truncation(8)
    used = row["segments"].astype(bool)
    assert row["tokens"][used].tolist() == whole.encode(texts[0]).ids
    assert "token_types" not in row
    with pytest.raises(DataError, match="expected token types below 1, as the model"):
        pair(load, records, **options | {"num_token_types": 1})
    with pytest.raises(DataError, match="--seq-len: expected at least 5 tokens"):
        pair(load, records, **options | {"seq_len": 4})


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({"text": "a", "label": 1}, "expected pairs of texts as in --data, found sing"),
        ({"text": "a", "text_pair": "b", "label": 3}, r"found \[3\], which it lacks"),
    ],
)
def test_validation_that_does_not_belong_to_the_pairs(load, write, held, expected):
    path, other = write("a.jsonl", PAIRED), write("b.jsonl", [held])
    with pytest.raises(DataError, match=f"--validation: .*{expected}"):
        load(path, task="classification", validation=(str(other),))
