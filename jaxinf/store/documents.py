"""The JSON documents of a store, each with a checksum of its own.

Invariant: a document is whole and as it was written, or it is refused; replaced by
rename alone.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.errors import StoreFormatError
from jaxinf.io import crc32c, write_bytes_atomically
from jaxinf.typing import JsonValue

__all__ = ["check_seal", "parse_document", "seal", "write_document"]

_BLANK = "00000000"
_END = re.compile(rb'"crc32c": "([0-9a-f]{8})"\n}\n\Z')


def seal(document: Mapping[str, JsonValue]) -> bytes:
    """A document as it is written, its checksum last.

    ``crc32c`` is the CRC-32C of all its bytes, with zeros for these eight digits.

    Raises:
      ValueError: a number is NaN or infinite: JSON has none.
      TypeError: something is no JSON value.
    """
    bare = {key: value for key, value in document.items() if key != "crc32c"}
    blank = {**bare, "crc32c": _BLANK}
    text = (json.dumps(blank, indent=1, allow_nan=False) + "\n").encode()
    digits = f"{_crc(text):08x}".encode()
    found = _END.search(text)
    assert found is not None
    return text[: found.start(1)] + digits + text[found.end(1) :]


def write_document(path: Path, document: Mapping[str, JsonValue]) -> None:
    """Seals a document and puts it in its place; blocks until it is durable.

    Raises:
      StoreSpaceError, StoreIOError: it cannot be written; the old one is there.
    """
    write_bytes_atomically(path, seal(document))


def parse_document(path: Path, what: str, remedy: str) -> tuple[bytes, Any]:
    """A document's bytes and what they say; its seal is not looked at.

    Args:
      path: of the file.
      what: it should be, for the error.
      remedy: what to do where it is not.

    Raises:
      StoreFormatError: it is missing, or no JSON.
    """
    try:
        raw = path.read_bytes()
        return raw, json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise StoreFormatError(
            f"{path}: expected {what}, found none that can be read "
            f"({type(error).__name__}: {error}); {remedy}"
        ) from error


def check_seal(path: Path, raw: bytes, what: str, remedy: str) -> None:
    """Refuses a document that is not as it was written.

    Raises:
      StoreFormatError: its checksum is missing, or another.
    """
    end = _END.search(raw)
    if end is None:
        raise StoreFormatError(
            f"{path}: expected {what}, with its checksum last, found none; the file "
            f"was edited or damaged: {remedy}"
        )
    held = end.group(1).decode()
    blank = raw[: end.start(1)] + _BLANK.encode() + raw[end.end(1) :]
    found = f"{_crc(blank):08x}"
    if held != found:
        raise StoreFormatError(
            f"{path}: expected {what} of CRC-32C {held}, as it says itself, found "
            f"{found}; the file was edited or damaged: {remedy}"
        )


def _crc(raw: bytes) -> int:
    return crc32c(np.frombuffer(raw, np.uint8))
