"""Text to token ids: by bytes, or by a tokenizer of `transformers`.

Invariant: ids are those of `tokenizer(text).input_ids`, of `tokenizer(a, b)` and of
`apply_chat_template`; special tokens are where those functions put them.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from jaxinf.exchange import VOCABULARIES
from jaxinf.train.data.errors import DataError, as_data_error
from jaxinf.train.data.examples import Example, Text
from jaxinf.typing import Array

_BYTE_IDS = 257  # the bytes and the mask
_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A template may write the date; a resumed run must see the same tokens.
_FIXED_DATE = "{% macro strftime_now(form) %}{{ form "
for _sign, _text in zip("dbBmYy", "26 Jul July 07 2024 24".split(), strict=True):
    _FIXED_DATE += f"| replace('%{_sign}', '{_text}') "
_FIXED_DATE += "}}{% endmacro %}"


class ByteTokenizer:
    """Every byte is its own id; NUL ends a document. Id 256 is no byte: it masks a byte
    for a masked language model, and begins a decoder's answer."""

    name = fingerprint = "bytes"
    vocab_size = mask = start = 256
    end = pad = 0
    special: tuple[int, ...] = (0,)
    adds_end = has_template = False

    def encode(
        self, where: str, text: Text, *, is_whole: bool, limit: int | None = None
    ) -> Array:
        return np.frombuffer(_as_bytes(where, text), np.uint8)[:limit]

    def encode_classified(
        self, where: str, texts: Sequence[Text], *, limit: int, num_types: int
    ) -> tuple[Array, Array | None]:
        if len(texts) > 1:
            raise DataError(
                f"{where}: expected one text, found two, which bytes do not tell "
                "apart; give a --tokenizer, or join them in the data"
            )
        ids = self.encode(where, texts[0], is_whole=False, limit=limit - 1)
        return np.append(ids, np.uint8(self.end)), None


