"""jaxinf: storage-offloaded training for JAX.

Optimizer state lives on drives and is updated near storage: `open_store` opens the
drives, `smart_update` wraps any elementwise optax optimizer, and `stream` trains models
that need not fit in memory.
"""

from importlib.metadata import version as _version

from jaxinf.compress import TopK, top_k
from jaxinf.engine import StepMetrics, Store, close, open_store, store_of
from jaxinf.errors import (
    BudgetError,
    CsdError,
    DeviceConfigurationError,
    DivergedParamsError,
    ExchangeError,
    JaxinfError,
    NonFiniteGradientError,
    NonFiniteScalarError,
    ProcessError,
    StaleStateError,
    StoreClosedError,
    StoreCorruptError,
    StoreError,
    StoreFormatError,
    StoreIOError,
    StoreLockedError,
    StoreMismatchError,
    StoreSpaceError,
    StreamError,
    UnsupportedTransformError,
)
from jaxinf.optimizer import SmartUpdateState, smart_update
from jaxinf.program import Average, ema
from jaxinf.streaming import StreamedStep, stream, stream_function, stream_in_memory

__version__ = _version("jaxinf")

__all__ = [
    "Average",
    "BudgetError",
    "CsdError",
    "DeviceConfigurationError",
    "DivergedParamsError",
    "ExchangeError",
    "JaxinfError",
    "NonFiniteGradientError",
    "NonFiniteScalarError",
    "ProcessError",
    "SmartUpdateState",
    "StaleStateError",
    "StepMetrics",
    "Store",
    "StoreClosedError",
    "StoreCorruptError",
    "StoreError",
    "StoreFormatError",
    "StoreIOError",
    "StoreLockedError",
    "StoreMismatchError",
    "StoreSpaceError",
    "StreamError",
    "StreamedStep",
    "TopK",
    "UnsupportedTransformError",
    "close",
    "ema",
    "open_store",
    "smart_update",
    "store_of",
    "stream",
    "stream_function",
    "stream_in_memory",
    "top_k",
]
