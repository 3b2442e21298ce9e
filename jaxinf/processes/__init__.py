"""One group of processes: what they tell each other, agree on, and wait for; Ctrl-C.

Invariant: no collective of the devices is involved, and a group of one asks nobody. An
interrupt leaves no callback half-way.
"""

from jaxinf.processes.ending import end_unless, exit_if_peer_is_silent
from jaxinf.processes.group import Group, all_processes, deserted, join_group
from jaxinf.processes.interrupts import (
    Ending,
    Work,
    is_kept,
    raise_kept,
    run_whole,
    serve,
)
