"""Training of models larger than memory: a loss function's own program, cut.

Invariant: a user's loss function is traced with its gradient and never changed; what
runs is that one jaxpr, in parts.
"""

from jaxinf.stream.plan import Plan, prepare
from jaxinf.stream.run import Runner
from jaxinf.stream.streamed import StreamedStep, stream

__all__ = ["Plan", "Runner", "StreamedStep", "prepare", "stream"]
