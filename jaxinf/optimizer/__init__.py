"""The optax transformation, and how a jitted update calls the host.

    transform ─► wrapped: one trace ─► init, update: the calls of a step
                                              │ leaf_call: what crosses
    engine ◄─ host_side: host functions ◄═ callback

Invariant: optax and JAX meet the store here; lower layers know nothing of callbacks.
"""

from jaxinf.optimizer.callback import check_device_configuration
from jaxinf.optimizer.state import SmartUpdateState, StoredArray
from jaxinf.optimizer.transform import smart_update
