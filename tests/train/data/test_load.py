"""Files to rows, for every kind of data and task: learned parts and refusals."""

import hashlib
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers
from families import family
from small_tokenizers import byte_level, word_level

from jaxinf.command_line import UsageError
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.errors import DataError
from jaxinf.train.data.loader import Batches

PAIRS = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(40)]
LABELLED = [{"text": f"number {n}", "label": n % 3} for n in range(40)]
TEXTS = [{"text": f"text number {n}, all of it.", "id": n} for n in range(40)]


PAIRED = [{**record, "text_pair": f"is it {n}?"} for n, record in enumerate(LABELLED)]


def word_tokenizer(folder, *special, **config):
    words = ["text", "number", *map(str, range(40))]
    return word_level(folder, words, *special, **config)


def picture_folder(root):
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for n in range(8):
            pixels = rng.integers(0, 256, (5, 7, 3), np.uint8)
            Image.fromarray(pixels).save(root / name / f"{n}.png")
    return root


@pytest.fixture
def source(tmp_path, write):
    """Writes one of the kinds of data; returns the arguments of `load`."""
    makers = {
        "text": lambda: ([write("a.txt", "some text\n" * 40)], {}),
        "records": lambda: ([write("a.jsonl", TEXTS)], {}),
        "parquet": lambda: ([parquet(tmp_path / "a.parquet", TEXTS)], {}),
        "tokens": lambda: (
            [write("a.jsonl", TEXTS)],
            {
                "tokenizer": word_tokenizer(
                    *(tmp_path / "t", "</s>", "[MASK]"),
                    eos_token="</s>",
                    mask_token="[MASK]",
                )
            },
        ),
        "pairs": lambda: ([write("a.jsonl", PAIRS)], {}),
        "labelled": lambda: ([write("a.jsonl", LABELLED)], {}),
        "paired": lambda: ([write("a.jsonl", PAIRED)], {"num_token_types": 2}),
        "folder": lambda: (
            [picture_folder(tmp_path / "pictures")],
            {"image_shape": (8, 8, 3)},
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
    "tokens": ("causal-lm", "masked-lm"),
    "pairs": ("causal-lm", "seq2seq"),
    "labelled": ("classification",),
    "paired": ("classification",),
    "folder": ("classification",),
}
SLOW = [("text", "masked-lm")]
CASES = [(kind, task) for kind, tasks in TASKS_OF.items() for task in tasks]


@pytest.mark.parametrize(
    ("kind", "task"), family(CASES, short=[x for x in CASES if x not in SLOW])
)
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


def tokens_of(rows):
    return np.concatenate([rows[n]["tokens"] for n in range(len(rows))])


def test_the_tail_of_a_text_is_held_out(load, write):
    path = write("a.txt", bytes(range(1, 201)))
    data = load(path, seq_len=4, validation=("0.25",))
    train, held = tokens_of(data.train), tokens_of(data.validation)
    assert not set(train) & set(held)
    assert held.tolist() == [*range(152, 200)][-held.size :]


def test_labels_are_names_or_digits(load, write):
    names = ["neg", "pos", "neutral"]
    named = [{**record, "label": names[record["label"]]} for record in LABELLED]
    data = load(write("a.jsonl", named), task="classification", seq_len=16)
    assert data.num_labels == 3
    assert data.notes[0] == "classes: 0 neg, 1 neutral, 2 pos"
    assert data.example == "number 0\\x00 → «neg» (text,label)"
    digits = [{**record, "label": str(record["label"])} for record in LABELLED]
    assert load(write("b.jsonl", digits), task="classification").num_labels == 3
    held = write("c.jsonl", [{"text": "a", "label": "bad"}])
    with pytest.raises(DataError, match="'neutral', 'pos', found 'bad', which it lac"):
        load(write("a.jsonl", named), task="classification", validation=(str(held),))


@pytest.mark.parametrize(
    ("records", "options", "found"),
    [
        (PAIRS, {}, "0+1=«1\\x00» (prompt,response)"),
        (PAIRS, {"loss_on": "all"}, "«0+1=1\\x00» (prompt,response)"),
        (PAIRS, {"task": "seq2seq"}, "0+1=«1\\x00» (prompt,response)"),
        (PAIRS * 9, {"fields": "text=prompt"}, "«0+1=\\x00» (text=prompt)"),
        (
            [{"prompt": "\x1b[2J", "response": "ü\u202e"}] * 40,
            {"seq_len": 50},
            "\\x1b[2J«ü\\u202e\\x00» (prompt,response)",
        ),
        (
            [{"text": "a" * 300}] * 40,
            {},
            f"«{'a' * 120}…» (text)",
        ),
    ],
)
def test_the_first_example_is_said(load, write, records, options, found):
    options = {"seq_len": 16, **options}
    assert load(write("a.jsonl", records), **options).example == found


def test_what_a_folder_leaves_out_is_said(load, write):
    path = write("d/a.txt", "some text\n" * 40)
    write("d/b.bin", b"\0")
    (note,) = load(path.parent).notes
    assert note == (
        "1 files of folders are neither text nor Parquet and are left out: 'b.bin'"
    )


def test_conversations_by_a_template(load, write, tmp_path):
    template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    folder = byte_level(tmp_path / "t", "<|im_end|>", eos_token="<|im_end|>",
                        chat_template=template)  # fmt: skip
    talk = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    path = write("a.jsonl", [{"messages": talk}] * 4)
    how = {"tokenizer": folder, "seq_len": 40}
    data = load(path, **how)
    row = data.train[0]
    learned = row["targets"][row["weights"] > 0]
    assert data.tokenizer.decode(learned) == b"a<|im_end|>" * row["segments"].max()
    assert data.example == "user:u<|im_end|>assistant:«a<|im_end|>» (messages)"
    (folder / "tokenizer_config.json").write_text("{}")
    for options in (how, {}):
        with pytest.raises(
            DataError, match=r"a.jsonl:1: .* found messages, whose form"
        ):
            load(path, **options)


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
    with pytest.raises(
        DataError, match=r"p.jsonl:1: expected records of one kind.* are text"
    ):
        load(train, seq_len=4, validation=(str(write("p.jsonl", PAIRS)),))


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
    assert len(load(path, seq_len=31).train)


def test_usual_length_of_rows(load, write):
    pairs = [{"prompt": "ab", "response": "c" * n} for n in (3, 60)] * 20
    data = load(write("a.jsonl", pairs), seq_len=None, most_tokens=1000)
    assert (data.seq_len, data.train[0]["tokens"].size) == (64, 64)
    assert load(write("b.jsonl", pairs), seq_len=None, most_tokens=32).seq_len == 32
    assert load(write("a.txt", "text " * 400), seq_len=None).seq_len == 50


def test_field_of_the_text(load, write):
    path = write("a.jsonl", [{"body": record["text"]} for record in TEXTS])
    assert (
        load(path, fields="text=body").identity
        == load(write("b.jsonl", TEXTS)).identity
    )
    with pytest.raises(DataError, match="--fields text=body: the data has no record"):
        load(write("a.txt", "text " * 99), fields="text=body")
    with pytest.raises(DataError, match="expected a field 'body', as --fields names"):
        load(write("c.jsonl", PAIRS), fields="text=body")


def test_order_of_files_does_not_count(load, write):
    one, two = write("a.txt", "first text " * 29), write("b.txt", "second text " * 29)
    moved = write("0/c.txt", "second text " * 29)
    identity = load(one, two).identity
    assert load(two, one).identity == identity
    assert load(one, moved).identity == identity
    assert load(one, two, validation=("0.2",)).identity != identity
    assert load(one).identity != identity


def test_masked_lm_needs_a_mask(load, write, tmp_path):
    path = word_tokenizer(tmp_path / "t", "</s>", eos_token="</s>")
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
            [{"text": "a", "label": "x"}, {"text": "a", "label": 1}],
            "classification",
            "labels that are all names or all numbers, found 'x' and 1",
        ),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": ("1.0",)}, "--validation: expected more than 0"),
        ({"loss_on": "all", "model": "t5"}, "--loss-on: --task seq2seq learns no pro"),
    ],
)
def test_options_that_mean_nothing(options, message):
    with pytest.raises(UsageError, match=message):
        check(TrainConfig(mode="memory", **options))


