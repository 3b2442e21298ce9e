"""Paths of scalars in the optimizer's state, as this format spells them.

      #0/.hyperparams/learning_rate      the key 'learning_rate' of the field
                                         `hyperparams` of the first of a tuple

Invariant: different places in a state have different paths, and no path depends on
another library's text. docs/format.md, "Paths in the optimizer's state", defines them.
"""

from jaxinf.store.names import encode_key
from jaxinf.typing import KeyPath

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
