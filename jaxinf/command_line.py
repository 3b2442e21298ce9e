"""Parts of command lines that the trainer and the commands share.

Invariant: no code here depends on a particular command.
"""

import difflib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxinf.terminal import exact_bytes, parse_bytes


class UsageError(Exception):
    """The command line parses, but asks for something impossible; exit status 2."""


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Returns ``did you mean X?`` with the nearest of the known words, or nothing."""
    close = difflib.get_close_matches(word, known)
    return f"did you mean {' or '.join(close)}?" if close else ""


def option(metavar: str | None = None, text: str | None = None) -> Any:
    """Describes an argument in ``--help``, without its default.

    The text is by default the comment above its field.
    """
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint="")


def absolute_path(text: str) -> Path:
    """Returns an absolute path, with ``~`` replaced."""
    return Path(os.path.expanduser(text)).absolute()


ByteSize = tyro.constructors.PrimitiveConstructorSpec[int](
    nargs=1,
    metavar="BYTES",
    instance_from_str=lambda words: parse_bytes(words[0]),
    is_instance=lambda value: isinstance(value, int | None),
    str_from_instance=lambda value: ["none" if value is None else exact_bytes(value)],
)
"""Annotates an ``int``, or None, that may be written as ``512MiB``."""

Switch = Annotated[bool, option()]
"""A flag without a value."""

PathArg = Annotated[
    Path,
    tyro.constructors.PrimitiveConstructorSpec[Path](
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda words: absolute_path(words[0]),
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda value: [str(value)],
    ),
]

StorePath = Annotated[
    tyro.conf.Positional[PathArg], option("STORE", "The store's directory.")
]
"""The first word after a command's verb."""

FLAG_FORMS = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes)
"""The forms of the commands' flags: no ``--no-json`` and no ``--action.name``."""
