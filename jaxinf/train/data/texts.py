"""Turns texts into rows: reads, encodes, holds a part out, packs.

Invariant: all texts of a run are of one kind, which suits its task.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
from jaxinf_models import TaskName

from jaxinf.train.data.errors import DataError, shown_names
from jaxinf.train.data.examples import (
    Example,
    ExampleKind,
    Label,
    classes_of,
    example_of,
    field_map,
    num_classes,
    numbered,
    used_fields,
)
from jaxinf.train.data.files import by_split, find_files, standard_library_files
from jaxinf.train.data.options import DataOptions
from jaxinf.train.data.records import read_records
from jaxinf.train.data.rows import (
    RowMap,
    Rows,
    TrainingData,
    digest_of,
    masking,
    packed,
    pairs,
    single,
    windows,
)
from jaxinf.train.data.sequences import Encoded, Sequences, encode_examples
from jaxinf.train.data.tokenizer import Tokenizer, open_tokenizer
from jaxinf.typing import Array

_EXPECTED: dict[TaskName, tuple[ExampleKind, ...]] = {
    "causal-lm": ("text", "dialogue"),
    "masked-lm": ("text",),
    "seq2seq": ("dialogue",),
    "classification": ("labelled",),
}
_MEANT = {
    "text": "text",
    "dialogue": "prompts and responses, or messages",
    "labelled": "a text and its label",
}

# A row of the longest example would otherwise take any memory.
_MOST_USUAL_TOKENS = 1024
_ROUNDED_TO = 16
_PROMPT_TOKENS = 32
_SHOWN_CHARS, _SHOWN_RUNS, _SHOWN_CLASSES = 120, 8, 20


@dataclasses.dataclass
class _Texts:
    """The settings that decide how texts are read, and what reading finds.

    Attributes:
      seq_len: tokens in a row; 0 until the longest example is known.
      first: the first example of the training data.
      classes: numbers of the training data's classes.
    """

    options: DataOptions
    task: TaskName
    tokenizer: Tokenizer
    seq_len: int
    most_usual_tokens: int
    num_token_types: int
    first: Example | None = None
    example: str = ""
    classes: dict[Label, int] | None = None
    unused: set[str] = dataclasses.field(default_factory=set)
    notes: list[str] = dataclasses.field(default_factory=list)
    num_json: int = 0

    @property
    def is_apart(self) -> bool:
        return self.task == "seq2seq"

    @property
    def kind(self) -> ExampleKind:
        assert self.first is not None
        return self.first.kind

    @property
    def most(self) -> int:
        return self.seq_len or self.most_usual_tokens


def load_texts(
    options: DataOptions,
    *,
    task: TaskName,
    seq_len: int | None,
    most_tokens: int | None = None,
    num_token_types: int = 0,
) -> TrainingData:
    """Reads texts (blocks), in the steps that all tasks share.

    Args:
      seq_len: tokens in a row; None for those of the longest example.
      most_tokens: most tokens in a row for the model; None for no limit.
      num_token_types: types of tokens that the model tells apart; 0 for none.

    Raises:
      DataError: the data is empty or malformed.
      OSError: a file cannot be read.
    """
    most = min(_MOST_USUAL_TOKENS, most_tokens or _MOST_USUAL_TOKENS)
    tokenizer, data = open_tokenizer(options.tokenizer), options.data
    texts = _Texts(options, task, tokenizer, seq_len or 0, most, num_token_types)
    files, left_out = find_files(data) if data else (standard_library_files(), [])
    train_files, held_files = by_split(files)
    if options.validation:
        found, others = find_files(options.validation_paths)
        held_files, _ = by_split(found, is_validation=True)
        left_out = left_out + others
    parts = _read(texts, train_files, "--data")
    if held_files:
        held = _read(texts, held_files, "--validation")
    else:
        share, by_tokens = options.held_out_share, texts.kind == "text"
        halves = [part.split(share, by_tokens=by_tokens) for part in parts]
        parts, held = map(list, zip(*halves, strict=True))
    if left_out:
        texts.notes.append(
            f"{len(left_out):,} files of folders are neither text nor tables and are "
            f"left out: {shown_names([path.name for path in left_out])}"
        )
    return _loaded(texts, parts, held)


def _read(texts: _Texts, files: Sequence[Path], flag: str) -> list[Sequences]:
    """Returns one list of sequences, or sources and answers in the same order."""
    options, tokenizer = texts.options, texts.tokenizer
    examples = encode_examples(
        _examples(texts, files, flag),
        tokenizer,
        most=texts.most,
        num_types=texts.num_token_types,
        learn_all=options.loss_on == "all",
        is_apart=texts.is_apart,
    )
    encoded = list(examples)
    if not encoded or texts.first is None:
        raise DataError(
            f"{flag}: expected {_MEANT[_EXPECTED[texts.task][0]]}, found "
            f"{len(files)} file(s) without a record"
        )
    if options.fields and not texts.first.fields:
        raise DataError(
            f"--fields {options.fields}: the data has no records, but text; leave "
            "it out"
        )
    texts.seq_len = texts.seq_len or _usual_length(texts, encoded)
    texts.example = texts.example or _shown_example(tokenizer, texts.first, encoded[0])
    if texts.kind == "labelled":
        encoded = [(one,) for one in _numbered(texts, encoded, flag)]
    encoded = _fitting(texts, encoded, flag)
    encoded.sort(key=lambda parts: [part.digest() for part in parts])
    return [Sequences.of(side) for side in zip(*encoded, strict=True)]


def _examples(texts: _Texts, files: Sequence[Path], flag: str) -> Iterator[Example]:
    """Yields the examples of files, and refuses those that do not suit the run."""
    mapping = field_map(texts.options.fields)
    used = used_fields(mapping)
    has_template = texts.tokenizer.has_template and not texts.is_apart
    for record in chain.from_iterable(read_records(path, used) for path in files):
        example = example_of(record, mapping, texts.unused, has_template=has_template)
        if problem := _problem(texts, example, flag):
            raise DataError(f"{example.where}: {problem}")
        if texts.first is None:
            texts.first = example
            if example.kind == "labelled":
                _check_room(texts, len(example.texts))
        texts.num_json += example.where.endswith(".json")
        yield example


def _problem(texts: _Texts, example: Example, flag: str) -> str:
    """Returns why an example does not suit the run; nothing if it does."""
    expected, first = _EXPECTED[texts.task], texts.first or example
    if example.kind != first.kind:
        return (
            f"expected records of one kind, found {_MEANT[example.kind]} after those "
            f"of {first.where}, which are {first.kind}; train on them one after the "
            "other"
        )
    if example.kind not in expected:
        meant = " or ".join(_MEANT[kind] for kind in expected)
        return f"--task {texts.task} expects {meant}, {flag} has {_MEANT[example.kind]}"
    if example.kind == "labelled" and len(example.texts) != len(first.texts):
        return (
            f"expected a field 'text_pair' in all records, or in none, as {first.where}"
        )
    if texts.is_apart and example.messages:
        return "--task seq2seq expects a prompt and a response, found messages"
    if example.kind == "text" and texts.options.loss_on == "all":
        return "--loss-on all: texts are learned whole; leave it out"
    if example.messages and not texts.tokenizer.has_template:
        return (
            "expected prompt and response, found messages, whose form is a chat "
            f"template's, which {texts.tokenizer.name} lacks: give --tokenizer a "
            "folder with chat_template.jinja, or copy that of the model's chat "
            "variant beside its tokenizer.json"
        )
    return ""


def _check_room(texts: _Texts, num_texts: int) -> None:
    has_types = texts.num_token_types > 0
    need = num_texts + texts.tokenizer.num_special(num_texts, has_types=has_types)
    if texts.most < need:
        what = ("a text", "two texts")[num_texts - 1]
        raise DataError(
            f"--seq-len: expected at least {need} tokens, for {what} and its special "
            f"tokens, got {texts.most}"
        )


def _usual_length(texts: _Texts, encoded: Sequence[tuple[Encoded, ...]]) -> int:
    """Returns the tokens of the longest example, within limits."""
    sizes = [part.num_tokens for parts in encoded for part in parts]
    longest = -(-max(sizes) // _ROUNDED_TO) * _ROUNDED_TO
    if texts.kind == "text":  # the part that is held out must have rows, too
        held = int(sum(sizes) * texts.options.held_out_share)
        longest = min(longest, held // 2)
    return max(2, min(longest, texts.most_usual_tokens))


def _numbered(
    texts: _Texts, encoded: Sequence[tuple[Encoded, ...]], flag: str
) -> Iterator[Encoded]:
    labels = [one.label for (one,) in encoded]
    if texts.classes is None:
        texts.classes = classes_of(labels, flag)
        classes = texts.classes.items()
        if named := [f"{n} {name}" for name, n in classes if str(name) != str(n)]:
            more = ", …" if len(named) > _SHOWN_CLASSES else ""
            said = _printable(", ".join(named[:_SHOWN_CLASSES]))
            texts.notes.append(f"classes: {said}{more}")
    numbers = numbered(labels, texts.classes, flag)
    for (one,), number in zip(encoded, numbers, strict=True):
        yield dataclasses.replace(one, label=number)


def _fitting(
    texts: _Texts, encoded: list[tuple[Encoded, ...]], flag: str
) -> list[tuple[Encoded, ...]]:
    """Leaves out examples whose answers begin after the cut, and notes cuts.

    Raises:
      DataError: none is left.
    """
    if texts.kind == "text":
        return encoded
    is_dialogue = texts.kind == "dialogue" and not texts.is_apart
    seq_len, kept = texts.seq_len, encoded
    limit = seq_len + is_dialogue
    num_cut = sum(any(part.num_tokens > limit for part in parts) for parts in encoded)
    if is_dialogue:
        kept = [p for p in encoded if p[0].is_learned[1:limit].any()]
    if not kept:
        starts = [1 + int(np.argmax(p[0].is_learned[1:])) for p in encoded]
        raise DataError(
            f"{flag}: expected an answer within --seq-len {seq_len} tokens, "
            f"found {len(encoded):,} examples whose answers all begin later, the "
            f"first after {min(starts):,} tokens; give a --seq-len above that"
        )
    is_pair = texts.first and texts.kind == "labelled" and len(texts.first.texts) == 2
    if num_cut:
        what = "pairs of texts" if is_pair else "examples"
        how = "the longer text of each is cut first"
        texts.notes.append(
            f"{num_cut:,} {what} are longer than --seq-len {seq_len}"
            + (f"; {how}" if is_pair else " and are cut there")
        )
    if num_dropped := len(encoded) - len(kept):
        texts.notes.append(
            f"{num_dropped:,} of those have no answer before the cut and are left out"
        )
    return kept


def _loaded(
    texts: _Texts, parts: list[Sequences], held: list[Sequences]
) -> TrainingData:
    tokenizer, notes = texts.tokenizer, texts.notes
    rows, held_rows = _rows(texts, parts, "train"), _rows(texts, held, "validation")
    unit = "bytes" if tokenizer.name == "bytes" else "tokens"
    num, num_held = parts[0].tokens.size, held[0].tokens.size
    if texts.kind != "text":
        unit, num, num_held = "examples", len(parts[0]), len(held[0])
    if texts.unused:
        notes.append(
            f"fields of records that are not used: {shown_names(texts.unused)}"
        )
    if texts.num_json:
        notes.append(
            f"{texts.num_json:,} .json files that are no list of records, read as text"
        )
    num_labels = None
    if texts.task == "classification":
        labels = [*parts[0].labels.tolist(), *held[0].labels.tolist()]
        num_labels = num_classes(labels, "labels")
    is_causal = texts.task == "causal-lm"
    return TrainingData(
        train=rows,
        validation=held_rows,
        row_map=_masking(texts),
        tokenizer=tokenizer,
        num_labels=num_labels,
        description=f"{num:,} {unit} to train on, {num_held:,} to validate",
        identity={
            "rows": [len(rows), len(held_rows)],
            "tokenizer": tokenizer.fingerprint,
            "sha256": digest_of(part.fingerprint() for part in (*parts, *held)),
        },
        notes=tuple(notes),
        seq_len=texts.seq_len,
        prompt=_prompt(held[0], texts.seq_len) if is_causal else None,
        example=texts.example,
    )


def _prompt(held: Sequences, seq_len: int) -> Array:
    """Returns the beginning of a text, or a whole prompt that has room."""
    for number in range(len(held)):
        tokens, is_learned = held[number]
        if 0 < (start := int(np.argmax(is_learned))) < seq_len:
            return tokens[:start]
    return held.tokens[: min(_PROMPT_TOKENS, seq_len)]


def _rows(texts: _Texts, parts: list[Sequences], name: str) -> Rows:
    seq_len, pad = texts.seq_len, texts.tokenizer.pad
    if texts.kind == "text":
        is_causal = texts.task == "causal-lm"
        rows = windows(parts[0], seq_len, is_causal=is_causal)
        if not len(rows):
            need = f"seq_len + 1 = {seq_len + 1}" if is_causal else f"{seq_len}"
            raise DataError(
                f"expected at least {need} tokens of {name} text, got "
                f"{parts[0].tokens.size}; name more text or shorten the sequence"
            )
        return rows
    if not len(parts[0]):
        raise DataError(
            f"expected at least one {name} example, got none; name more data, or "
            "what to hold out with --validation"
        )
    if texts.is_apart:
        sources, answers = parts
        return pairs(sources, answers, seq_len, pad=pad, start=texts.tokenizer.start)
    return (single if texts.kind == "labelled" else packed)(parts[0], seq_len, pad)


def _masking(texts: _Texts) -> RowMap | None:
    if texts.task != "masked-lm":
        return None
    one = texts.tokenizer
    if one.mask is None:
        raise DataError(
            f"--tokenizer {one.name}: --task masked-lm needs a mask token ([MASK] or "
            "<mask>, named in tokenizer_config.json), which it does not have"
        )
    rate, words = texts.options.mask_rate, one.vocab_size
    return masking(rate, mask=one.mask, special=one.special, vocab_size=words)


def _shown_example(
    tokenizer: Tokenizer, first: Example, parts: tuple[Encoded, ...]
) -> str:
    """Decodes an example; what is learned is in guillemets, what is long is cut."""
    shown = []
    for part in parts:
        places = np.flatnonzero(np.diff(part.is_learned)) + 1
        for start, end in pairwise([0, *places, part.tokens.size]):
            ids = part.tokens[start:end]
            text = tokenizer.decode(ids[: 4 * _SHOWN_CHARS]).decode(errors="replace")
            cut = "…" if len(text) > _SHOWN_CHARS else ""
            text = _printable(text[:_SHOWN_CHARS]) + cut
            is_learned = part.is_learned[start] and first.label == -1
            shown.append(f"«{text}»" if is_learned else text)
    more = " …" if len(shown) > _SHOWN_RUNS else ""
    label = f" → «{_printable(str(first.label))}»" if first.label != -1 else ""
    fields = f" ({_printable(first.fields)})" if first.fields else ""
    return f"{''.join(shown[:_SHOWN_RUNS])}{more}{label}{fields}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
