"""Rows of a fixed length out of token ids, and the data of a run.

    make_windows     all texts one after another, cut at equal lengths
    pack_examples    as many whole examples as fit
    make_pairs       a source and its answer, each padded
    make_labelled    one example and its label, padded

`segments` numbers the documents of a row from 1, with 0 for padding; a model masks
attention between documents. Lengths of rows are in tokens.

Invariant: row number n is a function of the examples and the length alone.
"""

import bisect
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxinf.train.data.tokenizer import Tokenizer
from jaxinf.typing import Array, JsonValue

Row: TypeAlias = Mapping[str, Array]
RowMap: TypeAlias = Callable[[Row, np.random.Generator], Row]

_CHOSEN_SHARE = 0.15
_MASKED, _RANDOM = 0.8, 0.9  # the last tenth stays


class Encoded(NamedTuple):
    """One example as ids: uint8 to uint32 [n]; `is_learned` is bool [n].

    Attributes:
      label: -1 for none.
      token_types: uint8 [n], the number of each token's text; None for one text.
    """

    tokens: Array
    is_learned: Array
    label: int = -1
    token_types: Array | None = None

    def digest(self) -> bytes:
        digest = hashlib.sha256(f"{self.tokens.dtype} {self.label} ".encode())
        digest.update(np.ascontiguousarray(self.tokens).data)
        digest.update(np.packbits(self.is_learned).data)
        if self.token_types is not None:
            digest.update(self.token_types.data)
        return digest.digest()


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
      row_map: A random change of each row, such as masking.
      tokenizer: None for images.
      identity: Data that must be the same in a resumed run.
      notes: Remarks about the data for the user.
      seq_len: Tokens in a row; 0 for images.
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


def all_learned(tokens: Array) -> Array:
    """Returns True for each token, without memory."""
    return np.broadcast_to(np.True_, tokens.shape)


def split_tokens(
    parts: Sequence[Encoded], share: float
) -> tuple[list[Encoded], list[Encoded]]:
    """Splits a share of the tokens off at the end, which may cut a text."""
    num_tokens = sum(part.tokens.size for part in parts)
    at, first, last = num_tokens - int(num_tokens * share), [], []
    for tokens in (part.tokens for part in parts):
        for half, ids in ((first, tokens[:at]), (last, tokens[at:])):
            if ids.size:
                half.append(Encoded(ids, all_learned(ids)))
        at = max(0, at - tokens.size)
    return first, last


def fingerprint(parts: Sequence[Encoded]) -> str:
    """Returns the SHA-256 of all examples, in hexadecimal."""
    digest = hashlib.sha256()

    def add(arrays: Sequence[Array]) -> None:
        digest.update(f"{arrays[0].dtype} {sum(a.size for a in arrays)};".encode())
        for array in arrays:
            digest.update(np.ascontiguousarray(array).data)

    add([part.tokens for part in parts])
    if all(part.is_learned.all() for part in parts):
        digest.update(b"all;")
    else:
        add([part.is_learned for part in parts])
    add([np.cumsum([part.tokens.size for part in parts], dtype=np.int64)])
    add([np.array([part.label for part in parts], np.int32)])
    for part in parts:
        if part.token_types is not None:
            digest.update(part.token_types.data)
    return digest.hexdigest()


