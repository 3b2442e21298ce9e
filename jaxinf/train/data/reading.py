"""Reads the examples of a run as token ids, many in each call of the tokenizer.

Invariant: all examples of a run are of one kind, which suits its task.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path

import numpy as np
from jaxinf_models import TaskName

from jaxinf.train.data.errors import DataError
from jaxinf.train.data.examples import (
    Example,
    ExampleKind,
    example_of,
    field_map,
    used_fields,
)
from jaxinf.train.data.records import read_records
from jaxinf.train.data.sequences import Encoded, all_of
from jaxinf.train.data.tokenizer import FolderTokenizer, Tokenizer
from jaxinf.train.options import DataOptions

_EXAMPLES_AT_ONCE = 1024
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


@dataclasses.dataclass
class Reader:
    """How the texts of a run are read, and what reading finds.

    Attributes:
      num_types: types of tokens that the model tells apart; 0 for none.
      first: the first example of the training data, once it is read.
      unused: fields of records without a use.
      num_json: files of JSON that are read as text.
    """

    options: DataOptions
    task: TaskName
    tokenizer: Tokenizer
    num_types: int
    first: Example | None = None
    unused: set[str] = dataclasses.field(default_factory=set)
    num_json: int = 0

    @property
    def kind(self) -> ExampleKind:
        assert self.first is not None
        return self.first.kind

    @property
    def is_apart(self) -> bool:
        """Whether sources and answers are apart, as for T5."""
        return self.task == "seq2seq"

    def read(
        self, files: Sequence[Path], flag: str, most: int
    ) -> list[tuple[Encoded, ...]]:
        """Reads files; of each example one part, or a source and its answer.

        Args:
          flag: names the files, for errors.
          most: most tokens of a labelled text or a source; more are cut.

        Raises:
          DataError: there is no example, or one that does not suit the run, or the
            tokenizer cannot read it.
        """
        found, coming = list[tuple[Encoded, ...]](), self._examples(files, flag)
        while group := list(islice(coming, _EXAMPLES_AT_ONCE)):
            encoded = self._classified if self.kind == "labelled" else self._learned
            for example, parts in zip(group, encoded(group, most), strict=True):
                if not all(part.tokens.size for part in parts):
                    raise DataError(f"{example.where}: expected text, found none")
                found.append(parts)
        if not found or self.first is None:
            raise DataError(
                f"{flag}: expected {_MEANT[_EXPECTED[self.task][0]]}, found "
                f"{len(files)} file(s) without a record"
            )
        if self.options.fields and not self.first.fields:
            raise DataError(
                f"--fields {self.options.fields}: the data has no records, but text; "
                "leave it out"
            )
        return found

    def _examples(self, files: Sequence[Path], flag: str) -> Iterator[Example]:
        mapping = field_map(self.options.fields)
        used = used_fields(mapping)
        for record in chain.from_iterable(read_records(path, used) for path in files):
            example = example_of(record, mapping, self.unused)
            self.first = self.first or example
            if problem := self._problem(self.first, example, flag):
                raise DataError(f"{example.where}: {problem}")
            self.num_json += example.where.endswith(".json")
            yield example

    def _problem(self, first: Example, example: Example, flag: str) -> str:
        """Returns why an example does not suit the run; nothing if it does."""
        kind, expected = example.kind, _EXPECTED[self.task]
        if kind != first.kind:
            return (
                f"expected records of one kind, found {_MEANT[kind]} after those of "
                f"{first.where}, which are {first.kind}; train on them one after the "
                "other"
            )
        if kind not in expected:
            meant = " or ".join(_MEANT[one] for one in expected)
            return f"--task {self.task} expects {meant}, {flag} has {_MEANT[kind]}"
        if kind == "labelled" and len(example.texts) != len(first.texts):
            where = first.where
            return (
                f"expected a field 'text_pair' in all records, or in none, as {where}"
            )
        if self.is_apart and example.messages:
            return "--task seq2seq expects a prompt and a response, found messages"
        if kind == "text" and self.options.loss_on == "all":
            return "--loss-on all: texts are learned whole; leave it out"
        if example.messages and not self.tokenizer.has_template:
            return (
                "expected prompt and response, found messages, whose form is a chat "
                f"template's, which {self.tokenizer.name} lacks: give --tokenizer a "
                "folder with chat_template.jinja, or copy that of the model's chat "
                "variant beside its tokenizer.json"
            )
        return ""

    def _learned(
        self, group: Sequence[Example], most: int
    ) -> Iterator[tuple[Encoded, ...]]:
        """Yields examples whose last text is learned, behind a prompt if it has one."""
        learn_all, tokenizer = self.options.loss_on == "all", self.tokenizer
        is_whole = self.is_apart or self.kind == "text"
        own = [example for example in group if not example.messages]
        prompts = [(e.where, e.texts[0]) for e in own if len(e.texts) == 2]
        limit = most if self.is_apart else None
        both = zip_longest(
            tokenizer.encode(prompts, is_whole=True, most=limit),
            tokenizer.encode([(e.where, e.texts[-1]) for e in own], is_whole=is_whole),
        )
        for example in group:
            if example.messages:
                assert isinstance(tokenizer, FolderTokenizer)
                yield (Encoded(*tokenizer.conversation(example, learn_all=learn_all)),)
                continue
            prompt, ids = next(both)
            if tokenizer.end is not None and not (is_whole and tokenizer.adds_end):
                ids = np.append(ids, np.array([tokenizer.end], ids.dtype))
            if prompt is None:
                yield (Encoded(ids, all_of(ids)),)
            elif self.is_apart:
                yield Encoded(prompt, ~all_of(prompt)), Encoded(ids, all_of(ids))
            else:
                joined = np.concatenate([prompt, ids])
                is_learned = learn_all | (np.arange(joined.size) >= prompt.size)
                yield (Encoded(joined, is_learned),)

    def _classified(
        self, group: Sequence[Example], most: int
    ) -> Iterator[tuple[Encoded]]:
        has_types, num_texts = self.num_types > 0, len(group[0].texts)
        need = num_texts + self.tokenizer.num_special(num_texts, has_types=has_types)
        if most < need:
            what = ("a text", "two texts")[num_texts - 1]
            raise DataError(
                f"--seq-len: expected at least {need} tokens, for {what} and its "
                f"special tokens, got {most}"
            )
        for one in group:
            ids, types, num = self.tokenizer.classified(
                one.where, one.texts, most=most, has_types=has_types
            )
            if types is not None and types.max() >= self.num_types:
                raise DataError(
                    f"--tokenizer {self.tokenizer.name}: expected token types below "
                    f"{self.num_types}, as the model has, found {types.max()} in pairs "
                    "of texts"
                )
            yield (Encoded(ids, all_of(ids), one.label, types, num),)
