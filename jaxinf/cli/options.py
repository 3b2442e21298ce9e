"""Helpers for declaring the commands' arguments.

Invariant: no code here depends on a particular command.
"""

from typing import Annotated, Any

import tyro


def option(text: str, metavar: str | None = None) -> Any:
    """Describes an argument in ``--help``, without showing its default."""
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint="")


StorePath = Annotated[
    tyro.conf.Positional[str], option("The store's directory.", "STORE")
]
"""Annotates the first word after a command's verb."""

FLAGS = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes)
"""How the commands' flags are made."""
