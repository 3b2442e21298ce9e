"""Turns texts into rows: reads, encodes, holds a part out, packs.

Invariant: all texts of a run are of one kind, which suits its task.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jaxinf_models import TaskName

from jaxinf.train.data.errors import DataError
from jaxinf.train.data.examples import Example, ExampleKind, read_examples
from jaxinf.train.data.files import find_files, standard_library_files
from jaxinf.train.data.labelled import labels_of
from jaxinf.train.data.masking import Masking
from jaxinf.train.data.options import DataOptions
from jaxinf.train.data.packing import Packed, Pairs, Rows, Single, Windows
from jaxinf.train.data.parts import TrainingData, digest_of
from jaxinf.train.data.records import read_records
from jaxinf.train.data.sequences import Encoded, Sequences, encode_examples, join
from jaxinf.train.data.splits import by_split, held_out_split
from jaxinf.train.data.tokenizers import open_tokenizer

__all__ = ["load_texts"]

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


def load_texts(options: DataOptions, *, task: TaskName, seq_len: int) -> TrainingData:
    """Reads texts (blocks), in the steps that all tasks share.

    Raises:
      DataError: the data is empty or malformed.
      OSError: a file cannot be read.
    """
    return _TextLoader(options, task, seq_len).load()


class _TextLoader:
    """Reads the parts of one run."""

    def __init__(self, options: DataOptions, task: TaskName, seq_len: int) -> None:
        self._options, self._seq_len = options, seq_len
        self._task: TaskName = task
        self._tokenizer = open_tokenizer(options.tokenizer)
        self._unused: set[str] = set()
        self._notes: list[str] = []
        self._kind: ExampleKind | None = None
        self._has_field = False

    def load(self) -> TrainingData:
        options = self._options
        files = find_files(options.data) if options.data else standard_library_files()
        train_files, held_files = by_split(files)
        if options.validation:
            held_files = held_out_split(find_files(options.validation))
        parts = self._read(train_files, "--data")
        if held_files:
            kind = self._kind
            held = self._read(held_files, "--validation")
            if kind != self._kind:
                raise DataError(
                    f"--validation: expected {_MEANT[kind or 'text']} as in --data, "
                    f"found {_MEANT[self._kind or 'text']}"
                )
        else:
            parts, held = self._hold_out(parts)
        if options.text_field != "text" and not self._has_field:
            raise DataError(
                f"--text-field {options.text_field}: the data has no records with "
                "such a text; leave it out"
            )
        return self._made(parts, held)

    def _read(self, files: Sequence[Path], flag: str) -> list[Sequences]:
        """Returns one list of sequences, or sources and answers in the same order."""
        options = self._options
        records = (record for path in files for record in read_records(path))
        examples = read_examples(
            records, text_field=options.text_field, unused=self._unused
        )
        encoded = list(self._encoded(self._checked(examples, flag)))
        if not encoded:
            raise DataError(
                f"{flag}: expected {_MEANT[_EXPECTED[self._task][0]]}, found "
                f"{len(files)} file(s) without a record"
            )
        if self._task != "seq2seq":
            return [Sequences.of(whole for (whole,) in encoded)]
        encoded.sort(key=lambda pair: (pair[0].digest(), pair[1].digest()))
        return [Sequences.in_order(side) for side in zip(*encoded, strict=True)]

    def _checked(self, examples: Iterable[Example], flag: str) -> Iterator[Example]:
        expected = _EXPECTED[self._task]
        for example in examples:
            if example.kind not in expected:
                meant = " or ".join(_MEANT[kind] for kind in expected)
                raise DataError(
                    f"{example.where}: --task {self._task} expects {meant}, {flag} has "
                    f"{_MEANT[example.kind]}"
                )
            if self._task == "seq2seq" and len(example.parts) != 2:
                raise DataError(
                    f"{example.where}: --task seq2seq expects a prompt and a response, "
                    "found messages"
                )
            self._kind = example.kind
            self._has_field |= example.has_text_field
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

        num_dropped = num_cut = 0
        encoded = encode_examples(noted(examples), self._tokenizer, learn_all=learn_all)
        for number, parts in enumerate(encoded):
            if self._task == "seq2seq":
                num_cut += any(part.tokens.size > self._seq_len for part in parts)
                yield tuple(join([part], None) for part in parts)
                continue
            whole = join(parts, labels[number])
            if self._kind != "text":
                limit = self._seq_len + (self._kind == "dialogue")
                num_cut += whole.tokens.size > limit
                if self._kind == "dialogue" and not whole.is_learned[1:limit].any():
                    num_dropped += 1
                    continue
            yield (whole,)
        self._note_cut(num_cut, num_dropped)

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
            names = ", ".join(sorted(self._unused))
            self._notes.append(f"fields of records that are not used: {names}")
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
        )

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
