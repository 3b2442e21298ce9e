"""Machines and workloads as data, and what they predict.

Invariant: every rate says where it comes from, and whether it was measured by its
authors or fitted to their figures.
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
