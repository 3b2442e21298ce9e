"""The step that a user calls: traces, plans, compiles and runs batches of each shape.

    a batch of a new shape   trace ─► cut ─► plan ─► compile, in all processes or none
    each batch               `CompiledStep.run`, on a thread that Ctrl-C does not leave

Ctrl-C ends a step at its next check, and the store stays at its last step
(compiled_step.py). A step past its last check still commits; the interrupt is raised
all the same, and the loss is gone.

Invariant: a run that ends early leaves nothing under way. A function and a step in
memory are steps whose params have another home.
"""

import contextvars
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, Self, TypeAlias

import jax

from jaxinf import compat
from jaxinf.engine import Store
from jaxinf.errors import StreamError
from jaxinf.processes import Group, run_uninterrupted
from jaxinf.streaming.backend import StepBackend, without
from jaxinf.streaming.compiled_step import CompiledStep, StreamMetrics
from jaxinf.streaming.count import Count, count
from jaxinf.streaming.function import FunctionHome, nested_avals
from jaxinf.streaming.in_memory import MemoryHome
from jaxinf.streaming.in_store import StoreHome
from jaxinf.streaming.micro_batches import first_part, relative_weights
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.compiled import Executables
from jaxinf.streaming.plan.cut_to_fit import plan_or_advise, plan_step
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
from jaxinf.streaming.run import Check
from jaxinf.typing import PyTree

