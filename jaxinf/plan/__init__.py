"""Models of machines and workloads, and their predicted times.

Invariant: every rate has a source, and is marked as measured by the authors or fitted
to their figures.
"""

from jaxinf.plan.published import (
    Comparison,
    compare_with_paper,
    gflops_per_dollar,
)
from jaxinf.plan.smart_infinity import (
    A100,
    A5000,
    METHODS,
    TESTBED,
    Gpu,
    Machine,
    Method,
    Phase,
    Rate,
    Workload,
    iteration_s,
    phases,
    update_s,
)

__all__ = [
    "A100",
    "A5000",
    "METHODS",
    "TESTBED",
    "Comparison",
    "Gpu",
    "Machine",
    "Method",
    "Phase",
    "Rate",
    "Workload",
    "compare_with_paper",
    "gflops_per_dollar",
    "iteration_s",
    "phases",
    "update_s",
]
