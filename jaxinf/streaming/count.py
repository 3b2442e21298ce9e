"""What a streamed step takes and moves, counted from its list of calls.

Invariant: no program is run, nothing is written, and params are never made.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxinf.program import aval_bytes
from jaxinf.streaming.backend import StepBackend
from jaxinf.streaming.move.spill import file_bytes
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.compiled import Executables, measure_memory
from jaxinf.streaming.plan.memory import NUM_STAGED
from jaxinf.streaming.plan.order import make_plan
from jaxinf.streaming.program.cut import cuts_of
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.lifetimes import order_program
from jaxinf.transfer import ByteCounts
from jaxinf.typing import PyTree

_UNLIMITED = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Count:
    """What a streamed step takes at its peak, and what it moves.

    Attributes:
      host_bytes: Memory of the host: programs, values, gradients that wait, params, and
        buffers for the optimizer's state.
      device_bytes: The same of a JAX device with memory of its own; else 0.
      disk_bytes: Bytes on drives at most: the store with both slots, and values and
        gradients that wait there.
      spilled_bytes: Of them, gradients that wait for the last one.
      drive_read_bytes, drive_write_bytes: Bytes that a step moves on drives, on
        average.
      plan: The calls; as a string, a table of them.
    """

    host_bytes: int
    device_bytes: int
    disk_bytes: int
    spilled_bytes: int
    drive_read_bytes: int
    drive_write_bytes: int
    plan: Plan = field(repr=False)


def count(plan: Plan, backend: StepBackend) -> Count:
    """Counts what a plan's steps take and move."""
    updates, moved = backend.updates, ByteCounts(plan.drive_bytes, plan.drive_bytes)
    deferred, disk_bytes = None, plan.drive_bytes
    if updates is not None:
        deferred, moved = updates.on_drives(plan), updates.traffic(plan)
        disk_bytes += updates.disk_bytes()
    spilled_bytes = file_bytes(deferred or {})
    host_bytes, device_bytes = _memory(plan, deferred)
    return Count(
        plan=plan.without_graph(),
        host_bytes=host_bytes,
        device_bytes=device_bytes,
        disk_bytes=disk_bytes + spilled_bytes,
        spilled_bytes=spilled_bytes,
        drive_read_bytes=moved.drive_read_bytes,
        drive_write_bytes=moved.drive_write_bytes,
    )


def _memory(plan: Plan, deferred: Mapping[Piece, int] | None) -> tuple[int, int]:
    """Returns the memory of the host at a step's peak, and of a device with its own."""
    reads, memory, program_bytes = plan.reads, plan.memory, plan.peak_bytes
    if memory.staged_bytes:
        pinned_bytes = memory.gradient_bytes + plan.offload.host_bytes
        params_bytes = NUM_STAGED * reads.largest_bytes
        pooled_bytes = memory.pool_factor * pinned_bytes
        device_bytes = program_bytes + plan.resident_bytes + memory.leaving_bytes
        return memory.state_bytes + pooled_bytes + params_bytes, device_bytes
    if deferred is not None:  # on drives; others wait in the programs' memory
        program_bytes = max(program_bytes, _peak_bytes(plan, deferred))
    spare_bytes = max(0, memory.program_bytes - plan.peak_bytes)
    ahead_bytes = max(0, spare_bytes - reads.unused_bytes)
    return program_bytes + plan.resident_bytes + ahead_bytes + memory.state_bytes, 0


def _peak_bytes(plan: Plan, on_drive: Mapping[Piece, int]) -> int:
    """Returns the peak memory of programs and of the gradients that wait in it."""
    peak_bytes = held_bytes = 0
    for call, call_bytes in zip(plan.calls, plan.call_bytes(), strict=True):
        peak_bytes = max(peak_bytes, held_bytes + call_bytes)
        held_bytes += sum(
            call.program.output_bytes[i]
            for piece, i in call.gradients
            if not {piece, Piece(piece.leaf)} & on_drive.keys()
        )
    return max(peak_bytes, held_bytes)


def program_bytes(loss_fn: Callable[..., Any], params: PyTree, batch: PyTree) -> int:
    """Returns what a loss and its gradients take, with all params and values in memory.

    Programs are those of a streamed step, and XLA says what they take: one is compiled
    for all equal blocks, in less time than a program of the whole. Gradients of params
    that the loss stops do not count. Blocks.
    """
    ordered = order_program(loss_fn, params, batch)
    plan = make_plan(ordered, cuts_of(ordered, _UNLIMITED), "keep")
    plan = measure_memory(replace(plan, param_stays=()), Executables(are_run=False))
    gradients = ordered.graph.gradients.items()
    stopped = {p: 0 for p, value in gradients if value.node and value.node.is_spread}
    return sum(map(aval_bytes, ordered.traced.params)) + _peak_bytes(plan, stopped)
