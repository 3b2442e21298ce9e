"""Ids, masks and special tokens are those of transformers; bytes need none of it."""

import json
from itertools import product

import numpy as np
import pytest
from small_tokenizers import KINDS, TEMPLATES, byte_level, word_level, write_kind
from transformers import AutoTokenizer

from jaxinf.train.data.errors import DataError
from jaxinf.train.data.examples import Example
from jaxinf.train.data.tokenizer import ByteTokenizer, open_tokenizer

TEXTS = ["one two", "the text number nine", "ü", "two </s> one", "three\n four "]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": None}}}
TALK = [
    {"role": "user", "content": "one two?"},
    {"role": "assistant", "content": "three", "reasoning_content": "four is more"},
    {"role": "user", "content": "text"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "f", "content": "nine"},
    {"role": "assistant", "content": "it is nine"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "all of it"}}]


@pytest.fixture(params=KINDS)
def both(request, tmp_path):
    """Our tokenizer of a folder, and that of transformers."""
    folder = write_kind(tmp_path / "t", request.param)
    return open_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


def test_bytes():
    tokenizer = open_tokenizer(None)
    ids = tokenizer.encode("a", "aü", is_whole=True)
    assert ids.tolist() == [97, 0xC3, 0xBC]
    assert tokenizer.encode("b", b"\xff", is_whole=True).tolist() == [255]
    assert (tokenizer.end, tokenizer.vocab_size) == (0, 256)


def test_ids_of_texts(both):
    ours, theirs = both

    def ids_of(**how):
        return [ours.encode("a", text, **how).tolist() for text in TEXTS]

    for is_whole in (True, False):
        expected = theirs(TEXTS, add_special_tokens=is_whole).input_ids
        assert ids_of(is_whole=is_whole) == expected
    found = ids_of(is_whole=True, limit=4)
    assert found == theirs(TEXTS, truncation=True, max_length=4).input_ids
    assert ours.adds_end == (theirs("one").input_ids[-1] == ours.end)


def test_ids_of_pairs(both):
    ours, theirs = both
    for limit, pair in product((6, 99), zip(TEXTS, TEXTS[::-1], strict=True)):
        expected = theirs(*pair, return_token_type_ids=True, truncation=True,
                          max_length=limit)  # fmt: skip
        ids, types = ours.encode_classified("a", pair, limit=limit, num_types=2)
        assert ids.tolist() == expected.input_ids
        assert types.tolist() == expected.token_type_ids
        ids, types = ours.encode_classified("a", pair, limit=limit, num_types=0)
        # transformers reads the class at the last token that is no padding.
        pad = ours.end if theirs.pad_token_id is None else theirs.pad_token_id
        kept = 1 + max(n for n, one in enumerate(expected.input_ids) if one != pad)
        assert ids.tolist() == expected.input_ids[:kept]
        assert types is None
    if max(expected.token_type_ids):
        with pytest.raises(DataError, match=r"types below 1, .*found 1"):
            ours.encode_classified("a", pair, limit=99, num_types=1)


@pytest.mark.parametrize("texts", [("one",), ("one", "two")], ids=len)
def test_special_tokens_leave_room_for_texts(both, texts):
    ours, theirs = both
    least = len(texts) + theirs.num_special_tokens_to_add(pair=len(texts) == 2)
    assert ours.encode_classified("a", texts, limit=least, num_types=2)[0].size == least
    with pytest.raises(DataError, match=f"--seq-len: expected at least {least} tok"):
        ours.encode_classified("a", texts, limit=least - 1, num_types=2)


