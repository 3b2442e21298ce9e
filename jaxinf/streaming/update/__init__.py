"""Where a gradient becomes an update: `apply_gradients`, as soon as it is complete.

    gradient ─► gradients: its shards on the host
             ─► apply_gradients ─► gradient_passes: norms and scalars ─► engine: kernels

Invariant: an update happens once, when its gradient is complete. `update_plan` counts
beforehand what updates take and move.
"""
