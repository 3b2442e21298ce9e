"""Parts of command lines that the trainer and the commands share.

Invariant: no code here depends on a particular command.
"""

import difflib
from collections.abc import Collection

import tyro

from jaxinf.terminal import exact_bytes, parse_bytes


class UsageError(Exception):
    """The command line parses, but asks for something impossible; exit status 2."""


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Returns ``did you mean X?`` with the nearest of the known words, or nothing."""
    close = difflib.get_close_matches(word, known)
    return f"did you mean {' or '.join(close)}?" if close else ""


ByteSize = tyro.constructors.PrimitiveConstructorSpec[int](
    nargs=1,
    metavar="BYTES",
    instance_from_str=lambda words: parse_bytes(words[0]),
    is_instance=lambda value: isinstance(value, int | None),
    str_from_instance=lambda value: ["none" if value is None else exact_bytes(value)],
)
"""Annotates an ``int``, or None, that may be written as ``512MiB``."""
