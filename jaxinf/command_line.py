"""Parts of command lines that the trainer and the commands share.

Invariant: no code here depends on a particular command.
"""

import dataclasses
import difflib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

from jaxinf.terminal import exact_bytes, parse_bytes

ByteSize = tyro.constructors.PrimitiveConstructorSpec[int](
    nargs=1,
    metavar="BYTES",
    instance_from_str=lambda words: (
        None if words[0].lower() == "none" else parse_bytes(words[0])  # type: ignore
    ),
    is_instance=lambda value: isinstance(value, int | None),
    str_from_instance=lambda value: ["none" if value is None else exact_bytes(value)],
)
"""Annotates an ``int``, or None, that may be written as ``512MiB``."""


class UsageError(Exception):
    """The command line parses, but asks for something impossible; exit status 2."""


def expand_home(path: Path, name: str) -> Path:
    """Returns a path with ``~`` replaced.

    Args:
      name: the flag or command that it is given to, for the error.

    Raises:
      UsageError: there is no such user.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"{name} {path}: expected the home of a user, found no such user; give the "
            "path in full"
        ) from error


@dataclasses.dataclass(frozen=True)
class Flag:
    """A field of a command.

    Attributes:
      field: the field.
      type: its type, without what only the command line looks at.
      name: its name, with hyphens.
      constructor: how a text becomes the value, if not by the type.
      is_positional: whether its value has no flag before it.
    """

    field: dataclasses.Field[Any]
    type: Any
    name: str
    constructor: Any = None
    is_positional: bool = False


def flags_of(command: Any) -> Iterator[Flag]:
    """Yields the fields that a command line can set, in their order."""
    hints = get_type_hints(command, include_extras=True)
    for field in dataclasses.fields(command):
        kind, *marks = _unwrapped(hints[field.name])
        if "Suppress" in map(_mark, marks):
            continue
        names = [name for mark in marks if (name := getattr(mark, "name", None))]
        specs = [mark for mark in marks if hasattr(mark, "instance_from_str")]
        yield Flag(
            field,
            kind,
            (names or [field.name.replace("_", "-")])[0],
            specs[0] if specs else None,
            "Positional" in map(_mark, marks),
        )


def _unwrapped(hint: Any) -> tuple[Any, ...]:
    """Returns a type and what `Annotated` says of it, innermost first."""
    return get_args(hint) if get_origin(hint) is Annotated else (hint,)


def _mark(mark: Any) -> str:
    return getattr(mark, "__name__", "") or repr(mark)


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Returns ``did you mean X?`` with the nearest of the known words, or nothing."""
    close = difflib.get_close_matches(word, known)
    return f"did you mean {' or '.join(close)}?" if close else ""
