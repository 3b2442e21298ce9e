"""The console script ``jaxinf``: shows and manages stores, and examines machines.

Invariant: only commands whose names say so change a store; results go to standard
output, everything else to standard error.
"""

from jaxinf.cli.commands import main
