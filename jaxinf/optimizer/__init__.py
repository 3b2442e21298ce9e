"""The optax transformation, and how a jitted update calls the host.

Invariant: optax and JAX meet the store here; lower layers know nothing of callbacks.
"""

from jaxinf.optimizer.state import SmartUpdateState, Stored, StoredArray
from jaxinf.optimizer.transform import smart_update

__all__ = ["SmartUpdateState", "Stored", "StoredArray", "smart_update"]