class FolderTokenizer:
    """The tokenizer of a Hugging Face folder, run by `transformers`; immutable.

    Args:
      path: The folder, or its `tokenizer.json`.

    Attributes:
      vocab_size: One more than the largest id of a text.
      end, mask: Ids of the end of a document and of the mask, or None.
      start: Id at the beginning of an answer, for a decoder.
      pad: Id for padding, which has no effect.
      special: Ids that are no text.
      adds_end: Whether it adds the end to a whole text itself.
      fingerprint: Text that changes whenever ids may change.
    """

    def __init__(self, path: Path) -> None:
        folder = path.parent if path.name == "tokenizer.json" else path
        if not any((folder / name).is_file() for name in VOCABULARIES):
            raise DataError(
                f"--tokenizer {path}: expected a folder with a tokenizer.json, or that "
                "file, found none; leave it out to train on bytes"
            )
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        self.name = str(path)
        with as_data_error(f"--tokenizer {path}: expected a tokenizer of transformers"):
            from transformers import AutoTokenizer

            tokenizer: Any = AutoTokenizer.from_pretrained(
                str(folder),
                local_files_only=True,
                trust_remote_code=False,
                model_input_names=["input_ids"],
            )
            vocabulary = tokenizer.get_vocab()
            fast = tokenizer.backend_tokenizer if tokenizer.is_fast else None
            content = fast.to_str() if fast else repr(sorted(vocabulary.items()))
            ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
            self.special = tuple(tokenizer.all_special_ids)
            self.has_template = tokenizer.chat_template is not None
            last = tokenizer("a").input_ids[-1:]
        if not vocabulary:
            raise DataError(f"--tokenizer {path}: expected tokens, found none")
        self._tokenizer = tokenizer
        self.vocab_size = max(vocabulary.values()) + 1
        self.end = next((token for token in ends if token is not None), None)
        self.adds_end = last == [self.end]
        self.mask, pad = tokenizer.mask_token_id, tokenizer.pad_token_id
        self.start = self.pad = pad if pad is not None else self.end or 0  # as T5 has
        self._has_pad = pad is not None or self.end is not None
        digest = hashlib.sha256(content.encode()).hexdigest()
        self.fingerprint = f"transformers {digest} end {self.end} mask {self.mask}"
        self._dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def encode(
        self, where: str, text: Text, *, is_whole: bool, limit: int | None = None
    ) -> Array:
        """Returns the ids of a text, uint8 to uint32 [n].

        Args:
          where: Place of the text, for errors.
          is_whole: Whether special tokens are put around it.
          limit: Number of tokens at which it is cut; special ones are kept.
        """
        string = _as_str(where, text)
        with as_data_error(f"--tokenizer {self.name}: expected ids of {where}"):
            options = {"truncation": limit is not None, "max_length": limit}
            encoding = self._tokenizer(string, add_special_tokens=is_whole, **options)
            return self._ids(encoding.input_ids)

    def encode_classified(
        self, where: str, texts: Sequence[Text], *, limit: int, num_types: int
    ) -> tuple[Array, Array | None]:
        """Encodes a text or a pair; if it is too long, the longer text is cut first.

        Returns ids, and their types (uint8) for a pair if the model has `num_types`.
        """
        strings, num = [_as_str(where, text) for text in texts], len(texts)
        is_typed = num_types > 0 and num == 2
        with as_data_error(f"--tokenizer {self.name}: expected ids of {where}"):
            least = num + self._tokenizer.num_special_tokens_to_add(pair=num == 2)
            if limit < least:  # transformers returns them without a cut, or empty
                raise DataError(
                    f"--seq-len: expected at least {least} tokens, for {num} text(s) "
                    f"and their special tokens, got {limit}"
                )
            options = {"truncation": True, "return_token_type_ids": is_typed}
            encoding = self._tokenizer(*strings, max_length=limit, **options)
        ids = self._ids(encoding.input_ids)
        if not num_types and self._has_pad:  # transformers reads before the padding
            ids = ids[: 1 + max(np.flatnonzero(ids != self.pad), default=0)]
        if not is_typed:
            return ids, None
        types = np.array(encoding.token_type_ids, np.uint8)
        if types.max() >= num_types:  # a model would read another type, or NaN
            raise DataError(
                f"--tokenizer {self.name}: expected token types below {num_types}, as "
                f"the model has, found {types.max()} in pairs of texts"
            )
        return ids, types

    def encode_conversation(
        self, example: Example, *, learn_all: bool
    ) -> tuple[Array, Array]:
        """Returns the ids of messages by the chat template, and which are learned."""
        what = f"{example.where}: expected messages that the chat template of "
        with as_data_error(f"{what}--tokenizer {self.name} can write"):
            template = self._tokenizer.get_chat_template(tools=example.tools)
            if _MARKS_ANSWERS.search(template) and not learn_all:
                options = {"return_dict": True, "return_assistant_tokens_mask": True}
                encoding = self._render(example, tokenize=True, **options)
                is_learned = np.array(encoding["assistant_masks"], np.bool_)
                return self._ids(encoding["input_ids"]), is_learned
            text = self._render(example)
            encoding = self._tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True
            )
            ids = self._ids(encoding.input_ids)
            if learn_all:
                return ids, np.ones(ids.size, np.bool_)
            offsets = np.array(encoding.offset_mapping, np.int64).reshape(-1, 2)
            is_learned = np.zeros(ids.size, np.bool_)
            for start, end in self._answers(example, text):
                is_learned |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
        return ids, is_learned

    def _answers(self, example: Example, text: str) -> Iterator[tuple[int, int]]:
        """Yields the start and end of each answer: the text that its message adds."""
        for number, message in enumerate(example.messages):
            if message["role"] != "assistant" or not number:  # answers nothing
                continue
            prompt = self._render(example, number, add_generation_prompt=True)
            through = self._render(example, number + 1)
            is_added = through.startswith(prompt) and text.startswith(through)
            if not is_added or through == prompt:
                raise DataError(
                    f"{example.where}: expected the chat template of --tokenizer "
                    f"{self.name} to write each message behind those before it, found "
                    f"that message {number + 1} changes the text before it, or that "
                    "later messages change it; so its answer cannot be told from the "
                    "prompt: give one answer in each record, or --loss-on all, or mark "
                    "answers in the template by {% generation %}"
                )
            yield len(prompt), len(through)

    def _render(self, example: Example, num: int | None = None, **options: Any) -> Any:
        """Returns the first `num` messages, or all, as the template writes them."""
        tools = example.tools
        template = _FIXED_DATE + self._tokenizer.get_chat_template(tools=tools)
        options = {"tokenize": False, "return_dict": False, "tools": tools, **options}
        messages = [*example.messages[:num]]
        return self._tokenizer.apply_chat_template(
            messages, chat_template=template, **options
        )

    def _ids(self, ids: Sequence[int]) -> Array:
        array = np.array(ids, np.uint32)
        if array.size and int(array.max()) >= self.vocab_size:
            raise DataError(
                f"--tokenizer {self.name}: expected ids below {self.vocab_size}, as "
                f"its vocabulary has, found {array.max()}"
            )
        return array.astype(self._dtype)


Tokenizer: TypeAlias = ByteTokenizer | FolderTokenizer


def open_tokenizer(path: Path | None) -> Tokenizer:
    """Opens the tokenizer of a folder; without a folder every byte is a token."""
    return ByteTokenizer() if path is None else FolderTokenizer(path.expanduser())


def find_tokenizer(folder: Path, num_ids: int) -> Path | None:
    """Finds the tokenizer of a checkpoint; None if its model reads bytes."""
    path = folder.expanduser()
    if any((path / name).is_file() for name in VOCABULARIES):
        return path
    if num_ids <= _BYTE_IDS:
        return None
    raise DataError(
        f"--from {folder}: expected a tokenizer.json, found no tokenizer, and a model "
        f"of {num_ids} ids, more than bytes; copy it from where the weights are from, "
        "or name one with --tokenizer"
    )


def _as_bytes(where: str, text: Text) -> bytes:
    with as_data_error(f"{where}: expected text"):
        return text if isinstance(text, bytes) else text.encode()


def _as_str(where: str, text: Text) -> str:
    raw = _as_bytes(where, text)
    remedy = "convert the file, or train on bytes (no --tokenizer)"
    with as_data_error(f"{where}: expected UTF-8", remedy):
        return raw.decode()
