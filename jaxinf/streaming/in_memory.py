"""A streamed step without a store: params and optax's state are in memory.

    batch ─► programs, one after another ─► gradients ─► optax's update
              values that backward needs may wait on a drive

Invariant: updates have the bits of jitted optax on the same gradients. A step that ends
  early leaves params and state as they were.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxinf.errors import BudgetError, NonFiniteGradientError, StreamError
from jaxinf.io import ByteCounts
from jaxinf.program import effect_of_nonfinite
from jaxinf.streaming.base import PlannedStep
from jaxinf.streaming.bound import Options
from jaxinf.streaming.budgets import planned_within
from jaxinf.streaming.move.cache import writing_bytes
from jaxinf.streaming.move.scratch import Scratch
from jaxinf.streaming.move.values import Offloaded, Tiered, Values
from jaxinf.streaming.plan.calls import Calls
from jaxinf.streaming.plan.memory import (
    DeviceLimit,
    Division,
    device_limit,
    return_freed_memory,
)
from jaxinf.streaming.plan.plan import Plan, Prepared, prepare
from jaxinf.streaming.plan.search import Problem
from jaxinf.streaming.plan.tiers import Tiers, check_leaving, check_tiers, plan_tiers
from jaxinf.streaming.plan.wear import Wear
from jaxinf.streaming.program.graph import Piece, aval_bytes
from jaxinf.streaming.program.meshes import default_device, mesh_text
from jaxinf.streaming.program.trace import abstract, check_params
from jaxinf.streaming.replanning import Planned
from jaxinf.streaming.run import (
    CompiledMemory,
    Executables,
    Runner,
    compiled_bytes,
    compiled_temp_bytes,
)
from jaxinf.streaming.turns import Check, Turns, check_not_traced
from jaxinf.streaming.update.micro_batches import first_part, parts_of, together
from jaxinf.streaming.update.optax_sink import PlainOptax, WholeGradients, are_finite
from jaxinf.streaming.wearing import Wearing
from jaxinf.typing import PathLikeStr, PyTree

__all__ = ["InMemoryStep"]


@dataclass(frozen=True)
class _Bound:
    """The plan and runner for batches of one shape."""

    runner: Runner
    values: Values
    planned: Planned | None

    def close(self) -> None:
        """Frees memory and files; idempotent."""
        self.values.close()
        if self.planned is not None:
            self.planned.close()


class InMemoryStep(PlannedStep[_Bound]):
    """Made by `jaxinf.stream` without a store; also a context manager.

    ``loss, aux = step(batch)`` runs one step; aux is None without `has_aux`. Params
    come by `load` or `init`, and leave by `params`. Not thread-safe.

    Args:
      loss_fn: The loss function.
      tx: Any optax optimizer.
      options: Memory, policy and so on.
      scratch: A folder on a drive for values of ``"offload"`` and ``"plan"``.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        tx: optax.GradientTransformation,
        options: Options,
        scratch: PathLikeStr,
    ) -> None:
        self._loss_fn = loss_fn
        self._options = options
        self._scratch = scratch
        self._optimizer = PlainOptax(tx)
        self._bound: dict[Any, _Bound] = {}
        self._executables: Executables = {}
        self._turns = Turns()
        self._wearing = Wearing(options.endurance_tbw)
        return_freed_memory()

    # --- params --------------------------------------------------------------------

    def init(
        self, init_fn: Callable[..., PyTree], *args: Any, batch: PyTree = None
    ) -> None:
        """Makes params with jitted `init_fn`, and the optimizer's first state.

        Args:
          init_fn: ``init_fn(*args)`` returns the params.
          args: Its arguments, such as a random key.
          batch: Not needed; as with a store, a loss function that no plan can fit in
            memory is refused before params are made.

        Raises:
          StreamError: The loss function cannot be streamed.
        """
        self._check(jax.eval_shape(init_fn, *args), batch)
        self._optimizer.begin(jax.jit(init_fn)(*args), None)
        if batch is not None:
            self.compile(batch)

    def load(
        self, params: PyTree, *, state: PyTree = None, batch: PyTree = None
    ) -> None:
        """Copies params, and the optimizer's state if there is one.

        Args:
          params: Tree of arrays.
          state: From `state`, or from ``tx.init``; by default the first one.
          batch: As for `init`.

        Raises:
          StreamError: A leaf is not an array of floating-point numbers, or the loss
            function cannot be streamed.
        """
        self._check(params, batch)
        own = partial(jax.tree.map, lambda leaf: jnp.array(leaf, copy=True))
        self._optimizer.begin(own(params), None if state is None else own(state))
        if batch is not None:
            self.compile(batch)

    def params(self) -> PyTree:
        """Returns the params, which later steps leave alone."""
        self._turns.settle()
        return self._optimizer.lend().params

    def state(self) -> PyTree:
        """Returns optax's state, which later steps leave alone."""
        self._turns.settle()
        return self._optimizer.lend().state

    def _check(self, params: PyTree, batch: PyTree) -> None:
        check_params(params)
        if batch is not None:
            self._planned(self._prepare(abstract(params), batch))

    # --- steps ---------------------------------------------------------------------

    def compile(self, batch: PyTree) -> Plan:
        """Plans and compiles for batches like this one; otherwise the first step does.

        Args:
          batch: Arrays, or shapes and dtypes.

        Raises:
          StreamError: The program cannot be cut to fit.
        """
        self._turns.settle()
        self._last = self._current(self._bound_for(batch))
        return self._last.runner.plan

    def __call__(self, batch: PyTree) -> tuple[jax.Array, PyTree]:
        """Runs one step.

        Returns:
          The loss, and aux; None without `has_aux`.

        Raises:
          NonFiniteGradientError: The step was refused.
        """
        check_not_traced(batch)
        self._turns.settle()
        called_s = time.perf_counter()
        key = self._bound_for(batch)

        def body(check: Check) -> tuple[tuple[jax.Array, PyTree], float, int]:
            bound = self._last = self._current(key)
            results = self._step(bound, batch, check)
            step_s = time.perf_counter() - called_s
            if bound.planned is not None:
                counts, peak_bytes = bound.values.counts(), bound.values.peak_bytes
                bound.planned.observe(step_s, counts, peak_bytes)
            return results, step_s, bound.values.num_bytes

        results, step_s, moved_bytes = self._turns.run(body)
        self._wearing.add(step_s, moved_bytes * self._options.micro_batches)
        return results

    def _step(
        self, bound: _Bound, batch: PyTree, check: Check
    ) -> tuple[jax.Array, PyTree]:
        bound.values.counts()
        if bound.planned is not None:
            bound.planned.begin()
        count = self._options.micro_batches
        gradients = WholeGradients(bound.runner.plan, count)
        results = [
            self._run(bound, part, gradients, check) for part in parts_of(batch, count)
        ]
        loss, aux = together(results)
        handed = {id(leaf) for leaf in jax.tree.leaves(results)}
        self._update(bound.runner.plan, gradients.take(handed))
        return loss, aux if self._options.has_aux else None

    def _run(
        self, bound: _Bound, batch: PyTree, gradients: WholeGradients, check: Check
    ) -> tuple[jax.Array, PyTree]:
        leaves = jax.tree.leaves(self._optimizer.params)

        def fetch(number: int, piece: Piece) -> jax.Array:
            check()
            leaf = leaves[piece.leaf]
            return piece.of(leaf) if piece.index or piece.rows else leaf

        try:
            loss, aux = bound.runner(
                batch, fetch, gradients.add, again=lambda piece: fetch(0, piece)
            )
        finally:
            bound.runner.settle()
        assert loss is not None, "a step has a loss"
        return loss, aux

    def _update(self, plan: Plan, gradients: list[jax.Array]) -> None:
        names = plan.traced.names
        policy = effect_of_nonfinite(
            self._options.nonfinite, is_guarded=self._optimizer.is_guarded
        )
        if policy != "allow":
            finite = are_finite(gradients)
            bad = [name for name, is_ok in zip(names, finite, strict=True) if not is_ok]
            if bad and policy == "error":
                raise NonFiniteGradientError(
                    f"NaN or Inf in the gradient of {', '.join(bad[:5])}; the step was "
                    "refused. Lower the learning rate or clip the gradients, or pass "
                    'nonfinite="skip" to go on without such steps'
                )
            if bad:
                self._num_skipped += 1
                return
        self._optimizer.update(plan.traced.params_tree.unflatten(gradients))

    # --- planning ------------------------------------------------------------------

    @cached_property
    def _limit(self) -> DeviceLimit:
        return device_limit(default_device(), self._options.device_memory_bytes)

    def _bound_for(self, batch: PyTree) -> Any:
        """Binds batches of this shape unless they are, and returns their key."""
        leaves, tree = jax.tree.flatten(abstract(batch))
        key = (tree, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._bound:
            params = abstract(self._optimizer.params)
            self._bound[key] = self._bind(self._prepare(params, batch))
            return_freed_memory()  # of planning and compilation
        return key

    def _current(self, key: Any) -> _Bound:
        """Returns what batches are bound to, as their planner has chosen by now."""
        bound = self._bound[key]
        if bound.planned is not None and bound.planned.is_changed:
            bound.values.close()
            self._bound[key] = self._running(bound.planned.plan, bound.planned)
            bound.planned.is_changed = False
        return self._bound[key]

    def _prepare(self, params: PyTree, batch: PyTree) -> Prepared:
        part = first_part(batch, self._options.micro_batches)
        ready = prepare(self._loss_fn, params, part, has_aux=self._options.has_aux)
        if ready.traced.mesh is not None:
            raise StreamError(
                "jaxinf.stream: expected arrays on one device, found "
                f"{mesh_text(ready.traced.mesh)}, which streaming does not use without "
                "a store yet; give a store, or put all arrays on one device "
                "(jax.device_put(x, jax.devices()[0]))"
            )
        return ready

    def _bind(self, ready: Prepared) -> _Bound:
        plan, budget = self._planned(ready)
        if not plan.is_offloaded:
            return self._running(plan)
        form = self._options.activations
        memory = CompiledMemory(plan, self._executables, budget, form)
        if self._options.policy == "offload":
            return self._running(memory.fitted())
        problem = Problem(
            ready.lifetimes.graph,
            plan.programs,
            budget,
            memory.call_bytes,
            plan.calls.resident,
            memory.admits,
            form=form,
            tiers=self._tiers,
        )
        parts, folders = self._options.micro_batches, [self._scratch]
        planned = Planned(plan, problem, parts, folders)
        return self._running(planned.plan, planned)

    def _running(self, plan: Plan, planned: Planned | None = None) -> _Bound:
        values = self._values(plan)
        watch = None if planned is None else planned.watch
        runner = Runner(plan, self._executables, values=values, watch=watch)
        return _Bound(runner, values, planned)

    def _values(self, plan: Plan) -> Values:
        if not plan.is_offloaded:
            return Values()
        tiers = self._tiers(plan.calls)
        if tiers is None:
            return Offloaded(plan.calls, Scratch([self._scratch]))
        check_tiers(tiers, self._division().staged)
        return Tiered(plan.calls, Scratch([self._scratch]), tiers)

    def _tiers(self, calls: Calls) -> Tiers | None:
        """Where values wait; None if the device's memory is the host's."""
        host_bytes = self._division().staged
        return plan_tiers(calls, host_bytes) if host_bytes else None

    def _planned(self, ready: Prepared) -> tuple[Plan, int]:
        """Returns a plan, and the memory for its programs beside params and so on."""
        return planned_within(self._options.limits, partial(self._fitted, ready))

    def _fitted(self, ready: Prepared, limits: Mapping[str, int]) -> tuple[Plan, int]:
        division = self._division(limits)
        traced = ready.traced
        kept = sum(map(aval_bytes, traced.params))
        held = 2 * kept + self._optimizer.state_bytes(
            traced.params_tree.unflatten(traced.params)
        )
        if held > division.programs:
            raise BudgetError(
                division.limit,
                f"expected room for params, gradients and optax's state, {held} bytes, "
                f"found {division.programs}",
                held - division.programs + 1,
                ", or give a store, which keeps the state on drives",
            )

        def beside(plan: Plan) -> Plan:
            pieces = {p for call in plan.calls.calls for p in call.pieces}
            whole = frozenset(p for p in pieces if not p.index and not p.rows)
            return plan.beside(whole)

        plan = ready.plan(
            division.programs,
            self._options.policy,
            lambda plan: held + compiled_bytes(beside(plan), self._executables),
            division.limit,
        )
        peak = plan.peak_bytes - held
        plan = replace(beside(plan), peak_bytes=peak, kept_bytes=kept)
        budget = division.programs - held
        if plan.is_offloaded and division.staged:
            temps = compiled_temp_bytes(plan, self._executables)
            check_leaving(
                plan.ways,
                budget,
                lambda calls: calls.call_bytes(temps),
                division.staged,
            )
        return plan, budget

    def _division(self, limits: Mapping[str, int] | None = None) -> Division:
        options, limit = self._options, self._limit
        limits = options.limits if limits is None else limits
        memory_bytes = limits["memory_bytes"]
        num_bytes, name = memory_bytes, "memory_bytes"
        own = limits.get("device_memory_bytes", limit.num_bytes)
        if own is not None and (not limit.is_host or own < num_bytes):
            num_bytes, name = own, "device_memory_bytes"
        staged = 0 if limit.is_host else memory_bytes
        division = Division(0, 0, num_bytes, staged, 0, name)
        if options.policy in ("offload", "plan"):
            division = division.without(
                writing_bytes(1), "writing its values to drives"
            )
        return division

    # --- control -------------------------------------------------------------------

    @property
    def wear(self) -> Wear | None:
        """Activations written by the last steps, and how long the drive lasts."""
        return self._wearing.wear

    @property
    def traffic(self) -> ByteCounts | None:
        """Bytes of activations on the drive in a step; None before the first."""
        if self._last is None:
            return None
        moved = self._last.values.num_bytes * self._options.micro_batches
        return ByteCounts(drive_read_bytes=moved, drive_write_bytes=moved)

    def close(self) -> None:
        """Frees memory and files; idempotent. The params stay available."""
        self._turns.settle()
        for bound in self._bound.values():
            bound.close()
        self._bound.clear()