@pytest.mark.parametrize("template", TEMPLATES)
def test_conversations(tmp_path, template):
    special = ("<s>", "<|im_start|>", "<|im_end|>")
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    folder = byte_level(
        tmp_path / "t", *special, chat_template=TEMPLATES[template], **config
    )
    ours, theirs = open_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    talk = TALK if template == "tools" else [*TALK[:3], TALK[-1]]
    tools = TOOLS if template == "tools" else None
    example = Example("a.jsonl:1", "dialogue", (), talk, tools)
    ids, is_learned = ours.encode_conversation(example, learn_all=False)
    text = theirs.apply_chat_template(talk, tools=tools, tokenize=False)
    expected = theirs.apply_chat_template(
        talk, tools=tools, return_dict=True,
        return_assistant_tokens_mask=template == "marked",
    )  # fmt: skip
    assert ids.tolist() == expected["input_ids"]

    def decoded(ids):
        return theirs.decode(ids, clean_up_tokenization_spaces=False)

    assert decoded(ids) == text
    if template == "marked":
        assert is_learned.tolist() == [bool(m) for m in expected["assistant_masks"]]
    starts = np.flatnonzero(np.diff(is_learned, prepend=False) & is_learned)
    ends = np.flatnonzero(np.diff(is_learned, append=False) & is_learned) + 1
    found = [decoded(ids[one]) for one in map(slice, starts, ends)]
    end = {"plain": "\n", "marked": "<|im_end|>"}.get(template, "<|im_end|>\n")
    thought = {"thinking": "<think>four is more</think>"}.get(template, "")
    call = '<call>{"name": "f", "arguments": {"x": 1, "y": null}}'
    answers = [thought + "three", call, "it is nine"]
    assert found == [a + end for a in answers if a != call or template == "tools"]
    ids, is_learned = ours.encode_conversation(example, learn_all=True)
    assert ids.tolist() == expected["input_ids"]
    assert is_learned.all()


CHANGES = "changes the text before it"
ROLES = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[-1]['content'] }}", CHANGES),
        ("{{ messages[0]['content'] }}", CHANGES),
        ("{% for m in messages %}{% if loop.last %}last {% endif %}{{ m }}\n"
         "{% endfor %}", CHANGES),
        (ROLES + "{% if add_generation_prompt %}assistant\n{% endif %}", CHANGES),
        (ROLES + "$", CHANGES),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ raise_exception('no tools') }}", "no tools"),
        ("{% if", "TemplateSyntaxError"),
    ],
)  # fmt: skip
def test_templates_that_are_refused(tmp_path, template, message):
    tokenizer = open_tokenizer(byte_level(tmp_path, chat_template=template))
    example = Example("a.jsonl:1", "dialogue", (), TALK[:2])
    with pytest.raises(DataError, match=r"^a.jsonl:1: expected ") as caught:
        tokenizer.encode_conversation(example, learn_all=False)
    assert message in str(caught.value)


def test_a_template_sees_always_the_same_day(tmp_path):
    template = "{{ strftime_now('%d %b %Y') }}"
    tokenizer = open_tokenizer(byte_level(tmp_path, chat_template=template))
    example = Example("a.jsonl:1", "dialogue", (), TALK[:2])
    ids, _ = tokenizer.encode_conversation(example, learn_all=True)
    day = tokenizer.encode("a", "26 Jul 2024", is_whole=False)
    assert ids.tolist() == day.tolist()


def test_fingerprint_tells_tokenizers_apart(tmp_path):
    first = open_tokenizer(word_level(tmp_path / "a", ["one"])).fingerprint
    assert open_tokenizer(word_level(tmp_path / "b", ["one"])).fingerprint == first
    other = word_level(tmp_path / "c", ["one"], "</s>")
    assert open_tokenizer(other).fingerprint != first
    assert ByteTokenizer().fingerprint != first


def test_text_that_is_none(tmp_path):
    path = word_level(tmp_path, ["one"]) / "tokenizer.json"
    tokenizer = open_tokenizer(path)
    with pytest.raises(DataError, match=r"a.txt: expected UTF-8: .*byte 0xff in"):
        tokenizer.encode("a.txt", b"one\xff", is_whole=True)
    for one in (tokenizer, ByteTokenizer()):
        with pytest.raises(DataError, match=r"a.jsonl:3: expected text: .*surrogates"):
            one.encode("a.jsonl:3", "\ud800", is_whole=True)
    document = json.loads(path.read_text())
    document["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match="PanicException"):
        open_tokenizer(path).encode("a.txt", "nine", is_whole=True)


@pytest.mark.parametrize("content", [None, b"{}", b"not JSON", b"\xff"])
def test_folders_that_are_none(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"--tokenizer .*tokenizer.json: expected"):
        open_tokenizer(path)


def test_code_of_a_folder_is_not_run(tmp_path):
    config = {
        "auto_map": {"AutoTokenizer": ["own.Own", None]},
        "tokenizer_class": "Own",
    }
    folder = word_level(tmp_path, ["one"], **config)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(DataError, match="expected a tokenizer of transformers"):
        open_tokenizer(folder)
    assert not (tmp_path / "ran").exists()
