"""Parses JSON from untrusted bytes.

Invariant: the limits here bound memory and time for any bytes.
"""

import json
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxinf.schema.kinds import Kind, SchemaError

MOST_BYTES = 64 << 20
"""Limit of a document; a record of 2 million chunks takes a third of it."""

MOST_NESTING = 100
"""Limit of nested lists and objects, since Python's parser recurses."""

_MOST_VALUES = 4 << 20
"""Limit of a document's values, each of which takes tens of bytes of memory."""


def parse_json(raw: bytes, *, most_bytes: int = MOST_BYTES) -> Any:
    """Parses a JSON document.

    Args:
      raw: the document in UTF-8.
      most_bytes: limit of its length.

    Raises:
      SchemaError: the bytes are not JSON, an object has a key twice, or the document
        exceeds the limits.
    """
    if len(raw) > most_bytes:
        raise SchemaError(f"expected at most {most_bytes} bytes, found {len(raw)}")
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > _MOST_VALUES:
        raise SchemaError(f"expected at most {_MOST_VALUES} values, found more")
    _check_nesting(raw)
    try:
        return json.loads(
            raw.decode(), object_pairs_hook=_object, parse_constant=_no_number
        )
    except SchemaError:
        raise
    except RecursionError:
        raise SchemaError("the document is nested too deep") from None
    except ValueError as error:
        raise SchemaError(f"no JSON: {json_problem(error)}") from None


def json_problem(error: ValueError) -> str:
    """Says why Python refused JSON, without its advice to programmers."""
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return str(error)
    return f"a number of more than {sys.get_int_max_str_digits()} digits"


def check_json(raw: bytes, kind: Kind, *, most_bytes: int = MOST_BYTES) -> Any:
    """Parses a JSON document and checks its schema.

    Raises:
      SchemaError: as `parse_json`, or the document is of another kind.
    """
    value = parse_json(raw, most_bytes=most_bytes)
    kind.check(value)
    return value


def _check_nesting(raw: bytes) -> None:
    if raw.count(b"[") + raw.count(b"{") <= MOST_NESTING:
        return
    depth = 0
    for bracket in _STRING.sub(b"", raw).translate(None, _NO_BRACKETS):
        depth += _STEPS[bracket]
        if depth > MOST_NESTING:
            raise SchemaError(f"expected nesting of at most {MOST_NESTING}, found more")


_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - set(_STEPS))


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise SchemaError("a key comes twice in one object")
    return document


def _no_number(text: str) -> NoReturn:
    raise SchemaError(f"expected finite numbers, found {text}")
