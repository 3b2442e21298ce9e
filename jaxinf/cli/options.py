"""Helpers for declaring the commands' arguments.

Invariant: no code here depends on a particular command.
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
    """The command line parses, but its arguments do not fit together."""


def option(text: str, metavar: str | None = None) -> Any:
    """Describes an argument in ``--help``, without showing its default."""
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint="")
