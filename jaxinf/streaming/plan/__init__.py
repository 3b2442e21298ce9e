"""The plan of a step: its calls in order, and where each tensor is during each of them.

    options.py    what is asked for           fit.py      memory ─► cuts ─► a plan
    order.py      the order of its calls      calls.py    the calls, loops over them
    compiled.py   what its programs take      leaving.py  the values that leave
    reads.py      the params that are read    choice.py   what is recomputed instead
    kept.py       cuts that a store keeps     report.py   a plan as text
    memory.py     parts of the host's memory  device.py   what a JAX device has

Invariant: memory is decided here, before a step runs, call by call and tier by tier.
"""
