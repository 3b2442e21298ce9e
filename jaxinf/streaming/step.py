"""One step: a plan, a source of params and a sink of gradients, by the batch's shape.

    batch ─► bound to its shape? ─► programs, one after another ─► results
                                     ▲ params      │ gradients
                                  a source         a sink

Invariant: a run that ends early leaves nothing under way. A function and a step in
memory are steps whose params have another home.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, Self, TypeAlias

import jax

from jaxinf.engine import Store
from jaxinf.errors import StreamError
from jaxinf.processes import Group
from jaxinf.streaming.compiled_step import CompiledStep, StreamMetrics, compile_step
from jaxinf.streaming.count import Count, count
from jaxinf.streaming.ctrl_c import Check, check_not_traced, step_thread
from jaxinf.streaming.endpoints import Endpoints, without
from jaxinf.streaming.function import ReadStore, nested_avals
from jaxinf.streaming.in_memory import InMemory
from jaxinf.streaming.in_store import InStore
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.choice import NUM_MEASURED, StepTimes, segments_to_recompute
from jaxinf.streaming.plan.compiled import Executables
from jaxinf.streaming.plan.cut_to_fit import plan_within, with_advice
from jaxinf.streaming.plan.memory import (
    Budget,
    DeviceLimit,
    limit_of,
    return_freed_memory,
)
from jaxinf.streaming.plan.options import Options
from jaxinf.streaming.program.lifetimes import OrderedProgram, order_program
from jaxinf.streaming.program.meshes import outside_mesh
from jaxinf.streaming.program.trace import abstract, check_params
from jaxinf.streaming.run import first_part, shares_of
from jaxinf.transfer import ByteCounts
from jaxinf.typing import PyTree

Home: TypeAlias = InStore | InMemory | ReadStore
"""Where params and state are."""


class StreamedStep:
    """A step, or a function's calls; also a context manager. Not thread-safe.

    Made by `jaxinf.stream`, `stream_in_memory` and `stream_function`.
    ``loss, aux = step(batch)`` runs one step, and with a store starts its commit; aux
    is None without `has_aux`. ``outputs = f(batch)`` are those of a function for the
    params of the store's last finished step, and no step may run meanwhile.
    """

    def __init__(self, fn: Callable[..., Any], home: Home, options: Options) -> None:
        return_freed_memory()
        self._fn, self._home, self._options = fn, home, options
        self._what = "a step" if home.has_loss else "a function"
        self._avals, self._num_skipped = None, 0  # known from `init` or `load` on
        engine = home.engine
        self._group = Group("jaxinf.stream") if engine is None else engine.group
        self._group.may_hang = False  # it comes to the step's end
        self._on_thread, self._settle = step_thread()
        self._executables = Executables(options.deterministic)
        device_bytes = options.device_memory_bytes
        self._limit_of = cache(lambda mesh: limit_of(mesh, device_bytes))
        self._bound: dict[Any, CompiledStep] = {}
        self._last: CompiledStep | None = None
        self._metrics: StreamMetrics | None = None
        weights = options.weights
        self._weights = None if weights is None else jax.jit(weights)

    # --- params --------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """The store of the params.

        Raises:
          StreamError: They are in memory.
        """
        if self._home.store is None:
            raise StreamError("step.store: params and state are in memory")
        return self._home.store

    def init(
        self,
        init_fn: Callable[..., PyTree],
        *args: Any,
        batch: PyTree = None,
        shardings: PyTree = None,
    ) -> None:
        """Makes the first params, leaf by leaf in a new store; resumes one that is not.

        Args:
          init_fn: ``init_fn(*args)`` returns the params. For a store it is traced, and
            computed only if that is new, one leaf at a time, with the bits of jitted
            `init_fn`.
          args: Its arguments, such as a random key.
          batch: Arrays, or shapes and dtypes, of a batch. With it a new store's chunks
            suit the program: each slice of stacked layers has its own. Its steps are
            planned and compiled here, before anything is written.
          shardings: Tree of ``NamedSharding`` like the params, for several devices.

        Raises:
          StoreMismatchError: The store holds another tree or optimizer.
          BudgetError: With `batch`, memory does not suffice for a step, or for making
            a leaf; names a budget that does. Nothing is written.
          StreamError: `init_fn` is not a function, or the loss function cannot be
            streamed; nothing is written.
        """
        self._start(*self._home.first(init_fn, args, shardings), batch)

    def load(
        self,
        params: PyTree,
        *,
        state: PyTree = None,
        batch: PyTree = None,
        shardings: PyTree = None,
    ) -> None:
        """Makes the first step from given params, or resumes a store.

        A function is told the tree of its params, if that is not made of nested dicts
        alone; values are not used.

        Args:
          params: Tree of arrays; memory-mapped ones are read leaf by leaf. Those on
            several devices say how the store's leaves are sharded over them.
          state: The optimizer's state, for a step in memory; by default the first one.
          batch: As for `init`.
          shardings: As for `init`, for arrays that are not on the devices yet.

        Raises:
          StoreMismatchError: The store holds another tree or optimizer.
          BudgetError: As for `init`.
          StreamError: A leaf is not an array of floating-point numbers, or the loss
            function cannot be streamed; nothing is written.
        """
        check_params(params)
        self._start(*self._home.given(params, state, shardings), batch)

    def _start(self, avals: PyTree, make: Any, batch: PyTree) -> None:
        budget = Budget(self._options.memory_bytes, self._options.device_memory_bytes)
        ready = None
        if batch is not None:
            ready = self._trace(batch, avals)
            own = partial(self._budget, ready)
            budget = self._group.in_all("the memory of the device", own)
        home = self._home
        with outside_mesh():
            if ready is not None and home.store is None:
                self._plan(ready, home.endpoints(ready), budget)  # or it is refused
            self._avals = home.start(avals, make, ready, budget, self._plan_within)
        if home.engine is not None:
            self._num_skipped = home.engine.opened.finished.skipped_steps
        if batch is not None:
            self._compile(batch, ready)

    def params(self, like: PyTree = None) -> PyTree:
        """Returns the params that the next call reads; blocks until they are read.

        Later steps leave them alone.

        Args:
          like: Tree of arrays, or of shapes and dtypes, that gives each leaf its dtype
            and sharding; by default that of `init` or `load`.

        Raises:
          StoreMismatchError: `like` is another tree than the store's.
          StreamError: There are none before `init` and `load`.
          BaseException: The exception that stopped the store.
        """
        self._settle()
        if like is None and self._home.store is not None:
            like = self._known_avals()
        return self._home.params(like)

    def _known_avals(self) -> PyTree:
        """Shapes, dtypes and shardings of the params; of a function in any case."""
        home = self._home
        if self._avals is None and isinstance(home, ReadStore):
            self._avals = nested_avals(home.store)
        if self._avals is None:
            raise StreamError(
                "jaxinf.stream: call step.init or step.load first; with a store that "
                "has a step they resume it"
            )
        return self._avals

    def state(self) -> PyTree:
        """Returns optax's state of a step in memory, which later steps leave alone.

        Raises:
          StreamError: It is in a store.
        """
        self._settle()
        if not isinstance(self._home, InMemory):
            raise StreamError("step.state: it is in the store; use store.state(like=)")
        return self._home.state()

    def compile(self, batch: PyTree) -> Plan:
        """Plans and compiles for batches like this one; otherwise the first run does.

        Args:
          batch: Arrays, or shapes and dtypes.

        Raises:
          StreamError: The program cannot be cut to fit, or the saved plan is another's.
        """
        return self._compile(batch)

    def _compile(self, batch: PyTree, ready: OrderedProgram | None = None) -> Plan:
        self._settle()
        bound = self._bind(batch, ready)
        self._on_thread(lambda check: self._take_turn(bound))
        return bound.plan

    @property
    def plan(self) -> Plan | None:
        """The plan of the last run, or of the first once it is planned; else None."""
        return None if self._last is None else self._last.plan

    @property
    def traffic(self) -> ByteCounts | None:
        """Bytes that the plan moves on the drive in a step; None before the first.

        An optimizer that leaves state alone in some steps moves fewer in those. Of
        state that stays in a memory, what commits alone write is divided among their
        steps; with ``durability="checkpoint"`` it does not count.
        """
        return None if self._last is None else self._last.plan.traffic

    @property
    def num_skipped(self) -> int:
        """Number of steps skipped for a non-finite gradient, with ``"skip"``."""
        return self._num_skipped

    @property
    def metrics(self) -> StreamMetrics | None:
        """Metrics of the last step; None before the first."""
        return self._metrics

    def dry_run(
        self,
        batch: PyTree,
        params: PyTree = None,
        *,
        device: DeviceLimit | None = None,
    ) -> Count:
        """Counts what a step takes and moves; blocks while its programs are compiled.

        Nothing is written, and params are never made. Programs are compiled for what
        they take alone, in less time than for a step.

        Args:
          batch: Arrays, or shapes and dtypes.
          params: Shapes and dtypes, such as of ``jax.eval_shape(init_fn, key)``; by
            default the step's, which `init` or `load` has set.
          device: The memory of another device than JAX's, to plan for.

        Raises:
          BudgetError: Memory does not suffice; names a budget that does.
          StreamError: The loss function cannot be streamed, or there are no params.
        """
        self._settle()
        if params is not None:
            check_params(params)
        avals = self._known_avals() if params is None else abstract(params)
        ready = self._trace(batch, avals)
        with outside_mesh():
            ends = self._home.endpoints(ready, is_new=params is not None)
            own = Executables(self._options.deterministic, are_run=False)
            budget = self._budget(ready, device)
            return count(self._plan(ready, ends, budget, executables=own), ends)

    def rest(self) -> None:
        """Frees params and buffers until the next call; waits for updates."""
        self._settle()
        if self._last is not None:
            self._last.rest()
            self._last.limit_store(0)

    def close(self) -> None:
        """Frees memory and files, and ends a step's store. Idempotent."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        home = self._home
        try:
            self._settle()
            for bound in self._bound.values():
                bound.close()
            if home.store is None:
                self._bound.clear()  # another step makes room anew
        finally:
            if home.store is not None and home.closes:
                home.store.__exit__(*error)

    # --- batches of one shape ------------------------------------------------------

    def _trace(self, batch: PyTree, avals: PyTree) -> OrderedProgram:
        """Traces the function for batches like this one."""
        options = self._options
        return order_program(
            self._fn,
            avals,
            first_part(batch, options.micro_batches),
            has_loss=self._home.has_loss,
            has_aux=options.has_aux,
        )

    def _budget(
        self, ready: OrderedProgram, device: DeviceLimit | None = None
    ) -> Budget:
        """Returns the memory of a step, on a device whose own was looked at once."""
        device = device or self._limit_of(ready.traced.mesh)
        options = self._options
        return Budget(options.memory_bytes, options.device_memory_bytes, device)

    def _plan_within(
        self, ready: OrderedProgram, ends: Endpoints, budget: Budget, **how: Any
    ) -> Plan:
        how = {"executables": self._executables, "kept": ends.kept_cuts, **how}
        needs, group = ends.needs, self._group
        plan = plan_within(ready, needs, self._options, budget, group=group, **how)
        traffic = ByteCounts(plan.away_bytes, plan.away_bytes)
        if ends.updates is not None:
            traffic = ends.updates.traffic(plan)
        return replace(plan, traffic=traffic)

    def _plan(
        self, ready: OrderedProgram, ends: Endpoints, budget: Budget, **how: Any
    ) -> Plan:
        """Returns a plan; if memory does not suffice, the error names a budget."""
        plan = partial(self._plan_within, ready, ends, **how)
        return with_advice(budget, plan, advises=self._group.is_alone)

    def _bind(self, batch: PyTree, ready: OrderedProgram | None = None) -> CompiledStep:
        """Returns the steps of batches of this shape; plans and compiles new ones.

        Args:
          ready: The function, if it was traced for this batch.
        """
        leaves, tree = jax.tree.flatten(abstract(batch))
        key = (tree, *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
        bound, times, how = self._bound.get(key), list[StepTimes](), dict[str, Any]()
        if bound is not None and len(bound.times) == NUM_MEASURED:
            times, again = bound.times, segments_to_recompute(bound.plan, bound.times)
            times.append(times[-1])  # it is chosen once
            if again:
                how = {"kept": partial(tuple, bound.plan.cuts), "again": again}
                self._bound.pop(key).close()
                bound = self._last = None
        if bound is None:
            bound = self._bound[key] = self._plan_and_compile(batch, ready, times, how)
            return_freed_memory()  # of planning and compilation
        return bound

    def _plan_and_compile(
        self,
        batch: PyTree,
        ready: OrderedProgram | None,
        times: list[StepTimes],
        how: Mapping[str, Any],
    ) -> CompiledStep:
        """Plans and compiles the steps of a batch in all processes, or in none.

        What one process is refused, by its device or its drive, all are: none goes on
        to a step, where it would wait for the others.
        """
        group, made = self._group, list[CompiledStep]()

        def trace_here() -> tuple[OrderedProgram, Endpoints, Budget]:
            traced = ready or self._trace(batch, self._known_avals())
            with outside_mesh():
                return traced, self._home.endpoints(traced), self._budget(traced)

        traced, ends, budget = group.in_all(f"the trace of {self._what}", trace_here)
        with outside_mesh():
            plan = self._plan(traced, ends, budget, **how)

            def compile_here() -> None:
                known = self._executables
                made.append(compile_step(plan, traced, ends, group, known, times))

            try:
                group.in_all("the room for a step", compile_here)
            except BaseException:
                for one in made:
                    one.close()
                raise
        return made[0]

    # --- a run ---------------------------------------------------------------------

    def __call__(
        self, batch: PyTree, extra_args: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one step; blocks until all its gradients are handed out.

        Args:
          batch: As the loss function takes it.
          extra_args: This step's values of `stream`'s `extra_args`.

        Returns:
          The loss, and aux, None without `has_aux`. Of a function its outputs.

        Raises:
          ValueError: `extra_args` has other names or shapes than `stream`'s.
          NonFiniteGradientError: The step was refused; the store stays where it was.
          BaseException: The exception that stopped the store.
        """
        check_not_traced(batch, extra_args)
        if not isinstance(self._home, InStore):
            without(extra_args=extra_args or None)
        self._settle()
        bound, options = self._bind(batch), self._options

        def body(check: Check) -> tuple[Any, PyTree]:
            self._take_turn(bound)
            with outside_mesh():
                shares = shares_of(batch, options.micro_batches, self._weights)
                own_args = extra_args or {}
                done = bound.run(batch, shares, options.extra_args, own_args, check)
            self._metrics = done.metrics
            self._num_skipped += self._home.has_loss and not done.is_done
            return done.loss, done.aux

        loss, aux = self._on_thread(body)
        if not self._home.has_loss:
            return aux
        return loss, aux if options.has_aux else None

    def _take_turn(self, bound: CompiledStep) -> None:
        """Gives steps the memory for reading, which those of before have."""
        if self._last is not None and self._last is not bound:
            self._last.rest()
        self._last = bound
        bound.limit_store(bound.plan.store_bytes)
