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
from jaxinf.train.data.errors import DataError, refusing
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
        self, where: str, text: Text, *, is_whole: bool, most: int | None = None
    ) -> Array:
        return np.frombuffer(_as_bytes(where, text), np.uint8)[:most]

    def classified(
        self, where: str, texts: Sequence[Text], *, most: int, num_types: int
    ) -> tuple[Array, Array | None]:
        if len(texts) > 1:
            raise DataError(
                f"{where}: expected one text, found two, which bytes do not tell "
                "apart; give a --tokenizer, or join them in the data"
            )
        ids = self.encode(where, texts[0], is_whole=False, most=most - 1)
        return np.append(ids, np.uint8(self.end)), None


class FolderTokenizer:
    """The tokenizer of a Hugging Face folder, run by `transformers`; immutable.

    Args:
      path: the folder, or its `tokenizer.json`.

    Attributes:
      vocab_size: one more than the largest id of a text.
      end: id of the end of a document, or None.
      mask: id of the mask, or None.
      start: id at the beginning of an answer, for a decoder.
      pad: id for padding, which has no effect.
      special: ids that are no text.
      adds_end: whether it adds the end to a whole text itself.
      fingerprint: text that changes whenever ids may change.
      has_template: whether it has a form of conversations.
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
        with refusing(f"--tokenizer {path}: expected a tokenizer of transformers"):
            from transformers import AutoTokenizer

            found: Any = AutoTokenizer.from_pretrained(
                str(folder),
                local_files_only=True,
                trust_remote_code=False,
                model_input_names=["input_ids"],
            )
            vocabulary = found.get_vocab()
            fast = found.backend_tokenizer if found.is_fast else None
            content = fast.to_str() if fast else repr(sorted(vocabulary.items()))
            ends = (found.eos_token_id, found.sep_token_id)
            self.special = tuple(found.all_special_ids)
            self.has_template = found.chat_template is not None
            last = found("a").input_ids[-1:]
        if not vocabulary:
            raise DataError(f"--tokenizer {path}: expected tokens, found none")
        self._tokenizer = found
        self.vocab_size = max(vocabulary.values()) + 1
        self.end = next((one for one in ends if one is not None), None)
        self.adds_end = last == [self.end]
        self.mask, pad = found.mask_token_id, found.pad_token_id
        self.start = self.pad = pad if pad is not None else self.end or 0  # as T5 has
        self._has_pad = pad is not None or self.end is not None
        digest = hashlib.sha256(content.encode()).hexdigest()
        self.fingerprint = f"transformers {digest} end {self.end} mask {self.mask}"
        self._dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def encode(
        self, where: str, text: Text, *, is_whole: bool, most: int | None = None
    ) -> Array:
        """Returns the ids of a text, uint8 to uint32 [n].

        Args:
          where: place of the text, for errors.
          is_whole: whether with the special tokens around a text.
          most: most tokens; more are cut, special ones kept.
        """
        string, is_cut = _as_str(where, text), most is not None
        how = {"truncation": is_cut, "max_length": most, "add_special_tokens": is_whole}
        with refusing(f"--tokenizer {self.name}: expected ids of {where}"):
            return self._ids(self._tokenizer(string, **how).input_ids)

    def classified(
        self, where: str, texts: Sequence[Text], *, most: int, num_types: int
    ) -> tuple[Array, Array | None]:
        """Encodes a text or a pair; of what is too long, the longer text is cut first.

        Returns ids, and their types (uint8) for a pair if the model has `num_types`.
        """
        strings, num = [_as_str(where, text) for text in texts], len(texts)
        is_typed = num_types > 0 and num == 2
        how = {"return_token_type_ids": is_typed, "truncation": True}
        with refusing(f"--tokenizer {self.name}: expected ids of {where}"):
            least = num + self._tokenizer.num_special_tokens_to_add(pair=num == 2)
            if most < least:  # transformers returns them without a cut, or empty
                raise DataError(
                    f"--seq-len: expected at least {least} tokens, for {num} text(s) "
                    f"and their special tokens, got {most}"
                )
            found = self._tokenizer(*strings, max_length=most, **how)
        ids = self._ids(found.input_ids)
        if not num_types and self._has_pad:  # transformers reads before the padding
            ids = ids[: 1 + max(np.flatnonzero(ids != self.pad), default=0)]
        if not is_typed:
            return ids, None
        types = np.array(found.token_type_ids, np.uint8)
        if types.max() >= num_types:  # a model would read another type, or NaN
            raise DataError(
                f"--tokenizer {self.name}: expected token types below {num_types}, as "
                f"the model has, found {types.max()} in pairs of texts"
            )
        return ids, types

    def conversation(self, example: Example, *, learn_all: bool) -> tuple[Array, Array]:
        """Returns the ids of messages by the chat template, and which are learned."""
        what = f"{example.where}: expected messages that the chat template of "
        with refusing(f"{what}--tokenizer {self.name} can write"):
            template = self._tokenizer.get_chat_template(tools=example.tools)
            if _MARKS_ANSWERS.search(template) and not learn_all:
                how = {"return_dict": True, "return_assistant_tokens_mask": True}
                found = self._rendered(example, tokenize=True, **how)
                is_learned = np.array(found["assistant_masks"], np.bool_)
                return self._ids(found["input_ids"]), is_learned
            text = self._rendered(example)
            found = self._tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True
            )
            ids = self._ids(found.input_ids)
            if learn_all:
                return ids, np.ones(ids.size, np.bool_)
            places = np.array(found.offset_mapping, np.int64).reshape(-1, 2)
            is_learned = np.zeros(ids.size, np.bool_)
            for start, end in self._answers(example, text):
                is_learned |= (places[:, 0] < end) & (places[:, 1] > start)
        return ids, is_learned

    def _answers(self, example: Example, text: str) -> Iterator[tuple[int, int]]:
        """Yields where answers are: what their messages add to those before them."""
        for number, message in enumerate(example.messages):
            if message["role"] != "assistant" or not number:  # answers nothing
                continue
            prompt = self._rendered(example, number, add_generation_prompt=True)
            through = self._rendered(example, number + 1)
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

    def _rendered(self, example: Example, num: int | None = None, **how: Any) -> Any:
        """Returns the first messages, or all, as the template writes them."""
        template = self._tokenizer.get_chat_template(tools=example.tools)
        how = {"tokenize": False, "return_dict": False, "tools": example.tools, **how}
        messages, whole = [*example.messages[:num]], _FIXED_DATE + template
        return self._tokenizer.apply_chat_template(messages, chat_template=whole, **how)

    def _ids(self, ids: Sequence[int]) -> Array:
        found = np.array(ids, np.uint32)
        if found.size and int(found.max()) >= self.vocab_size:
            raise DataError(
                f"--tokenizer {self.name}: expected ids below {self.vocab_size}, as "
                f"its vocabulary has, found {found.max()}"
            )
        return found.astype(self._dtype)


Tokenizer: TypeAlias = ByteTokenizer | FolderTokenizer


def open_tokenizer(path: Path | None) -> Tokenizer:
    """Opens the tokenizer of a folder; without a folder every byte is a token."""
    return ByteTokenizer() if path is None else FolderTokenizer(path.expanduser())


def tokenizer_in(folder: Path, num_ids: int) -> Path | None:
    """Finds the tokenizer of a checkpoint; None if its model reads bytes."""
    place = folder.expanduser()
    if any((place / name).is_file() for name in VOCABULARIES):
        return place
    if num_ids <= _BYTE_IDS:
        return None
    raise DataError(
        f"--from {folder}: expected a tokenizer.json, found no tokenizer, and a model "
        f"of {num_ids} ids, more than bytes; copy it from where the weights are from, "
        "or name one with --tokenizer"
    )


def _as_bytes(where: str, text: Text) -> bytes:
    with refusing(f"{where}: expected text"):
        return text if isinstance(text, bytes) else text.encode()


def _as_str(where: str, text: Text) -> str:
    raw = _as_bytes(where, text)
    remedy = "convert the file, or train on bytes (no --tokenizer)"
    with refusing(f"{where}: expected UTF-8", remedy):
        return raw.decode()
