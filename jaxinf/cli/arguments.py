"""The arguments that commands share: paths, sizes, switches, and their help."""

import os
from pathlib import Path
from typing import Annotated, Any

import tyro


def option(metavar: str | None = None, text: str | None = None) -> Any:
    """Describes an argument in ``--help``, without its default.

    The text is by default the comment above its field.
    """
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint="")


def absolute_path(text: str) -> Path:
    """Returns an absolute path, with ``~`` replaced."""
    return Path(os.path.expanduser(text)).absolute()


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
