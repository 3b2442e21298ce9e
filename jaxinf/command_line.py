"""Parts of command lines that the trainer and the commands share.

Invariant: no code here depends on a particular command.
"""

import dataclasses
import difflib
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

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

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that it may be, if these are all."""
        members = [self.type, *get_args(self.type)]
        literals = [one for one in members if get_origin(one) is Literal]
        if self.constructor is not None or len(literals) != 1:
            return ()
        return tuple(str(value) for value in get_args(literals[0]))


def flags_of(command: Any) -> Iterator[Flag]:
    """Yields the fields that a command line can set, in their order."""
    hints = get_type_hints(command, include_extras=True)
    for field in dataclasses.fields(command):
        kind, *marks = _unwrapped(hints[field.name])
        if _commands(kind) or "Suppress" in map(_mark, marks):
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


def commands_of(command: Any) -> Mapping[str, Any]:
    """Returns commands by their words: those of a union, or of a command's field."""
    if not dataclasses.is_dataclass(command):
        return _commands(command)
    hints = get_type_hints(command, include_extras=True)
    return next((found for hint in hints.values() if (found := _commands(hint))), {})


def _commands(union: Any) -> dict[str, Any]:
    members = [_unwrapped(member) for member in get_args(union)]
    return {
        marks[0].name: kind
        for kind, *marks in members
        if marks and dataclasses.is_dataclass(kind)
    }


def _unwrapped(hint: Any) -> tuple[Any, ...]:
    """Returns a type and what `Annotated` says of it, innermost first."""
    return get_args(hint) if get_origin(hint) is Annotated else (hint,)


def _mark(mark: Any) -> str:
    return getattr(mark, "__name__", "") or repr(mark)


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Returns ``did you mean X?`` with the nearest of the known words, or nothing."""
    close = difflib.get_close_matches(word, known)
    return f"did you mean {' or '.join(close)}?" if close else ""


def parse(command: Any, words: Sequence[str], *, prog: str, **options: Any) -> Any:
    """Parses a command line; a word that is not known gets the nearest one said.

    Args:
      command: a dataclass, or a union of subcommands.

    Raises:
      SystemExit: after ``--help`` (0), or because the words do not parse (2).
    """
    try:
        return tyro.cli(command, prog=prog, args=words, **options)
    except SystemExit as ended:
        if ended.code == 2 and (advice := _advice(command, words)):
            print(f"{prog}: {advice}", file=sys.stderr)
        raise


def _advice(command: Any, words: Sequence[str]) -> str:
    """Returns what the first unknown command, flag or value may be meant for."""
    commands, flags = commands_of(command), {}
    if dataclasses.is_dataclass(command):
        named = [flag for flag in flags_of(command) if not flag.is_positional]
        flags = {f"--{flag.name}": flag for flag in named}
    for number, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
            flag = flags.get(name) or flags.get(name.replace("--no-", "--", 1))
            if flag is None:
                return _say(name, ["--help", *flags])
            if not has_value:
                value = words[number + 1] if number + 1 < len(words) else ""
            if flag.choices and value not in (*flag.choices, "None"):
                return _say(value, flag.choices, f"{name} ")
        elif word in commands:
            return _advice(commands[word], words[number + 1 :])
        elif commands:
            return _say(word, commands)
    return ""


def _say(word: str, known: Collection[str], before: str = "") -> str:
    advice = did_you_mean(word, known)
    return f"{before}{word} is not known; {advice}" if advice else ""
