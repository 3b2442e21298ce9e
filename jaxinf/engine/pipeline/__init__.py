"""Streams subgroups through a fixed memory, with reads and writes beside updates.

    step ──► task ──► handler: threads and waiting ──► executor ──► csd ──► file
                        │  ▲
                        ▼  │ the next unit of work
                 queues, scheduling: plain data, no threads, locks or I/O

Invariant: state passes only through buffers of the CSDs' budget, where its checksums
  are computed.
"""

from jaxinf.engine.pipeline.handler import TransferHandler
from jaxinf.engine.pipeline.work import Loads, Task

__all__ = ["Loads", "Task", "TransferHandler"]
