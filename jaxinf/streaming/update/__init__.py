"""Where a gradient becomes an update: a sink takes each as soon as it is complete.

    gradient ─► store_sink ─► passes: the optimizer's numbers ─► engine: kernels

Invariant: an update happens once, when its gradient is complete.
"""
