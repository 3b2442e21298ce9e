"""Models of machines and workloads, and their predicted times.

Invariant: every rate has a source, and is marked as measured by the authors or fitted
to their figures.
"""

from jaxinf.plan.machine import (
    MACHINES,
    Card,
    Device,
    Drive,
    Machine,
    MachineError,
    Rate,
    read_machine,
    write_machine,
)
from jaxinf.plan.published import (
    Comparison,
    compare_with_paper,
    gflops_per_dollar,
)
from jaxinf.plan.smart_infinity import (
    A100,
    A5000,
    BUFFERS_S,
    METHODS,
    TESTBED,
    Gpu,
    Method,
    Phase,
    Workload,
    iteration_s,
    phases,
    update_s,
)

__all__ = [
    "A100",
    "A5000",
    "BUFFERS_S",
    "MACHINES",
    "METHODS",
    "TESTBED",
    "Card",
    "Comparison",
    "Device",
    "Drive",
    "Gpu",
    "Machine",
    "MachineError",
    "Method",
    "Phase",
    "Rate",
    "Workload",
    "compare_with_paper",
    "gflops_per_dollar",
    "iteration_s",
    "phases",
    "read_machine",
    "update_s",
    "write_machine",
]
