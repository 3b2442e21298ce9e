"""JSON documents: bounded parsing, types as msgspec's structs, one form of refusal.

    bytes ──parse_json──► JSON ──convert──► a struct, or any type that msgspec knows

Invariant: any bytes give a value of the type or a `DocumentError`, in memory and time
linear in their number. Nothing here reads a file.
"""

import json
import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import msgspec

MOST_BYTES = 64 << 20
"""Limit of a document; a record of 2 million chunks takes a third of it."""

MOST_NESTING = 100
"""Limit of nested lists and objects."""

_MOST_VALUES = 4 << 20
"""Limit of a document's values, each of which takes tens of bytes of memory."""

_MAX_CHARS = 60
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_AS_LISTS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - {*b"[]{}"})

_Kind = TypeVar("_Kind")


class DocumentError(ValueError):
    """Bytes are no JSON document, or not one of the expected type."""


class Document(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    gc=False,  # it is in no cycle, and a large store has thousands
):
    """A document of jaxinf's own, or an object in one; other keys are refused."""


def pattern(text: str, what: str, most_chars: int | None = None) -> msgspec.Meta:
    """Makes the constraint of a text that a pattern matches as a whole.

    Errors name its meaning, `what`.
    """
    meta = msgspec.Meta(pattern=rf"\A(?:{text})\Z", max_length=most_chars)
    _MEANINGS[f"str matching regex {meta.pattern!r}"] = what
    return meta


def one_of(*texts: str) -> msgspec.Meta:
    """Makes the constraint of a text that is one of some."""
    listed = ", ".join(map(repr, texts))
    return pattern("|".join(map(re.escape, texts)), f"one of {listed}")


_MEANINGS: dict[str, str] = {}
_WORDS = {"int": "a whole number", "float": "a number", "str": "a text"}
_WORDS |= {"bool": "true or false", "array": "a list", "object": "an object"}


def parse_json(raw: bytes, *, most_bytes: int = MOST_BYTES) -> Any:
    """Parses a JSON document in UTF-8.

    Raises:
      DocumentError: The bytes are not JSON, an object has a key twice, or the document
        exceeds the limits.
    """
    if len(raw) > most_bytes:
        raise DocumentError(f"expected at most {most_bytes} bytes, found {len(raw)}")
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > _MOST_VALUES:
        raise DocumentError(f"expected at most {_MOST_VALUES} values, found more")
    too_deep = DocumentError(f"expected nesting of at most {MOST_NESTING}, found more")
    try:
        value = msgspec.json.decode(raw)
    except RecursionError:
        raise too_deep from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DocumentError(f"no JSON: {error}") from None
    brackets = _STRING.sub(b"", raw).translate(_AS_LISTS, _NO_BRACKETS)
    for _ in range(MOST_NESTING):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise too_deep
    json.loads(raw, object_pairs_hook=_check_keys)  # msgspec takes the last of two
    return value


def _check_keys(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) < len(pairs):
        raise DocumentError("a key comes twice in one object")


def convert(
    value: Any,
    kind: type[_Kind],
    where: str = "",
    *,
    dec_hook: Callable[[type, Any], Any] | None = None,
) -> _Kind:
    """Returns JSON as a value of a type.

    Args:
      where: Place in the document, such as ``leaves[3].shape``.
      dec_hook: Makes values of types that msgspec does not know.

    Raises:
      DocumentError: Names the place, the expected kind and the found value.
    """
    try:
        return msgspec.convert(value, kind, dec_hook=dec_hook)
    except msgspec.ValidationError as error:
        raise DocumentError(_problem(str(error), value, where)) from None


def decode(raw: bytes, kind: type[_Kind]) -> _Kind:
    """Returns a document as a value of a type; raises as `parse_json`, `convert`."""
    return convert(parse_json(raw), kind)


def encode(document: Any) -> bytes:
    """Returns the bytes of a document on disk.

    Raises:
      ValueError: A number is NaN or infinite, or a text is no Unicode: JSON cannot
        express these.
      TypeError: A value has no form in JSON.
    """
    if isinstance(document, msgspec.Struct):
        document = msgspec.to_builtins(document)
    # `json` indents in Python, which takes 20 times as long.
    compact = json.dumps(document, allow_nan=False)
    try:
        return msgspec.json.format(compact.encode(), indent=1) + b"\n"
    except msgspec.MsgspecError as error:  # half of a surrogate pair
        raise DocumentError(f"no JSON: {error}") from None


def _problem(text: str, value: Any, where: str) -> str:
    """Translates msgspec's refusal of a value into our words."""
    text, _, place = text.partition(" - at `")
    place, _, of_key = place.rstrip("`").partition("` in `")
    place = (of_key or place).removeprefix("$")
    try:
        for name, number in re.findall(r"\.(\w+)|\[(.*?)\]", place):
            value = value[name or int(number)]
        found = "" if of_key else f", found {shorten(value)}"
    except (LookupError, TypeError, ValueError):
        # msgspec names no key of a mapping, and an unknown key may look like a place.
        found = ""
    where = (where + place).removeprefix(".") or "the document"
    where += ": a key" if of_key else ""
    if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
        return f"{where}: expected the key {missing[1]!r}, found none"
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", text, re.S):
        return f"{where}: expected no key {shorten(unknown[1])}"
    if not text.startswith("Expected "):
        return f"{where}: {text}{found}"
    text = text.removeprefix("Expected ").partition(", got")[0].replace("`", "")
    text = _MEANINGS.get(text) or re.sub(r"\w+", lambda m: _WORDS.get(m[0], m[0]), text)
    return f"{where}: expected {text}{found}"


def shorten(value: Any) -> str:
    """Shortens a value of any size for a message."""
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "a list"
        return f"{kind} of {len(value)}"
    if isinstance(value, str) and len(value) > _MAX_CHARS:
        return ascii(value[:_MAX_CHARS]) + "…"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    return ascii(value) if isinstance(value, str) else repr(value)[:_MAX_CHARS]


def first_few(names: Collection[str], most: int = 5) -> str:
    """Lists names for a message: the first few, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join([*names][:most]) or "none") + more
