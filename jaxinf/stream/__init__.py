"""Training of models larger than memory, by cutting a loss function's program.

Invariant: a user's loss function is traced with its gradient and never changed; the
parts of that one jaxpr run.
"""

from jaxinf.activations import Form
from jaxinf.stream.calls import Policy
from jaxinf.stream.function import StreamedFunction
from jaxinf.stream.in_memory import InMemoryStep
from jaxinf.stream.initial import check_init
from jaxinf.stream.keeping import check_keep
from jaxinf.stream.making import stream
from jaxinf.stream.memory import store_memory_bytes
from jaxinf.stream.optimizer import passes_for, trace_optimizer
from jaxinf.stream.plan import Plan, prepare
from jaxinf.stream.planner import Forecast
from jaxinf.stream.run import Runner
from jaxinf.stream.streamed import StreamedStep

__all__ = [
    "Forecast",
    "Form",
    "InMemoryStep",
    "Plan",
    "Policy",
    "Runner",
    "StreamedFunction",
    "StreamedStep",
    "check_init",
    "check_keep",
    "passes_for",
    "prepare",
    "store_memory_bytes",
    "stream",
    "trace_optimizer",
]