Home: TypeAlias = StoreHome | MemoryHome | FunctionHome
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
        self._avals, self._num_skipped = None, 0  # known from `init` or `load` on
        engine = home.engine
        self._group = Group("jaxinf.stream") if engine is None else engine.group
        self._group.may_hang = False  # it comes to the step's end
        self._under_way = threading.Lock()
        self._executables = Executables(options.deterministic)
        device_bytes = options.device_memory_bytes
        self._limit_of = cache(lambda mesh: limit_of(mesh, device_bytes))
        self._compiled: dict[Any, CompiledStep] = {}
        self._last: CompiledStep | None = None
        self._metrics: StreamMetrics | None = None
        self._weights = None if options.weights is None else jax.jit(options.weights)

    def __call__(
        self, batch: PyTree, extra_args: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one step; blocks until all its gradients are handed out.

        Args:
          batch: The batch that the loss function takes.
          extra_args: This step's values of `stream`'s `extra_args`.

        Returns:
          The loss, and aux, None without `has_aux`. Of a function its outputs.

        Raises:
          ValueError: `extra_args` has other names or shapes than `stream`'s.
          NonFiniteGradientError: The step was refused; the store stays where it was.
          BaseException: The exception that stopped the store.
        """
        check_not_traced(batch, extra_args)
        if not self._home.takes_extra_args:
            without(extra_args=extra_args or None)
        compiled, options = self._compiled_for(batch), self._options

        def run(check: Check) -> tuple[Any, PyTree]:
            self._take_turn(compiled)
            with outside_mesh():
                shares = relative_weights(batch, options.micro_batches, self._weights)
                loss, aux, has_changed = compiled.run(
                    batch, shares, options.extra_args, extra_args or {}, check
                )
            self._metrics = compiled.metrics
            self._num_skipped += self._home.has_loss and not has_changed
            return loss, aux

        loss, aux = self._run_whole(run)
        if not self._home.has_loss:
            return aux
        return loss, aux if options.has_aux else None

    def _take_turn(self, compiled: CompiledStep) -> None:
        """Gives steps of one shape the memory for reading, which others have had."""
        if self._last is not None and self._last is not compiled:
            self._last.free_memory()
        self._last = compiled
        compiled.limit_store(compiled.plan.store_bytes)

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped for a non-finite gradient, with ``"skip"``."""
        return self._num_skipped

    @property
    def metrics(self) -> StreamMetrics | None:
        """Metrics of the last step; None before the first."""
        return self._metrics

    # --- Ctrl-C ----------------------------------------------------------------------

    def _run_whole(self, body: Callable[[Check], Any]) -> Any:
        """Runs what no interrupt leaves half-way; blocks, and returns what it returns.

        An interrupt ends it at its next check. A second one is raised at once, and the
        body ends by itself before the next one begins.

        Raises:
          StreamError: Another thread runs one.
        """
        given_up, results = threading.Event(), list[Any]()
        config: Any = jax.config  # what is set for this thread alone counts, too
        device, x64 = config.jax_default_device, config.jax_enable_x64
        context = contextvars.copy_context()

        def check() -> None:
            if given_up.is_set():
                raise KeyboardInterrupt

        def run() -> None:
            check()
            if not self._under_way.acquire(blocking=False):
                raise StreamError(
                    "jaxinf.stream: expected one thread, found a step under way in "
                    "another; a step and its functions run one at a time, so call them "
                    "from one thread, or hold a lock"
                )
            try:
                with jax.default_device(device), jax.enable_x64(x64):
                    results.append(context.run(body, check))
            finally:
                self._under_way.release()

        try:
            run_uninterrupted(run, given_up.set)
        except KeyboardInterrupt as interrupt:
            self._add_note(interrupt)
            raise
        return results.pop()

    def _add_note(self, interrupt: KeyboardInterrupt) -> None:
        engine = self._home.engine
        if engine is not None and self._home.has_loss and engine.has_files:
            interrupt.add_note(
                f"{engine.path}: step {engine.files.commit.step} is committed; closing "
                "the store commits the steps that have finished since. Run the same "
                "program again to go on after them"
            )

    def _settle(self) -> None:
        """Waits for a step that a second interrupt has left."""
        if self._under_way.locked():
            self._run_whole(lambda check: None)

    # --- params and state ----------------------------------------------------------

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
          args: Arguments of `init_fn`, such as a random key.
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
        self._start(*self._home.from_init(init_fn, args, shardings), batch)

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
          batch: A batch, or its shapes and dtypes, as for `init`.
          shardings: Shardings, as for `init`, of arrays that are on no device yet.

        Raises:
          StoreMismatchError: The store holds another tree or optimizer.
          BudgetError: As for `init`.
          StreamError: A leaf is not an array of floating-point numbers, or the loss
            function cannot be streamed; nothing is written.
        """
        check_params(params)
        self._start(*self._home.from_params(params, state, shardings), batch)

    def _start(self, avals: PyTree, make: Any, batch: PyTree) -> None:
        budget = Budget(self._options.memory_bytes, self._options.device_memory_bytes)
        ordered = None
        if batch is not None:
            ordered = self._trace(batch, avals)
            make_budget = partial(self._budget, ordered)
            budget = self._group.in_all("the memory of the device", make_budget)
        home = self._home
        with outside_mesh():
            if ordered is not None and home.store is None:  # else `start` plans it
                self._plan_or_advise(home.make_backend(ordered), budget)
            self._avals = home.start(avals, make, ordered, budget, self._plan_step)
        if home.engine is not None:
            self._num_skipped = home.engine.files.finished.skipped_steps
        if batch is not None:
            self._compiled_for(batch, ordered)
            self.compile(batch)

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
        if self._avals is None and not self._home.has_loss:
            self._avals = nested_avals(self.store)
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
        if self._home.store is not None:
            raise StreamError("step.state: it is in the store; use store.state(like=)")
        return self._home.state()

    def compile(self, batch: PyTree) -> Plan:
        """Plans and compiles for batches like this one; otherwise the first run does.

        Args:
          batch: Arrays, or shapes and dtypes.

        Raises:
          StreamError: The program cannot be cut to fit, or the saved plan is another's.
        """
        compiled = self._compiled_for(batch)
        self._run_whole(lambda check: self._take_turn(compiled))
        return compiled.plan

    @property
    def plan(self) -> Plan | None:
        """The plan of the last run, or of the first once it is planned; else None."""
        return None if self._last is None else self._last.plan

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
        if params is not None:
            check_params(params)
        avals = self._known_avals() if params is None else abstract(params)
        ordered = self._trace(batch, avals)
        with outside_mesh():
            backend = self._home.make_backend(ordered, is_new=params is not None)
            executables = Executables(self._options.deterministic, are_run=False)
            budget = self._budget(ordered, device)
            plan = self._plan_or_advise(backend, budget, executables=executables)
            return count(plan, backend)

    def free_memory(self) -> None:
        """Frees params and buffers until the next call; waits for updates."""
        self._settle()
        if self._last is not None:
            self._last.free_memory()
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
            for compiled in self._compiled.values():
                compiled.close()
            if home.store is None:
                self._compiled.clear()  # another step makes room anew
        finally:
            if home.store is not None and home.closes:
                home.store.__exit__(*error)

    # --- batches of one shape ------------------------------------------------------

    def _trace(self, batch: PyTree, avals: PyTree) -> OrderedProgram:
        options = self._options
        return order_program(
            self._fn,
            avals,
            first_part(batch, options.micro_batches),
            has_loss=self._home.has_loss,
            has_aux=options.has_aux,
        )

    def _budget(
        self, ordered: OrderedProgram, device: DeviceLimit | None = None
    ) -> Budget:
        """Returns the memory of a step, on a device whose own was looked at once."""
        device = device or self._limit_of(ordered.traced.mesh)
        options = self._options
        return Budget(options.memory_bytes, options.device_memory_bytes, device)

    def _plan_step(self, backend: StepBackend, budget: Budget, **choice: Any) -> Plan:
        """Plans a step; `choice` has further arguments of `plan_step`."""
        choice = {"executables": self._executables, "kept": backend.kept_cuts} | choice
        program, needs, options = backend.ordered, backend.needs, self._options
        return plan_step(program, needs, options, budget, group=self._group, **choice)

    def _plan_or_advise(
        self, backend: StepBackend, budget: Budget, **choice: Any
    ) -> Plan:
        """Plans a step; if memory does not suffice, the error names a budget."""
        plan = partial(self._plan_step, backend, **choice)
        return plan_or_advise(budget, plan, advises=self._group.is_alone)

    def _compiled_for(
        self, batch: PyTree, ordered: OrderedProgram | None = None
    ) -> CompiledStep:
        """Returns the steps of batches of this shape; plans and compiles new ones."""
        self._settle()
        leaves, tree = jax.tree.flatten(abstract(batch))
        key = (tree, *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
        compiled, choice = self._compiled.get(key), dict[str, Any]()
        if compiled is not None and (recomputed := compiled.choose_recomputed()):
            choice = {"kept": compiled.plan.cuts, "recomputed": recomputed}
            self._compiled.pop(key).close()
            compiled = self._last = None
        if compiled is None:
            compiled = self._plan_and_compile(batch, ordered, choice)
            self._compiled[key] = compiled
            return_freed_memory()  # of planning and compilation
        return compiled

    def _plan_and_compile(
        self, batch: PyTree, ordered: OrderedProgram | None, choice: Mapping[str, Any]
    ) -> CompiledStep:
        """Plans and compiles the steps of a batch in all processes, or in none.

        What one process is refused, by its device or its drive, all are: none goes on
        to a step, where it would wait for the others.
        """
        group, executables = self._group, self._executables

        def trace_here() -> tuple[StepBackend, Budget]:
            program = ordered or self._trace(batch, self._known_avals())
            with outside_mesh():
                return self._home.make_backend(program), self._budget(program)

        backend, budget = group.in_all("the trace of a function", trace_here)
        with outside_mesh(), ExitStack() as closing:
            plan = self._plan_or_advise(backend, budget, **choice)

            def compile_here() -> CompiledStep:
                compiled = CompiledStep(
                    plan, backend, group, executables, is_measured=not choice
                )
                closing.callback(compiled.close)
                return compiled

            compiled = group.in_all("the room for a step", compile_here)
            closing.pop_all()
        return compiled


def check_not_traced(*trees: PyTree) -> None:
    """Refuses a call inside `jax.jit`, `jax.grad`, `jax.vmap`, …: StreamError."""
    leaves = jax.tree.leaves(trees)
    is_traced = any(isinstance(leaf, compat.Tracer) for leaf in leaves)
    if is_traced or compat.is_in_transformation():
        raise StreamError(
            "jaxinf.stream: a step or function reads the store and runs programs of "
            "its own, found a call inside a function that JAX traces (jit, grad, vmap, "
            "scan, …); call it outside. Its gradients are taken inside already"
        )
