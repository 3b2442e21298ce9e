"""Chat templates: answers, tokens, and templates that must not run on."""

import json
import sys

import pytest
import tokenizers
from families import family

from jaxinf.train.data import chat
from jaxinf.train.data.chat import ChatRenderer, ChatTemplate
from jaxinf.train.data.errors import DataError

CHATML = (
    "{{ bos_token }}{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROLES = ("user", "assistant", "user", "assistant")
MESSAGES = [{"role": r, "content": f"{r[0]}{n}"} for n, r in enumerate(ROLES)]


@pytest.fixture
def render():
    """Renders the messages by a template."""
    made = []

    def call(text, *, learn_all=False, messages=MESSAGES):
        template = ChatTemplate("t.jinja", text, {"bos_token": "<s>"})
        made.append(ChatRenderer(template))
        return made[-1].render("a.jsonl:1", messages, learn_all=learn_all)

    yield call
    for renderer in made:
        renderer.close()


def test_answers_are_told_by_prefixes(render):
    parts = render(CHATML)
    assert "".join(text for text, _ in parts) == (
        "<s><|im_start|>user\nu0<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
        "<|im_start|>user\nu2<|im_end|>\n<|im_start|>assistant\na3<|im_end|>\n"
    )
    assert [text for text, is_answer in parts if is_answer] == [
        "a1<|im_end|>\n",
        "a3<|im_end|>\n",
    ]
    assert render(CHATML, learn_all=True) == [("".join(t for t, _ in parts), True)]


BOUNDS = {
    "without-end": (
        "{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}{% endfor %}",
        "was stopped: it took more than 1 s of processor time",
    ),
    "power": ("{{ 10 ** (10 ** 9) }}", "was stopped: it took more than 1 s"),
    "long-range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "much-output": ("{{ 'a' * (messages | length * 10**7) }}", "it writes more than"),
    "much-memory": ("{{ 'a' * 10**11 }}", "MemoryError"),
    "internals": ("{{ messages.__class__.__mro__ }}", "SecurityError"),
    "change": ("{{ messages.append(1) }}", "SecurityError"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "refusal": ("{{ raise_exception('no tools') }}", "ValueError: no tools"),
    "today": ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
    "no-template": ("{% if", "TemplateSyntaxError"),
    "last-only": ("{{ messages[-1]['content'] }}", "changes the text before it"),
    "no-answer": ("{{ messages[0]['content'] }}", "changes the text before it"),
}


@pytest.mark.parametrize(
    "name", family(BOUNDS, short=[name for name in BOUNDS if name != "without-end"])
)
def test_templates_are_bounded(render, monkeypatch, name):
    text, message = BOUNDS[name]
    monkeypatch.setattr(chat, "_MOST_CPU_S", 1)
    with pytest.raises(DataError, match=r"a.jsonl:1: .*t.jinja") as caught:
        render(text)
    assert message in str(caught.value)


def test_a_package_that_is_missing(render, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(DataError, match=r"t.jinja: needs jinja2.*pip install"):
        render(CHATML)


def byte_level(folder, *special):
    """Saves a tokenizer of bytes and special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {character: n for n, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))


def test_answers_as_tokens(load, write, tmp_path):
    byte_level(tmp_path, "<s>", "<|im_start|>", "<|im_end|>")
    config = {"chat_template": [{"name": "default", "template": CHATML}]}
    config |= {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}
    write("tokenizer_config.json", json.dumps(config))
    path = write("a.jsonl", [{"messages": MESSAGES[:2]}] * 3)
    data = load(path, tokenizer=tmp_path, seq_len=40, is_pretrained=True)
    row = data.train[0]
    learned = row["targets"][row["weights"] > 0]
    assert data.tokenizer.decode(learned) == b"a1<|im_end|>\n" * int(
        row["segments"].max()
    )
    assert data.tokenizer.decode(data.prompt) == (
        b"<s><|im_start|>user\nu0<|im_end|>\n<|im_start|>assistant\n"
    )
    write("chat_template.jinja", CHATML.replace("im_end", "im_start"))
    other = load(path, tokenizer=tmp_path, seq_len=40, is_pretrained=True)
    assert other.identity != data.identity


def test_without_a_template_only_a_new_model_learns_messages(load, write, tmp_path):
    byte_level(tmp_path)
    path = write("a.jsonl", [{"messages": MESSAGES}] * 3)
    assert len(load(path, tokenizer=tmp_path, seq_len=40).train)
    with pytest.raises(DataError, match=r"a.jsonl:1: expected a chat template beside"):
        load(path, tokenizer=tmp_path, seq_len=40, is_pretrained=True)
