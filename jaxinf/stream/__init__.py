"""Training of models larger than memory, by cutting a loss function's program.

Invariant: a user's loss function is traced with its gradient and never changed; the
parts of that one jaxpr run.
"""

from jaxinf.stream.plan import Plan, prepare
from jaxinf.stream.run import Runner
from jaxinf.stream.streamed import StreamedStep, stream

__all__ = ["Plan", "Runner", "StreamedStep", "prepare", "stream"]
