"""Turns texts into rows.

    files ─► records ─► examples ─► token ids ─► sorted, a part held out ─► rows

Invariant: all examples of a run are of one kind, which suits its task. They are ordered
by the SHA-256 of their content alone. This mixes them, so that the held-out tail is
like the rest.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import numpy as np
from jaxinf_models import TaskName

from jaxinf.train.config import HELD_OUT_SHARE, TrainConfig
from jaxinf.train.data import rows as forms
from jaxinf.train.data.errors import DataError, list_names
from jaxinf.train.data.examples import (
    FIELDS,
    Example,
    ExampleKind,
    count_classes,
    parse_example,
)
from jaxinf.train.data.files import find_files, read_records, standard_library_files
from jaxinf.train.data.rows import Encoded, all_learned
from jaxinf.train.data.tokenizer import FolderTokenizer, Tokenizer, open_tokenizer

# A row of the longest example would otherwise take any memory.
_MAX_DEFAULT_TOKENS = 1024
_ROUNDED_TO = 16

_KINDS: dict[TaskName, tuple[ExampleKind, ...]] = {
    "causal-lm": ("text", "dialogue"),
    "masked-lm": ("text",),
    "seq2seq": ("dialogue",),
    "classification": ("labelled",),
}
_KIND_NAMES = {
    "text": "text",
    "dialogue": "prompts and responses, or messages",
    "labelled": "a text and its label",
}

_Examples: TypeAlias = list[tuple[Encoded, ...]]
"""An example is one part, or a source and its answer."""


def load_texts(
    options: TrainConfig,
    *,
    task: TaskName,
    seq_len: int | None,
    max_tokens: int | None = None,
    num_types: int = 0,
) -> forms.TrainingData:
    """Reads texts (blocks), in the steps that all tasks share.

    Args:
      seq_len: Tokens in a row; None for those of the longest example.
      max_tokens: Limit of the model for a row; None for no limit.
      num_types: Types of tokens that the model tells apart; 0 for none.
    """
    tokenizer, share = open_tokenizer(options.tokenizer), options.held_out_share
    reader = _Reader(task, tokenizer, num_types, options.loss_on == "all")
    limit = seq_len or min(_MAX_DEFAULT_TOKENS, max_tokens or _MAX_DEFAULT_TOKENS)
    files = reader.find(options.data)
    held_out_files = reader.find(options.validation) if share is None else []
    train = reader.read(files, "--data", limit)
    is_text = reader.kind == "text"
    if seq_len is None:
        held_out_share = is_text * (share or HELD_OUT_SHARE)
        seq_len = _default_length(train, limit, held_out_share)
    train = reader.sort_and_cut(train, "--data", seq_len)
    if share is None:
        validation = reader.read(held_out_files, "--validation", seq_len)
        validation = reader.sort_and_cut(validation, "--validation", seq_len)
    else:
        train, validation = _hold_out(train, share, is_text=is_text)
    halves = {"train": train, "validation": validation}
    rows = [reader.make_rows(half, seq_len, name) for name, half in halves.items()]
    parts = [side for half in halves.values() for side in zip(*half, strict=True)]
    fingerprints = " ".join(map(forms.fingerprint, parts))
    labels = [part.label for part in chain(*parts)]
    num_labels = count_classes(labels) if reader.kind == "labelled" else None
    return forms.TrainingData(
        train=rows[0],
        validation=rows[1],
        row_map=_masking(tokenizer) if task == "masked-lm" else None,
        tokenizer=tokenizer,
        num_labels=num_labels,
        description=reader.describe(train, validation, num_labels),
        identity={
            "rows": [*map(len, rows)],
            "tokenizer": tokenizer.fingerprint,
            "sha256": hashlib.sha256(fingerprints.encode()).hexdigest(),
        },
        notes=tuple(reader.remarks()),
        seq_len=seq_len,
    )


def _default_length(encoded: _Examples, limit: int, held_out_share: float) -> int:
    """Returns the tokens of the longest example; texts held out must have rows, too."""
    sizes = [part.tokens.size for parts in encoded for part in parts]
    longest = -(-max(sizes) // _ROUNDED_TO) * _ROUNDED_TO
    if held_out_share:
        longest = min(longest, int(sum(sizes) * held_out_share) // 2)
    return max(2, min(longest, limit))


def _hold_out(
    examples: _Examples, share: float, *, is_text: bool
) -> tuple[_Examples, _Examples]:
    """Splits a share off at the end: of the tokens of texts, else of the examples."""
    if is_text:
        halves = forms.split_tokens([part for (part,) in examples], share)
        train, validation = ([(part,) for part in half] for half in halves)
        return train, validation
    num = len(examples)
    at = num - max(int(num > 1), int(num * share))  # at least one of several
    return examples[:at], examples[at:]


def _masking(tokenizer: Tokenizer) -> forms.RowMap:
    if tokenizer.mask is None:
        raise DataError(
            f"--tokenizer {tokenizer.name}: --task masked-lm needs a mask token "
            "([MASK] or <mask>, named in tokenizer_config.json), which it does not have"
        )
    special, num_ids = tokenizer.special, tokenizer.vocab_size
    return forms.make_masking(mask=tokenizer.mask, special=special, vocab_size=num_ids)


@dataclasses.dataclass
class _Reader:
    """Reads the texts of a run, and keeps remarks about them.

    Attributes:
      learn_all: Whether prompts are learned, too.
      first: The first example of the training data, once it is read.
      unused: Fields of records without a use.
      left_out: Files of folders that are no text.
    """

    task: TaskName
    tokenizer: Tokenizer
    num_types: int
    learn_all: bool
    first: Example | None = None
    unused: set[str] = dataclasses.field(default_factory=set)
    left_out: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def kind(self) -> ExampleKind:
        assert self.first is not None
        return self.first.kind

    def find(self, names: Sequence[str]) -> list[Path]:
        """Returns the files of names, by default those of the standard library."""
        files, others = find_files(names) if names else (standard_library_files(), [])
        self.left_out += [path.name for path in others]
        return files

    def read(self, files: Sequence[Path], flag: str, limit: int) -> _Examples:
        """Reads files; cuts a labelled text, or a source, to a number of tokens."""
        examples: _Examples = []
        for record in chain.from_iterable(read_records(path, FIELDS) for path in files):
            example = parse_example(record, self.unused)
            self.first = self.first or example
            if problem := self._problem(self.first, example, flag):
                raise DataError(f"{example.where}: {problem}")
            parts = self._encode(example, limit)
            if not all(part.tokens.size for part in parts):
                raise DataError(f"{example.where}: expected text, found none")
            examples.append(parts)
        if not examples:
            raise DataError(
                f"{flag}: expected {_KIND_NAMES[_KINDS[self.task][0]]}, found "
                f"{len(files)} file(s) without a record"
            )
        return examples

    def _problem(self, first: Example, example: Example, flag: str) -> str:
        kind, kinds = example.kind, _KINDS[self.task]
        if kind != first.kind:
            return (
                f"expected records of one kind, found {_KIND_NAMES[kind]} after those "
                f"of {first.where}, which are {first.kind}; train on them one after "
                "the other"
            )
        if kind == "labelled" and len(example.texts) != len(first.texts):
            return f"expected 'text_pair' in all, or in none, as {first.where}"
        if kind not in kinds:
            expected = " or ".join(map(_KIND_NAMES.__getitem__, kinds))
            found = f"{flag} has {_KIND_NAMES[kind]}"
            remedy = "; give --task classification" if kind == "labelled" else ""
            return f"--task {self.task} expects {expected}, {found}{remedy}"
        if self.task == "seq2seq" and example.messages:
            return "--task seq2seq expects a prompt and a response, found messages"
        if example.messages and not self.tokenizer.has_template:
            return (
                "expected prompt and response, found messages, whose form is a chat "
                f"template's, which {self.tokenizer.name} lacks: give --tokenizer a "
                "folder with chat_template.jinja, or copy that of the model's chat "
                "variant beside its tokenizer.json"
            )
        return ""

    def _encode(self, example: Example, limit: int) -> tuple[Encoded, ...]:
        """Encodes an example; its last text is learned, behind a prompt if any."""
        learn_all, tokenizer, where = self.learn_all, self.tokenizer, example.where
        if example.kind == "labelled":
            ids, types = tokenizer.encode_classified(
                where, example.texts, limit=limit, num_types=self.num_types
            )
            return (Encoded(ids, all_learned(ids), example.label, types),)
        if example.messages:
            assert isinstance(tokenizer, FolderTokenizer)
            return (
                Encoded(*tokenizer.encode_conversation(example, learn_all=learn_all)),
            )
        *prompts, text = example.texts
        is_pair = self.task == "seq2seq"  # a source and its answer
        is_whole = is_pair or not prompts
        ids = tokenizer.encode(where, text, is_whole=is_whole)
        if tokenizer.end is not None and not (is_whole and tokenizer.adds_end):
            ids = np.append(ids, np.array([tokenizer.end], ids.dtype))
        if not prompts:
            return (Encoded(ids, all_learned(ids)),)
        prompt_limit = limit if is_pair else None
        prompt = tokenizer.encode(where, prompts[0], is_whole=True, limit=prompt_limit)
        if is_pair:
            return Encoded(prompt, ~all_learned(prompt)), Encoded(ids, all_learned(ids))
        joined = np.concatenate([prompt, ids])
        is_learned = learn_all | (np.arange(joined.size) >= prompt.size)
        return (Encoded(joined, is_learned),)

    def sort_and_cut(self, encoded: _Examples, flag: str, seq_len: int) -> _Examples:
        """Sorts examples; leaves out those whose answers begin after the cut."""
        limit, kept = seq_len, encoded
        if self.kind == "dialogue" and self.task != "seq2seq":
            limit += 1  # the last target has no place of its own
            kept = [parts for parts in encoded if parts[0].is_learned[1:limit].any()]
        if not kept:
            starts = [1 + int(np.argmax(p[0].is_learned[1:])) for p in encoded]
            raise DataError(
                f"{flag}: expected an answer within --seq-len {seq_len} tokens, "
                f"found {len(encoded):,} examples whose answers all begin later, the "
                f"first after {min(starts):,} tokens; give a --seq-len above that"
            )
        num = sum(any(p.tokens.size >= limit for p in parts) for parts in encoded)
        if num and self.kind != "text":
            self.notes.append(
                f"{num:,} examples reach --seq-len {seq_len}; longer ones are cut there"
            )
        if num := len(encoded) - len(kept):
            self.notes.append(
                f"{num:,} of those have no answer before the cut and are left out"
            )
        return sorted(kept, key=lambda parts: [part.digest() for part in parts])

    def make_rows(self, examples: _Examples, seq_len: int, name: str) -> forms.Rows:
        pad, parts = self.tokenizer.pad, [example[0] for example in examples]
        if self.kind == "text":
            is_causal = self.task == "causal-lm"
            rows = forms.make_windows(parts, seq_len, is_causal=is_causal)
            if not len(rows):
                need = f"seq_len + 1 = {seq_len + 1}" if is_causal else f"{seq_len}"
                raise DataError(
                    f"expected at least {need} tokens of {name} text, got "
                    f"{sum(part.tokens.size for part in parts)}; name more text or "
                    "shorten the sequence"
                )
            return rows
        if not examples:
            raise DataError(
                f"expected at least one {name} example, got none; name more data, or "
                "what to hold out with --validation"
            )
        if self.task == "seq2seq":
            start = self.tokenizer.start
            return forms.make_pairs(examples, seq_len, pad=pad, start=start)
        is_labelled = self.kind == "labelled"
        make_rows = forms.make_labelled if is_labelled else forms.pack_examples
        return make_rows(parts, seq_len, pad)

    def describe(
        self, train: _Examples, validation: _Examples, num_labels: int | None
    ) -> str:
        classes = "" if num_labels is None else f" of {num_labels:,} classes"
        noun = "example" if self.kind == "dialogue" else "text"
        unit = "bytes" if self.tokenizer.name == "bytes" else "tokens"
        counts = []
        for half in (train, validation):
            num, num_tokens = len(half), sum(x.tokens.size for x in chain(*half))
            count = f"{num:,} {noun}{'s' * (num != 1)}{classes}, {num_tokens:,} {unit}"
            if self.kind == "dialogue" and not self.learn_all:
                num_learned = sum(np.count_nonzero(x.is_learned) for x in chain(*half))
                count += f" ({num_learned:,} of them learned)"
            counts.append(count)
        return f"{counts[0]} to train on; {counts[1]} to validate"

    def remarks(self) -> Iterator[str]:
        yield from self.notes
        if self.left_out:
            yield (
                f"{len(self.left_out):,} files of folders are no text and no Parquet, "
                f"and are left out: {list_names(self.left_out)}; to have them read, "
                "save tables as JSON lines (.jsonl), and unpack archives"
            )
        if self.unused:
            yield f"fields of records that are not used: {list_names(self.unused)}"
