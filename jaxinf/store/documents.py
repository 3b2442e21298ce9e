"""The JSON documents of a store, each with a checksum of its own.

Invariant: a document is accepted only if it is as written, and is replaced only by
rename.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.errors import ExchangeError, StoreFormatError, StoreIOError
from jaxinf.io import crc32c, read_beneath, read_bounded, write_bytes_atomically
from jaxinf.schema import MOST_BYTES, Kind, SchemaError, check_json, parse_json
from jaxinf.typing import JsonValue, PathLikeStr

_BLANK = "00000000"
_END = re.compile(rb'"crc32c": "([0-9a-f]{8})"\n}\n\Z')


def seal(document: Mapping[str, JsonValue]) -> bytes:
    """Returns a document's bytes on disk, with its checksum as last key.

    ``crc32c`` is the CRC-32C of all its bytes, with zeros for these eight digits.

    Raises:
      ValueError: a number is NaN or infinite, which JSON cannot express.
      TypeError: a value has no form in JSON.
    """
    bare = {key: value for key, value in document.items() if key != "crc32c"}
    blank = {**bare, "crc32c": _BLANK}
    text = (json.dumps(blank, indent=1, allow_nan=False) + "\n").encode()
    digits = f"{_crc(text):08x}".encode()
    found = _END.search(text)
    assert found is not None
    return text[: found.start(1)] + digits + text[found.end(1) :]


def write_document(path: Path, document: Mapping[str, JsonValue]) -> None:
    """Seals a document and writes it; blocks until it is durable.

    Raises:
      StoreSpaceError, StoreIOError: it cannot be written; the old one stays.
    """
    write_bytes_atomically(path, seal(document))


def read_document(path: Path, what: str, remedy: str) -> tuple[bytes, Any]:
    """Returns a document's bytes and their JSON; checks neither seal nor schema.

    Args:
      path: path of the file; a link is not followed.
      what: the expected document, for the error.

    Raises:
      StoreFormatError: the document is missing, not a file, too large, or not JSON.
    """
    try:
        raw = read_beneath(path.parent, path.name, MOST_BYTES)
        return raw, parse_json(raw)
    except (StoreIOError, SchemaError) as error:
        raise no_document(path, what, remedy, error) from (error.__cause__ or error)


def no_document(
    path: Path, what: str, remedy: str, problem: object
) -> StoreFormatError:
    """Makes the error for a document that cannot be understood."""
    return StoreFormatError(
        f"{path}: expected {what}, found none that can be read ({problem}); {remedy}"
    )


def read_foreign(path: Path, kind: Kind, what: str, remedy: str) -> Any:
    """Reads a JSON document of another tool, and checks its schema; follows links.

    Raises:
      ExchangeError: the document is missing, not a file, too large, or does not fit the
        schema.
    """
    try:
        return check_json(read_bounded(path, MOST_BYTES), kind)
    except (StoreIOError, SchemaError) as error:
        raise ExchangeError(
            f"{path}: expected {what}, found a document that cannot be read "
            f"({error}); {remedy}"
        ) from error


def check_seal(path: PathLikeStr, raw: bytes, what: str, remedy: str) -> None:
    """Refuses a document that was changed after it was written.

    Raises:
      StoreFormatError: its checksum is missing or wrong.
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
