"""Small tokenizers of each kind as Hugging Face folders, and chat templates."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

_TEXT = ["one two three four", "the text number nine, all of it", "ünï two one"] * 9
_MODELS = {
    "bpe": (models.BPE, trainers.BpeTrainer, pre_tokenizers.ByteLevel),
    "wordpiece": (
        models.WordPiece,
        trainers.WordPieceTrainer,
        pre_tokenizers.Whitespace,
    ),
    "unigram": (models.Unigram, trainers.UnigramTrainer, pre_tokenizers.Metaspace),
}
KINDS = {
    "bpe": ("bpe", "{a}", {"eos_token": "</s>", "pad_token": "<pad>"}),
    "bpe-begin-end": (
        *("bpe", "<s> {a} </s>"),
        {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
    ),
    "bpe-end-is-pad": ("bpe", "{a} </s>", {"eos_token": "</s>", "pad_token": "</s>"}),
    "bpe-without-end": ("bpe", "{a}", {}),
    "wordpiece": (
        *("wordpiece", "<s> {a} </s>"),
        {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"},
    ),
    "unigram-begin": ("unigram", "<s> {a}", {"bos_token": "<s>", "eos_token": "</s>"}),
}
"""Model, form of a text, and names of special tokens."""

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TOOLS = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}{{ ' ' + m['name'] if m['name'] }}\n"
    "{% if m['content'] %}{{ m['content'] }}{% endif %}"
    "{% for c in m['tool_calls'] or [] %}<call>{{ c['function'] | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['reasoning_content'] %}<think>{{ m['reasoning_content'] }}</think>"
    "{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
TEMPLATES = {
    "plain": _PLAIN + "{% if add_generation_prompt %}assistant: {% endif %}",
    "chatml": _CHATML,
    "marked": _MARKED,
    "tools": _TOOLS,
    "thinking": _THINKING,
}


def write_kind(folder, name, **config):
    """Writes one of `KINDS`; returns the folder."""
    kind, form, named = KINDS[name]
    model, trainer, splitter = _MODELS[kind]
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    how = {"vocab_size": 90, "show_progress": False, "special_tokens": special}
    if kind == "unigram":
        tokenizer = Tokenizer(model())
        trained = trainer(unk_token="<unk>", **how)
    else:
        tokenizer, trained = Tokenizer(model(unk_token="<unk>")), trainer(**how)
    tokenizer.pre_tokenizer = splitter()
    tokenizer.train_from_iterator(_TEXT, trained)
    if kind == "bpe":
        tokenizer.decoder = decoders.ByteLevel()
    pair = form.format(a="$A") + " " + form.format(a="$B").replace("<s> ", "")
    if "cls_token" in named:
        pair = "<s> $A </s> $B:1 </s>:1"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=form.format(a="$A"),
        pair=pair,
        special_tokens=[(n, tokenizer.token_to_id(n)) for n in ("<s>", "</s>")],
    )
    return _write(folder, tokenizer, {**named, **config})


def byte_level(folder, *special, **config):
    """Writes a tokenizer of bytes and special tokens; returns the folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {character: n for n, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return _write(folder, tokenizer, config)


def word_level(folder, words, *special, processor=None, **config):
    """Writes a tokenizer of words, and ``[UNK]``; returns the folder."""
    ids = {word: n for n, word in enumerate(["[UNK]", *words, *special])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    if processor is not None:
        tokenizer.post_processor = processor
    return _write(folder, tokenizer, config)


def _write(folder, tokenizer, config):
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
