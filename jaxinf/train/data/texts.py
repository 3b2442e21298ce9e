"""Turns texts into rows: reads, encodes, holds a part out, packs.

Invariant: all texts of a run are of one kind, which suits its task.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
from jaxinf_models import TaskName

from jaxinf.terminal import printable
from jaxinf.train.data import rows as forms
from jaxinf.train.data.errors import DataError, shown_names
from jaxinf.train.data.examples import (
    Example,
    ExampleKind,
    Label,
    example_of,
    field_map,
    num_classes,
    numbered,
    used_fields,
)
from jaxinf.train.data.files import by_split, find_files, standard_library_files
from jaxinf.train.data.options import HELD_OUT_SHARE, DataOptions
from jaxinf.train.data.records import read_records
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


def load_texts(
    options: DataOptions,
    *,
    task: TaskName,
    seq_len: int | None,
    most_tokens: int | None = None,
    num_token_types: int = 0,
) -> forms.TrainingData:
    """Reads texts (blocks), in the steps that all tasks share.

    Args:
      seq_len: tokens in a row; None for those of the longest example.
      most_tokens: most tokens in a row for the model; None for no limit.
      num_token_types: types of tokens that the model tells apart; 0 for none.

    Raises:
      DataError: the data is empty or malformed.
      OSError: a file cannot be read.
    """
    tokenizer, data = open_tokenizer(options.tokenizer), options.data
    files, left_out = find_files(data) if data else (standard_library_files(), [])
    train_files, held_files = by_split(files)
    if (share := options.held_out_share) is None:
        found, others = find_files(options.validation)
        held_files, _ = by_split(found, is_validation=True)
        left_out += others

    run = _Run(options, task, tokenizer, num_token_types)
    most = seq_len or min(_MOST_USUAL_TOKENS, most_tokens or _MOST_USUAL_TOKENS)
    encoded = _encoded(run, train_files, "--data", most)
    is_text, example = run.kind == "text", _shown_example(run, encoded[0])
    if seq_len is None:
        seq_len = _usual_length(encoded, most, is_text * (share or HELD_OUT_SHARE))
    train = _sequences(run, encoded, "--data", seq_len)
    if held_files:
        encoded = _encoded(run, held_files, "--validation", seq_len)
        held = _sequences(run, encoded, "--validation", seq_len)
    else:
        halves = [part.split(share or 0, by_tokens=is_text) for part in train]
        train, held = map(list, zip(*halves, strict=True))
    rows = _rows(run, train, seq_len, "train")
    held_rows = _rows(run, held, seq_len, "validation")

    unit, nums = "examples", [len(train[0]), len(held[0])]
    if is_text:
        unit = "bytes" if tokenizer.name == "bytes" else "tokens"
        nums = [train[0].tokens.size, held[0].tokens.size]
    prints = " ".join(part.fingerprint() for part in (*train, *held))
    num_labels = None
    if run.kind == "labelled":
        num_labels = num_classes([*train[0].labels.tolist(), *held[0].labels.tolist()])
    return forms.TrainingData(
        train=rows,
        validation=held_rows,
        row_map=_masking(options, tokenizer) if task == "masked-lm" else None,
        tokenizer=tokenizer,
        num_labels=num_labels,
        description=f"{nums[0]:,} {unit} to train on, {nums[1]:,} to validate",
        identity={
            "rows": [len(rows), len(held_rows)],
            "tokenizer": tokenizer.fingerprint,
            "sha256": hashlib.sha256(prints.encode()).hexdigest(),
        },
        notes=tuple(_remarks(run, left_out)),
        seq_len=seq_len,
        prompt=_prompt(held[0], seq_len) if task == "causal-lm" else None,
        example=example,
    )


class _Run:
    """The settings that decide how texts are read, and what reading finds.

    Attributes:
      first: the first example of the training data, once it is read.
      classes: numbers of the training data's classes, once they are known.
      notes: remarks for the user.
    """

    def __init__(
        self, options: DataOptions, task: TaskName, tokenizer: Tokenizer, num_types: int
    ) -> None:
        self.options, self.tokenizer = options, tokenizer
        self.task: TaskName = task
        self.num_types, self.is_apart = num_types, task == "seq2seq"
        self.first: Example | None = None
        self.classes: dict[Label, int] = {}
        self.unused: set[str] = set()
        self.num_json = 0
        self.notes: list[str] = []

    @property
    def kind(self) -> ExampleKind:
        assert self.first is not None
        return self.first.kind


def _encoded(
    run: _Run, files: Sequence[Path], flag: str, most: int
) -> list[tuple[Encoded, ...]]:
    """Reads files as ids; of each example one part, or a source and its answer."""
    encoded = encode_examples(
        _examples(run, files, flag),
        run.tokenizer,
        most=most,
        num_types=run.num_types,
        learn_all=run.options.loss_on == "all",
        is_apart=run.is_apart,
    )
    found = list(encoded)
    if not found or run.first is None:
        raise DataError(
            f"{flag}: expected {_MEANT[_EXPECTED[run.task][0]]}, found {len(files)} "
            "file(s) without a record"
        )
    if run.options.fields and not run.first.fields:
        raise DataError(
            f"--fields {run.options.fields}: the data has no records, but text; leave "
            "it out"
        )
    return found


def _examples(run: _Run, files: Sequence[Path], flag: str) -> Iterator[Example]:
    """Yields the examples of files, and refuses those that do not suit the run."""
    mapping = field_map(run.options.fields)
    used = used_fields(mapping)
    has_template = run.tokenizer.has_template and not run.is_apart
    for record in chain.from_iterable(read_records(path, used) for path in files):
        example = example_of(record, mapping, run.unused, has_template=has_template)
        run.first = run.first or example
        if problem := _problem(run, run.first, example, flag):
            raise DataError(f"{example.where}: {problem}")
        run.num_json += example.where.endswith(".json")
        yield example


def _problem(run: _Run, first: Example, example: Example, flag: str) -> str:
    """Returns why an example does not suit the run; nothing if it does."""
    expected = _EXPECTED[run.task]
    if example.kind != first.kind:
        return (
            f"expected records of one kind, found {_MEANT[example.kind]} after those "
            f"of {first.where}, which are {first.kind}; train on them one after the "
            "other"
        )
    if example.kind not in expected:
        meant = " or ".join(_MEANT[kind] for kind in expected)
        return f"--task {run.task} expects {meant}, {flag} has {_MEANT[example.kind]}"
    if example.kind == "labelled" and len(example.texts) != len(first.texts):
        return (
            f"expected a field 'text_pair' in all records, or in none, as {first.where}"
        )
    if run.is_apart and example.messages:
        return "--task seq2seq expects a prompt and a response, found messages"
    if example.kind == "text" and run.options.loss_on == "all":
        return "--loss-on all: texts are learned whole; leave it out"
    if example.messages and not run.tokenizer.has_template:
        return (
            "expected prompt and response, found messages, whose form is a chat "
            f"template's, which {run.tokenizer.name} lacks: give --tokenizer a "
            "folder with chat_template.jinja, or copy that of the model's chat "
            "variant beside its tokenizer.json"
        )
    return ""


def _usual_length(
    encoded: Sequence[tuple[Encoded, ...]], most: int, held_share: float
) -> int:
    """Returns the tokens of the longest example, within limits.

    Args:
      held_share: the share of texts that is held out, and must have rows, too.
    """
    sizes = [part.num_tokens for parts in encoded for part in parts]
    longest = -(-max(sizes) // _ROUNDED_TO) * _ROUNDED_TO
    if held_share:
        longest = min(longest, int(sum(sizes) * held_share) // 2)
    return max(2, min(longest, most))


def _sequences(
    run: _Run, encoded: list[tuple[Encoded, ...]], flag: str, seq_len: int
) -> list[Sequences]:
    """Returns one list of sequences, or sources and answers in the same order."""
    if run.kind == "labelled":
        numbers = numbered([one.label for (one,) in encoded], run.classes, flag)
        both = zip(encoded, numbers, strict=True)
        encoded = [(one._replace(label=number),) for (one,), number in both]
    if run.kind != "text":
        encoded = _fitting(run, encoded, flag, seq_len)
    encoded.sort(key=lambda parts: [part.digest() for part in parts])
    return [Sequences.of(side) for side in zip(*encoded, strict=True)]


def _fitting(
    run: _Run, encoded: list[tuple[Encoded, ...]], flag: str, seq_len: int
) -> list[tuple[Encoded, ...]]:
    """Leaves out examples whose answers begin after the cut, and notes cuts."""
    is_packed = run.kind == "dialogue" and not run.is_apart
    limit, kept = (
        seq_len + is_packed,
        encoded,
    )  # the last target has no place of its own
    if is_packed:
        kept = [parts for parts in encoded if parts[0].is_learned[1:limit].any()]
    if not kept:
        starts = [1 + int(np.argmax(p[0].is_learned[1:])) for p in encoded]
        raise DataError(
            f"{flag}: expected an answer within --seq-len {seq_len} tokens, "
            f"found {len(encoded):,} examples whose answers all begin later, the "
            f"first after {min(starts):,} tokens; give a --seq-len above that"
        )
    if num := sum(any(p.num_tokens > limit for p in parts) for parts in encoded):
        run.notes.append(
            f"{num:,} examples are longer than --seq-len {seq_len} and are cut there"
        )
    if num := len(encoded) - len(kept):
        run.notes.append(
            f"{num:,} of those have no answer before the cut and are left out"
        )
    return kept


def _rows(run: _Run, parts: Sequence[Sequences], seq_len: int, name: str) -> forms.Rows:
    one, pad = parts[0], run.tokenizer.pad
    if run.kind == "text":
        is_causal = run.task == "causal-lm"
        rows = forms.windows(one, seq_len, is_causal=is_causal)
        if not len(rows):
            need = f"seq_len + 1 = {seq_len + 1}" if is_causal else f"{seq_len}"
            raise DataError(
                f"expected at least {need} tokens of {name} text, got "
                f"{one.tokens.size}; name more text or shorten the sequence"
            )
        return rows
    if not len(one):
        raise DataError(
            f"expected at least one {name} example, got none; name more data, or "
            "what to hold out with --validation"
        )
    if run.is_apart:
        return forms.pairs(one, parts[1], seq_len, pad=pad, start=run.tokenizer.start)
    form = forms.single if run.kind == "labelled" else forms.packed
    return form(one, seq_len, pad)


def _masking(options: DataOptions, tokenizer: Tokenizer) -> forms.RowMap:
    if tokenizer.mask is None:
        raise DataError(
            f"--tokenizer {tokenizer.name}: --task masked-lm needs a mask token "
            "([MASK] or <mask>, named in tokenizer_config.json), which it does not have"
        )
    return forms.masking(
        options.mask_rate,
        mask=tokenizer.mask,
        special=tokenizer.special,
        vocab_size=tokenizer.vocab_size,
    )


def _prompt(held: Sequences, seq_len: int) -> Array:
    """Returns the beginning of a text, or a whole prompt that has room."""
    for number in range(len(held)):
        tokens, is_learned = held[number]
        if 0 < (start := int(np.argmax(is_learned))) < seq_len:
            return tokens[:start]
    return held.tokens[: min(_PROMPT_TOKENS, seq_len)]


def _remarks(run: _Run, left_out: Sequence[Path]) -> Iterator[str]:
    """Yields notes for the user."""
    named = [f"{n} {name}" for name, n in run.classes.items() if str(name) != str(n)]
    if named:
        more = ", …" if len(named) > _SHOWN_CLASSES else ""
        yield f"classes: {printable(', '.join(named[:_SHOWN_CLASSES]))}{more}"
    yield from run.notes
    if left_out:
        yield (
            f"{len(left_out):,} files of folders are neither text nor tables and are "
            f"left out: {shown_names([path.name for path in left_out])}"
        )
    if run.unused:
        yield f"fields of records that are not used: {shown_names(run.unused)}"
    if run.num_json:
        yield f"{run.num_json:,} .json files that are no list of records, read as text"


def _shown_example(run: _Run, parts: Sequence[Encoded]) -> str:
    """Decodes the first example; what is learned is in guillemets, the rest is cut."""
    assert run.first is not None
    has_label, shown = run.kind == "labelled", list[str]()
    for part in parts:
        places = np.flatnonzero(np.diff(part.is_learned)) + 1
        for start, end in pairwise([0, *places, part.tokens.size]):
            ids = part.tokens[start:end][: 4 * _SHOWN_CHARS]
            text = run.tokenizer.decode(ids).decode(errors="replace")
            cut = "…" if len(text) > _SHOWN_CHARS else ""
            text = printable(text[:_SHOWN_CHARS]) + cut
            is_learned = part.is_learned[start] and not has_label
            shown.append(f"«{text}»" if is_learned else text)
    more = " …" if len(shown) > _SHOWN_RUNS else ""
    label = f" → «{printable(str(run.first.label))}»" if has_label else ""
    fields = f" ({printable(run.first.fields)})" if run.first.fields else ""
    return f"{''.join(shown[:_SHOWN_RUNS])}{more}{label}{fields}"
