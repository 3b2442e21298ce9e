"""Names on disk: of leaves, of states and their arrays, of scalars' paths.

Invariant: two different leaves of one tree never share a name, and every name is a
single path component that any POSIX file system takes.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from jaxinf.typing import KeyPath

MASTER_PARAMS = "params"
"""The state that holds the fp32 master params."""

ERROR_FEEDBACK = "error_feedback"
"""The state with the gradients' elements that compression has not sent yet.

It follows the optimizer's states."""

_MAX_NAME_BYTES = 255


@lru_cache(maxsize=1 << 16)
def encode_key(key: str) -> str:
    """Percent-encodes ``/``, ``%`` and control characters, for use in a file name."""
    return re.sub("[/%\0-\x1f\x7f]", lambda match: f"%{ord(match[0]):02X}", key)


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
    """Returns the path of a scalar, from its keys with their kinds."""
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
