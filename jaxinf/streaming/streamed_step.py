"""A training step that never has all params in memory, made by `jaxinf.stream`.

    batch ─► programs, one after another ─► loss
              ▲ params read ahead   │ gradients, each as soon as it is complete
              └──────── store ◄─────┘ updated near storage; one commit a step

Invariant: a step writes updates to the slot that is not committed. So a crash at any
  point leaves the last committed step. A chunk that a step overwrites in place is
  written after the step's last read of it. Of a new store, nothing is written before
  its leaves and the program are known to fit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import optax
from jax.sharding import Mesh

from jaxinf.csd import ScalarInputs
from jaxinf.engine import (
    FirstParams,
    Store,
    StoreDescription,
    check_processes,
    describe,
    distinct_shards,
    engine_of,
    part_holders,
)
from jaxinf.errors import StreamError
from jaxinf.program import UpdateProgram, averaged, trace_init
from jaxinf.store import required_bytes
from jaxinf.streaming.count import Count, count
from jaxinf.streaming.plan.fit import Prepared
from jaxinf.streaming.plan.memory import check_mesh, return_freed_memory
from jaxinf.streaming.plan.options import StepOptions
from jaxinf.streaming.planning import plan_within, within
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.initial import (
    BUFFERS_SHARE,
    Shard,
    initial_inputs,
    trace_params,
)
from jaxinf.streaming.program.meshes import (
    mesh_of,
    on_mesh,
    outside_mesh,
    sharded_like,
    without_shardings,
)
from jaxinf.streaming.program.trace import abstract, check_params
from jaxinf.streaming.program.units import part_counts
from jaxinf.streaming.step import BoundStep, Step
from jaxinf.streaming.update.near_storage import passes_for, trace_optimizer
from jaxinf.streaming.update.store_sink import StoreSink
from jaxinf.typing import PyTree

_MakeLeaves: TypeAlias = Callable[[int], Iterable[Iterable[Shard]]]
"""Returns the shards of each leaf, made in so many bytes."""


class StreamedStep(Step):
    """Made by `jaxinf.stream`; also a context manager. Not thread-safe.

    ``loss, aux = step(batch)`` runs one step and starts its commit; aux is None without
    `has_aux`.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        tx: optax.GradientTransformation,
        store: Store,
        options: StepOptions,
    ) -> None:
        super().__init__(options)
        self.store = store
        self._loss_fn, self._tx = loss_fn, averaged(tx, options.average)
        self._params: PyTree | None = None
        self._update: tuple[PyTree, UpdateProgram] | None = None  # of these params
        self._ready: Prepared | None = None  # traced by `init`, bound at its end

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
            only for a new store, one leaf at a time, with the bits of jitted
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
        maker = trace_params(init_fn, *args)
        self._start(sharded_like(maker.avals, shardings), maker.compile, batch)

    def load(
        self, params: PyTree, *, batch: PyTree = None, shardings: PyTree = None
    ) -> None:
        """Makes the store's first step from given params, or resumes a store.

        Args:
          params: Tree of arrays; memory-mapped ones are read leaf by leaf. Those on
            several devices say how the store's leaves are sharded over them.
          batch: As for `init`.
          shardings: As for `init`, for arrays that are not on the devices yet.

        Raises:
          StoreMismatchError: The store holds another tree or optimizer.
          BudgetError: As for `init`.
          StreamError: A leaf is not an array of floating-point numbers, or the loss
            function cannot be streamed; nothing is written.
        """
        check_params(params)
        leaves = jax.tree.leaves(params)
        avals = sharded_like(abstract(params), shardings)
        self._start(avals, lambda _: map(distinct_shards, leaves), batch)

    def params(self, like: PyTree = None) -> PyTree:
        """Returns the params of the last finished step; blocks until they are read.

        Args:
          like: Tree of arrays, or of shapes and dtypes, that gives each leaf its dtype
            and sharding; by default that of `init` or `load`.

        Raises:
          StoreMismatchError: `like` is another tree than the store's.
          StreamError: Without `like`, before `init` and `load`.
          BaseException: The exception that stopped the store.
        """
        self._thread.settle()
        return self.store.params(self._started() if like is None else like)

    # --- steps ---------------------------------------------------------------------

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
        return self._call(batch, extra_args)

    def rest(self) -> None:
        """Also frees the store's buffers; waits for the updates of the last step."""
        super().rest()
        engine = engine_of(self.store)
        if self._last is not None:
            engine.join()
            engine.opened.limit_memory(0)

    # --- control -------------------------------------------------------------------

    @property
    def num_skipped(self) -> int:
        """Number of steps skipped for a non-finite gradient, with ``"skip"``."""
        return self._num_skipped

    def __exit__(self, *error: Any) -> None:
        """Finishes the commit in flight and closes the store, as `close` does."""
        try:
            super().__exit__(*error)
        finally:
            self.store.__exit__(*error)

    # --- what configures a step ----------------------------------------------------

    def _started(self) -> PyTree:
        """Returns shapes, dtypes and shardings of the params."""
        if self._params is None:
            raise StreamError(
                "jaxinf.stream: call step.init or step.load first; with a store that "
                "has a step they resume it"
            )
        return self._params

    def _trace(self, batch: PyTree, params: PyTree = None) -> Prepared:
        if params is None:
            params = self._started()
            ready, self._ready = self._ready, None
            if ready is not None:
                return ready
        ready = self._prepared(self._loss_fn, params, batch)
        self._check_mesh(ready.traced.mesh)
        return ready

    def _check_mesh(self, mesh: Mesh | None) -> None:
        check_mesh(mesh, self._options.policy)
        check_processes(engine_of(self.store).group, mesh)

    def _sink(self, ready: Prepared, options: StepOptions) -> StoreSink:
        update, shape = self._optimizer(self._started()), engine_of(self.store).opened
        return StoreSink(self.store, ready, update, shape, options)

    def _count(self, ready: Prepared, params: PyTree, options: StepOptions) -> Count:
        avals = self._started() if params is None else params
        engine = engine_of(self.store)
        _, description = self._described(avals, ready.gradient_pieces)
        shape = engine.shape(description)
        num_bytes = sum(required_bytes(shape.directory).values())
        sink = StoreSink(self.store, ready, self._optimizer(avals), shape, options)
        return count(sink, ready, num_bytes, num_bytes * (engine.commit is not None))

    def _optimizer(self, params: PyTree) -> UpdateProgram:
        if self._update is None or self._update[0] is not params:
            plain = without_shardings(params)
            made = trace_optimizer(self._tx, plain, self._options.extra_args)
            self._update = params, made
        return self._update[1]

    def _take_turn(self, key: Any) -> BoundStep:
        engine_of(self.store).health.check()
        bound = super()._take_turn(key)
        engine, store_bytes = engine_of(self.store), bound.plan.store_bytes
        if store_bytes != engine.opened.memory_bytes:
            engine.join()
            engine.opened.limit_memory(store_bytes)
        return bound

    def _join(self) -> None:
        engine_of(self.store).join()

    # --- the first step of a store -------------------------------------------------

    def _start(self, avals: PyTree, leaves: _MakeLeaves, batch: PyTree) -> None:
        """Makes the first step, or resumes; compiles for a batch if there is one."""
        try:
            self._ready = None if batch is None else self._trace(batch, avals)
            with outside_mesh():
                self._start_pieces(avals, leaves)
            if batch is not None:
                self.compile(batch)
        finally:
            self._ready = None

    def _start_pieces(self, avals: PyTree, leaves: _MakeLeaves) -> None:
        engine, ready = engine_of(self.store), self._ready
        check_params(avals)
        self._check_mesh(mesh_of(avals))
        pieces = () if ready is None else ready.gradient_pieces
        first, description = self._described(avals, pieces)
        plain = jax.tree.leaves(without_shardings(avals))
        scalars, inputs = initial_inputs(first, plain)
        made: Iterator[Iterable[Shard]] = iter(())
        if engine.commit is None:
            plan = None
            if ready is not None:
                shape = engine.shape(description)
                what = self.store, ready, self._optimizer(avals), shape, self._options
                make, group = partial(StoreSink, *what), self._together.group
                sink = group.in_all("the optimizer's programs", make)
                plan = partial(plan_within, sink, ready)
            made = within(self._options, partial(self._fitting, leaves, plan))
        self._params = avals
        if engine.bind(description, may_create=True, uses_budget=False):
            for leaf, own in inputs.items():
                self._write_leaf(description, leaf, made, own)
            engine.finish_initialisation(scalars)
        self._num_skipped = engine.opened.finished.skipped_steps
        return_freed_memory()  # of traces and of the first params

    def _fitting(
        self,
        leaves: _MakeLeaves,
        plan: Callable[[Mapping[str, int]], object] | None,
        budgets: Mapping[str, int],
    ) -> Iterator[Iterable[Shard]]:
        """Returns the leaves to be made, if they and the program fit in budgets."""
        host_bytes, group = budgets["memory_bytes"], self._together.group
        num_bytes = min(budgets.get("device_memory_bytes") or host_bytes, host_bytes)
        made = group.in_all("the first params", lambda: leaves(num_bytes))
        if plan is not None:
            plan(budgets)
        return iter(made)

    def _described(
        self, avals: PyTree, pieces: Sequence[Piece]
    ) -> tuple[Any, StoreDescription]:
        """Returns the optimizer's first state, traced, and the store for a program.

        Args:
          avals: Shapes, dtypes and shardings of the params.

        Raises:
          UnsupportedTransformError: The optimizer needs too much of all leaves.
        """
        options, update = self._options, self._optimizer(avals)
        is_alone = options.together.group.is_alone
        passes_for(update, pieces, is_alone=is_alone)
        held, holders = jax.tree.leaves(avals), list[Any]()
        first = trace_init(self._tx, without_shardings(avals))
        counts = part_counts(held, pieces)
        if not is_alone:  # the processes that have each part of each leaf
            pairs = zip(on_mesh(held, mesh_of(avals)), counts, strict=True)
            holders = [part_holders(x.sharding, x.shape, own) for x, own in pairs]
        how = {"average": options.average, "compression": options.compress}
        return first, describe(update, first, counts, holders=holders, **how)

    def _write_leaf(
        self,
        description: StoreDescription,
        leaf: int,
        made: Iterator[Iterable[Shard]],
        inputs: ScalarInputs,
    ) -> None:
        """Makes the next leaf, and writes its params and first state; blocks."""
        engine = engine_of(self.store)
        engine.opened.mover.drain()
        engine.opened.fleet.limit_memory(0)  # idle buffers leave the leaf their memory
        shards = next(made)
        engine.opened.limit_memory(self._options.memory_bytes // BUFFERS_SHARE)
        for index, shard in shards:
            origin = [dim.start or 0 for dim in index]
            engine.initialise(description, [FirstParams(leaf, shard, origin, inputs)])
