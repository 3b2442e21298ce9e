"""Four tasks for fine-tuning, from the sources of Python's standard library.

    next       which of twelve words follows these lines of a function
    swapped    have two neighbouring words of these lines been exchanged
    continues  do these lines follow those, or are they of another function of the file
    order      are these two neighbouring statements in their order

`continues` has two texts, the others one. Examples are divided by file: no function is
on both sides, and no example occurs twice. They are chosen in rounds, one of each file
in a round, so that few files are not most of a task; and all classes have as many. The
same Python makes the same files. `pretraining.txt` is the text of the files that are
trained on. The tokenizers have the pairs of bytes (BPE) that are frequent in it;
`bert.json` has BERT's special tokens, too.

    python scripts/finetune_tasks.py runs/tasks
"""

import argparse
import ast
import hashlib
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.train.data.files import standard_library_files

TASKS = ("next", "swapped", "continues", "order")
PAIRS = ("continues",)
WORDS = ("self", "if", "return", "None", "not", "for")
WORDS += ("raise", "is", "or", "len", "isinstance", "False")

SEQ_LEN = 32  # tokens of an example, with special ones; longer ones are left out
VOCAB_SIZE = 2048
SPECIAL_TOKENS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")  # ids from 0
_MOST_BYTES = 88  # of an example
_ROOM = _MOST_BYTES // 2 - 1
_HELD_OUT = 0.25  # of the files
_MOST = {"train": 12_000, "validation": 4_000}
_LEAST_LINES = 6
_WORD_AT = re.compile(rf"(?<=[\s(\[,=])({'|'.join(WORDS)})\b")
_TWO_WORDS = re.compile(r"\b([A-Za-z_]\w*)([^\w\n]+)([A-Za-z_]\w*)\b")

Record = dict[str, Any]


@dataclass(frozen=True)
class Function:
    """A function of the library.

    Attributes:
      file: its module's path in the library.
      text: its source, from `def` on, as it is in the file.
      doc: its docstring, as in the file; empty if it has none.
      code: its source without the docstring, not indented.
      neighbours: pairs of neighbouring simple statements in it.
    """

    file: str
    text: str
    doc: str
    code: str
    neighbours: tuple[tuple[str, str], ...]


def functions() -> Iterator[Function]:
    """Yields the functions of the standard library, file by file."""
    files = standard_library_files()
    root = files[0].parents[0]
    while not all(path.is_relative_to(root) for path in files):
        root = root.parent
    for path in files:
        source = path.read_bytes()
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # test data with errors on purpose
            continue
        lines = source.splitlines()
        name = path.relative_to(root).as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield _function(name, lines, node)


def _function(name: str, lines: Sequence[bytes], node: ast.FunctionDef) -> Function:
    own = _lines(lines, node)
    doc = ast.get_docstring(node, clean=False) or ""
    if doc:
        first = node.body[0]
        start, end = first.lineno - node.lineno, (first.end_lineno or 0) - node.lineno
        code = [*own[:start], *own[end + 1 :]]
    else:
        code = own
    statements = [one for one in ast.walk(node) if isinstance(one, ast.stmt)]
    pairs = []
    for block in statements:
        for body in ("body", "orelse", "finalbody"):
            inside = getattr(block, body, ())
            pairs += itertools.pairwise(inside)
    return Function(
        file=name,
        text="\n".join(own).lstrip(),
        doc=doc,
        code=textwrap.dedent("\n".join(code)),
        neighbours=tuple(
            (_plain(lines, one), _plain(lines, other))
            for one, other in pairs
            if isinstance(one, _SIMPLE) and isinstance(other, _SIMPLE)
        ),
    )


_SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return, ast.Raise, ast.Delete)


def _lines(lines: Sequence[bytes], node: ast.stmt) -> list[str]:
    found = lines[node.lineno - 1 : node.end_lineno]
    return [line.decode("ascii", "ignore") for line in found]


