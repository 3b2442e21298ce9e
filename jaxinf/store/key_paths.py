"""Paths of scalars in the optimizer's state, as this format spells them.

      #0/.hyperparams/learning_rate      the key 'learning_rate' of the field
                                         `hyperparams` of the first of a tuple

Invariant: different places in a state have different paths, and no path depends on
another library's text. docs/format.md, "Paths in the optimizer's state", defines them.
"""

import ast
import re

from jaxinf.errors import StoreFormatError
from jaxinf.store.names import encode_key
from jaxinf.typing import KeyPath

__all__ = ["encode_path", "from_version_2", "path_keys"]

_MARKS = ".#="

_VERSION_2 = re.compile(
    r"""\.(?P<field>\w+)
    |\[<flat\ index\ (?P<flat>\d+)>\]
    |\[(?P<index>-?\d+)\]
    |\[(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]
    |\[(?P<other>[^\]]*)\]""",
    re.VERBOSE,
)


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


def path_keys(path: str) -> tuple[str, ...]:
    """Returns the keys of a path, still encoded, without the marks of their kinds."""
    if not path:
        return ()
    return tuple(key[1:] if key[:1] in ".#=" else key for key in path.split("/"))


def from_version_2(path: str) -> str:
    """Converts a scalar's path from format version 2, which used JAX's spelling.

    Raises:
      StoreFormatError: JAX does not print such a path.
    """
    keys: list[tuple[str, object]] = []
    end = 0
    for found in _VERSION_2.finditer(path):
        if found.start() != end:
            break
        end = found.end()
        number = found["flat"] or found["index"]
        if found["field"] is not None:
            keys.append(("field", found["field"]))
        elif number is not None:
            keys.append(("key", int(number)))
        elif found["text"] is not None:
            keys.append(("key", _literal(found["text"])))
        else:
            keys.append(("other", found["other"]))
    if end != len(path):
        raise _no_path(path, f"other text from position {end}")
    return encode_path(tuple(keys))


def _literal(text: str) -> str:
    try:
        return str(ast.literal_eval(text))
    except (SyntaxError, ValueError):  # unknown escapes
        raise _no_path(text, "no text of Python's") from None


def _no_path(path: str, found: str) -> StoreFormatError:
    return StoreFormatError(
        f"scalar path {path!r}: expected one of format version 2, such as [0].count, "
        f"found {found}; restore the store from a backup"
    )
