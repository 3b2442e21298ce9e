"""Helpers for declaring the commands' arguments.

Invariant: no code here depends on a particular command.
"""

from typing import Any

import tyro

__all__ = ["option"]


def option(text: str, metavar: str | None = None) -> Any:
    """Describes an argument in ``--help``, without showing its default."""
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint="")
