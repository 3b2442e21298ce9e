"""Compiles the programs of a plan, and says how much memory they take.

Invariant: a program is compiled once for its inputs' shardings and the inputs whose
memory it may reuse, for batches of all shapes. The shardings of inputs and gradients
are the user's; JAX chooses those of other values when what makes them is compiled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinf.program import aval_bytes
from jaxinf.streaming.plan import memory
from jaxinf.streaming.plan.calls import Call, Plan, StepValue
from jaxinf.streaming.program.graph import Batch, Const, Origin, Piece
from jaxinf.streaming.program.meshes import typed_sharding
from jaxinf.streaming.program.programs import bytes_beside, compile_program
from jaxinf.streaming.program.units import piece_sharding


@dataclass(frozen=True)
class Executables:
    """Compiled programs.

    Attributes:
      are_run: Whether they are compiled to run, not only for what they take.
      compiled: By key, donated inputs, and shardings of inputs and outputs.
    """

    is_deterministic: bool = True
    are_run: bool = True
    compiled: dict[tuple[Any, ...], Any] = field(default_factory=dict)


def compile_plan(plan: Plan, executables: Executables) -> Sequence[Any]:
    """Compiles a plan's programs, each once; returns one for each call. Blocks.

    On several devices JAX chooses the shardings of values. A program is compiled for
    those of its inputs, so that equal blocks share one as soon as their inputs' agree.
    """
    mesh, compiled, of_calls = plan.traced.mesh, executables.compiled, list[Any]()
    shardings: dict[StepValue, Any] = {}
    for call in plan.calls:
        program, donated = call.program, plan.donated[call.program.key]
        inputs: tuple[Any, ...] = ()
        outputs: tuple[Any, ...] = ()
        if mesh is not None:
            inputs = tuple(
                _input_sharding(plan, mesh, shardings, ref, value)
                for ref, value in zip(call.takes, program.inputs, strict=True)
            )
            outputs = _output_shardings(plan, mesh, call)
        key = program.key, donated, inputs, outputs
        if key not in compiled:
            compiled[key] = compile_program(
                program,
                donated,
                inputs,
                outputs,
                is_deterministic=executables.is_deterministic,
                is_run=executables.are_run,
            )
        of_calls.append(compiled[key])
        if mesh is not None:
            chosen = zip(call.makes, compiled[key].output_shardings, strict=True)
            shardings |= {value: s for value, s in chosen if value is not None}
    return of_calls


def measure_memory(plan: Plan, executables: Executables) -> Plan:
    """Returns the plan with the memory that its programs take, as XLA says; blocks.

    Devices in the host's memory count together; of others, one counts.
    """
    temps, outputs = dict[str, int](), list[Sequence[int]]()
    mesh, num_devices = plan.traced.mesh, 1
    if mesh is not None and memory.device_is_host(mesh.devices.flat[0]):
        num_devices = len(mesh.local_devices)
    compiled = compile_plan(plan, executables)
    for call, executable in zip(plan.calls, compiled, strict=True):
        temp_bytes = bytes_beside(call.program, executable) * num_devices
        temps[call.program.key] = max(temp_bytes, temps.get(call.program.key, 0))
        if mesh is not None:
            pairs = zip(call.program.outputs, executable.output_shardings, strict=True)
            shards = (
                jax.ShapeDtypeStruct(sharding.shard_shape(value.shape), value.dtype)
                for value, sharding in pairs
            )
            outputs.append([num_devices * aval_bytes(shard) for shard in shards])
    return replace(plan, temp_bytes=temps, output_bytes=outputs or None)


def known_temp_bytes(plan: Plan, executables: Executables) -> Mapping[str, int]:
    """Returns the temporaries, by key, of programs that were compiled before.

    On several devices none is known before the shardings of its inputs.
    """
    temps = dict[str, int]()
    for key, program in plan.programs.items() if plan.traced.mesh is None else ():
        executable = executables.compiled.get((key, plan.donated[key], (), ()))
        if executable is not None:
            temps[key] = bytes_beside(program, executable)
    return temps


def const_sharding(const: Any, mesh: Mesh | None) -> Any:
    if mesh is None:
        return None
    sharding = getattr(const, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return sharding
    return NamedSharding(mesh, PartitionSpec())


def _output_shardings(plan: Plan, mesh: Mesh, call: Call) -> tuple[Any, ...]:
    """Returns the shardings that outputs must have, or None: a gradient its params'."""
    # A program without inputs would be one device's.
    other = None if call.takes else NamedSharding(mesh, PartitionSpec())
    pieces = {i: piece for piece, i in call.pieces}
    numbers = range(len(call.program.outputs))
    return tuple(_of_piece(plan, pieces[i]) if i in pieces else other for i in numbers)


def _input_sharding(
    plan: Plan,
    mesh: Mesh,
    shardings: Mapping[StepValue, Any],
    ref: Origin | StepValue,
    value: Any,
) -> Any:
    typed, traced = typed_sharding(value.aval), plan.traced
    if typed is not None and mesh.are_all_axes_explicit:
        return NamedSharding(mesh, typed.spec)
    match ref:
        case StepValue():
            return shardings[ref]
        case Piece():
            return _of_piece(plan, ref)
        case Batch():
            return traced.batch[ref.leaf].sharding
        case Const():
            return const_sharding(traced.consts[ref.number], mesh)
    return NamedSharding(mesh, PartitionSpec())


def _of_piece(plan: Plan, piece: Piece) -> Any:
    return piece_sharding(plan.traced.params[piece.leaf].sharding, piece)
