"""Moves tensors between drives, the host and the JAX device while programs run.

    plan/offload.py  which values leave memory, where they wait     ─► values.py
    plan/reads.py    when params are read, and how long they stay   ─► params.py
    spill.py         gradients that wait: in memory, then on drives

Invariant: what is in memory at any time is what the plan says; a tensor comes back with
its bits. Here nothing is decided but the time.
"""
