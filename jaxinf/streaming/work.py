"""What a streamed step has to do, for the simulation of its time on a machine.

    dry run ─► calls, values, params, updates ─┬─► schedule.steps ─► seconds
    speeds of a machine ───────────────────────┘

Invariant: what moves is what the plan of the dry run moves.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinf.schedule.moves import Kind
from jaxinf.schedule.simulator import Trips
from jaxinf.schedule.steps import HOST, PROCESSOR, StepWork, Update, drive_name
from jaxinf.streaming.bound import Ends
from jaxinf.streaming.fit import Fitted
from jaxinf.streaming.move.params import MemoryParams
from jaxinf.streaming.move.scratch import Folder, Scratch
from jaxinf.streaming.plan.plan import Plan, prepare
from jaxinf.streaming.plan.simulator import Profile, moved_beside, moved_gradients
from jaxinf.streaming.program.keys import Keys
from jaxinf.streaming.program.programs import Program, lowered
from jaxinf.streaming.run import Executables, Runner, compile_plan
from jaxinf.typing import PyTree

_MOST_RUNS, _LONG_ENOUGH_S = 10, 2.0


class Speeds(NamedTuple):
    """Speeds of a machine.

    Attributes:
      profile: Of programs, params and values.
      state: Of each drive for the state of updates, in bytes a second.
      update: Params a second that all cores of the host update.
      commit_s: Time of a commit.
      call_s: Time of a call beside its program.
      move_s: Time of a read or write on a drive beside that of its bytes.
    """

    profile: Profile
    state: Sequence[float]
    update: float
    commit_s: float = 0.0
    call_s: float = 0.0
    move_s: float = 0.0


def step_work(ends: Ends, fitted: Fitted, plan: Plan, speeds: Speeds) -> StepWork:
    """Returns the work of a step.

    Args:
      ends: Where params come from, and where gradients go.
    """
    calls, profile = plan.calls, speeds.profile
    moves, tiers = ends.moves(fitted, plan), fitted.tiers(calls)
    reading, division = fitted.reading(plan)
    queues = [drive_name(number) for number in range(len(speeds.state))]
    is_apart = len(queues) > 1
    loads = reading.trips(division, merges=not is_apart)
    if is_apart:
        loads = _on_drives(loads, moves.fetched, "read")
    moved = moved_beside(calls, profile, loads, tiers)
    last = []
    if moves.waiting is not None and moves.waiting.on_drive:
        last = [moved_gradients(calls, profile, moves.waiting)]
    if is_apart:
        last = [_on_drives(one, _placed(one, moves.shares), "write") for one in last]
    ring_bytes = division.ring
    if not division.staged:  # and what params do not need
        ring_bytes += reading.room_bytes - reading.memory(division)[0]
    return StepWork(
        call_s=[seconds + speeds.call_s for seconds in profile.call_s(calls)],
        moved=[one._replace(drives=queues, move_s=speeds.move_s) for one in moved],
        last=[one._replace(drives=queues, move_s=speeds.move_s) for one in last],
        num_parts=ends.setup.options.num_runs,
        updates=[
            Update(
                made,
                one.num_elements / speeds.update,
                one.read_bytes,
                one.written_bytes,
                one.layout.num_bytes,
                one.layout.subgroup.csd,
            )
            for made, one in moves.updates
        ],
        kernels=PROCESSOR if ends.setup.limit.is_host else HOST,
        rates=speeds.state,
        move_s=speeds.move_s,
        memory_bytes=ring_bytes,
        commit_s=speeds.commit_s,
        joins=True,
    )


def _on_drives(moved: Trips, found: Iterable[Sequence[int]], kind: Kind) -> Trips:
    """Returns tensors with their bytes on each drive, of which one moves at a time."""
    pairs = zip(moved.trips, found, strict=True)
    trips = [one._replace(drive_bytes=num_bytes) for one, num_bytes in pairs]
    return moved._replace(trips=trips, in_turn=(kind,))


def _placed(gradients: Trips, shares: Sequence[float]) -> Iterator[Sequence[int]]:
    """Yields the bytes on each drive of gradients that wait there."""
    scratch = Scratch([Folder(Path(), share) for share in shares])
    for one in gradients.trips:
        drive_bytes = [0] * len(shares)
        for part in scratch.allocate(one.stored_bytes).parts:
            drive_bytes[part.drive] += part.num_bytes
        yield drive_bytes


def num_operations(plan: Plan, keys: Keys) -> Mapping[str, float]:
    """Counts the operations of a plan's programs by key; nothing is compiled.

    Args:
      keys: Of the graph before tables were divided; they keep what was counted.
    """

    def counted(program: Program) -> float:
        costs: Any = lowered(program).cost_analysis()
        return float((costs or {}).get("flops", 0.0))

    return {
        key: keys.once(("operations", plan.tables, key), partial(counted, program))
        for key, program in plan.calls.programs.items()
    }


def measured_s(
    plan: Plan,
    executables: Executables,
    usual: Callable[[Sequence[float]], float] = statistics.median,
) -> Mapping[str, float]:
    """Runs each program of a plan some times; returns usual times by key. Blocks.

    Args:
      plan: The plan, with its graph unless the programs are compiled.
    """
    found: dict[str, float] = {}
    compiled = compile_plan(plan, executables)
    for call, executable in zip(plan.calls.calls, compiled, strict=True):
        if call.program.key not in found:
            avals = [value.aval for value in call.program.inputs]
            found[call.program.key] = usual_s(executable, avals, usual)
    return found


class CallTime(NamedTuple):
    """The usual time of a call.

    Attributes:
      program_s: Seconds of its program, handed over and waited for alone.
      beside_s: Seconds that it takes longer as one of a streamed step.
    """

    program_s: float
    beside_s: float


def usual_call(
    loss_fn: Callable[..., jax.Array], params: PyTree, batch: PyTree
) -> CallTime:
    """Runs the calls of a streamed step on zeros, cut as small as can be. Blocks.

    The least times count: what else the machine does is not of a call.

    Args:
      loss_fn, params, batch: As for `LeastMemory`; params are made.
    """
    ready = prepare(loss_fn, params, batch)
    plan = ready.plan(ready.smallest_bytes())
    executables: Executables = {}
    seconds = measured_s(plan, executables, min)
    leaves = [_example(leaf) for leaf in jax.tree.leaves(params)]
    inputs = jax.tree.map(_example, batch)
    runner, held = Runner(plan, executables), MemoryParams(lambda: leaves)
    times = []
    for _ in range(_MOST_RUNS):
        began_s = time.perf_counter()
        held.begin(_nothing)
        jax.block_until_ready(runner(inputs, held, _nothing))
        times.append(time.perf_counter() - began_s)
    num_calls = len(plan.calls.calls)
    alone_s = sum(seconds[call.program.key] for call in plan.calls.calls) / num_calls
    whole_s = min(times[1:]) / num_calls
    return CallTime(alone_s, max(0.0, whole_s - alone_s))


def _nothing(*_: object) -> None:
    pass


def usual_s(
    executable: Any,
    args: Sequence[Any],
    usual: Callable[[Sequence[float]], float] = statistics.median,
) -> float:
    """Runs a compiled program some times on zeros; returns its usual time. Blocks.

    Args:
      executable: The program.
      args: Its arguments, as trees of shapes and dtypes.
      usual: As for `measured_s`.
    """
    times: list[float] = []
    for _ in range(_MOST_RUNS):
        inputs = jax.tree.map(_example, args)  # some are donated
        jax.block_until_ready(inputs)
        began_s = time.perf_counter()
        jax.block_until_ready(executable(*inputs))
        times.append(time.perf_counter() - began_s)
        if len(times) > 1 and sum(times) > _LONG_ENOUGH_S:
            break
    return usual(times[1:])  # the first one takes new memory


def _example(aval: Any) -> jax.Array:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), aval.shape)
    return jnp.zeros(aval.shape, aval.dtype)
