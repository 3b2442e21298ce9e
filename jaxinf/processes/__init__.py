"""One group of processes: what they tell each other, agree on and wait for; Ctrl-C.

Invariant: no collective of the devices is involved, and a group of one asks no other
process. An interrupt leaves no callback half-way.
"""

from jaxinf.processes.ending import exit_if_peer_is_silent, exit_unless_known
from jaxinf.processes.group import Group, all_processes, join_group, silent_groups
from jaxinf.processes.interrupts import (
    BackgroundCall,
    Completion,
    is_interrupt_kept,
    raise_kept_interrupt,
    run_uninterrupted,
    serve,
)