def _plain(lines: Sequence[bytes], node: ast.stmt) -> str:
    return textwrap.dedent("\n".join(_lines(lines, node))).strip()


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def side_of(file: str) -> str:
    """Returns whether a file is for training or for validation."""
    return "validation" if _hash(file) < _HELD_OUT * 2**64 else "train"


# --- the tasks ---------------------------------------------------------------------


def _next_words(found: Sequence[Function]) -> Iterator[Record]:
    for one in found:
        for match in _WORD_AT.finditer(one.code):
            before = one.code[: match.start()].removesuffix(" ")
            lines = before[-_MOST_BYTES:]
            if len(before) > _MOST_BYTES:  # from the beginning of a line on
                lines = lines.partition("\n")[2]
            if len(lines) > _ROOM // 2:
                label = WORDS.index(match[0])
                yield {"text": lines, "label": label, "file": one.file}


def _exchanges(found: Sequence[Function]) -> Iterator[Record]:
    for one in found:
        for piece in _pieces(one.code.splitlines()):
            pairs = [m for m in _TWO_WORDS.finditer(piece) if m[1] != m[3]]
            if not pairs:
                continue
            chance = _hash(piece)
            label, pair = chance % 2, pairs[chance // 2 % len(pairs)]
            if label:
                other = pair[3] + pair[2] + pair[1]
                piece = piece[: pair.start()] + other + piece[pair.end() :]
            yield {"text": piece, "label": label, "file": one.file}


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """Yields whole lines, as many as fit."""
    piece = ""
    for line in lines:
        if piece and len(piece) + len(line) >= _MOST_BYTES:
            yield piece[: _MOST_BYTES - 1]
            piece = ""
        piece += line + "\n"
    if len(piece) > _ROOM:
        yield piece[: _MOST_BYTES - 1]


def _continuations(found: Sequence[Function]) -> Iterator[Record]:
    halves: dict[str, list[tuple[Function, str, str]]] = {}
    for one in found:
        lines = one.code.splitlines()
        if len(lines) < _LEAST_LINES:
            continue
        for cut in range(_LEAST_LINES // 2, len(lines) - 2, _LEAST_LINES):
            before, after = "\n".join(lines[:cut]) + "\n", "\n".join(lines[cut:])
            half = one, before[-_ROOM:], after[:_ROOM]
            halves.setdefault(one.file, []).append(half)
    for file, own in halves.items():
        for number, (one, before, after) in enumerate(own):
            others = [half for half in own if half[0] is not one]
            if others:
                other = others[_hash(file, number) % len(others)][2]
                for second, label in ((after, 1), (other, 0)):
                    record = {"text": before, "text_pair": second, "label": label}
                    yield record | {"file": file}


def _orders(found: Sequence[Function]) -> Iterator[Record]:
    for one in found:
        for first, second in one.neighbours:
            if first != second and len(first) + len(second) < _MOST_BYTES - 1:
                label = _hash(first, second) % 2
                pair = (first, second) if label else (second, first)
                yield {"text": "\n".join(pair), "label": label, "file": one.file}


_MADE: dict[str, Callable[[Sequence[Function]], Iterator[Record]]] = dict(
    zip(TASKS, (_next_words, _exchanges, _continuations, _orders), strict=True)
)


def key_of(record: Record) -> bytes:
    """Returns an example's bytes, one text after the other."""
    return "".join(_texts(record)).encode()


def _texts(record: Record) -> list[str]:
    return [record[name] for name in ("text", "text_pair") if name in record]


def examples(
    found: Sequence[Function], task: str, fits: Callable[[Record], bool]
) -> dict[str, list[Record]]:
    """Returns the examples of a task by side, each of them once; at most `_MOST`.

    Args:
      found: the functions.
      task: of `TASKS`.
      fits: whether an example is short enough.
    """
    by_side: dict[str, dict[bytes, Record]] = {side: {} for side in _MOST}
    seen: dict[bytes, int] = {}
    for record in _MADE[task](found):
        key = key_of(record)
        seen[key] = seen.get(key, 0) + 1
        by_side[side_of(record["file"])].setdefault(key, record)
    return {
        side: _shares([r for key, r in own.items() if seen[key] == 1 and fits(r)], side)
        for side, own in by_side.items()
    }


def _shares(records: Sequence[Record], side: str) -> list[Record]:
    """Chooses examples in rounds, one of each file, and as many of each class."""
    share = _MOST[side] // len({record["label"] for record in records})
    taken: dict[Any, int] = {}

    def number(*key: object) -> int:
        taken[key] = taken.get(key, 0) + 1
        return taken[key]

    mixed = sorted(records, key=lambda record: _hash(key_of(record)))
    rounds = [(number(record["file"]), record) for record in mixed]
    rounds.sort(key=lambda pair: pair[0])
    return [r for _, r in rounds if number("class", r["label"]) <= share]


def make(place: Path, most: int | None = None) -> None:
    """Writes the tasks, the text for pretraining and its tokenizer, or finds them.

    Args:
      place: a folder, which may be new.
      most: examples of each side of a task; by default 12,000 and 4,000.
    """
    if (place / "pretraining.txt").exists():
        return
    found = list(functions())
    text = [one.text for one in found if side_of(one.file) == "train"]
    tokenizer = write_tokenizer(place, text)

    def fits(record: Record) -> bool:
        encoded = tokenizer.encode(*_texts(record))
        return len(encoded.ids) <= SEQ_LEN

    for task in TASKS:
        for side, records in examples(found, task, fits).items():
            lines = [json.dumps(record) + "\n" for record in records[:most]]
            (place / f"{task}-{side}.jsonl").write_text("".join(lines))
    (place / "pretraining.txt").write_text("\n\n".join(text))


def write_tokenizer(place: Path, text: Iterable[str]) -> Any:
    """Writes `tokenizer.json` for a text, and `bert.json` with BERT's special tokens.

    Returns:
      The tokenizer with them.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    place.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(place / "tokenizer.json"))
    first, second = ((name, SPECIAL_TOKENS.index(name)) for name in ("[SEP]", "[CLS]"))
    tokenizer.post_processor = processors.BertProcessing(first, second)
    tokenizer.save(str(place / "bert.json"))
    return tokenizer


def read_task(place: Path, task: str, side: str) -> list[Record]:
    """Returns the examples of a side of a task that `make` wrote."""
    lines = (place / f"{task}-{side}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# --- baselines ---------------------------------------------------------------------


def baselines(place: Path, task: str) -> dict[str, np.ndarray]:
    """Returns whether each held-out example is right, bool, by a baseline's name.

    The linear model is a logistic regression on the n-grams of 1 to 4 bytes; of a pair,
    on those of each text and on those that both have.
    """
    from scipy.sparse import hstack  # pyright: ignore[reportMissingImports]
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.linear_model import LogisticRegression

    grams = HashingVectorizer(analyzer="char", ngram_range=(1, 4), n_features=1 << 16)

    def features(records: Sequence[Record]) -> Any:
        first: Any = grams.transform([one["text"] for one in records])
        if task not in PAIRS:
            return first
        second = grams.transform([one["text_pair"] for one in records])
        return hstack([first, second, first.multiply(second)]).tocsr()

    train, held = (read_task(place, task, side) for side in _MOST)
    labels, wanted = (np.array([r["label"] for r in rs]) for rs in (train, held))
    linear = LogisticRegression(C=10.0, max_iter=100).fit(features(train), labels)
    largest = np.bincount(labels).argmax()
    return {
        "largest class": wanted == largest,
        "linear": linear.predict(features(held)) == wanted,
    }


def main() -> None:
    """Writes the tasks; says their sizes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("place", type=Path)
    parser.add_argument("--most", type=int, help="examples of each side of a task")
    arguments = parser.parse_args()
    make(arguments.place, arguments.most)
    for task in TASKS:
        sizes = [len(read_task(arguments.place, task, side)) for side in _MOST]
        files = {r["file"] for r in read_task(arguments.place, task, "validation")}
        print(f"{task}: {sizes[0]} to train on, {sizes[1]} of {len(files)} files held")


if __name__ == "__main__":
    sys.exit(main())
