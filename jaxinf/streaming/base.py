"""What steps and functions have in common: programs, bound to batches by shape.

    batch ─► bound to its shape? ─► programs, one after another ─► results
                                     ▲ params      │ gradients
                                  a source         a sink

Invariant: programs run in turns, on a thread of their own, and a run that ends early
leaves nothing under way.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import jax

from jaxinf.io import ByteCounts
from jaxinf.streaming.fit import Fitted
from jaxinf.streaming.move.mover import MoverCounts
from jaxinf.streaming.move.params import Params
from jaxinf.streaming.options import Options
from jaxinf.streaming.plan.memory import return_freed_memory
from jaxinf.streaming.plan.plan import Plan, Prepared
from jaxinf.streaming.plan.planner import Forecast
from jaxinf.streaming.plan.wear import Wear, Wearing
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.meshes import outside_mesh
from jaxinf.streaming.program.trace import abstract
from jaxinf.streaming.replanning import Replanner
from jaxinf.streaming.run import Executables, Runner
from jaxinf.streaming.turns import Check, Turns, check_not_traced
from jaxinf.streaming.update.micro_batches import parts_of, together
from jaxinf.streaming.update.sink import Sink
from jaxinf.typing import PyTree

__all__ = ["Bound", "Streamed", "TrainingStep"]

Results = tuple[jax.Array, PyTree]


@dataclass(frozen=True)
class Bound:
    """Programs for batches of one shape, and what they run with.

    Attributes:
      runner: Runs them.
      params: Their params.
      fitted: The plan and the memory that they were fitted to.
      sink: Takes their gradients; None for a function without.
      replanner: With ``"plan"``, what plans the step.
      traffic: Bytes that a step moves on the drive.
      reused_bytes: See `plan.reads.reused_bytes`.
      store_bytes: Memory for the store's buffers.
    """

    runner: Runner
    params: Params
    fitted: Fitted
    sink: Sink | None = None
    replanner: Replanner | None = None
    traffic: ByteCounts = field(default_factory=ByteCounts)
    reused_bytes: int = 0
    store_bytes: int = 0

    def begin(self) -> None:
        """Begins to measure a run."""
        self.params.counts = MoverCounts()
        self.runner.values.counts()
        if self.replanner is not None:
            self.replanner.begin()

    def close(self) -> None:
        """Frees memory and files; idempotent."""
        self.close_calls()
        if self.sink is not None:
            self.sink.close()
        if self.replanner is not None:
            self.replanner.close()

    def close_calls(self) -> None:
        """Frees what depends on the order of the calls; idempotent."""
        self.runner.values.close()
        self.params.close()


_Bound = TypeVar("_Bound", bound=Bound)


class Streamed(ABC, Generic[_Bound]):
    """A step or a function; also a context manager. Not thread-safe."""

    def __init__(self, turns: Turns | None = None) -> None:
        self._turns = turns or Turns()
        self._executables: Executables = {}
        self._bound: dict[Any, _Bound] = {}
        self._last: _Bound | None = None

    def compile(self, batch: PyTree) -> Plan:
        """Plans and compiles for batches like this one; otherwise the first run does.

        Args:
          batch: Arrays, or shapes and dtypes.

        Raises:
          StreamError: The program cannot be cut to fit, or the saved plan is another's.
        """
        self._turns.settle()
        key = self._key(batch)
        bound = self._turns.run(lambda check: self._take_turn(key))
        return bound.runner.plan

    @property
    def plan(self) -> Plan | None:
        """The plan of the last run, or of the first once it is planned; else None."""
        return None if self._last is None else self._last.runner.plan

    @abstractmethod
    def close(self) -> None:
        """Frees what it holds; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- inside --------------------------------------------------------------------

    @abstractmethod
    def _prepare(self, batch: PyTree) -> Prepared:
        """Traces the function for batches like this one."""

    @abstractmethod
    def _bind(self, ready: Prepared) -> _Bound:
        """Plans and compiles."""

    def _rebind(self, bound: _Bound) -> _Bound:
        """Returns the same for another choice of its planner."""
        raise AssertionError("only a step is planned again")

    def _key(self, batch: PyTree) -> Any:
        """Binds batches of this shape unless they are, and returns their key."""
        leaves, tree = jax.tree.flatten(abstract(batch))
        key = (tree, *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
        if key not in self._bound:
            ready = self._prepare(batch)
            with outside_mesh():
                self._bound[key] = self._bind(ready)
            return_freed_memory()  # of planning and compilation
        return key

    def _take_turn(self, key: Any) -> _Bound:
        """Returns what batches are bound to, and gives it the memory of the last one.

        It is bound again if its planner has chosen something else by now.
        """
        bound, last = self._bound[key], self._last
        if last is not None and last is not bound:
            last.params.rest()
        if bound.replanner is not None and bound.replanner.is_changed:
            bound.replanner.is_changed = False
            bound = self._bound[key] = self._rebind(bound)
        self._last = bound
        return bound

    def _run(
        self,
        bound: _Bound,
        batch: PyTree,
        hand_out: Callable[[Piece, jax.Array], None],
        check: Check,
        *,
        is_last: bool = True,
    ) -> tuple[jax.Array | None, PyTree]:
        """Runs the programs once; nothing is in flight when it ends."""

        def fetch(number: int, piece: Piece) -> jax.Array:
            check()
            return bound.params.get(number, piece)

        params = bound.params
        try:
            params.begin(check, is_last=is_last)
            return bound.runner(batch, fetch, hand_out, params.done, params.again)
        finally:
            bound.runner.settle()  # before the memory that they read is freed
            params.stop()


class TrainingStep(Streamed[_Bound]):
    """A step, with or without a store."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._options = options
        self._num_skipped = 0
        self._waited_s = 0.0  # in the last step, for gradients and updates
        self._values = MoverCounts()
        self._wearing = Wearing(options.endurance_tbw)
        return_freed_memory()

    @property
    def plan(self) -> Plan | None:
        """The plan of the last step, or of the first once it is planned; else None."""
        bound = self._last
        if bound is None or bound.replanner is None:
            return super().plan
        return bound.replanner.shown(bound.runner.plan, self.wear)

    @property
    def forecast(self) -> Forecast | None:
        """With ``"plan"``, expected and found time and memory of a step.

        None while the first steps are measured.
        """
        replanner = None if self._last is None else self._last.replanner
        return None if replanner is None else replanner.forecast

    @property
    def num_skipped(self) -> int:
        """Number of steps skipped for a non-finite gradient, with ``"skip"``."""
        return self._num_skipped

    @property
    def wear(self) -> Wear | None:
        """Bytes written by the last steps, and how long drives last; None before one.

        State counts, and activations and gradients that wait on drives.
        """
        return self._wearing.wear

    @property
    def traffic(self) -> ByteCounts | None:
        """Bytes that the plan moves on the drive in a step; None before the first.

        An optimizer that leaves state alone in some steps moves fewer in those.
        """
        return None if self._last is None else self._last.traffic

    # --- inside --------------------------------------------------------------------

    def _join(self) -> None:
        """Waits for the updates of the step before; there are none by default."""

    def _call(self, batch: PyTree, extra_args: Mapping[str, Any] | None) -> Results:
        check_not_traced(batch, extra_args)
        self._turns.settle()
        called_s = time.perf_counter()
        key = self._key(batch)

        def body(check: Check) -> tuple[Results, float, int]:
            bound = self._take_turn(key)
            with outside_mesh():
                results = self._step(bound, batch, extra_args or {}, check)
            step_s = time.perf_counter() - called_s
            if bound.replanner is not None:
                peak_bytes = bound.runner.values.peak_bytes
                bound.replanner.observe(
                    step_s, self._values, peak_bytes, bound.params.counts
                )
            return results, step_s, bound.traffic.drive_write_bytes

        results, step_s, written_bytes = self._turns.run(body)
        self._wearing.add(step_s, written_bytes)
        return results

    def _step(
        self, bound: _Bound, batch: PyTree, own_args: Mapping[str, Any], check: Check
    ) -> Results:
        sink = bound.sink
        assert sink is not None, "a step has gradients"
        given = {**self._options.extra_args, **own_args}
        began_s = time.perf_counter()
        self._join()
        self._waited_s = time.perf_counter() - began_s
        bound.begin()
        sink.begin(given)
        try:
            parts = self._parts(bound, sink, batch, check)
            self._values = bound.runner.values.counts()
            self._waited_s += sink.waited_s
            began_s = time.perf_counter()
            loss, aux = together(parts)
            if "value" in given and "value" not in own_args:
                given["value"] = loss
            has_advanced = sink.finish(given, parts, check)
            if has_advanced:
                bound.params.end()
            self._num_skipped += not has_advanced
            self._waited_s += time.perf_counter() - began_s
        except BaseException:
            sink.abandon()
            raise
        return loss, aux if self._options.has_aux else None

    def _parts(
        self, bound: _Bound, sink: Sink, batch: PyTree, check: Check
    ) -> list[Results]:
        """Runs the programs for each part of the batch."""
        count, runner = self._options.micro_batches, bound.runner
        results, dispatched_s, waited_s = [], 0.0, 0.0
        for number, part in enumerate(parts_of(batch, count)):
            sink.begin_part(number)
            is_last = number == count - 1
            loss, aux = self._run(bound, part, sink.put, check, is_last=is_last)
            assert loss is not None, "a step has a loss"
            results.append((loss, aux))
            sink.end_part(number)
            dispatched_s += runner.dispatched_s
            waited_s += runner.waited_s
        runner.dispatched_s, runner.waited_s = dispatched_s, waited_s
        return results

    def _close_bound(self) -> None:
        self._turns.settle()
        for bound in self._bound.values():
            bound.close()