def pair(load, path, **options):
    """Loads two equal pairs; returns a row of them, and the notes."""
    data = load(path, task="classification", validation=("0.5",), **options)
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
    assert notes[0] == "2 examples are longer than --seq-len 8 and are cut there"
    row, notes = pair(load, path, seq_len=12)
    assert bytes(row["tokens"].astype(np.uint8)) == "".join(texts).encode() + bytes(4)
    assert row["segments"].sum() == 9
    assert "token_types" not in row
    assert notes == ()


@pytest.mark.parametrize("sizes", [(2, 3), (9, 2), (8, 9)])
def test_pairs_are_as_their_tokenizer_has_them(load, write, tmp_path, sizes):
    path = word_tokenizer(
        *(tmp_path / "t", "[CLS]", "[SEP]", "[PAD]"), pad_token="[PAD]"
    ).joinpath("tokenizer.json")
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
        (
            {"text": "a", "label": 1},
            r"b.jsonl:1: expected a field 'text_pair' in all .*a.jso",
        ),
        (
            {"text": "a", "text_pair": "b", "label": 3},
            "--validation: .*'0', '1', '2', found '3', which it lacks",
        ),
    ],
)
def test_validation_that_does_not_belong_to_the_pairs(load, write, held, expected):
    path, other = write("a.jsonl", PAIRED), write("b.jsonl", [held])
    with pytest.raises(DataError, match=expected):
        load(path, task="classification", validation=(str(other),))