def make_windows(parts: Sequence[Encoded], seq_len: int, *, is_causal: bool) -> Rows:
    """Returns runs of the concatenated texts, without overlap.

    Args:
      is_causal: Whether rows have `targets`, the next token of each, and `weights`, 0
        for a target in another document.
    """
    flat = np.concatenate([part.tokens for part in parts] or [np.zeros(0, np.uint8)])
    ends = np.cumsum([part.tokens.size for part in parts], dtype=np.int64)

    def row(number: int) -> Row:
        start, size = number * seq_len, seq_len + is_causal
        tokens = flat[start : start + size].astype(np.int32)
        first = np.searchsorted(ends, start, side="right")
        last = np.searchsorted(ends, start + size, side="left")
        begins = np.zeros(size, np.int32)
        begins[ends[first:last] - start] = 1  # the next document begins
        segments = np.cumsum(begins, dtype=np.int32) + 1
        if not is_causal:
            return {"tokens": tokens, "segments": segments}
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "weights": (segments[1:] == segments[:-1]).astype(np.float32),
            "segments": segments[:-1],
        }

    return Rows(max(0, (flat.size - is_causal) // seq_len), row)


def pack_examples(parts: Sequence[Encoded], seq_len: int, pad: int) -> Rows:
    """Packs examples of at least two tokens into rows; long ones are cut."""
    # Every token but the last is an input, and every one but the first a target.
    sizes = np.array([min(part.tokens.size - 1, seq_len) for part in parts])
    plan = plan_rows(sizes, seq_len)

    def row(number: int) -> Row:
        members = plan[number]
        cut = [(parts[member], sizes[member]) for member in members]
        tokens = [part.tokens[:size] for part, size in cut]
        targets = [part.tokens[1 : size + 1] for part, size in cut]
        weights = [part.is_learned[1 : size + 1] for part, size in cut]
        segments = np.repeat(np.arange(1, len(members) + 1), sizes[members])
        return {
            "tokens": _pad(np.concatenate(tokens), seq_len, pad),
            "targets": _pad(np.concatenate(targets), seq_len, pad),
            "weights": _pad(np.concatenate(weights), seq_len, 0, np.float32),
            "segments": _pad(segments, seq_len, 0),
        }

    return Rows(len(plan), row)


def make_pairs(
    examples: Sequence[Sequence[Encoded]], seq_len: int, *, pad: int, start: int
) -> Rows:
    """Returns a source for the encoder, and its answer for the decoder, in each row.

    `start` is the id before an answer.
    """

    def row(number: int) -> Row:
        source, answer = (
            _pad_document(x.tokens, seq_len, pad) for x in examples[number]
        )
        return {
            **source,
            "decoder_tokens": np.append(np.int32(start), answer["tokens"][:-1]),
            "decoder_segments": answer["segments"],
            "targets": answer["tokens"],
            "weights": answer["segments"].astype(np.float32),
        }

    return Rows(len(examples), row)


def make_labelled(parts: Sequence[Encoded], seq_len: int, pad: int) -> Rows:
    """Returns one example a row, cut at its end, with its label, int32 []."""

    def row(number: int) -> Row:
        part = parts[number]
        result = _pad_document(part.tokens, seq_len, pad)
        result["labels"] = np.array(part.label, np.int32)
        if part.token_types is not None:
            result["token_types"] = _pad(part.token_types, seq_len, 0)
        return result

    return Rows(len(parts), row)


def plan_rows(lengths: Array, seq_len: int) -> Sequence[Sequence[int]]:
    """Returns the numbers of the examples of each row, for lengths 1 to `seq_len`.

    The longest example comes first, and goes to the row with the best fit.
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


def make_masking(*, mask: int, special: Sequence[int], vocab_size: int) -> RowMap:
    """Returns a function that masks tokens, and keeps them as targets.

    As in BERT (Devlin et al. 2019, section 3.1), 15 % of a row's tokens are chosen, at
    least one. Of these 80 % become the mask, 10 % a random token, and 10 % stay. The
    function adds `targets`, and `weights` of 1 for chosen tokens; its result depends on
    the row and the generator alone.

    Args:
      special: Ids that are never chosen, such as ends of documents.
    """

    def mask_row(row: Row, rng: np.random.Generator) -> Row:
        tokens = row["tokens"]
        allowed = np.flatnonzero(~np.isin(tokens, special) & (row["segments"] > 0))
        if not allowed.size:  # a row of special ones; at least one must count
            allowed = np.arange(tokens.size)
        num = max(1, round(_CHOSEN_SHARE * allowed.size))
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

    return mask_row


def _pad(values: Array, seq_len: int, pad: int, dtype: type = np.int32) -> Array:
    row = np.full(seq_len, pad, dtype)
    row[: len(values)] = values[:seq_len]
    return row


def _pad_document(ids: Array, seq_len: int, pad: int) -> dict[str, Array]:
    segments = (np.arange(seq_len) < len(ids)).astype(np.int32)
    return {"tokens": _pad(ids, seq_len, pad), "segments": segments}
