"""What a streamed step takes and moves, counted from its list of calls.

Invariant: no program is run, nothing is written, and params are never made.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxinf.program import aval_bytes
from jaxinf.streaming.endpoints import Endpoints
from jaxinf.streaming.move.spill import file_bytes
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.compiled import Executables, measured
from jaxinf.streaming.plan.memory import NUM_STAGED
from jaxinf.streaming.plan.order import plan_of
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
      drive_read_bytes, drive_write_bytes: Bytes that a step moves on drives, on
        average.
      plan: The calls; as a string, a table of them.
    """

    host_bytes: int
    device_bytes: int
    disk_bytes: int
    drive_read_bytes: int
    drive_write_bytes: int
    plan: Plan = field(repr=False)


def count(plan: Plan, ends: Endpoints) -> Count:
    """Counts what a plan's steps take and move, with such updates."""
    updates, moved = ends.updates, ByteCounts(plan.away_bytes, plan.away_bytes)
    last = None
    if updates is not None:
        last, moved = updates.on_drives(plan), updates.traffic(plan)
    host_bytes, device_bytes = _memory(plan, last)
    waiting_bytes = plan.away_bytes + (0 if last is None else file_bytes(last))
    return Count(
        plan=plan.without_graph(),
        host_bytes=host_bytes,
        device_bytes=device_bytes,
        disk_bytes=waiting_bytes + (0 if updates is None else updates.disk_bytes()),
        drive_read_bytes=moved.drive_read_bytes,
        drive_write_bytes=moved.drive_write_bytes,
    )


def _memory(plan: Plan, last: Mapping[Piece, int] | None) -> tuple[int, int]:
    """Returns the memory of the host at a step's peak, and of a device with its own."""
    reading, memory = plan.reads, plan.memory
    programs = plan.peak_bytes + plan.resident_bytes
    if not memory.staged:  # where gradients wait in the programs' memory
        if last is not None:
            most = _most_bytes(plan, last)
            programs = max(programs, most + plan.resident_bytes)
        spare = max(0, memory.programs - plan.peak_bytes)
        ahead = max(0, spare - reading.unused_bytes)
        return programs + ahead + memory.state, 0
    pinned = memory.gradients + plan.waiting.host_bytes
    params = NUM_STAGED * reading.largest_bytes
    host_bytes = memory.state + memory.pool_factor * pinned + params
    return host_bytes, programs + memory.leaving


def _most_bytes(plan: Plan, on_drive: Mapping[Piece, int]) -> int:
    """Memory of programs at their most, with gradients that wait for the last one."""
    most = held = 0
    for call, own_bytes in zip(plan.calls, plan.call_bytes(), strict=True):
        most = max(most, held + own_bytes)
        held += sum(
            call.program.output_bytes[i]
            for piece, i in call.gradients
            if not {piece, Piece(piece.leaf)} & on_drive.keys()
        )
    return max(most, held)


def program_bytes(loss_fn: Callable[..., Any], params: PyTree, batch: PyTree) -> int:
    """Returns what a loss and its gradients take, with all params and values in memory.

    Programs are those of a streamed step, and XLA says what they take: one is compiled
    for all equal blocks, in less time than a program of the whole. Gradients of params
    that the loss stops do not count. Blocks.
    """
    ready = order_program(loss_fn, params, batch)
    plan = plan_of(ready, cuts_of(ready, _UNLIMITED), "keep")
    plan = measured(replace(plan, uses=()), Executables(are_run=False))
    gradients = ready.graph.gradients.items()
    stopped = {p: 0 for p, value in gradients if value.node and value.node.is_spread}
    return sum(map(aval_bytes, ready.traced.params)) + _most_bytes(plan, stopped)
