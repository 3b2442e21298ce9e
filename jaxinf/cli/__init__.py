"""The console script ``jaxinf``: what a store holds, what a machine can do.

Invariant: no command changes the state that a store holds; results go to standard
output, everything else to standard error.
"""

from jaxinf.cli.commands import main

__all__ = ["main"]
