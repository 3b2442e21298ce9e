"""Four tasks for fine-tuning, from the sources of Python's standard library.

    next       which of twelve words follows these lines of a function
    statement  with which of nine words does the next line begin
    operator   which of ten operators, brackets and keywords follows a name
    inside     which of twelve words follows these lines in a function of this head

`inside` has two texts, the first line of a function and later lines of it. In all tasks
the last token is just before what is asked for, as in pretraining.

Examples are divided by file: no function is on both sides, and no example occurs twice.
They are chosen in rounds, one of each file in a round, so that few files are not most
of a task; all classes have as many, or all that they have. The same Python makes the
same files. `pretraining.txt` is the text of the files that are trained on. The
tokenizer has the pairs of bytes (BPE) that are frequent in it.
"""

import ast
import hashlib
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxinf.train.data.files import standard_library_files

WORDS = "self if return None not for raise is or len isinstance False".split()
CHOICES: dict[str, Sequence[str]] = {
    "next": WORDS,
    "statement": "if self return else raise for try except elif".split(),
    "operator": "[,:, = , == , + , is , in , and , or , for ".split(","),
    "inside": WORDS,
}
"""What follows, by task; a label is a place in it."""

TASKS = (*CHOICES,)
PAIRS = ("inside",)

SEQ_LEN = 32  # tokens of an example, with special ones; longer ones are left out
VOCAB_SIZE = 2048
SPECIAL_TOKENS = ("[PAD]", "[SEP]")  # ids from 0
_MOST_BYTES = 88  # of an example
_MOST_BYTES_FIRST = 36  # of the first of two texts
_LEAST_BYTES = 22  # before what is asked for
_HELD_OUT = 0.25  # of the files
_MOST = {"train": 12_000, "validation": 4_000}
_WORD = r"(?<=[\s(\[,=])({})\b"
_PLACES = {
    "next": _WORD,
    "statement": r"(?<=\n) +({})\b",
    "operator": r"(?<=[A-Za-z_])({})",
    "inside": _WORD,
}
"""Where a choice, the group, is in a function's code."""

Record = dict[str, Any]


class Function(NamedTuple):
    """A function of the library: its module's path there, its source from `def` on as
    it is in the file, and as code without the docstring, not indented."""

    file: str
    text: str
    code: str


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
        lines = [line.decode("ascii", "ignore") for line in source.splitlines()]
        name = path.relative_to(root).as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                own = code = lines[node.lineno - 1 : node.end_lineno]
                if ast.get_docstring(node, clean=False):
                    start = node.body[0].lineno - node.lineno
                    end = (node.body[0].end_lineno or 0) - node.lineno
                    code = [*own[:start], *own[end + 1 :]]
                text = "\n".join(own).lstrip()
                yield Function(name, text, textwrap.dedent("\n".join(code)))


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def side_of(file: str) -> str:
    """Returns whether a file is for training or for validation."""
    return "validation" if _hash(file) < _HELD_OUT * 2**64 else "train"


# --- the tasks ---------------------------------------------------------------------


def _made(found: Iterable[Function], task: str) -> Iterator[Record]:
    choices = CHOICES[task]
    anyone = "|".join(re.escape(choice) for choice in choices)
    place = re.compile(_PLACES[task].format(anyone))
    for one in found:
        for match in place.finditer(one.code):
            texts = _texts_before(one.code, match.start(1), task in PAIRS)
            if texts:
                label = choices.index(match[1])
                yield texts | {"label": label, "file": one.file}


def _texts_before(code: str, end: int, has_two: bool) -> Record | None:
    first = code.partition("\n")[0] + "\n" if has_two else ""
    before = code[len(first) : end].removesuffix(" ")  # a word's token has its space
    most = _MOST_BYTES - min(len(first), _MOST_BYTES_FIRST)
    lines = before[-most:]
    if len(before) > most:  # from the beginning of a line on
        lines = lines.partition("\n")[2]
    if len(lines) < _LEAST_BYTES:
        return None
    if not has_two:
        return {"text": lines}
    head = first[: _MOST_BYTES_FIRST - 1].rstrip("\n") + "\n"
    return {"text": head, "text_pair": lines}


def key_of(record: Record) -> bytes:
    """Returns an example's bytes, one text after the other."""
    return "".join(_texts(record)).encode()


def _texts(record: Record) -> list[str]:
    return [record[name] for name in ("text", "text_pair") if name in record]


def examples(
    found: Sequence[Function], task: str, fits: Callable[[Record], bool]
) -> dict[str, list[Record]]:
    """Returns the examples of a task that fit, by side, each of them once."""
    by_side: dict[str, dict[bytes, Record]] = {side: {} for side in _MOST}
    seen: Counter[bytes] = Counter()
    for record in _made(found, task):
        key = key_of(record)
        seen[key] += 1
        by_side[side_of(record["file"])].setdefault(key, record)
    return {
        side: _shares([r for key, r in own.items() if seen[key] == 1 and fits(r)], side)
        for side, own in by_side.items()
    }


def _shares(records: Sequence[Record], side: str) -> list[Record]:
    """Chooses examples in rounds, one of each file, and as many of each class."""
    share = _MOST[side] // len({record["label"] for record in records})
    taken: Counter[Any] = Counter()

    def number(key: object) -> int:
        taken[key] += 1
        return taken[key]

    mixed = sorted(records, key=lambda record: _hash(key_of(record)))
    rounds = [(number(record["file"]), record) for record in mixed]
    rounds.sort(key=lambda pair: pair[0])
    return [r for _, r in rounds if number(r["label"]) <= share]


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
        return len(tokenizer.encode(*_texts(record)).ids) <= SEQ_LEN

    for task in TASKS:
        for side, records in examples(found, task, fits).items():
            lines = [json.dumps(record) + "\n" for record in records[:most]]
            (place / f"{task}-{side}.jsonl").write_text("".join(lines))
    (place / "pretraining.txt").write_text("\n\n".join(text))


def write_tokenizer(place: Path, text: Iterable[str]) -> Any:
    """Writes a tokenizer to the folder `gpt2`, and returns it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
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
    folder = place / "gpt2"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL_TOKENS}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"  # not that of a model
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return tokenizer


def read_task(place: Path, task: str, side: str) -> list[Record]:
    """Returns the examples of a side of a task that `make` wrote."""
    lines = (place / f"{task}-{side}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
