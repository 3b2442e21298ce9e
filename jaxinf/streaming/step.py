"""A training step that never has all params in memory, made by `jaxinf.stream`.

    batch ─► programs, one after another ─► loss
              ▲ params read ahead   │ gradients, each as soon as it is complete
              └──────── store ◄─────┘ updated near storage; one commit a step

Invariant: a step writes updates to the slot that is not committed. So a crash at any
  point leaves the last committed step. A chunk that a step overwrites in place is
  written after the step's last read of it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias

import jax
import optax

from jaxinf.csd import ScalarInputs
from jaxinf.engine import (
    Store,
    StoreDescription,
    check_compressed,
    describe,
    distinct_shards,
    gradient_forms,
    keeps_feedback,
)
from jaxinf.errors import StreamError
from jaxinf.io import ByteCounts
from jaxinf.program import trace_init
from jaxinf.streaming.base import PlannedStep
from jaxinf.streaming.bound import Binder, Bound, Options
from jaxinf.streaming.budgets import planned_within
from jaxinf.streaming.function import FunctionOptions, StreamedFunction
from jaxinf.streaming.metrics import StreamMetrics
from jaxinf.streaming.move.cache import CacheCounts
from jaxinf.streaming.plan.memory import (
    check_mesh,
    return_freed_memory,
)
from jaxinf.streaming.plan.plan import Plan, Prepared, prepare
from jaxinf.streaming.plan.wear import Wear
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.initial import initial_inputs, trace_params
from jaxinf.streaming.program.meshes import (
    mesh_of,
    outside_mesh,
    sharded_like,
    without_shardings,
)
from jaxinf.streaming.program.shards import Gradient, handed_out
from jaxinf.streaming.program.trace import abstract, check_params, param_names
from jaxinf.streaming.program.units import part_counts
from jaxinf.streaming.turns import Check, Turns, check_not_traced
from jaxinf.streaming.update.micro_batches import first_part, parts_of, together
from jaxinf.streaming.update.optimizer import passes_for, trace_optimizer
from jaxinf.streaming.wearing import Wearing
from jaxinf.typing import Array, JsonValue, PyTree

__all__ = ["StreamedStep"]

Shard: TypeAlias = tuple[tuple[slice, ...], Array]
"""A part of a leaf: its index, and its numbers."""

# Part of the memory that the store's buffers take while the first step is made.
_INIT_SHARE = 4


class StreamedStep(PlannedStep[Bound]):
    """Made by `jaxinf.stream`; also a context manager. Not thread-safe.

    ``loss, aux = step(batch)`` runs one step and starts its commit; aux is None without
    `has_aux`.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        tx: optax.GradientTransformation,
        store: Store,
        options: Options,
    ) -> None:
        self.store = store
        self._loss_fn = loss_fn
        self._tx = optax.with_extra_args_support(tx)
        self._options = options
        self._params: PyTree | None = None
        self._bound: dict[Any, Bound] = {}
        self._waited_s = 0.0  # in the last step, for the store
        self._values = CacheCounts()
        self._wearing = Wearing(options.endurance_tbw)
        self._functions: list[StreamedFunction] = []
        self._binder = Binder(store, self._tx, options)
        self._turns = Turns()
        return_freed_memory()

    # --- params --------------------------------------------------------------------

    def init(
        self,
        init_fn: Callable[..., PyTree],
        *args: Any,
        batch: PyTree = None,
        shardings: PyTree = None,
    ) -> None:
        """Makes the store's first step leaf by leaf, or resumes an existing store.

        Args:
          init_fn: ``init_fn(*args)`` returns the params. It is traced, and computed
            only for a new store, one leaf at a time, with the bits of jitted `init_fn`.
          args: Its arguments, such as a random key.
          batch: Arrays, or shapes and dtypes, of a batch. With it a new store's chunks
            suit the program: each slice of stacked layers has its own. Its steps are
            planned and compiled here, before anything is written.
          shardings: Tree of ``NamedSharding`` like the params, for several devices.

        Raises:
          StoreMismatchError: The store holds another tree or optimizer.
          BudgetError: With `batch`, memory does not suffice for a step, or for making
            a leaf; names a budget that does. Nothing is written.
          StreamError: The loss function cannot be streamed; nothing is written.
        """
        maker = trace_params(init_fn, *args)
        self._bind(
            sharded_like(maker.avals, shardings),
            lambda memory_bytes: map(distinct_shards, maker.compile(memory_bytes)),
            batch,
        )

    def load(self, params: PyTree, *, batch: PyTree = None) -> None:
        """Makes the store's first step from given params, or resumes a store.

        Args:
          params: Tree of arrays; memory-mapped ones are read leaf by leaf. Those on
            several devices say how the store's leaves are sharded over them.
          batch: As for `init`.

        Raises:
          StoreMismatchError: The store holds another tree or optimizer.
          BudgetError: As for `init`.
          StreamError: A leaf is not an array of floating-point numbers, or the loss
            function cannot be streamed; nothing is written.
        """
        check_params(params)
        leaves = jax.tree.leaves(params)
        self._bind(abstract(params), lambda _: map(distinct_shards, leaves), batch)

    def _bind(
        self,
        avals: PyTree,
        leaves: Callable[[int], Iterable[Iterable[Shard]]],
        batch: PyTree,
    ) -> None:
        ready = None if batch is None else self._prepare(avals, batch)
        with outside_mesh():
            self._bind_pieces(avals, leaves, ready)
        if batch is not None:
            self.compile(batch)

    def _bind_pieces(
        self,
        avals: PyTree,
        leaves: Callable[[int], Iterable[Iterable[Shard]]],
        ready: Prepared | None,
    ) -> None:
        pieces = () if ready is None else ready.gradient_pieces
        training, whole = self.store.training, self._options.memory_bytes
        held = check_params(avals)
        mesh = mesh_of(
            zip(param_names(avals), [leaf.sharding for leaf in held], strict=True)
        )
        check_mesh(mesh, self._options.policy)
        plain = without_shardings(avals)
        update = trace_optimizer(self._tx, plain, self._options.extra_args)
        passes_for(update, pieces)
        first = trace_init(self._tx, plain)
        scalars, inputs = initial_inputs(first, jax.tree.leaves(plain))
        compress = self._options.compress
        check_compressed(compress, update)
        description = describe(
            update,
            first,
            part_counts(held, pieces),
            has_feedback=keeps_feedback(compress),
            forms=partial(gradient_forms, compress),
        )
        made: Iterator[Iterable[Shard]] = iter(())
        if training.commit is None:
            check = None
            if ready is not None:
                check = self._binder.check(ready, plain, training.shape(description))
            made = iter(self._making(leaves, check))
        self._params = avals
        if training.bind(description, may_create=True, uses_budget=False):
            training.opened.limit_memory(whole // _INIT_SHARE)
            for number in range(len(held)):
                # The next leaf is made in its memory.
                self._initialise(description, number, next(made), inputs[number])
            training.finish_initialisation(scalars)
        self._num_skipped = training.opened.finished.skipped_steps
        return_freed_memory()  # of traces and of the first params

    def _initialise(
        self,
        description: StoreDescription,
        leaf: int,
        shards: Iterable[Shard],
        inputs: ScalarInputs,
    ) -> None:
        for index, shard in shards:
            origin = [dim.start or 0 for dim in index]
            self.store.training.initialise(description, leaf, shard, origin, inputs)

    def _making(
        self,
        leaves: Callable[[int], Iterable[Iterable[Shard]]],
        check: Callable[[Mapping[str, int]], object] | None,
    ) -> Iterable[Iterable[Shard]]:
        """Returns the leaves to be made, if they and the program fit in memory."""

        def plan(limits: Mapping[str, int]) -> Iterable[Iterable[Shard]]:
            whole = limits["memory_bytes"]
            device_bytes = limits.get("device_memory_bytes") or whole
            made = leaves(min(device_bytes, whole - whole // _INIT_SHARE))
            if check is not None:
                check(limits)
            return made

        return planned_within(self._options.limits, plan)

    def _prepare(self, avals: PyTree, batch: PyTree) -> Prepared:
        options = self._options
        part = first_part(batch, options.micro_batches)
        ready = prepare(self._loss_fn, avals, part, has_aux=options.has_aux)
        check_mesh(ready.traced.mesh, options.policy)
        return ready

    # --- steps ---------------------------------------------------------------------

    def compile(self, batch: PyTree) -> Plan:
        """Plans and compiles for batches like this one; otherwise the first step does.

        Args:
          batch: Arrays, or shapes and dtypes.

        Raises:
          StreamError: The program cannot be cut to fit, or the kept plan is another's.
        """
        self._turns.settle()
        key = self._bound_for(batch)
        bound = self._turns.run(lambda check: self._take_turn(self._current(key)))
        return bound.runner.plan

    def __call__(
        self, batch: PyTree, extra_args: Mapping[str, Any] | None = None
    ) -> tuple[jax.Array, PyTree]:
        """Runs one step; blocks until all its gradients are handed out.

        Args:
          batch: As the loss function takes it.
          extra_args: This step's values of `stream`'s `extra_args`.

        Returns:
          The loss, and aux; None without `has_aux`.

        Raises:
          ValueError: `extra_args` has other names or shapes than `stream`'s.
          NonFiniteGradientError: The step was refused; the store stays where it was.
          BaseException: The exception that stopped the store.
        """
        check_not_traced(batch, extra_args)
        self._turns.settle()
        self.store.training.check()
        called_s = time.perf_counter()
        key = self._bound_for(batch)

        def body(check: Check) -> tuple[tuple[jax.Array, PyTree], float, int]:
            for function in self._functions:
                function.rest()
            bound = self._take_turn(self._current(key))
            with outside_mesh():
                results = self._step(bound, batch, extra_args, check)
            step_s = time.perf_counter() - called_s
            self._observe(bound, step_s)
            return results, step_s, bound.traffic.drive_write_bytes

        results, step_s, written_bytes = self._turns.run(body)
        self._wearing.add(step_s, written_bytes)
        return results

    def _step(
        self,
        bound: Bound,
        batch: PyTree,
        extra_args: Mapping[str, Any] | None,
        check: Check,
    ) -> tuple[jax.Array, PyTree]:
        training = self.store.training
        given = {**self._options.extra_args, **(extra_args or {})}
        began_s = time.perf_counter()
        training.join()
        self._waited_s = time.perf_counter() - began_s
        bound.begin()
        bound.updates.begin(given)
        try:
            loss, aux = self._run(bound, batch, check)
            self._values = bound.runner.values.counts()
            self._waited_s += bound.sums.waited_s or bound.updates.waited_s
            began_s = time.perf_counter()
            if "value" in given and "value" not in (extra_args or {}):
                given["value"] = loss
            has_advanced = bound.updates.finish(given, check)
            if has_advanced:
                bound.supply.end()
            self._num_skipped += not has_advanced
            self._waited_s += time.perf_counter() - began_s
        except BaseException:
            bound.sums.abandon()
            bound.updates.abandon()
            raise
        return loss, aux if self._options.has_aux else None

    def _observe(self, bound: Bound, step_s: float) -> None:
        if bound.planned is not None:
            peak_bytes = bound.runner.values.peak_bytes
            bound.planned.observe(step_s, self._values, peak_bytes, bound.supply.counts)

    def _run(
        self, bound: Bound, batch: PyTree, check: Check
    ) -> tuple[jax.Array, PyTree]:
        count, runner = self._options.micro_batches, bound.runner
        if count == 1:
            return self._run_part(bound, batch, bound.updates.hand_out, check)
        results, dispatched_s, waited_s = [], 0.0, 0.0
        for number, part in enumerate(parts_of(batch, count)):
            bound.sums.begin(number, bound.updates.hand_out)
            is_last = number == count - 1
            results.append(
                self._run_part(bound, part, bound.sums.put, check, is_last=is_last)
            )
            bound.sums.end()
            dispatched_s += runner.dispatched_s
            waited_s += runner.waited_s
        runner.dispatched_s, runner.waited_s = dispatched_s, waited_s
        return together(results)

    def _run_part(
        self,
        bound: Bound,
        batch: PyTree,
        sink: Callable[[Piece, Gradient], None],
        check: Check,
        *,
        is_last: bool = True,
    ) -> tuple[jax.Array, PyTree]:
        def fetch(number: int, piece: Piece) -> jax.Array:
            check()
            return bound.supply.get(number, piece)

        try:
            bound.supply.begin(check, is_last=is_last)
            loss, aux = bound.runner(
                batch,
                fetch,
                lambda piece, gradient: self._hand_out(sink, piece, gradient),
                bound.supply.done,
                bound.supply.again,
            )
        finally:
            bound.runner.settle()  # before the memory that they read is freed
            bound.supply.stop()
        assert loss is not None, "a step has a loss"
        return loss, aux

    def _hand_out(
        self,
        sink: Callable[[Piece, Gradient], None],
        piece: Piece,
        gradient: jax.Array,
    ) -> None:
        handed = handed_out(gradient)
        if not self._binder.device_limit.is_host:
            handed.copy_to_host_async()
        sink(piece, handed)

    def _take_turn(self, bound: Bound) -> Bound:
        """Gives the memory to a plan; the step before may have been of another."""
        if self._last is not None and self._last is not bound:
            self._last.supply.rest()
        self.store.training.opened.limit_memory(bound.store_bytes)
        self._last = bound
        return bound

    def _bound_for(self, batch: PyTree) -> Any:
        """Binds batches of this shape unless they are, and returns their key."""
        if self._params is None:
            raise StreamError(
                "jaxinf.stream: call step.init or step.load first; with a store that "
                "has a step they resume it"
            )
        leaves, tree = jax.tree.flatten(abstract(batch))
        key = (tree, *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
        if key not in self._bound:
            ready = self._prepare(self._params, batch)
            with outside_mesh():
                self._bound[key] = self._binder.bind(
                    ready, without_shardings(self._params)
                )
            return_freed_memory()  # of planning and compilation
        return key

    def _current(self, key: Any) -> Bound:
        """Returns what batches are bound to, as their planner has chosen by now."""
        bound = self._bound[key]
        if bound.planned is not None and bound.planned.is_changed:
            self.store.training.join()  # its updates may still take params
            self._bound[key] = self._binder.rebind(bound)
            if self._last is bound:
                self._last = self._bound[key]
        return self._bound[key]

    def function(self, fn: Callable[..., Any]) -> StreamedFunction:
        """Makes a function of the params without a gradient, in this step's memory.

        Args:
          fn: ``fn(params, batch)`` returns any pytree. Traced: no side effects.

        Returns:
          As `jaxinf.stream` without an optimizer; closed with this step.
        """
        options, last = self._options, self._last
        kept = 0 if last is None else last.runner.plan.kept_bytes
        held = 0 if last is None else last.store_bytes

        def share(limits: Mapping[str, int]) -> Mapping[str, int]:
            whole, shared = limits["memory_bytes"], dict(limits)
            if last is None or whole != options.memory_bytes:
                shared["memory_bytes"] -= max(held, whole // _INIT_SHARE)
            else:
                shared["memory_bytes"] -= held
            on_device = not self._binder.device_limit.is_host
            name = "device_memory_bytes" if on_device else "memory_bytes"
            if name in shared:
                shared[name] -= kept
            return shared

        stays = () if last is None else last.supply.stays
        made = StreamedFunction(
            fn,
            self.store,
            FunctionOptions(
                options.memory_bytes, options.device_memory_bytes, share=share
            ),
            shared=(self._binder.resident, stays),
            before=lambda: self._rest(made),
            turns=self._turns,
        )
        if self._params is not None:
            made.load(self._params)
        self._functions.append(made)
        return made

    def _rest(self, function: StreamedFunction) -> None:
        """Gives the memory of the step and of its other functions to one of them."""
        for bound in self._bound.values():
            bound.supply.rest()
        for other in self._functions:
            if other is not function:
                other.rest()

    # --- control -------------------------------------------------------------------

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

    @property
    def metrics(self) -> StreamMetrics | None:
        """Metrics of the last step; None before the first."""
        bound = self._last
        if bound is None or self.wear is None:
            return None
        counts, values = bound.supply.counts, self._values
        in_memory, on_drive = bound.updates.spilled_bytes
        sums_in_memory, sums_on_drive = bound.sums.spilled_bytes
        return StreamMetrics(
            fetched_drive_bytes=counts.num_bytes,
            fetched_memory_bytes=bound.reused_bytes,
            spilled_memory_bytes=in_memory + sums_in_memory,
            spilled_drive_bytes=on_drive + sums_on_drive,
            offloaded_drive_bytes=values.num_written_bytes,
            offloaded_host_bytes=values.num_out_bytes,
            prefetch_hit_rate=counts.hit_rate,
            waited_params_s=counts.waited_s,
            waited_values_s=values.waited_s,
            waited_device_s=bound.runner.waited_s,
            waited_updates_s=self._waited_s,
            dispatched_s=bound.runner.dispatched_s,
        )

    def annotate(self, payload: JsonValue) -> None:
        """Sets the caller's payload for the commit of the next step.

        Blocks until the last step has ended.

        Args:
          payload: JSON: position in the data, random seeds, ….

        Raises:
          ValueError, TypeError: It is not JSON.
        """
        training = self.store.training
        training.join()
        training.annotate(training.opened.finished.step + 1, payload)

    def close(self) -> None:
        """Finishes the commit in flight and closes the store; idempotent."""
        try:
            self._close_bound()
        finally:
            self.store.close()

    def _close_bound(self) -> None:
        self._turns.settle()
        for function in self._functions:
            function.close()
        for bound in self._bound.values():
            bound.close()
        self._binder.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._close_bound()
        finally:
            self.store.__exit__(kind, error, trace)
