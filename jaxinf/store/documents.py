"""A store's JSON documents: types of their fields, and the checksum that seals them.

Invariant: a document is accepted only if it is as written, and is replaced only by
rename.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from jaxinf.documents import MOST_BYTES, convert, encode, one_of, parse_json, pattern
from jaxinf.errors import StoreFormatError, StoreIOError
from jaxinf.transfer import crc32c, read_beneath

_Kind = TypeVar("_Kind")

Checksum: TypeAlias = Annotated[str, pattern("[0-9a-f]{8}", "8 hex digits")]
Id: TypeAlias = Annotated[str, pattern("[0-9a-f]{32}", "32 hex digits")]
Name: TypeAlias = Annotated[
    str, pattern(r"[^./\0-\x1f\x7f][^/\0-\x1f\x7f]*", "the name of a file", 255)
]
Roots: TypeAlias = Annotated[
    tuple[Annotated[str, pattern(r"/[^\0]*", "an absolute path", 4096)], ...],
    Meta(max_length=65536),
]
Lengths: TypeAlias = Annotated[
    tuple[Annotated[int, Meta(ge=0, le=2**62 - 1)], ...], Meta(max_length=64)
]
Dtype: TypeAlias = Annotated[
    str,
    one_of(
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
        *("uint64", "float16", "bfloat16", "float32", "float64"),
        *("complex64", "complex128"),
    ),
]

_SEAL = re.compile(rb'"crc32c": "[0-9a-f]{8}"\n}\n')
_SEAL_BYTES = 23  # at the end of a document


def seal(document: Any) -> bytes:
    """Encodes a struct or a mapping as JSON, whose last key is its checksum.

    ``crc32c`` is the CRC-32C of all bytes, with zeros in place of its own eight digits.
    Raises as `jaxinf.documents.encode`.
    """
    if isinstance(document, msgspec.Struct):
        document = msgspec.to_builtins(document)
    bare = {key: value for key, value in document.items() if key != "crc32c"}
    return _sealed(encode({**bare, "crc32c": "00000000"}))


def _sealed(raw: bytes) -> bytes:
    head, tail = raw[:-12], raw[-4:]  # around the eight digits
    blank = head + b"00000000" + tail
    return head + b"%08x" % crc32c(blank) + tail


def read_document(
    path: Path | str,
    kind: type[_Kind],
    what: str,
    remedy: str,
    *,
    check: Callable[[Any], None] = lambda document: None,
    finish: Callable[[_Kind], _Kind] = lambda value: value,
    dec_hook: Callable[[type, Any], Any] | None = None,
    raw: bytes | None = None,
) -> _Kind:
    """Reads a document, and checks its seal and its types; a link is not followed.

    Args:
      what: The expected document, for the error.
      check: Raises ValueError for another kind or version, before the seal counts.
      finish: Raises ValueError for a value whose parts do not fit together.
      dec_hook: Makes values of types that msgspec does not know.
      raw: Content of the document, if it does not come from the file.

    Raises:
      StoreFormatError: There is no such document, or it is damaged.
    """
    try:
        if raw is None:
            raw = read_beneath(Path(path).parent, Path(path).name, MOST_BYTES)
        document = parse_json(raw)
        check(document)
        if not _SEAL.fullmatch(raw[-_SEAL_BYTES:]) or raw != _sealed(raw):
            raise ValueError(
                "expected its CRC-32C at its end, found another or none; it was edited "
                "or damaged"
            )
        del document["crc32c"]
        return finish(convert(document, kind, dec_hook=dec_hook))
    except (StoreIOError, ValueError) as error:
        raise StoreFormatError(
            f"{path}: expected {what}, found none that can be read ({error}); {remedy}"
        ) from (error.__cause__ or error)
