"""Rows of a fixed length out of sequences of any length, and what is loaded of them.

    windows    all sequences one after another, cut at equal lengths
    packed     as many whole sequences as fit
    pairs      a source and its answer, each padded
    single     one sequence and its label, padded

`segments` numbers the documents of a row from 1, with 0 for padding; a model masks
attention between documents. Lengths of rows are in tokens.

Invariant: row number n is a function of the sequences and the length alone.
"""

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from jaxinf.train.data.sequences import Sequences
from jaxinf.train.data.tokenizer import Tokenizer
from jaxinf.typing import Array, JsonValue

Row: TypeAlias = Mapping[str, Array]
RowMap: TypeAlias = Callable[[Row, np.random.Generator], Row]

_CHOSEN = 0.15
_MASKED, _RANDOM = 0.8, 0.9  # the last tenth stays


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Rows of the same shapes, read by number; safe to share between threads."""

    num: int
    row: Callable[[int], Row]

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, number: int) -> Row:
        return self.row(number)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingData:
    """The data of a run. Immutable, safe to share between threads.

    Attributes:
      row_map: a random change of each row, such as masking.
      tokenizer: the texts' tokenizer; None for images.
      identity: data that must be the same in a resumed run.
      notes: remarks about the data for the user.
      seq_len: tokens in a row; 0 for images.
      example: the first example, decoded, what is learned in guillemets.
    """

    train: Rows
    validation: Rows
    row_map: RowMap | None
    tokenizer: Tokenizer | None
    num_labels: int | None
    description: str
    identity: dict[str, JsonValue]
    notes: tuple[str, ...]
    seq_len: int = 0
    example: str = ""


def windows(sequences: Sequences, seq_len: int, *, is_causal: bool) -> Rows:
    """Returns runs of the concatenated sequences, without overlap.

    Args:
      is_causal: whether rows have `targets`, the next token of each, and `weights`, 0
        for a target in another document or one not to be learned.
    """

    def row(number: int) -> Row:
        start, size = number * seq_len, seq_len + is_causal
        part = slice(start, start + size)
        tokens = sequences.tokens[part].astype(np.int32)
        ends = sequences.ends
        first = np.searchsorted(ends, part.start, side="right")
        last = np.searchsorted(ends, part.stop, side="left")
        begins = np.zeros(size, np.int32)
        begins[ends[first:last] - start] = 1  # the next document begins
        segments = np.cumsum(begins, dtype=np.int32) + 1
        if not is_causal:
            return {"tokens": tokens, "segments": segments}
        is_learned = sequences.is_learned[part][1:] & (segments[1:] == segments[:-1])
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "weights": is_learned.astype(np.float32),
            "segments": segments[:-1],
        }

    return Rows(max(0, (sequences.tokens.size - is_causal) // seq_len), row)


def packed(sequences: Sequences, seq_len: int, pad: int) -> Rows:
    """Packs whole sequences into rows; longer ones are cut at the row's end.

    Args:
      sequences: the sequences to pack, each of at least two tokens.
    """
    # Every token but the last is an input, and every one but the first a target.
    lengths = np.diff(sequences.ends, prepend=0) - 1
    starts, sizes = sequences.ends - lengths - 1, np.minimum(lengths, seq_len)
    plan = plan_rows(sizes, seq_len)

    def row(number: int) -> Row:
        members = plan[number]
        places = np.concatenate([starts[m] + np.arange(sizes[m]) for m in members])
        weights = sequences.is_learned[places + 1]
        segments = np.repeat(np.arange(1, len(members) + 1), sizes[members])
        return {
            "tokens": _padded(sequences.tokens[places], seq_len, pad),
            "targets": _padded(sequences.tokens[places + 1], seq_len, pad),
            "weights": _padded(weights, seq_len, 0, np.float32),
            "segments": _padded(segments, seq_len, 0),
        }

    return Rows(len(plan), row)


def pairs(
    sources: Sequences, answers: Sequences, seq_len: int, *, pad: int, start: int
) -> Rows:
    """Returns a source for the encoder, and its answer for the decoder, in each row.

    Args:
      answers: the sequences to learn, in the same order.
      start: id before an answer.
    """

    def row(number: int) -> Row:
        answer = _alone(answers[number][0], seq_len, pad)
        return {
            **_alone(sources[number][0], seq_len, pad),
            "decoder_tokens": np.append(np.int32(start), answer["tokens"][:-1]),
            "decoder_segments": answer["segments"],
            "targets": answer["tokens"],
            "weights": answer["segments"].astype(np.float32),
        }

    return Rows(len(sources), row)


def single(sequences: Sequences, seq_len: int, pad: int) -> Rows:
    """Returns one sequence a row, cut at its end, with its label, int32 []."""

    def row(number: int) -> Row:
        part, types = sequences.part(number), sequences.token_types
        found = _alone(sequences.tokens[part], seq_len, pad)
        found["labels"] = np.array(sequences.labels[number], np.int32)
        if types is not None:
            found["token_types"] = _padded(types[part], seq_len, 0)
        return found

    return Rows(len(sequences), row)


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


def masking(*, mask: int, special: Sequence[int], vocab_size: int) -> RowMap:
    """Returns a function that masks tokens, and keeps them as targets.

    As in BERT (Devlin et al. 2019, section 3.1), 15 % of a row's tokens are chosen, at
    least one. Of these 80 % become the mask, 10 % a random token, and 10 % stay. The
    function adds `targets`, and `weights` of 1 for chosen tokens; its result depends on
    the row and the generator alone.

    Args:
      special: ids that are never chosen, such as ends of documents.
    """

    def masked(row: Row, rng: np.random.Generator) -> Row:
        tokens = row["tokens"]
        allowed = np.flatnonzero(~np.isin(tokens, special) & (row["segments"] > 0))
        if not allowed.size:  # a row of special ones; at least one must count
            allowed = np.arange(tokens.size)
        num = max(1, round(_CHOSEN * allowed.size))
        chosen = rng.permutation(allowed)[:num]
        fate = rng.random(num)
        hidden = tokens.copy()
        hidden[chosen[fate < _MASKED]] = mask
        is_random = (fate >= _MASKED) & (fate < _RANDOM)
        drawn = rng.integers(0, vocab_size, num, np.int32)
        hidden[chosen[is_random]] = drawn[is_random]
        weights = np.zeros(tokens.size, np.float32)
        weights[chosen] = 1
        return {**row, "tokens": hidden, "targets": tokens, "weights": weights}

    return masked


def _padded(values: Array, seq_len: int, pad: int, dtype: type = np.int32) -> Array:
    row = np.full(seq_len, pad, dtype)
    row[: len(values)] = values[:seq_len]
    return row


def _alone(ids: Array, seq_len: int, pad: int) -> dict[str, Array]:
    segments = (np.arange(seq_len) < len(ids)).astype(np.int32)
    return {"tokens": _padded(ids, seq_len, pad), "segments": segments}
