"""Parts of command lines that the trainer and the commands share.

Invariant: no code here depends on a particular command.
"""

import tyro

from jaxinf.terminal import format_bytes, parse_bytes

__all__ = ["ByteSize", "UsageError"]

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
