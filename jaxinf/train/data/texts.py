"""Turns texts into rows: reads, encodes, holds a part out, packs."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from jaxinf_models import TaskName

from jaxinf.terminal import printable
from jaxinf.train.data import rows as forms
from jaxinf.train.data.errors import DataError, shown_names
from jaxinf.train.data.examples import Label, num_classes, numbered
from jaxinf.train.data.files import find_files, standard_library_files
from jaxinf.train.data.reading import Reader
from jaxinf.train.data.sequences import Encoded, Sequences
from jaxinf.train.data.tokenizer import open_tokenizer
from jaxinf.train.options import HELD_OUT_SHARE, DataOptions

# A row of the longest example would otherwise take any memory.
_MOST_USUAL_TOKENS = 1024
_ROUNDED_TO = 16
_SHOWN_CHARS, _SHOWN_RUNS, _SHOWN_CLASSES = 120, 8, 20


def load_texts(
    options: DataOptions,
    *,
    task: TaskName,
    seq_len: int | None,
    most_tokens: int | None = None,
    num_token_types: int = 0,
) -> forms.TrainingData:
    """Reads texts (blocks), in the steps that all tasks share.

    Args:
      seq_len: tokens in a row; None for those of the longest example.
      most_tokens: most tokens in a row for the model; None for no limit.
      num_token_types: types of tokens that the model tells apart; 0 for none.

    Raises:
      DataError: the data is empty or malformed.
      OSError: a file cannot be read.
    """
    tokenizer, data = open_tokenizer(options.tokenizer), options.data
    files, left_out = find_files(data) if data else (standard_library_files(), [])
    held_files: list[Path] = []
    if (share := options.held_out_share) is None:
        held_files, others = find_files(options.validation)
        left_out += others

    reader = Reader(options, task, tokenizer, num_token_types)
    most = seq_len or min(_MOST_USUAL_TOKENS, most_tokens or _MOST_USUAL_TOKENS)
    encoded = reader.read(files, "--data", most)
    is_text, example = reader.kind == "text", _shown_example(reader, encoded[0])
    if seq_len is None:
        seq_len = _usual_length(encoded, most, is_text * (share or HELD_OUT_SHARE))
    classes, notes = dict[Label, int](), list[str]()
    train = _sequences(reader, encoded, "--data", seq_len, classes, notes)
    if held_files:
        encoded = reader.read(held_files, "--validation", seq_len)
        held = _sequences(reader, encoded, "--validation", seq_len, classes, notes)
    else:
        halves = [part.split(share or 0, by_tokens=is_text) for part in train]
        train, held = map(list, zip(*halves, strict=True))
    rows = _rows(reader, train, seq_len, "train")
    held_rows = _rows(reader, held, seq_len, "validation")

    unit, nums = "examples", [len(train[0]), len(held[0])]
    if is_text:
        unit = "bytes" if tokenizer.name == "bytes" else "tokens"
        nums = [train[0].tokens.size, held[0].tokens.size]
    prints = " ".join(part.fingerprint() for part in (*train, *held))
    num_labels = None
    if reader.kind == "labelled":
        num_labels = num_classes([*train[0].labels.tolist(), *held[0].labels.tolist()])
    return forms.TrainingData(
        train=rows,
        validation=held_rows,
        row_map=_masking(reader) if task == "masked-lm" else None,
        tokenizer=tokenizer,
        num_labels=num_labels,
        description=f"{nums[0]:,} {unit} to train on, {nums[1]:,} to validate",
        identity={
            "rows": [len(rows), len(held_rows)],
            "tokenizer": tokenizer.fingerprint,
            "sha256": hashlib.sha256(prints.encode()).hexdigest(),
        },
        notes=(*_named(classes), *notes, *_remarks(reader, left_out)),
        seq_len=seq_len,
        example=example,
    )


def _usual_length(
    encoded: Sequence[tuple[Encoded, ...]], most: int, held_share: float
) -> int:
    """Returns the tokens of the longest example, within limits.

    Args:
      held_share: the share of texts that is held out, and must have rows, too.
    """
    sizes = [part.num_tokens for parts in encoded for part in parts]
    longest = -(-max(sizes) // _ROUNDED_TO) * _ROUNDED_TO
    if held_share:
        longest = min(longest, int(sum(sizes) * held_share) // 2)
    return max(2, min(longest, most))


def _sequences(
    reader: Reader,
    encoded: list[tuple[Encoded, ...]],
    flag: str,
    seq_len: int,
    classes: dict[Label, int],
    notes: list[str],
) -> list[Sequences]:
    """Returns one list of sequences, or sources and answers in the same order."""
    if reader.kind == "labelled":
        numbers = numbered([one.label for (one,) in encoded], classes, flag)
        both = zip(encoded, numbers, strict=True)
        encoded = [(one._replace(label=number),) for (one,), number in both]
    if reader.kind != "text":
        encoded = _fitting(reader, encoded, flag, seq_len, notes)
    encoded.sort(key=lambda parts: [part.digest() for part in parts])
    return [Sequences.of(side) for side in zip(*encoded, strict=True)]


def _fitting(
    reader: Reader,
    encoded: list[tuple[Encoded, ...]],
    flag: str,
    seq_len: int,
    notes: list[str],
) -> list[tuple[Encoded, ...]]:
    """Leaves out examples whose answers begin after the cut, and notes cuts."""
    limit, kept = seq_len, encoded
    if reader.kind == "dialogue" and not reader.is_apart:
        limit += 1  # the last target has no place of its own
        kept = [parts for parts in encoded if parts[0].is_learned[1:limit].any()]
    if not kept:
        starts = [1 + int(np.argmax(p[0].is_learned[1:])) for p in encoded]
        raise DataError(
            f"{flag}: expected an answer within --seq-len {seq_len} tokens, "
            f"found {len(encoded):,} examples whose answers all begin later, the "
            f"first after {min(starts):,} tokens; give a --seq-len above that"
        )
    if num := sum(any(p.num_tokens > limit for p in parts) for parts in encoded):
        notes.append(
            f"{num:,} examples are longer than --seq-len {seq_len} and are cut there"
        )
    if num := len(encoded) - len(kept):
        notes.append(f"{num:,} of those have no answer before the cut and are left out")
    return kept


def _rows(
    reader: Reader, parts: Sequence[Sequences], seq_len: int, name: str
) -> forms.Rows:
    one, pad = parts[0], reader.tokenizer.pad
    if reader.kind == "text":
        is_causal = reader.task == "causal-lm"
        rows = forms.windows(one, seq_len, is_causal=is_causal)
        if not len(rows):
            need = f"seq_len + 1 = {seq_len + 1}" if is_causal else f"{seq_len}"
            raise DataError(
                f"expected at least {need} tokens of {name} text, got "
                f"{one.tokens.size}; name more text or shorten the sequence"
            )
        return rows
    if not len(one):
        raise DataError(
            f"expected at least one {name} example, got none; name more data, or "
            "what to hold out with --validation"
        )
    if reader.is_apart:
        start = reader.tokenizer.start
        return forms.pairs(one, parts[1], seq_len, pad=pad, start=start)
    form = forms.single if reader.kind == "labelled" else forms.packed
    return form(one, seq_len, pad)


def _masking(reader: Reader) -> forms.RowMap:
    tokenizer = reader.tokenizer
    if tokenizer.mask is None:
        raise DataError(
            f"--tokenizer {tokenizer.name}: --task masked-lm needs a mask token "
            "([MASK] or <mask>, named in tokenizer_config.json), which it does not have"
        )
    special, num_ids = tokenizer.special, tokenizer.vocab_size
    return forms.masking(mask=tokenizer.mask, special=special, vocab_size=num_ids)


# --- what the user is told -----------------------------------------------------------


def _named(classes: dict[Label, int]) -> Iterator[str]:
    named = [f"{n} {name}" for name, n in classes.items() if str(name) != str(n)]
    if named:
        more = ", …" if len(named) > _SHOWN_CLASSES else ""
        yield f"classes: {printable(', '.join(named[:_SHOWN_CLASSES]))}{more}"


def _remarks(reader: Reader, left_out: Sequence[Path]) -> Iterator[str]:
    if left_out:
        yield (
            f"{len(left_out):,} files of folders are neither text nor Parquet and are "
            f"left out: {shown_names([path.name for path in left_out])}"
        )
    if reader.unused:
        yield f"fields of records that are not used: {shown_names(reader.unused)}"
    if num := reader.num_json:
        yield f"{num:,} .json files that are no list of records, read as text"


def _shown_example(reader: Reader, parts: Sequence[Encoded]) -> str:
    """Decodes the first example; what is learned is in guillemets, the rest is cut."""
    assert reader.first is not None
    has_label, shown = reader.kind == "labelled", list[str]()
    for part in parts:
        places = np.flatnonzero(np.diff(part.is_learned)) + 1
        for start, end in pairwise([0, *places, part.tokens.size]):
            ids = part.tokens[start:end][: 4 * _SHOWN_CHARS]
            text = reader.tokenizer.decode(ids).decode(errors="replace")
            cut = "…" if len(text) > _SHOWN_CHARS else ""
            text = printable(text[:_SHOWN_CHARS]) + cut
            is_learned = part.is_learned[start] and not has_label
            shown.append(f"«{text}»" if is_learned else text)
    more = " …" if len(shown) > _SHOWN_RUNS else ""
    label = f" → «{printable(str(reader.first.label))}»" if has_label else ""
    fields = f" ({printable(reader.first.fields)})" if reader.first.fields else ""
    return f"{''.join(shown[:_SHOWN_RUNS])}{more}{label}{fields}"
