"""The console script ``jaxinf``: what a store holds and keeps, what a machine can do.

Invariant: only the commands whose names say so change a store; results go to standard
output, everything else to standard error.
"""

from jaxinf.cli.commands import main

__all__ = ["main"]
