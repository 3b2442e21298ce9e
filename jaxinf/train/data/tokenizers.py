"""Converts text to token ids and back, by bytes or by a `tokenizer.json`.

Invariant: a tokenizer is immutable, and its fingerprint decides its ids.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from jaxinf.train.data.errors import DataError, optional_import
from jaxinf.typing import Array

__all__ = ["ByteTokenizer", "FileTokenizer", "Text", "Tokenizer", "open_tokenizer"]

Text: TypeAlias = tuple[str, str | bytes]
"""The place of a text, for errors, and the text."""

# In the order of preference, without a tokenizer_config.json that names one.
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
_MASKS = ("[MASK]", "<mask>")
_PADS = ("[PAD]", "<pad>", "<|finetune_right_pad_id|>")


class Tokenizer(Protocol):
    """The interface of a tokenizer; immutable, safe to share between threads.

    Attributes:
      name: name for messages.
      vocab_size: one more than the largest id of a text.
      end: id of the end of a document, or None.
      mask: id of the mask, or None.
      start: id at the beginning of an answer, for a decoder.
      pad: id for padding, which has no effect.
      fingerprint: text that changes whenever ids may change.
    """

    name: str
    vocab_size: int
    end: int | None
    mask: int | None
    start: int
    pad: int
    fingerprint: str

    def encode(self, texts: Sequence[Text]) -> list[Array]:
        """Returns the ids of each text, uint8 to uint32 [n], without an end.

        Raises:
          DataError: a text cannot be read; names its place.
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

    def encode(self, texts: Sequence[Text]) -> list[Array]:
        """See `Tokenizer`."""
        return [np.frombuffer(_as_bytes(*text), np.uint8) for text in texts]

    def decode(self, ids: Array) -> bytes:
        """See `Tokenizer`. Ids above 255, from an untrained model, become 0xFF."""
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
        try:
            self._tokenizer = package.Tokenizer.from_buffer(content)
        except Exception as error:  # the package raises no narrower exception
            raise DataError(
                f"--tokenizer {path}: expected a tokenizer.json of the tokenizers "
                f"package: {error}"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"--tokenizer {path}: expected tokens, found none")
        named = _special_tokens(path.with_name("tokenizer_config.json"))
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
        """See `Tokenizer`."""
        decoded = [_as_bytes(where, text) for where, text in texts]
        strings = [
            _as_str(where, b) for (where, _), b in zip(texts, decoded, strict=True)
        ]
        encodings = self._tokenizer.encode_batch_fast(strings, add_special_tokens=False)
        return [np.array(encoding.ids, self._dtype) for encoding in encodings]

    def decode(self, ids: Array) -> bytes:
        """See `Tokenizer`."""
        known = [int(i) for i in np.asarray(ids) if i < self.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=False).encode()


def open_tokenizer(path: Path | None) -> Tokenizer:
    """Opens the tokenizer of a file or folder, or that of bytes if there is none.

    Raises:
      DataError: as `FileTokenizer`.
    """
    return ByteTokenizer() if path is None else FileTokenizer(path.expanduser())


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


def _special_tokens(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: expected JSON: {error}") from error
    found = {}
    for name, value in document.items() if isinstance(document, dict) else ():
        content: Any = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _find(
    vocabulary: dict[str, int], named: str | None, known: Sequence[str]
) -> int | None:
    names = (named, *known) if named else known
    return next((vocabulary[name] for name in names if name in vocabulary), None)
