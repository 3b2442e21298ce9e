"""Compiles the programs of a plan, and says what they take.

Invariant: a program is compiled once for its inputs' shardings and the inputs whose
memory it may reuse, for batches of all shapes.
"""

import logging
from collections.abc import Sequence
from typing import Any, TypeAlias

from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.memory import num_together
from jaxinf.streaming.plan.offload import evicted, least_bytes
from jaxinf.streaming.plan.shardings import Shardings, output_bytes
from jaxinf.streaming.program.programs import bytes_beside, compile_program

_LOG = logging.getLogger("jaxinf.compile")

Executables: TypeAlias = dict[tuple[Any, ...], Any]
"""Compiled programs by key, donated inputs, and shardings of inputs and outputs."""


class Measured(Executables):
    """Programs that are compiled for what they take, and never run."""


def compile_plan(plan: Plan, executables: Executables) -> Sequence[Any]:
    """Compiles a plan's programs unless they are known; returns one a call. Blocks.

    On several devices JAX chooses the shardings of values. A program is compiled for
    those of its inputs, so that equal blocks share one as soon as their inputs' agree.

    Args:
      executables: Programs compiled before; new ones are added.
    """
    found, shardings = [], Shardings(plan)
    is_run = not isinstance(executables, Measured)
    new = {(c.program.key, plan.donated[c.program.key]) for c in plan.calls}
    new -= {known[:2] for known in executables}
    if new and is_run:
        _LOG.info("compiling %d programs", len(new))
    for call in plan.calls:
        program = call.program
        donated = plan.donated[program.key]
        inputs, outputs = shardings.inputs(call), shardings.outputs(call)
        known = (program.key, donated, inputs, outputs)
        if known not in executables:
            executables[known] = compile_program(
                program,
                donated,
                inputs,
                outputs,
                is_deterministic=plan.traced.is_deterministic,
                is_run=is_run,
            )
        shardings.note(call, executables[known])
        found.append(executables[known])
    return found


def compiled_bytes(plan: Plan, executables: Executables) -> int:
    """Returns the memory of a step, with temporaries as reported by XLA; blocks."""
    temps = compiled_temp_bytes(plan, executables)
    if not plan.is_offloaded:
        compiled = compile_plan(plan, executables)
        plan = plan.varied(output_bytes=output_bytes(plan, compiled))
    return least_bytes(plan, temps)


def compiled_temp_bytes(plan: Plan, executables: Executables) -> dict[str, int]:
    """Returns the temporaries of a plan's programs as reported by XLA; blocks.

    Those of all devices that share the host's memory, or of one with its own.
    """
    if plan.is_offloaded:
        plan = plan.varied(lenders=None)
    return temp_bytes(plan, compile_plan(plan, executables))


def temp_bytes(plan: Plan, compiled: Sequence[Any]) -> dict[str, int]:
    found, num_devices = dict[str, int](), num_together(plan.traced.mesh)
    for call, executable in zip(plan.calls, compiled, strict=True):
        own = bytes_beside(call.program, executable) * num_devices
        found[call.program.key] = max(own, found.get(call.program.key, 0))
    return found


def offloaded(plan: Plan, executables: Executables, budget_bytes: int) -> Plan:
    """Returns the plan with as few values on a drive as the budget allows; blocks.

    A program is compiled anew where its outputs may reuse other values' memory, and may
    then take other temporaries. Those of the largest variant count.
    """
    temps, before = compiled_temp_bytes(plan, executables), dict[str, int]()
    found = plan
    while temps != before:
        before = dict(temps)
        found = evicted(plan, budget_bytes, temps)
        compiled = compile_plan(found, executables)
        for call, executable in zip(found.calls, compiled, strict=True):
            own = bytes_beside(call.program, executable)
            temps[call.program.key] = max(temps[call.program.key], own)
        if found.most_bytes(temps) <= budget_bytes:
            break
    return found
