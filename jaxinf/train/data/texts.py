"""Turns texts into rows: reads, encodes, holds a part out, packs.

Invariant: all texts of a run are of one kind, which suits its task.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from jaxinf_models import TaskName

from jaxinf.train.data.chat import ChatRenderer
from jaxinf.train.data.errors import DataError, shown_names
from jaxinf.train.data.examples import (
    Example,
    ExampleKind,
    MessageForm,
    read_examples,
    used_fields,
)
from jaxinf.train.data.files import find_files, standard_library_files
from jaxinf.train.data.labelled import labels_of
from jaxinf.train.data.masking import Masking
from jaxinf.train.data.options import DataOptions
from jaxinf.train.data.packing import Packed, Pairs, Rows, Single, Windows
from jaxinf.train.data.parts import TrainingData, digest_of
from jaxinf.train.data.records import read_records
from jaxinf.train.data.sequences import (
    Encoded,
    Sequences,
    encode_examples,
    join,
    join_texts,
)
from jaxinf.train.data.splits import by_split, held_out_split
from jaxinf.train.data.tokenizers import TextForm, open_tokenizer
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
    given = (options, task, seq_len, most, is_pretrained, num_token_types)
    with _TextLoader(*given) as loader:
        return loader.load()


class _TextLoader(contextlib.ExitStack):
    """Reads the parts of one run."""

    def __init__(
        self,
        options: DataOptions,
        task: TaskName,
        seq_len: int | None,
        most_usual_tokens: int,
        is_pretrained: bool,
        num_token_types: int,
    ) -> None:
        super().__init__()
        self._options = options
        self._seq_len, self._most_usual_tokens = seq_len or 0, most_usual_tokens
        self._task: TaskName = task
        self._tokenizer = open_tokenizer(options.tokenizer)
        self._is_pretrained = is_pretrained
        self._unused: set[str] = set()
        self._notes: list[str] = []
        self._kind: ExampleKind | None = None
        self._has_field = False
        self._num_json = 0
        self._is_paired = False
        self._form: TextForm | None = None
        self._num_token_types = num_token_types

    def load(self) -> TrainingData:
        """Reads, holds out and packs."""
        options = self._options
        files = find_files(options.data) if options.data else standard_library_files()
        train_files, held_files = by_split(files)
        if options.validation:
            held_files = held_out_split(find_files(options.validation))
        parts = self._read(train_files, "--data")
        if held_files:
            kind, is_paired = self._kind, self._is_paired
            held = self._read(held_files, "--validation")
            if kind != self._kind:
                raise DataError(
                    f"--validation: expected {_MEANT[kind or 'text']} as in --data, "
                    f"found {_MEANT[self._kind or 'text']}"
                )
            if is_paired != self._is_paired:
                found = ("pairs of texts", "single texts")[:: 1 if is_paired else -1]
                raise DataError(
                    f"--validation: expected {found[0]} as in --data, found {found[1]}"
                )
            self._check_classes(parts[0], held[0])
        else:
            parts, held = self._hold_out(parts)
        if options.text_field != "text" and not self._has_field:
            raise DataError(
                f"--text-field {options.text_field}: the data has no records with "
                "such a text; leave it out"
            )
        return self._made(parts, held)

    def _check_classes(self, parts: Sequences, held: Sequences) -> None:
        """Refuses labels of validation data that the model never sees."""
        if more := sorted({*held.labels.tolist()} - {*parts.labels.tolist()}):
            raise DataError(
                f"--validation: expected the labels of --data, found {more[:8]}, which "
                "it lacks; train on examples of them, too, or leave them out"
            )

    def _read(self, files: Sequence[Path], flag: str) -> list[Sequences]:
        """Returns one list of sequences, or sources and answers in the same order."""
        options = self._options
        used = used_fields(options.text_field)
        records = (record for path in files for record in read_records(path, used))
        examples = read_examples(
            records,
            text_field=options.text_field,
            unused=self._unused,
            message_form=self._message_form(),
        )
        encoded = list(self._encoded(self._checked(examples, flag)))
        if not encoded:
            raise DataError(
                f"{flag}: expected {_MEANT[_EXPECTED[self._task][0]]}, found "
                f"{len(files)} file(s) without a record"
            )
        self._seq_len = self._seq_len or self._usual_length(encoded)
        if self._kind == "labelled":
            return [Sequences.of(self._joined(encoded))]
        encoded = self._fitting(encoded, flag)
        if self._task != "seq2seq":
            return [Sequences.of(whole for (whole,) in encoded)]
        encoded.sort(key=lambda pair: (pair[0].digest(), pair[1].digest()))
        return [Sequences.in_order(side) for side in zip(*encoded, strict=True)]

    def _message_form(self) -> MessageForm | None:
        """Returns the form of the tokenizer's chat template, where there is one."""
        tokenizer = self._tokenizer
        learn_all = self._options.loss_on == "all"
        if tokenizer.chat is not None:
            renderer = ChatRenderer(tokenizer.chat)
            self.callback(renderer.close)
            return functools.partial(renderer.render, learn_all=learn_all)
        if not self._is_pretrained or tokenizer.name == "bytes":
            return None

        def refuse(where: str, messages: object) -> NoReturn:
            raise DataError(
                f"{where}: expected a chat template beside {tokenizer.name}, in "
                "chat_template.jinja or tokenizer_config.json, which says in what form "
                "the model of --from knows messages; found none: copy the template of "
                "its chat model, or give prompt and response in place of messages"
            )

        return refuse

    def _checked(self, examples: Iterable[Example], flag: str) -> Iterator[Example]:
        expected = _EXPECTED[self._task]
        for example in examples:
            if example.kind not in expected:
                meant = " or ".join(_MEANT[kind] for kind in expected)
                raise DataError(
                    f"{example.where}: --task {self._task} expects {meant}, {flag} has "
                    f"{_MEANT[example.kind]}"
                )
            is_pair = len(example.parts) == 2 and not example.is_joined
            if self._task == "seq2seq" and not is_pair:
                raise DataError(
                    f"{example.where}: --task seq2seq expects a prompt and a response, "
                    "found messages"
                )
            self._kind = example.kind
            self._is_paired = example.kind == "labelled" and len(example.parts) == 2
            self._has_field |= example.has_text_field
            self._num_json += example.where.endswith(".json")
            if self._kind == "text" and self._options.loss_on == "all":
                raise DataError(
                    "--loss-on all: texts have no prompts and are learned whole; leave "
                    "it out"
                )
            yield example

    def _encoded(self, examples: Iterable[Example]) -> Iterator[tuple[Encoded, ...]]:
        learn_all = self._options.loss_on == "all"
        labels: list[int | None] = []

        def noted(examples: Iterable[Example]) -> Iterator[Example]:
            for example in examples:
                labels.append(example.label)
                yield example

        encoded = encode_examples(noted(examples), self._tokenizer, learn_all=learn_all)
        for number, parts in enumerate(encoded):
            if self._task == "seq2seq":
                yield tuple(join([part], None) for part in parts)
            elif self._is_paired:
                yield tuple(join([part], labels[number]) for part in parts)
            else:
                yield (join(parts, labels[number]),)

    def _usual_length(self, encoded: Sequence[tuple[Encoded, ...]]) -> int:
        """Returns the tokens of the longest example, within limits."""
        sizes = [part.tokens.size for parts in encoded for part in parts]
        if self._kind == "labelled":
            special = self._text_form().num_special
            sizes = [special + sum(p.tokens.size for p in parts) for parts in encoded]
        longest = -(-max(sizes) // _ROUNDED_TO) * _ROUNDED_TO
        if self._kind == "text":  # the part that is held out must have rows, too
            held = int(sum(sizes) * self._options.validation_fraction)
            longest = min(longest, held // 2)
        return max(2, min(longest, self._most_usual_tokens))

    def _text_form(self) -> TextForm:
        """Returns the form of one text, or of pairs, for this model.

        Raises:
          DataError: the tokenizer has none, or more types than the model.
        """
        tokenizer, most = self._tokenizer, self._num_token_types
        if not self._is_paired:
            return dataclasses.replace(tokenizer.form(1), is_typed=False)
        if not most:
            return TextForm.one_after_the_other(tokenizer.end)
        form = self._form = self._form or tokenizer.form(2)
        largest = max(*form.text_types, *(t for types in form.types for t in types))
        if largest >= most:
            raise DataError(
                f"--tokenizer {tokenizer.name}: expected token types below {most}, as "
                f"the model has, found {largest} in pairs of texts"
            )
        return form

    def _joined(self, encoded: Sequence[tuple[Encoded, ...]]) -> list[Encoded]:
        form, seq_len = self._text_form(), self._seq_len
        num_texts = len(form.ids) - 1
        if seq_len < form.num_special + num_texts:
            what = ("a text", "two texts")[self._is_paired]
            raise DataError(
                f"--seq-len: expected at least {form.num_special + num_texts} tokens, "
                f"for {what} and its special tokens, got {seq_len}"
            )
        whole = (sum(p.tokens.size for p in parts) for parts in encoded)
        num_cut = sum(n + form.num_special > seq_len for n in whole)
        if num_cut and self._is_paired:
            self._notes.append(
                f"{num_cut:,} pairs of texts are longer than --seq-len {seq_len}; the "
                "longer text of each is cut first"
            )
        elif num_cut:
            self._note_cut(num_cut, 0)
        return [join_texts(parts, form, parts[0].label, seq_len) for parts in encoded]

    def _fitting(
        self, encoded: list[tuple[Encoded, ...]], flag: str
    ) -> list[tuple[Encoded, ...]]:
        """Leaves out examples whose answers begin after the cut.

        Raises:
          DataError: none is left.
        """
        if self._kind == "text":
            return encoded
        limit = self._seq_len + (self._kind == "dialogue" and self._task != "seq2seq")
        cut = [any(part.tokens.size > limit for part in parts) for parts in encoded]
        kept = encoded
        if self._kind == "dialogue" and self._task != "seq2seq":
            kept = [p for p in encoded if p[0].is_learned[1:limit].any()]
        if not kept:
            starts = [1 + int(np.argmax(p[0].is_learned[1:])) for p in encoded]
            raise DataError(
                f"{flag}: expected an answer within --seq-len {self._seq_len} tokens, "
                f"found {len(encoded):,} examples whose answers all begin later, the "
                f"first after {min(starts):,} tokens; give a --seq-len above that"
            )
        self._note_cut(sum(cut), len(encoded) - len(kept))
        return kept

    def _note_cut(self, num_cut: int, num_dropped: int) -> None:
        if num_cut:
            self._notes.append(
                f"{num_cut:,} examples are longer than --seq-len {self._seq_len} and "
                "are cut there"
            )
        if num_dropped:
            self._notes.append(
                f"{num_dropped:,} of those have no answer before the cut and are left "
                "out"
            )

    def _hold_out(
        self, parts: list[Sequences]
    ) -> tuple[list[Sequences], list[Sequences]]:
        fraction = self._options.validation_fraction
        if self._kind == "text":
            pairs = [part.split_tokens(fraction) for part in parts]
        else:
            pairs = [part.split(fraction) for part in parts]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    def _made(self, parts: list[Sequences], held: list[Sequences]) -> TrainingData:
        rows, held_rows = self._rows(parts, "train"), self._rows(held, "validation")
        tokenizer, is_text = self._tokenizer, self._kind == "text"
        unit = "bytes" if tokenizer.name == "bytes" else "tokens"
        num, num_held = parts[0].tokens.size, held[0].tokens.size
        if not is_text:
            unit, num, num_held = "examples", len(parts[0]), len(held[0])
        if self._unused:
            names = shown_names(self._unused)
            self._notes.append(f"fields of records that are not used: {names}")
        if self._num_json:
            self._notes.append(
                f"{self._num_json:,} .json files that are no list of records, read as "
                "text"
            )
        num_labels = None
        if self._task == "classification":
            labels = [*parts[0].labels.tolist(), *held[0].labels.tolist()]
            num_labels = labels_of(labels, self._options.num_labels, "labels")
        return TrainingData(
            train=rows,
            validation=held_rows,
            row_map=self._masking(),
            tokenizer=tokenizer,
            num_labels=num_labels,
            description=f"{num:,} {unit} to train on, {num_held:,} to validate",
            identity={
                "rows": [len(rows), len(held_rows)],
                "tokenizer": tokenizer.fingerprint,
                "sha256": digest_of(part.fingerprint() for part in (*parts, *held)),
            },
            notes=tuple(self._notes),
            held_out_tokens=held[0].tokens if self._task == "causal-lm" else None,
            seq_len=self._seq_len,
            prompt=self._prompt(held[0]) if self._task == "causal-lm" else None,
        )

    def _prompt(self, held: Sequences) -> Array:
        """Returns the beginning of a text, or a whole prompt that has room."""
        for number in range(len(held)):
            tokens, is_learned = held[number]
            start = int(np.argmax(is_learned))
            if 0 < start < self._seq_len:
                return tokens[:start]
        return held.tokens[: min(_PROMPT_TOKENS, self._seq_len)]

    def _rows(self, parts: list[Sequences], name: str) -> Rows:
        seq_len, pad = self._seq_len, self._tokenizer.pad
        if self._kind == "text":
            is_causal = self._task == "causal-lm"
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
        if self._task == "seq2seq":
            sources, answers = parts
            start = self._tokenizer.start
            return Pairs(sources, answers, seq_len, pad=pad, start=start)
        if self._task == "classification":
            return Single(parts[0], seq_len, pad)
        return Packed(parts[0], seq_len, pad)

    def _masking(self) -> Masking | None:
        if self._task != "masked-lm":
            return None
        tokenizer, rate = self._tokenizer, self._options.mask_rate
        if tokenizer.mask is None:
            raise DataError(
                f"--tokenizer {tokenizer.name}: --task masked-lm needs a mask token "
                "([MASK] or <mask>), which it does not have"
            )
        return Masking(rate, tokenizer.mask, tokenizer.end, tokenizer.vocab_size)
