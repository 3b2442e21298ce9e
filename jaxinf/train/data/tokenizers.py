"""Converts text to token ids and back, by bytes or by a `tokenizer.json`.

Invariant: a tokenizer is immutable, and its fingerprint decides its ids.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from jaxinf.documents import MOST_BYTES, DocumentError, parse_json
from jaxinf.errors import StoreIOError
from jaxinf.io import read_bounded
from jaxinf.train.data.chat import ChatTemplate, read_chat_template
from jaxinf.train.data.errors import DataError, optional_import, refusing
from jaxinf.typing import Array

Text: TypeAlias = tuple[str, str | bytes]
"""The place of a text, for errors, and the text."""

# Files of tokenizers that are not read; their owners can save a tokenizer.json.
_OTHER_FORMS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_OTHER_FORMS += ("vocab.json", "merges.txt", "vocab.txt", "tekken.json")
_BYTE_IDS = 257  # the bytes and the mask

# In the order of preference, without a tokenizer_config.json that names one.
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
_MASKS = ("[MASK]", "<mask>")
_PADS = ("[PAD]", "<pad>", "<|finetune_right_pad_id|>")


@dataclasses.dataclass(frozen=True)
class TextForm:
    """Special tokens around one text or two, and the types of all tokens.

    Attributes:
      ids: special tokens before the first text, and after each.
    """

    ids: tuple[tuple[int, ...], ...]
    types: tuple[tuple[int, ...], ...]
    text_types: tuple[int, ...] = (0, 1)
    is_typed: bool = True

    @classmethod
    def one_after_the_other(cls, end: int | None) -> "TextForm":
        """The texts and an end, for a model that takes no types."""
        ends = () if end is None else (end,)
        return cls(((), (), ends), ((), (), (1,) * len(ends)), is_typed=False)

    @property
    def num_special(self) -> int:
        return sum(map(len, self.ids))

    def join(self, *texts: Array) -> tuple[Array, Array | None]:
        """Returns the tokens of texts, and their types, uint8, if there are any."""
        first, *others = (np.array(ids, texts[0].dtype) for ids in self.ids)
        tokens = [first, *itertools.chain(*zip(texts, others, strict=True))]
        if not self.is_typed:
            return np.concatenate(tokens), None
        own = ([t] * x.size for t, x in zip(self.text_types, texts, strict=True))
        types = [
            self.types[0],
            *itertools.chain(*zip(own, self.types[1:], strict=True)),
        ]
        return np.concatenate(tokens), np.concatenate(
            [np.array(some, np.uint8) for some in types]
        )


class Tokenizer(Protocol):
    """The interface of a tokenizer; immutable, safe to share between threads.

    Attributes:
      vocab_size: one more than the largest id of a text.
      end: id of the end of a document, or None.
      mask: id of the mask, or None.
      start: id at the beginning of an answer, for a decoder.
      pad: id for padding, which has no effect.
      fingerprint: text that changes whenever ids may change.
      chat: its own form of conversations, or None.
    """

    name: str
    vocab_size: int
    end: int | None
    mask: int | None
    start: int
    pad: int
    fingerprint: str
    chat: ChatTemplate | None

    def encode(self, texts: Sequence[Text]) -> list[Array]:
        """Returns the ids of each text, uint8 to uint32 [n], without an end.

        Raises:
          DataError: a text cannot be read; names its place.
        """
        ...

    def form(self, num_texts: int) -> TextForm:
        """Returns the form of one text, or of two for a model with token types.

        Raises:
          DataError: the tokenizer has no such form.
        """
        ...

    def decode(self, ids: Array) -> bytes:
        """Returns the text of ids as UTF-8; unknown ids are left out."""
        ...


class ByteTokenizer:
    """Every byte is its own id; NUL ends a document. Id 256 is no byte: it masks a byte
    for a masked language model, and begins a decoder's answer."""

    name = "bytes"
    vocab_size = 256
    end: int | None = 0
    mask: int | None = 256
    start = 256
    pad = 0
    fingerprint = "bytes"
    chat: ChatTemplate | None = None

    def encode(self, texts: Sequence[Text]) -> list[Array]:
        return [np.frombuffer(_as_bytes(*text), np.uint8) for text in texts]

    def form(self, num_texts: int) -> TextForm:
        count = 1 + num_texts
        types = tuple(range(num_texts))
        return TextForm(((), (0,), (0,))[:count], ((), (0,), (1,))[:count], types)

    def decode(self, ids: Array) -> bytes:
        return bytes(min(int(i), 0xFF) for i in np.asarray(ids))


