"""Compiles the programs of a plan, and says what they take.

Invariant: a program is compiled once for its inputs' shardings and the inputs whose
memory it may reuse, for batches of all shapes. The shardings of inputs and gradients
are the user's; JAX chooses those of other values when what makes them is compiled.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinf.streaming.plan.calls import Call, Plan, Slot
from jaxinf.streaming.plan.leaving import evicted, least_bytes
from jaxinf.streaming.plan.memory import num_together
from jaxinf.streaming.program.graph import (
    Batch,
    Const,
    Origin,
    Piece,
    aval_bytes,
    piece_sharding,
)
from jaxinf.streaming.program.meshes import shard_bytes, typed_sharding
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
    mesh, found = plan.traced.mesh, []
    held: dict[Slot, Any] = {}  # shardings of values
    gradients = [] if mesh is None else _gradients(plan)
    is_run = not isinstance(executables, Measured)
    new = {(c.program.key, plan.donated[c.program.key]) for c in plan.calls}
    new -= {known[:2] for known in executables}
    if new and is_run:
        _LOG.info("compiling %d programs", len(new))
    for number, call in enumerate(plan.calls):
        program, donated = call.program, plan.donated[call.program.key]
        inputs: tuple[Any, ...] = ()
        outputs: tuple[Any, ...] = ()
        if mesh is not None:
            pairs = zip(call.takes, program.inputs, strict=True)
            inputs = tuple(_input(plan, mesh, held, *pair) for pair in pairs)
            outputs = _outputs(plan, mesh, call, gradients[number])
        known = program.key, donated, inputs, outputs
        if known not in executables:
            executables[known] = compile_program(
                program,
                donated,
                inputs,
                outputs,
                is_deterministic=plan.traced.is_deterministic,
                is_run=is_run,
            )
        found.append(executables[known])
        if mesh is not None:
            chosen = zip(call.makes, found[-1].output_shardings, strict=True)
            held.update((slot, one) for slot, one in chosen if slot is not None)
    return found


# --- memory --------------------------------------------------------------------------


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


def output_bytes(plan: Plan, compiled: Sequence[Any]) -> Sequence[Sequence[int]] | None:
    """Returns the bytes of each call's outputs; None for one device.

    Those on all devices that share the host's memory, or on one with its own.
    """
    if plan.traced.mesh is None:
        return None
    num = num_together(plan.traced.mesh)
    return [
        [
            num * shard_bytes(aval_bytes(value.aval), value.shape, sharding)
            for value, sharding in zip(
                call.program.outputs, executable.output_shardings, strict=True
            )
        ]
        for call, executable in zip(plan.calls, compiled, strict=True)
    ]


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
        own = temp_bytes(found, compile_plan(found, executables))
        temps |= {key: max(num_bytes, temps[key]) for key, num_bytes in own.items()}
        if found.most_bytes(temps) <= budget_bytes:
            break
    return found


# --- shardings -----------------------------------------------------------------------


def const_sharding(const: Any, mesh: Mesh | None) -> Any:
    """Returns the sharding of an array that a function closed over."""
    if mesh is None:
        return None
    own = getattr(const, "sharding", None)
    if isinstance(own, NamedSharding) and own.mesh == mesh:
        return own
    return NamedSharding(mesh, PartitionSpec())


def _gradients(plan: Plan) -> Sequence[Mapping[int, Piece]]:
    """Returns for each call the outputs that are gradients, of a part of a batch, too.

    A program that is called again has the same.
    """
    found: list[Mapping[int, Piece]] = []
    by_key: dict[str, Mapping[int, Piece]] = {}
    pieces: dict[Slot | None, Piece] = {}  # gradients of parts, and their sums
    for call in reversed(plan.calls):
        own = {i: piece for piece, i in call.gradients}
        own |= {i: pieces[s] for i, s in enumerate(call.makes) if s in pieces}
        found.append(own)
        if own:
            by_key[call.program.key] = own
        for i, piece in own.items() if call.program.is_sum else ():
            for ref in (call.takes[i], call.takes[i + len(call.makes)]):
                assert isinstance(ref, Slot), "a sum's operand is a value"
                pieces[ref] = piece
    pairs = zip(plan.calls, reversed(found), strict=True)
    return [own or by_key.get(call.program.key, {}) for call, own in pairs]


def _outputs(
    plan: Plan, mesh: Mesh, call: Call, own: Mapping[int, Piece]
) -> tuple[Any, ...]:
    """Returns the shardings that outputs must have, or None: a gradient its params'."""
    # A program without inputs would be one device's.
    other = None if call.takes else NamedSharding(mesh, PartitionSpec())
    numbers = range(len(call.program.outputs))
    return tuple(_of_piece(plan, own[i]) if i in own else other for i in numbers)


def _input(
    plan: Plan, mesh: Mesh, held: Mapping[Slot, Any], ref: Origin | Slot, value: Any
) -> Any:
    typed, traced = typed_sharding(value.aval), plan.traced
    if typed is not None and mesh.are_all_axes_explicit:
        return NamedSharding(mesh, typed.spec)
    match ref:
        case Slot():
            return held[ref]
        case Piece():
            return _of_piece(plan, ref)
        case Batch():
            return traced.batch[ref.leaf].sharding
        case Const():
            return const_sharding(traced.consts[ref.number], mesh)
    return NamedSharding(mesh, PartitionSpec())


def _of_piece(plan: Plan, piece: Piece) -> Any:
    return piece_sharding(plan.traced.params[piece.leaf].sharding, piece)
