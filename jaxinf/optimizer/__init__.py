"""The optax transformation, and how a jitted update calls the host.

One update, from top to bottom; ═ is a call of the host:

    module      in JAX                               HostFunctions   engine
    transform   update(grads, state, params)
    update      the state's step ══════════════════► must_compare    is it the last one?
                if not: all params ════════════════► compare         read, compare
                prologue: counts, norms, schedules
    leaf_call   gradients, as soon as ready ═══════► update          read, kernel, write
                updates ◄═══════════════════════════
    update      statuses, scalar state ════════════► commit          make it durable
    state       next state ◄════════════════════════ verdict

`callback` makes these calls, `host_side` answers them; with an accelerator `start`
takes the gradients and `finish` returns the updates. `init` makes the store or resumes
it in calls of the same kind, and `offloaded` holds the arguments of `smart_update`.

Invariant: optax and JAX meet the store here; lower layers know nothing of callbacks.
"""

from jaxinf.optimizer.callback import check_device_configuration
from jaxinf.optimizer.state import SmartUpdateState, StoredArray
from jaxinf.optimizer.transform import smart_update
