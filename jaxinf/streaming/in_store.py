"""Params and the optimizer's state of a step in a store, made leaf by leaf.

    batch ─► programs, one after another ─► loss
              ▲ params read ahead   │ gradients, each as soon as it is complete
              └──────── store ◄─────┘ updated near storage; one commit a step

Invariant: a step writes updates to the slot that is not committed. So a crash at any
  point leaves the last committed step. A chunk that a step overwrites in place is
  written after the step's last read of it. Of a new store, nothing is written before
  its leaves and the program are known to fit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxinf.engine import (
    Engine,
    InitialParams,
    Store,
    StoreDescription,
    bind_optimizer,
    check_processes,
    describe_store,
    engine_of,
    held_shards,
    initialise_leaves,
    shards_with_origin,
    subgroups_of,
)
from jaxinf.errors import StreamError
from jaxinf.program import LeafInputs, UpdateProgram, trace_init, trace_update
from jaxinf.store import Shards
from jaxinf.streaming.endpoints import Endpoints
from jaxinf.streaming.move.params import read_units
from jaxinf.streaming.move.scratch import scratch_files
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.cut_to_fit import with_advice
from jaxinf.streaming.plan.kept import kept_cuts
from jaxinf.streaming.plan.memory import Budget, return_freed_memory
from jaxinf.streaming.plan.options import Options
from jaxinf.streaming.program.initial import BUFFERS_SHARE, MakeLeaves, trace_params
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.streaming.program.meshes import (
    mesh_of,
    mesh_text,
    on_mesh,
    sharded_like,
    without_shardings,
)
from jaxinf.streaming.program.trace import abstract, check_params
from jaxinf.streaming.program.units import part_counts
from jaxinf.streaming.update.apply_gradients import StoreSink
from jaxinf.streaming.update.update_plan import (
    UpdatePlan,
    initial_inputs,
    passes_for,
)
from jaxinf.typing import PyTree


@dataclass(frozen=True)
class InStore:
    """The home of a step whose params and state a store has.

    Attributes:
      tx: The optimizer, with the average of the params.
      traced: What it is as a program, by the types of the params.
    """

    tx: optax.GradientTransformation
    store: Store
    options: Options
    traced: dict[Any, UpdateProgram] = field(default_factory=dict)

    has_loss = closes = True

    @cached_property
    def engine(self) -> Engine:
        return engine_of(self.store)

    # --- params --------------------------------------------------------------------

    def first(
        self, init_fn: Callable[..., PyTree], args: Sequence[Any], shardings: PyTree
    ) -> tuple[PyTree, MakeLeaves]:
        """Returns the avals of the first params, and what makes them: for `start`."""
        avals, make = trace_params(init_fn, *args)
        return sharded_like(avals, shardings), make

    def given(
        self, params: PyTree, state: PyTree, shardings: PyTree
    ) -> tuple[PyTree, MakeLeaves]:
        """Returns the avals of params that exist, and what gives them: for `start`."""
        if state is not None:
            raise ValueError("state: use store.load(params, state, step=…) instead")
        leaves = jax.tree.leaves(params)
        return sharded_like(abstract(params), shardings), lambda _: leaves

    def params(self, like: PyTree) -> PyTree:
        return self.store.params(like)

    # --- a step --------------------------------------------------------------------

    def endpoints(self, ready: OrderedProgram, *, is_new: bool = False) -> Endpoints:
        """Returns the endpoints of a traced program.

        Args:
          is_new: Whether its params are of a store that is not made yet.
        """
        engine, traced = self.engine, ready.traced
        self._check_mesh(traced.mesh)
        avals = traced.params_tree.unflatten(traced.params)
        if is_new:
            subgroups = subgroups_of(engine, self._described(avals, ready)[1])
        else:
            subgroups = engine.files.subgroups
        program = self._optimizer(avals)
        updates = UpdatePlan(engine, ready, program, subgroups, self.options)
        return Endpoints(
            needs=updates.needs,
            engine=engine,
            reads=partial(read_units, engine),
            version=lambda: engine.contents_version,
            sink=partial(StoreSink, updates),
            updates=updates,
            scratch=partial(scratch_files, engine),
            kept_cuts=self._kept_cuts(ready),
        )

    def _kept_cuts(self, ready: OrderedProgram) -> Sequence[int] | None:
        if self.options.replan or self.engine.is_new:
            return None
        return kept_cuts(self.store.path, self.engine.files.finished, ready)

    def _check_mesh(self, mesh: Mesh | None) -> None:
        policy = self.options.policy
        if mesh is not None and policy not in ("recompute", "keep"):
            raise StreamError(
                f'policy="{policy}": not supported yet on several devices, found '
                f'{mesh_text(mesh)}; use "recompute" or "keep"'
            )
        check_processes(self.engine.group, mesh)

    def _optimizer(self, avals: PyTree) -> UpdateProgram:
        plain = without_shardings(avals)
        key = jax.tree.structure(plain), *jax.tree.leaves(plain)
        if key not in self.traced:
            extra_args = self.options.extra_args
            program = trace_update(self.tx, plain, extra_args, may_read="all")
            self.traced[key] = program
        return self.traced[key]

    # --- the first step of a store -------------------------------------------------

    def start(
        self,
        avals: PyTree,
        make: MakeLeaves,
        ready: OrderedProgram | None,
        budget: Budget,
        plan: Callable[[OrderedProgram, Endpoints, Budget], Plan],
    ) -> PyTree:
        """Makes the first step, once that is known to fit in a budget, or resumes.

        Args:
          avals, make: Of `first` or `given`.
          ready: The function, if a batch was given.
          plan: Plans a step; raises BudgetError.

        Returns:
          Shapes, dtypes and shardings of the params.
        """
        engine, group = self.engine, self.engine.group
        check_params(avals)
        self._check_mesh(mesh_of(avals))
        first, description = self._described(avals, ready)
        plain = jax.tree.leaves(without_shardings(avals))
        scalars, inputs = initial_inputs(first, plain)
        made, ends = iter(()), None
        if engine.is_new:
            if ready is not None:
                own = partial(self.endpoints, ready, is_new=True)
                ends = group.in_all("the optimizer's programs", own)

            def fitting(budget: Budget) -> Iterator[Any]:
                """Returns the leaves, which can be made if a step fits, too."""
                host_bytes = budget.memory_bytes
                num_bytes = min(budget.device_memory_bytes or host_bytes, host_bytes)
                made = group.in_all("the first params", lambda: make(num_bytes))
                if ready is not None and ends is not None:
                    plan(ready, ends, budget)
                return iter(made)

            made = with_advice(budget, fitting, advises=group.is_alone)
        if bind_optimizer(engine, description, may_create=True, uses_budget=False):
            for leaf, own in enumerate(inputs):
                self._write_leaf(description, leaf, made, own)
            engine.steps.commit_written_step(0, scalars)
        return_freed_memory()  # of traces and of the first params
        return avals

    def _described(
        self, avals: PyTree, ready: OrderedProgram | None
    ) -> tuple[Any, StoreDescription]:
        """Returns the optimizer's first state, traced, and the store for a program.

        Raises:
          UnsupportedTransformError: The optimizer needs too much of all leaves.
        """
        options, update = self.options, self._optimizer(avals)
        pieces = () if ready is None else tuple(ready.graph.gradients)
        is_alone = self.engine.group.is_alone
        passes_for(update, pieces, is_alone=is_alone)
        held, shards = jax.tree.leaves(avals), list[Shards]()
        first = trace_init(self.tx, without_shardings(avals))
        counts = part_counts(held, pieces)
        if not is_alone:
            there = on_mesh(held, mesh_of(avals))
            shards = [held_shards(leaf.sharding, leaf.shape) for leaf in there]
        return first, describe_store(
            update,
            first,
            counts,
            shards=shards,
            average=options.average,
            compression=options.compress,
        )

    def _write_leaf(
        self,
        description: StoreDescription,
        leaf: int,
        made: Iterator[Any],
        inputs: LeafInputs,
    ) -> None:
        """Makes the next leaf, and writes its params and first state; blocks."""
        files = self.engine.files
        files.mover.drain()
        files.fleet.limit_memory(0)  # idle buffers leave the leaf their memory
        shards = shards_with_origin(next(made))
        files.limit_memory(self.options.memory_bytes // BUFFERS_SHARE)
        for origin, shard in shards:
            first = InitialParams(leaf, shard, origin, inputs)
            initialise_leaves(files, description, [first])
