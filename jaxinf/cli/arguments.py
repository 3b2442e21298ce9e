"""Helpers for declaring the commands' arguments.

Invariant: no code here depends on a particular command.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import tyro


def option(metavar: str | None = None, text: str | None = None) -> Any:
    """Describes an argument in ``--help``, without showing its default.

    Args:
      text: help; by default the comment above its field.
    """
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint="")


Switch = Annotated[bool, option()]
"""A flag without a value."""


def whole_path(text: str) -> Path:
    """Returns an absolute path, with ``~`` replaced."""
    return Path(os.path.expanduser(text)).absolute()


AnyPath = Annotated[
    Path,
    tyro.constructors.PrimitiveConstructorSpec[Path](
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda words: whole_path(words[0]),
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda value: [str(value)],
    ),
]
"""A path that is made whole."""

StorePath = Annotated[
    tyro.conf.Positional[AnyPath], option("STORE", "The store's directory.")
]
"""Annotates the first word after a command's verb."""

FLAG_FORMS = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes)
"""How the commands' flags are made."""