class FileTokenizer:
    """A `tokenizer.json`, run by the `tokenizers` package.

    Args:
      path: the file, or its folder. A `tokenizer_config.json` beside it defines the
        special tokens.

    Raises:
      DataError: the file is missing or malformed, or `tokenizers` is not installed.
    """

    def __init__(self, path: Path) -> None:
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise DataError(
                f"--tokenizer {path}: expected a tokenizer.json, or a folder with one, "
                "found none; leave it out to train on bytes"
            )
        package = optional_import("tokenizers", what=f"--tokenizer {path}")
        content = path.read_bytes()
        what = (
            f"--tokenizer {path}: expected a tokenizer.json of the tokenizers package"
        )
        with refusing(what):
            self._tokenizer = package.Tokenizer.from_buffer(content)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"--tokenizer {path}: expected tokens, found none")
        config = _read_config(path.with_name("tokenizer_config.json"))
        named = _special_tokens(config)
        self.chat = read_chat_template(path.parent, config, named)
        self.name = str(path)
        self.vocab_size = max(vocabulary.values()) + 1
        self.end = _find(vocabulary, named.get("eos_token"), _ENDS)
        self.mask = _find(vocabulary, named.get("mask_token"), _MASKS)
        pad = _find(vocabulary, named.get("pad_token"), _PADS)
        self.start = self.pad = pad if pad is not None else self.end or 0  # as T5 has
        digest = hashlib.sha256(content).hexdigest()
        self.fingerprint = f"tokenizer.json {digest} end {self.end} mask {self.mask}"
        self._dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def encode(self, texts: Sequence[Text]) -> list[Array]:
        decoded = [_as_bytes(where, text) for where, text in texts]
        strings = [
            _as_str(where, b) for (where, _), b in zip(texts, decoded, strict=True)
        ]
        first = texts[0][0] if texts else "no text"
        with refusing(
            f"--tokenizer {self.name}: expected ids of {first} and what follows"
        ):
            encode = self._tokenizer.encode_batch_fast
            encodings = encode(strings, add_special_tokens=False)
            found = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        largest = max((int(ids.max()) for ids in found if ids.size), default=0)
        if largest >= self.vocab_size:
            raise DataError(
                f"--tokenizer {self.name}: expected ids below {self.vocab_size}, as "
                f"its vocabulary has, found {largest}"
            )
        return [ids.astype(self._dtype) for ids in found]

    def encode_with_places(
        self, texts: Sequence[tuple[str, str]]
    ) -> list[tuple[Array, Array]]:
        """Returns the ids of each text, and the characters that each id stands for.

        Returns:
          Ids as `encode` gives them, and int64 [n, 2]: first character, and the one
          after the last.

        Raises:
          DataError: a text cannot be read; names its place.
        """
        strings = [_as_str(where, _as_bytes(where, text)) for where, text in texts]
        encodings = self._tokenizer.encode_batch(strings, add_special_tokens=False)
        return [
            (np.array(e.ids, self._dtype), np.array(e.offsets, np.int64).reshape(-1, 2))
            for e in encodings
        ]

    def form(self, num_texts: int) -> TextForm:
        what = f"--tokenizer {self.name}: expected a form of {num_texts} texts"
        with refusing(what):
            found = self._tokenizer.encode(*("a", "b")[:num_texts])
        places = found.sequence_ids
        is_there = set(range(num_texts)) <= set(places)
        if not is_there or places.index(0) > places.index(num_texts - 1):
            raise DataError(f"{what}, the first text first, found none")
        ids: list[list[int]] = [[] for _ in range(1 + num_texts)]
        types: list[list[int]] = [[] for _ in range(1 + num_texts)]
        texts, at = [*range(num_texts)], 0
        for token, kind, text in zip(found.ids, found.type_ids, places, strict=True):
            if text is not None:
                texts[text], at = kind, text + 1
            else:
                ids[at].append(token)
                types[at].append(kind)
        return TextForm(tuple(map(tuple, ids)), tuple(map(tuple, types)), tuple(texts))

    def decode(self, ids: Array) -> bytes:
        known = [int(i) for i in np.asarray(ids) if i < self.vocab_size]
        with refusing(f"--tokenizer {self.name}: expected a text for ids"):
            return self._tokenizer.decode(known, skip_special_tokens=False).encode()


def open_tokenizer(path: Path | None) -> Tokenizer:
    """Opens the tokenizer of a file or folder, or that of bytes if there is none.

    Raises:
      DataError: as `FileTokenizer`.
    """
    return ByteTokenizer() if path is None else FileTokenizer(path.expanduser())


def tokenizer_in(folder: Path, num_ids: int) -> Path | None:
    """Finds the tokenizer of a checkpoint; None if its model reads bytes.

    Raises:
      DataError: its tokenizer has another form, or it has none and more ids than bytes.
    """
    path = folder.expanduser() / "tokenizer.json"
    if path.is_file():
        return path
    others = [name for name in _OTHER_FORMS if path.with_name(name).exists()]
    if not others and num_ids <= _BYTE_IDS:
        return None
    found = f"found {' and '.join(others)} alone, which is not read here"
    remedy = "save the tokenizer anew with a current transformers, which writes one"
    if not others:
        found = f"found no tokenizer, and a model of {num_ids} ids, more than bytes"
        remedy = "copy it from where the weights are from"
    raise DataError(
        f"--from {folder}: expected a tokenizer.json, {found}; {remedy}, or name one "
        "with --tokenizer"
    )


def _as_bytes(where: str, text: str | bytes) -> bytes:
    if isinstance(text, bytes):
        return text
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: expected text, found {error.reason}") from error


def _as_str(where: str, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: expected UTF-8, found byte {text[error.start]:#x} at offset "
            f"{error.start}; convert the file, or train on bytes (no --tokenizer)"
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = parse_json(read_bounded(path, MOST_BYTES))
    except (DocumentError, StoreIOError) as error:
        raise DataError(f"{path}: expected JSON: {error}") from error
    return document if isinstance(document, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in config.items():
        content: Any = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _find(
    vocabulary: dict[str, int], named: str | None, known: Sequence[str]
) -> int | None:
    names = (named, *known) if named else known
    return next((vocabulary[name] for name in names if name in vocabulary), None)
