"""Token sequences of many examples in flat arrays, with their fingerprint.

Invariant: sequences are ordered by the SHA-256 of their content alone. This mixes them,
so that the held-out tail is like the rest.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxinf.train.data.errors import DataError
from jaxinf.train.data.examples import Example
from jaxinf.train.data.tokenizer import FolderTokenizer, Tokenizer
from jaxinf.typing import Array

_EXAMPLES_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """One example as ids.

    Attributes:
      where: its file and line or row.
      tokens: uint8 to uint32 [n].
      label: -1 for none; a class's name until all are known.
      token_types: uint8 [n], the number of each token's text; None for one text.
      num_uncut: number of tokens before a cut; 0 if it is the number of tokens.
    """

    where: str
    tokens: Array
    is_learned: Array
    label: int | str
    token_types: Array | None = None
    num_uncut: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_uncut or self.tokens.size

    def digest(self) -> bytes:
        """SHA-256 of its content, without `where`."""
        digest = hashlib.sha256(f"{self.tokens.dtype} {self.label} ".encode())
        digest.update(np.ascontiguousarray(self.tokens).data)
        digest.update(np.packbits(self.is_learned).data)
        if self.token_types is not None:
            digest.update(self.token_types.data)
        return digest.digest()


@dataclasses.dataclass(frozen=True, eq=False)
class Sequences:
    """Concatenated sequences. Immutable and safe to share between threads.

    Attributes:
      is_learned: bool [all]; if every token is learned it takes no memory.
      ends: int64 [num], the end of each sequence.
      labels: int32 [num]; -1 for none.
      token_types: uint8 [all], as of `Encoded`; None where no sequence has them.
    """

    tokens: Array
    is_learned: Array
    ends: Array
    labels: Array
    token_types: Array | None = None

    @classmethod
    def of(cls, ordered: Sequence[Encoded]) -> "Sequences":
        """Concatenates examples in their order."""
        tokens = np.concatenate([e.tokens for e in ordered] or [np.zeros(0, np.uint8)])
        learned = [example.is_learned for example in ordered]
        types = [e.token_types for e in ordered if e.token_types is not None]
        is_all = all(map(np.all, learned))
        return cls(
            tokens=tokens,
            is_learned=_all(tokens) if is_all else np.concatenate(learned),
            ends=np.cumsum([len(e.tokens) for e in ordered], dtype=np.int64),
            labels=np.array([example.label for example in ordered], np.int32),
            token_types=np.concatenate(types) if types else None,
        )

    def __len__(self) -> int:
        return len(self.ends)

    def part(self, number: int) -> slice:
        """Returns the place of a sequence's tokens."""
        return slice(
            int(self.ends[number - 1]) if number else 0, int(self.ends[number])
        )

    def __getitem__(self, number: int) -> tuple[Array, Array]:
        """Returns views of a sequence's tokens and of its `is_learned`."""
        part = self.part(number)
        return self.tokens[part], self.is_learned[part]

    def split(
        self, fraction: float, *, by_tokens: bool = False
    ) -> tuple["Sequences", "Sequences"]:
        """Splits off a tail of whole sequences, at least one of several.

        Args:
          by_tokens: whether to count tokens, which may cut a sequence.
        """
        if not by_tokens:
            num_held = int(len(self) * fraction)
            if fraction and len(self) > 1:
                num_held = max(1, num_held)
            return self._cut(len(self) - num_held)
        cut = self.tokens.size - int(self.tokens.size * fraction)
        number = int(np.searchsorted(self.ends, cut))  # the sequence to cut
        if number == len(self) or self.ends[number] == cut:
            return self._cut(min(number + 1, len(self)))
        ends = np.insert(self.ends, number, cut)
        labels = np.insert(self.labels, number, self.labels[number])
        whole = dataclasses.replace(self, ends=ends, labels=labels)
        return whole._cut(number + 1)

    def _cut(self, num: int) -> tuple["Sequences", "Sequences"]:
        at = int(self.ends[num - 1]) if num else 0

        def part(tokens: slice, numbers: slice, start: int) -> Sequences:
            types = self.token_types
            return Sequences(
                self.tokens[tokens],
                self.is_learned[tokens],
                self.ends[numbers] - start,
                self.labels[numbers],
                None if types is None else types[tokens],
            )

        first = part(slice(at), slice(num), 0)
        return first, part(slice(at, None), slice(num, None), at)

    def fingerprint(self) -> str:
        """SHA-256 of everything, in hexadecimal."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.is_learned, self.ends, self.labels):
            if array.strides == (0,):  # all are learned
                digest.update(b"all;")
                continue
            digest.update(f"{array.dtype} {array.size};".encode())
            digest.update(np.ascontiguousarray(array).data)
        if self.token_types is not None:
            digest.update(self.token_types.data)
        return digest.hexdigest()


def encode_examples(
    examples: Iterable[Example],
    tokenizer: Tokenizer,
    *,
    most: int,
    num_types: int = 0,
    learn_all: bool = False,
    is_apart: bool = False,
) -> Iterator[tuple[Encoded, ...]]:
    """Encodes examples, many in each call of the tokenizer.

    Args:
      most: most tokens of a labelled text or a source; more are cut.
      num_types: types of tokens that the model tells apart; 0 for none.
      learn_all: whether prompts are learned, too.
      is_apart: whether sources and answers are apart, as for T5.

    Yields:
      The tokens of an example; of a source and its answer both, if `is_apart`.

    Raises:
      DataError: the tokenizer cannot read a text, or there is none.
    """
    coming = iter(examples)
    while group := list(itertools.islice(coming, _EXAMPLES_AT_ONCE)):
        if group[0].kind == "text":
            texts = [(e.where, e.texts[0]) for e in group]
            found = tokenizer.encode(texts, is_whole=True)
            for example, ids in zip(group, found, strict=True):
                ids = ids if tokenizer.adds_end else _ended(ids, tokenizer)
                yield (_encoded(example.where, [(ids, True)]),)
        elif group[0].kind == "labelled":
            for example in group:
                yield (_classified(example, tokenizer, most, num_types),)
        else:
            most_of_source = most if is_apart else None
            yield from _dialogues(group, tokenizer, most_of_source, learn_all, is_apart)


def _dialogues(
    group: Sequence[Example],
    tokenizer: Tokenizer,
    most: int | None,
    learn_all: bool,
    is_apart: bool,
) -> Iterator[tuple[Encoded, ...]]:
    prompts = [(e.where, e.texts[0]) for e in group if not e.messages]
    responses = [(e.where, e.texts[1]) for e in group if not e.messages]
    sources = tokenizer.encode(prompts, is_whole=True, most=most)
    answers = tokenizer.encode(responses, is_whole=is_apart)
    both = zip(sources, answers, strict=True)
    for example in group:
        where = example.where
        if example.messages:
            assert isinstance(tokenizer, FolderTokenizer)
            ids, is_learned = tokenizer.conversation(example, learn_all=learn_all)
            yield (Encoded(where, ids, is_learned, -1),)
            continue
        source, answer = next(both)
        if not (is_apart and tokenizer.adds_end):
            answer = _ended(answer, tokenizer)
        parts = [(source, learn_all), (answer, True)]
        apart = [[part] for part in parts] if is_apart else [parts]
        yield tuple(_encoded(where, some) for some in apart)


def _classified(
    example: Example, tokenizer: Tokenizer, most: int, num_types: int
) -> Encoded:
    ids, types, num = tokenizer.classified(
        example.where, example.texts, most=most, has_types=num_types > 0
    )
    if types is not None and types.max() >= num_types:
        raise DataError(
            f"--tokenizer {tokenizer.name}: expected token types below {num_types}, as "
            f"the model has, found {types.max()} in pairs of texts"
        )
    return Encoded(example.where, ids, _all(ids), example.label, types, num)


def _all(tokens: Array) -> Array:
    return np.broadcast_to(np.True_, tokens.shape)


def _ended(ids: Array, tokenizer: Tokenizer) -> Array:
    if tokenizer.end is None:
        return ids
    return np.append(ids, np.array([tokenizer.end], ids.dtype))


def _encoded(where: str, parts: Sequence[tuple[Array, bool]]) -> Encoded:
    tokens = np.concatenate([ids for ids, _ in parts])
    if not tokens.size:
        raise DataError(f"{where}: expected text, found none")
    if all(is_learned for _, is_learned in parts):
        return Encoded(where, tokens, _all(tokens), -1)
    learned = [np.full(ids.size, is_learned) for ids, is_learned in parts]
    return Encoded(where, tokens, np.concatenate(learned), -1)
