"""How arguments of the commands show in ``--help``, and how sizes are read.

Invariant: nothing here knows a command.
"""

from typing import Any

import tyro

from jaxinf.terminal import format_bytes, parse_bytes

__all__ = ["ByteSize", "UsageError", "option"]

ByteSize = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="BYTES",
    instance_from_str=lambda words: parse_bytes(words[0]),
    is_instance=lambda value: isinstance(value, int),
    str_from_instance=lambda value: [format_bytes(value).replace(" ", "")],
)
"""Annotates an ``int`` that may be written as ``512MiB``."""


class UsageError(Exception):
    """A command line that parses but makes no sense."""


def option(text: str, metavar: str | None = None) -> Any:
    """How an argument shows in ``--help``, where None and False are no defaults."""
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint="")
