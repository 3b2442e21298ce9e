"""Turns texts into rows: reads, encodes, holds a part out, packs.

Invariant: all texts of a run are of one kind, which suits its task.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxinf_models import TaskName

from jaxinf.train.data.errors import DataError, shown_names
from jaxinf.train.data.examples import (
    Example,
    ExampleKind,
    field_map,
    read_examples,
    used_fields,
)
from jaxinf.train.data.files import (
    by_split,
    find_files,
    standard_library_files,
)
from jaxinf.train.data.labels import num_classes, number_of_classes, numbered
from jaxinf.train.data.masking import Masking
from jaxinf.train.data.options import DataOptions
from jaxinf.train.data.packing import Packed, Pairs, Rows, Single, Windows
from jaxinf.train.data.parts import TrainingData, digest_of
from jaxinf.train.data.records import read_records
from jaxinf.train.data.sequences import (
    Encoded,
    Encoding,
    Sequences,
    encode_examples,
)
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
_SHOWN_CHARS, _SHOWN_RUNS = 120, 8


@dataclasses.dataclass
class _Reading:
    """What reading finds beside the examples.

    Attributes:
      first: the first example of the training data.
      classes: numbers of the training data's classes.
    """

    first: Example | None = None
    example: str = ""
    classes: dict[int | str, int] | None = None
    unused: set[str] = dataclasses.field(default_factory=set)
    notes: list[str] = dataclasses.field(default_factory=list)
    num_json: int = 0


@dataclasses.dataclass(frozen=True)
class _Run:
    """The settings of a run that decide how its texts are read."""

    options: DataOptions
    task: TaskName
    tokenizer: Tokenizer
    seq_len: int
    most_usual_tokens: int
    is_pretrained: bool
    num_token_types: int

    @property
    def is_apart(self) -> bool:
        return self.task == "seq2seq"


def load_texts(
    options: DataOptions,
    *,
    task: TaskName,
    seq_len: int | None,
    most_tokens: int | None = None,
    is_pretrained: bool = False,
    num_token_types: int = 0,
) -> TrainingData:
    """Reads texts (blocks), in the steps that all tasks share.

    Args:
      seq_len: tokens in a row; None for those of the longest example.
      most_tokens: most tokens in a row for the model; None for no limit.
      is_pretrained: whether messages must have the model's own form.
      num_token_types: types of tokens that the model tells apart; 0 for none.

    Raises:
      DataError: the data is empty or malformed.
      OSError: a file cannot be read.
    """
    most = min(_MOST_USUAL_TOKENS, most_tokens or _MOST_USUAL_TOKENS)
    tokenizer = open_tokenizer(options.tokenizer)
    given = (tokenizer, seq_len or 0, most, is_pretrained, num_token_types)
    run, reading = _Run(options, task, *given), _Reading()
    data = options.data
    files, left_out = find_files(data) if data else (standard_library_files(), [])
    train_files, held_files = by_split(files)
    if options.validation:
        found, others = find_files(options.validation)
        held_files, _ = by_split(found, is_validation=True)
        left_out = left_out + others
    parts, seq_len = _read(run, reading, train_files, "--data")
    run = dataclasses.replace(run, seq_len=seq_len)
    if held_files:
        held, _ = _read(run, reading, held_files, "--validation")
    else:
        parts, held = _hold_out(parts, reading, options.validation_fraction)
    if left_out:
        reading.notes.append(
            f"{len(left_out):,} files of folders are neither text nor tables and are "
            f"left out: {shown_names([path.name for path in left_out])}"
        )
    return _loaded(run, reading, parts, held)


def _read(
    run: _Run, reading: _Reading, files: Sequence[Path], flag: str
) -> tuple[list[Sequences], int]:
    """Returns one list of sequences, or sources and answers in the same order."""
    mapping = field_map(run.options.fields)
    used = used_fields(mapping)
    records = (record for path in files for record in read_records(path, used))
    examples = read_examples(
        records,
        mapping=mapping,
        unused=reading.unused,
        has_template=run.tokenizer.has_template and not run.is_apart,
        first=reading.first,
    )
    how = Encoding(
        most=run.seq_len or run.most_usual_tokens,
        num_types=run.num_token_types,
        learn_all=run.options.loss_on == "all",
        is_apart=run.is_apart,
    )
    checked = _checked(run, reading, examples, flag)
    encoded = list(encode_examples(checked, run.tokenizer, how))
    if not encoded or reading.first is None:
        raise DataError(
            f"{flag}: expected {_MEANT[_EXPECTED[run.task][0]]}, found "
            f"{len(files)} file(s) without a record"
        )
    kind = reading.first.kind
    if mapping and not reading.first.fields:
        raise DataError(
            f"--fields {run.options.fields}: the data has no records, but text; leave "
            "it out"
        )
    seq_len = run.seq_len or _usual_length(run, kind, encoded)
    reading.example = reading.example or _shown_example(run, reading.first, encoded[0])
    if kind == "labelled":
        encoded = [(one,) for one in _numbered(reading, encoded, flag)]
    encoded = _fitting(run, reading, encoded, seq_len, flag)
    if not run.is_apart:
        return [Sequences.of(whole for (whole,) in encoded)], seq_len
    encoded.sort(key=lambda pair: (pair[0].digest(), pair[1].digest()))
    return [Sequences.in_order(side) for side in zip(*encoded, strict=True)], seq_len


def _checked(
    run: _Run, reading: _Reading, examples: Iterable[Example], flag: str
) -> Iterator[Example]:
    """Refuses examples that do not suit the run, before any is encoded."""
    expected = _EXPECTED[run.task]
    for example in examples:
        if example.kind not in expected:
            meant = " or ".join(_MEANT[kind] for kind in expected)
            raise DataError(
                f"{example.where}: --task {run.task} expects {meant}, {flag} has "
                f"{_MEANT[example.kind]}"
            )
        if run.is_apart and example.messages:
            raise DataError(
                f"{example.where}: --task seq2seq expects a prompt and a response, "
                "found messages"
            )
        if example.kind == "text" and run.options.loss_on == "all":
            raise DataError(
                "--loss-on all: texts have no prompts and are learned whole; leave it "
                "out"
            )
        if example.messages:
            _check_template(run, example.where)
        reading.first = reading.first or example
        if example is reading.first and example.kind == "labelled":
            _check_room(run, len(example.texts))
        reading.num_json += example.where.endswith(".json")
        yield example


def _check_template(run: _Run, where: str) -> None:
    tokenizer = run.tokenizer
    if tokenizer.has_template or not run.is_pretrained or tokenizer.name == "bytes":
        return
    raise DataError(
        f"{where}: expected a chat template beside {tokenizer.name}, in "
        "chat_template.jinja or tokenizer_config.json, which says in what form the "
        "model of --from knows messages; found none: copy the template of its chat "
        "model, or give prompt and response in place of messages"
    )


def _check_room(run: _Run, num_texts: int) -> None:
    has_types = run.num_token_types > 0
    need = num_texts + run.tokenizer.num_special(num_texts, has_types=has_types)
    if (run.seq_len or run.most_usual_tokens) < need:
        what = ("a text", "two texts")[num_texts - 1]
        raise DataError(
            f"--seq-len: expected at least {need} tokens, for {what} and its special "
            f"tokens, got {run.seq_len or run.most_usual_tokens}"
        )


def _usual_length(
    run: _Run, kind: ExampleKind, encoded: Sequence[tuple[Encoded, ...]]
) -> int:
    """Returns the tokens of the longest example, within limits."""
    sizes = [part.num_uncut or part.tokens.size for parts in encoded for part in parts]
    longest = -(-max(sizes) // _ROUNDED_TO) * _ROUNDED_TO
    if kind == "text":  # the part that is held out must have rows, too
        held = int(sum(sizes) * run.options.validation_fraction)
        longest = min(longest, held // 2)
    return max(2, min(longest, run.most_usual_tokens))


def _numbered(
    reading: _Reading, encoded: Sequence[tuple[Encoded, ...]], flag: str
) -> Iterator[Encoded]:
    labels = [one.label for (one,) in encoded]
    if reading.classes is None:
        reading.classes = number_of_classes(labels, flag)
        classes = reading.classes.items()
        if named := [f"{n} {name}" for name, n in classes if str(name) != str(n)]:
            more = ", …" if len(named) > 20 else ""
            said = _printable(", ".join(named[:20]))
            reading.notes.append(f"classes: {said}{more}")
    numbers = numbered(labels, reading.classes, flag)
    for (one,), number in zip(encoded, numbers, strict=True):
        yield dataclasses.replace(one, label=number)


def _fitting(
    run: _Run,
    reading: _Reading,
    encoded: list[tuple[Encoded, ...]],
    seq_len: int,
    flag: str,
) -> list[tuple[Encoded, ...]]:
    """Leaves out examples whose answers begin after the cut, and notes cuts.

    Raises:
      DataError: none is left.
    """
    assert reading.first is not None
    kind = reading.first.kind
    if kind == "text":
        return encoded
    is_dialogue = kind == "dialogue" and not run.is_apart
    limit = seq_len + is_dialogue
    num_cut = sum(
        any((part.num_uncut or part.tokens.size) > limit for part in parts)
        for parts in encoded
    )
    kept = encoded
    if is_dialogue:
        kept = [p for p in encoded if p[0].is_learned[1:limit].any()]
    if not kept:
        starts = [1 + int(np.argmax(p[0].is_learned[1:])) for p in encoded]
        raise DataError(
            f"{flag}: expected an answer within --seq-len {seq_len} tokens, "
            f"found {len(encoded):,} examples whose answers all begin later, the "
            f"first after {min(starts):,} tokens; give a --seq-len above that"
        )
    if num_cut and kind == "labelled" and len(reading.first.texts) == 2:
        reading.notes.append(
            f"{num_cut:,} pairs of texts are longer than --seq-len {seq_len}; the "
            "longer text of each is cut first"
        )
    elif num_cut:
        reading.notes.append(
            f"{num_cut:,} examples are longer than --seq-len {seq_len} and are cut "
            "there"
        )
    if num_dropped := len(encoded) - len(kept):
        reading.notes.append(
            f"{num_dropped:,} of those have no answer before the cut and are left out"
        )
    return kept


def _hold_out(
    parts: list[Sequences], reading: _Reading, fraction: float
) -> tuple[list[Sequences], list[Sequences]]:
    is_text = reading.first is not None and reading.first.kind == "text"
    cut = Sequences.split_tokens if is_text else Sequences.split
    train, held = zip(*(cut(part, fraction) for part in parts), strict=True)
    return [*train], [*held]


def _loaded(
    run: _Run, reading: _Reading, parts: list[Sequences], held: list[Sequences]
) -> TrainingData:
    assert reading.first is not None
    tokenizer, kind = run.tokenizer, reading.first.kind
    rows = _rows(run, kind, parts, "train")
    held_rows = _rows(run, kind, held, "validation")
    unit = "bytes" if tokenizer.name == "bytes" else "tokens"
    num, num_held = parts[0].tokens.size, held[0].tokens.size
    if kind != "text":
        unit, num, num_held = "examples", len(parts[0]), len(held[0])
    notes = reading.notes
    if reading.unused:
        notes.append(
            f"fields of records that are not used: {shown_names(reading.unused)}"
        )
    if reading.num_json:
        notes.append(
            f"{reading.num_json:,} .json files that are no list of records, read as "
            "text"
        )
    num_labels = None
    if run.task == "classification":
        labels = [*parts[0].labels.tolist(), *held[0].labels.tolist()]
        num_labels = num_classes(labels, run.options.num_labels, "labels")
    is_causal = run.task == "causal-lm"
    return TrainingData(
        train=rows,
        validation=held_rows,
        row_map=_masking(run),
        tokenizer=tokenizer,
        num_labels=num_labels,
        description=f"{num:,} {unit} to train on, {num_held:,} to validate",
        identity={
            "rows": [len(rows), len(held_rows)],
            "tokenizer": tokenizer.fingerprint,
            "sha256": digest_of(part.fingerprint() for part in (*parts, *held)),
        },
        notes=tuple(notes),
        held_out_tokens=held[0].tokens if is_causal else None,
        seq_len=run.seq_len,
        prompt=_prompt(run, held[0]) if is_causal else None,
        example=reading.example,
    )


def _prompt(run: _Run, held: Sequences) -> Array:
    """Returns the beginning of a text, or a whole prompt that has room."""
    for number in range(len(held)):
        tokens, is_learned = held[number]
        start = int(np.argmax(is_learned))
        if 0 < start < run.seq_len:
            return tokens[:start]
    return held.tokens[: min(_PROMPT_TOKENS, run.seq_len)]


def _rows(run: _Run, kind: ExampleKind, parts: list[Sequences], name: str) -> Rows:
    seq_len, pad = run.seq_len, run.tokenizer.pad
    if kind == "text":
        is_causal = run.task == "causal-lm"
        rows: Rows = Windows(parts[0], seq_len, is_causal=is_causal)
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
    if run.is_apart:
        sources, answers = parts
        return Pairs(sources, answers, seq_len, pad=pad, start=run.tokenizer.start)
    if kind == "labelled":
        return Single(parts[0], seq_len, pad)
    return Packed(parts[0], seq_len, pad)


def _masking(run: _Run) -> Masking | None:
    if run.task != "masked-lm":
        return None
    tokenizer, rate = run.tokenizer, run.options.mask_rate
    if tokenizer.mask is None:
        raise DataError(
            f"--tokenizer {tokenizer.name}: --task masked-lm needs a mask token "
            "([MASK] or <mask>, named in tokenizer_config.json), which it does not have"
        )
    return Masking(rate, tokenizer.mask, tokenizer.special, tokenizer.vocab_size)


def _shown_example(run: _Run, first: Example, parts: tuple[Encoded, ...]) -> str:
    """Decodes an example; what is learned is in guillemets, what is long is cut."""
    runs: list[tuple[Array, bool]] = []
    for part in parts:
        changes = np.flatnonzero(np.diff(part.is_learned)) + 1
        learned = np.split(part.is_learned, changes)
        runs += [
            (ids, bool(mask[0]) and first.label == -1)
            for ids, mask in zip(np.split(part.tokens, changes), learned, strict=True)
        ]
    found = []
    for ids, is_learned in runs[:_SHOWN_RUNS]:
        text = run.tokenizer.decode(ids[: 4 * _SHOWN_CHARS]).decode(errors="replace")
        cut = "…" if len(text) > _SHOWN_CHARS or ids.size > 4 * _SHOWN_CHARS else ""
        text = _printable(text[:_SHOWN_CHARS]) + cut
        found.append(f"«{text}»" if is_learned else text)
    more = " …" if len(runs) > _SHOWN_RUNS else ""
    label = f" → «{_printable(str(first.label))}»"
    label = label if first.label != -1 else ""
    fields = f" ({_printable(first.fields)})" if first.fields else ""
    return f"{''.join(found)}{more}{label}{fields}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
