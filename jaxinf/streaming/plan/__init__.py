"""The plan of a step: its calls in order, and where each tensor is during each of them.

    cut_to_fit.py  memory ─► cuts ─► a plan   calls.py      the calls, loops over them
    memory.py      what host and device have  order.py      the order of calls and parts
    options.py     the options of a step      offload.py    the values that leave
    compiled.py    what its programs take     reads.py      the params that are read
    kept.py        cuts that a store keeps    recompute.py  what is recomputed instead
    report.py      a plan as text

Invariant: memory is decided here, before a step runs, call by call and tier by tier.
"""
