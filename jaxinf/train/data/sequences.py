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
from jaxinf.train.data.tokenizers import FileTokenizer, Text, TextForm, Tokenizer
from jaxinf.typing import Array

_EXAMPLES_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """One example as ids.

    Attributes:
      where: its file and line or row.
      tokens: uint8 to uint32 [n].
      token_types: uint8 [n], the number of each token's text; None for one text.
    """

    where: str
    tokens: Array
    is_learned: Array
    label: int
    token_types: Array | None = None

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
      is_learned: bool [all]; None if every token is learned.
      ends: int64 [num], the end of each sequence.
      labels: int32 [num]; -1 for none.
      token_types: uint8 [all], as of `Encoded`; None where no sequence has them.
    """

    tokens: Array
    is_learned: Array | None
    ends: Array
    labels: Array
    token_types: Array | None = None

    @classmethod
    def of(cls, examples: Iterable[Encoded]) -> "Sequences":
        """Concatenates examples, ordered by their content."""
        return cls.in_order(sorted(examples, key=Encoded.digest))

    @classmethod
    def in_order(cls, ordered: Sequence[Encoded]) -> "Sequences":
        tokens = [example.tokens for example in ordered] or [np.zeros(0, np.uint8)]
        learned = [example.is_learned for example in ordered]
        types = [e.token_types for e in ordered if e.token_types is not None]
        return cls(
            tokens=np.concatenate(tokens),
            is_learned=None if all(map(np.all, learned)) else np.concatenate(learned),
            ends=np.cumsum([len(e.tokens) for e in ordered], dtype=np.int64),
            labels=np.array([example.label for example in ordered], np.int32),
            token_types=np.concatenate(types) if types else None,
        )

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> tuple[Array, Array]:
        """Returns views of a sequence's tokens and of its `is_learned`."""
        start = int(self.ends[number - 1]) if number else 0
        part = slice(start, int(self.ends[number]))
        return self.tokens[part], self.learned(part)

    def types(self, number: int) -> Array | None:
        """Returns a view of a sequence's token types; None if there are none."""
        if self.token_types is None:
            return None
        start = int(self.ends[number - 1]) if number else 0
        return self.token_types[start : int(self.ends[number])]

    def learned(self, part: slice) -> Array:
        """Returns whether each token of a range is learned: bool."""
        if self.is_learned is None:
            return np.ones(self.tokens[part].size, np.bool_)
        return self.is_learned[part]

    @property
    def lengths(self) -> Array:
        """int64 [num]."""
        return np.diff(self.ends, prepend=0)

    def split(self, fraction: float) -> tuple["Sequences", "Sequences"]:
        """Splits off a tail of whole sequences, at least one of several."""
        num_held = int(len(self) * fraction)
        if fraction and len(self) > 1:
            num_held = max(1, num_held)
        return self._cut(len(self) - num_held)

    def split_tokens(self, fraction: float) -> tuple["Sequences", "Sequences"]:
        """Splits off a tail by tokens; this may cut a sequence."""
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
        return self._part(slice(at), slice(num), 0), self._part(
            slice(at, None), slice(num, None), at
        )

    def _part(self, tokens: slice, numbers: slice, start: int) -> "Sequences":
        return Sequences(
            self.tokens[tokens],
            None if self.is_learned is None else self.is_learned[tokens],
            self.ends[numbers] - start,
            self.labels[numbers],
            None if self.token_types is None else self.token_types[tokens],
        )

    def fingerprint(self) -> str:
        """SHA-256 of everything, in hexadecimal."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.is_learned, self.ends, self.labels):
            if array is None:
                digest.update(b"all;")
                continue
            digest.update(f"{array.dtype} {array.size};".encode())
            digest.update(np.ascontiguousarray(array).data)
        if self.token_types is not None:
            digest.update(self.token_types.data)
        return digest.hexdigest()


def encode_examples(
    examples: Iterable[Example], tokenizer: Tokenizer, *, learn_all: bool
) -> Iterator[list[Encoded]]:
    """Encodes the parts of examples, many in each call of the tokenizer.

    Args:
      learn_all: whether prompts are learned, too; parts that are joined say it
        themselves.

    Yields:
      The parts of an example, in their order.

    Raises:
      DataError: the tokenizer cannot read a text.
    """
    coming = iter(examples)
    while group := list(itertools.islice(coming, _EXAMPLES_AT_ONCE)):
        apart = [example for example in group if not example.is_joined]
        texts: list[Text] = [(e.where, p.text) for e in apart for p in e.parts]
        ids = iter(tokenizer.encode(texts))
        joined = iter(_encoded_whole(tokenizer, [e for e in group if e.is_joined]))
        for example in group:
            yield (
                [next(joined)]
                if example.is_joined
                else [
                    _encoded(example.where, part_ids, part.is_learned or learn_all, end)
                    for part, part_ids in zip(example.parts, ids, strict=False)
                    for end in [tokenizer.end if part.has_end else None]
                ]
            )


def _encoded_whole(
    tokenizer: Tokenizer, examples: Sequence[Example]
) -> Iterator[Encoded]:
    """Encodes parts as one text; a token is learned if any of its characters is."""
    if not examples:
        return
    assert isinstance(tokenizer, FileTokenizer)
    texts = [(e.where, "".join(str(p.text) for p in e.parts)) for e in examples]
    encodings = tokenizer.encode_with_places(texts)
    for example, (ids, places) in zip(examples, encodings, strict=True):
        is_learned, at = np.zeros(len(ids), np.bool_), 0
        for part in example.parts:
            end = at + len(part.text)
            if part.is_learned:
                is_learned |= (places[:, 0] < end) & (places[:, 1] > at)
            at = end
        yield Encoded(example.where, ids, is_learned, -1)


def _encoded(where: str, ids: Array, is_learned: bool, end: int | None) -> Encoded:
    if end is not None:
        ids = np.append(ids, np.array([end], ids.dtype))
    return Encoded(where, ids, np.broadcast_to(np.bool_(is_learned), ids.shape), -1)


def join(parts: Sequence[Encoded], label: int | None) -> Encoded:
    """Joins the parts of an example.

    Raises:
      DataError: it has no tokens.
    """
    tokens = np.concatenate([part.tokens for part in parts])
    if not tokens.size:
        raise DataError(f"{parts[0].where}: expected text, found none")
    is_learned = np.concatenate([part.is_learned for part in parts])
    if is_learned.all():
        is_learned = np.broadcast_to(np.True_, is_learned.shape)  # takes no memory
    return Encoded(parts[0].where, tokens, is_learned, -1 if label is None else label)


def join_texts(
    texts: Sequence[Encoded], form: TextForm, label: int, seq_len: int
) -> Encoded:
    """Joins texts in a form; of what is too long, the longer text is cut first.

    Args:
      texts: one or two, without special tokens.
      seq_len: most tokens of the result; at least one more than `form.num_special` for
        each text.
    """
    room = seq_len - form.num_special
    sizes = [text.tokens.size for text in texts]
    if len(sizes) == 2 and sum(sizes) > room:
        short = min(sizes)
        short = short if 2 * short <= room else room // 2
        is_second_short = sizes[1] < sizes[0]
        sizes = [room - short, short] if is_second_short else [short, room - short]
    parts = [text.tokens[: min(n, room)] for text, n in zip(texts, sizes, strict=True)]
    tokens, types = form.join(*parts)
    return Encoded(
        *(texts[0].where, tokens, np.broadcast_to(np.True_, tokens.shape), label),
        token_types=types,
    )
