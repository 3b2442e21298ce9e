"""Rows of a fixed length out of sequences of any length.

    Windows    all sequences one after another, cut at equal lengths
    Packed     as many whole sequences as fit
    Pairs      a source and its answer, each padded
    Single     one sequence and its label, padded

Rows are read by number in any order. `segments` numbers the documents of a row from 1,
with 0 for padding; a model masks attention between documents.

Invariant: row number n is a function of the sequences and the length alone.
"""

import bisect
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from jaxinf.train.data.sequences import Sequences
from jaxinf.typing import Array

Row: TypeAlias = Mapping[str, Array]


class Rows(Protocol):
    """Rows that are read by number; immutable, safe to share between threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Row:
        """Returns arrays by name, of the same shapes for all rows."""
        ...


class Windows:
    """Runs of the concatenated sequences, without overlap.

    Args:
      is_causal: whether rows have `targets`, the next token of each, and `weights`, 0
        for a target in another document or one not to be learned.
    """

    def __init__(self, sequences: Sequences, seq_len: int, *, is_causal: bool) -> None:
        self._sequences, self._seq_len = sequences, seq_len
        self._is_causal = is_causal
        self._num = max(0, (sequences.tokens.size - is_causal) // seq_len)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, number: int) -> Row:
        part = slice(
            number * self._seq_len, (number + 1) * self._seq_len + self._is_causal
        )
        tokens = self._sequences.tokens[part].astype(np.int32)
        segments = self._segments(part)
        if not self._is_causal:
            return {"tokens": tokens, "segments": segments}
        is_learned = self._sequences.learned(part)[1:] & (segments[1:] == segments[:-1])
        return _shifted(tokens, segments, is_learned)

    def _segments(self, part: slice) -> Array:
        ends = self._sequences.ends
        first = np.searchsorted(ends, part.start, side="right")
        last = np.searchsorted(ends, part.stop, side="left")
        begins = np.zeros(part.stop - part.start, np.int32)
        begins[ends[first:last] - part.start] = 1  # the next document begins
        return np.cumsum(begins, dtype=np.int32) + 1


class Packed:
    """Packs whole sequences into rows; longer ones are cut at the row's end.

    Args:
      sequences: the sequences to pack, each of at least two tokens.
    """

    def __init__(self, sequences: Sequences, seq_len: int, pad: int) -> None:
        self._sequences, self._seq_len, self._pad = sequences, seq_len, pad
        # Every token but the last is an input, and every one but the first a target.
        self._plan = plan_rows(np.minimum(sequences.lengths - 1, seq_len), seq_len)

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, number: int) -> Row:
        names = ("tokens", "targets", "weights", "segments")
        row: dict[str, Array] = {
            name: np.zeros(self._seq_len, np.int32) for name in names
        }
        row["tokens"][:] = row["targets"][:] = self._pad
        row["weights"] = np.zeros(self._seq_len, np.float32)
        at = 0
        for segment, member in enumerate(self._plan[number], 1):
            tokens, is_learned = self._sequences[member]
            num = min(tokens.size - 1, self._seq_len)
            place = slice(at, at + num)
            row["tokens"][place] = tokens[:num]
            row["targets"][place] = tokens[1 : num + 1]
            row["weights"][place] = is_learned[1 : num + 1]
            row["segments"][place] = segment
            at += num
        return row


class Pairs:
    """A source for the encoder, and its answer for the decoder.

    Args:
      answers: the sequences to learn, in the same order.
    """

    def __init__(
        self,
        sources: Sequences,
        answers: Sequences,
        seq_len: int,
        *,
        pad: int,
        start: int,
    ) -> None:
        self._sources, self._answers = sources, answers
        self._seq_len, self._pad, self._start = seq_len, pad, start

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, number: int) -> Row:
        tokens, segments = self._padded(self._sources[number][0])
        targets, decoder_segments = self._padded(self._answers[number][0])
        return {
            "tokens": tokens,
            "segments": segments,
            "decoder_tokens": np.append(np.int32(self._start), targets[:-1]),
            "decoder_segments": decoder_segments,
            "targets": targets,
            "weights": decoder_segments.astype(np.float32),
        }

    def _padded(self, ids: Array) -> tuple[Array, Array]:
        return _padded(ids, self._seq_len, self._pad)


class Single:
    """One sequence a row, with its label.

    Args:
      seq_len: tokens in a row; longer sequences are cut.
    """

    def __init__(self, sequences: Sequences, seq_len: int, pad: int) -> None:
        self._sequences, self._seq_len, self._pad = sequences, seq_len, pad

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, number: int) -> Row:
        """See `Rows`: tokens, segments, and token_types of pairs, int32 [seq_len], and
        labels int32 []."""
        ids = self._sequences[number][0]
        tokens, segments = _padded(ids, self._seq_len, self._pad)
        labels = np.array(self._sequences.labels[number], np.int32)
        row = {"tokens": tokens, "segments": segments, "labels": labels}
        if (types := self._sequences.types(number)) is not None:
            row["token_types"], _ = _padded(types, self._seq_len, 0)
        return row


def plan_rows(lengths: Array, seq_len: int) -> Sequence[Sequence[int]]:
    """Assigns sequences to rows, the longest first, each to the row with the best fit.

    Args:
      lengths: int [num], each of 1 to `seq_len`.

    Returns:
      The numbers of the sequences of each row.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for number in np.argsort(-np.asarray(lengths), kind="stable"):
        length = int(lengths[number])
        at = bisect.bisect_left(room, (length, -1))
        if at == len(room):
            rows.append([])
            left, row = seq_len, len(rows) - 1
        else:
            left, row = room.pop(at)
        rows[row].append(int(number))
        if left > length:
            bisect.insort(room, (left - length, row))
    return rows


def _shifted(tokens: Array, segments: Array, is_learned: Array) -> Row:
    return {
        "tokens": tokens[:-1],
        "targets": tokens[1:],
        "weights": is_learned.astype(np.float32),
        "segments": segments[:-1],
    }


def _padded(ids: Array, seq_len: int, pad: int) -> tuple[Array, Array]:
    num = min(len(ids), seq_len)
    tokens = np.full(seq_len, pad, np.int32)
    tokens[:num] = ids[:num]
    return tokens, (np.arange(seq_len) < num).astype(np.int32)
