"""Parts of command lines that the trainer and the commands share.

Invariant: no code here depends on a particular command.
"""

import dataclasses
import difflib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import tyro

from jaxinf.terminal import format_bytes, parse_bytes

ByteSize = tyro.constructors.PrimitiveConstructorSpec[int](
    nargs=1,
    metavar="BYTES",
    instance_from_str=lambda words: parse_bytes(words[0]),
    is_instance=lambda value: isinstance(value, int | None),
    str_from_instance=lambda value: [
        "none" if value is None else format_bytes(value).replace(" ", "")
    ],
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

    def is_none(self, value: object) -> bool:
        """Whether a value is the word ``none``, which tyro knows as ``None`` alone."""
        may_be_none = self.field.default is None and self.constructor is None
        return may_be_none and isinstance(value, str) and value.lower() == "none"


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


def with_none(
    words: Sequence[str], command: Any, *, but: Collection[str] = ()
) -> list[str]:
    """Returns a command line in which ``none`` is written as tyro knows it.

    Args:
      but: flags of which it may be a name.
    """
    flags = {flag.name: flag for flag in flags_of(command) if flag.name not in but}
    found, before = list[str](), ""
    for word in words:
        start, equals, value = word.partition("=")
        if not (word.startswith("--") and equals):
            start, value = before, word
        flag = flags.get(start[2:].replace("_", "-"))
        if start.startswith("--") and flag is not None and flag.is_none(value):
            word = f"{start}=None" if equals else "None"
        found.append(word)
        before = word
    return found


def _unwrapped(hint: Any) -> tuple[Any, ...]:
    """Returns a type and what `Annotated` says of it, innermost first."""
    return get_args(hint) if get_origin(hint) is Annotated else (hint,)


def _mark(mark: Any) -> str:
    return getattr(mark, "__name__", "") or repr(mark)


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Returns ``did you mean X?`` with the nearest of the known words, or nothing."""
    close = difflib.get_close_matches(word, known)
    return f"did you mean {' or '.join(close)}?" if close else ""
