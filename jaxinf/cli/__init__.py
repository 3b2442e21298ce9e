"""The console script ``jaxinf``: shows and manages stores, and examines machines.

`commands` has them all: `checkpoints`, `doctor` (by `directories`), `inspection`,
`plan`, `report` (by `run_logs`), `stores` and `verification`.

Invariant: only commands whose names say so change a store; results go to standard
output, everything else to standard error.
"""

from jaxinf.cli.commands import main
