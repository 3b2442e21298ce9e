"""Where a gradient becomes an update: a sink takes each as soon as it is complete.

    gradient ─► store_sink ─► passes: the optimizer's numbers ─► engine: kernels
             └► optax_sink ─► optax in memory

Invariant: an update happens once, when its gradient is complete.
"""
