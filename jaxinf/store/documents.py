"""The JSON documents of a store, each with a checksum of its own, and names on disk.

Invariant: a document is accepted only if it is as written, and is replaced only by
rename. Two different leaves of one tree never share a name, and every name is a single
path component that any POSIX file system takes.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from jaxinf.documents import MOST_BYTES, convert, encode, one_of, parse_json, pattern
from jaxinf.errors import StoreFormatError, StoreIOError
from jaxinf.transfer import crc32c, read_beneath
from jaxinf.typing import KeyPath

_Kind = TypeVar("_Kind")

Sum: TypeAlias = Annotated[str, pattern("[0-9a-f]{8}", "8 hex digits")]
"""A CRC-32C, or a float32."""
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
    """Returns the bytes on disk of a struct or a mapping, its checksum as last key.

    ``crc32c`` is the CRC-32C of all its bytes, with zeros for these eight digits.
    Raises as `jaxinf.documents.encode`.
    """
    if isinstance(document, msgspec.Struct):
        document = msgspec.to_builtins(document)
    bare = {key: value for key, value in document.items() if key != "crc32c"}
    return _sealed(encode({**bare, "crc32c": "00000000"}))


def _sealed(raw: bytes) -> bytes:
    """Returns a document's bytes with the right checksum."""
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
    """Reads a document and its seal.

    Args:
      path: path of the file; a link is not followed.
      what: the expected document, for the error.
      check: refuses JSON of another kind or version, whatever its seal is.
      finish: refuses a value whose parts do not fit, by a ValueError.
      dec_hook: makes values of types that msgspec does not know.
      raw: bytes of the document, if they are no file's.

    Raises:
      StoreFormatError: the document is missing, not a file, too large, not JSON,
        changed since it was written, or of another type.
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


# --- names ----------------------------------------------------------------------------

MASTER_PARAMS = "params"
"""The state that holds the fp32 master params."""

ERROR_FEEDBACK = "error_feedback"
"""The state with the gradients' elements that compression has not sent yet.

It follows the optimizer's states."""

_MAX_NAME_BYTES = 255


@lru_cache(maxsize=1 << 16)
def encode_key(key: str) -> str:
    """Percent-encodes ``/``, ``%`` and control characters, for use in a file name."""
    return re.sub("[/%\0-\x1f\x7f]", lambda found: f"%{ord(found[0]):02X}", key)


def leaf_name(path: Sequence[str]) -> str:
    """Returns a leaf's name for users: its keys joined by ``/``."""
    return "/".join(encode_key(key) for key in path)


def array_name(state: str, path: Sequence[str]) -> str:
    """Returns the directory of a leaf's state, as Orbax names it."""
    return ".".join([state, *(encode_key(key) for key in path)])


def check_leaf_paths(paths: Iterable[Sequence[str]], states: Iterable[str]) -> None:
    """Raises ValueError for trees whose array names would collide or be too long."""
    longest = max((len(state.encode()) for state in states), default=0)
    seen: dict[str, Sequence[str]] = {}
    for path in paths:
        name = array_name("", path)
        try:
            num_bytes = longest + len(name.encode())
        except UnicodeEncodeError as error:
            raise ValueError(
                f"leaf {leaf_name(path)!a}: {error}; rename the key in the params tree"
            ) from None
        if name in seen:
            raise ValueError(
                f"leaves {list(seen[name])} and {list(path)} would both be stored as "
                f"'params{name}'; rename one of them so that joining their keys with "
                "'.' tells them apart"
            )
        if num_bytes > _MAX_NAME_BYTES:
            raise ValueError(
                f"leaf {leaf_name(path)}: its array name takes {num_bytes} bytes, a "
                f"file name has at most {_MAX_NAME_BYTES}; shorten the keys of the "
                "params tree"
            )
        seen[name] = path


# --- paths of scalars in the optimizer's state ---------------------------------------
#
#     #0/.hyperparams/learning_rate      the key 'learning_rate' of the field
#                                        `hyperparams` of the first of a tuple
#
# Different places in a state have different paths, and no path depends on another
# library's text. docs/format.md, "commit.json", defines them.

_MARKS = ".#="


def encode_path(keys: KeyPath) -> str:
    """Returns the path of a place, from its keys with their kinds."""
    return "/".join(_encode(kind, value) for kind, value in keys)


def _encode(kind: str, value: object) -> str:
    if kind == "field":
        return "." + encode_key(str(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"#{value}"
    if kind == "other" or not isinstance(value, str) or not value:
        return "=" + encode_key(str(value))
    text = encode_key(value)
    return f"%{ord(text[0]):02X}{text[1:]}" if text[0] in _MARKS else text
