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
from jaxinf.program import (
    InitProgram,
    LeafInputs,
    UpdateProgram,
    trace_init,
    trace_update,
)
from jaxinf.streaming.backend import StepBackend
from jaxinf.streaming.move.params import read_units
from jaxinf.streaming.move.scratch import scratch_files
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.cut_to_fit import plan_or_advise
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
from jaxinf.streaming.update.update_plan import UpdatePlan, initial_inputs, passes_for
from jaxinf.typing import PyTree


@dataclass(frozen=True)
class StoreHome:
    """The home of a step whose params and state a store has.

    Attributes:
      tx: The optimizer, with the average of the params.
      programs: The optimizer as a program, by the types of the params.
    """

    tx: optax.GradientTransformation
    store: Store
    options: Options
    programs: dict[Any, UpdateProgram] = field(default_factory=dict)

    has_loss = closes = takes_extra_args = True

    @cached_property
    def engine(self) -> Engine:
        return engine_of(self.store)

    def from_init(
        self, init_fn: Callable[..., PyTree], args: Sequence[Any], shardings: PyTree
    ) -> tuple[PyTree, MakeLeaves]:
        avals, make = trace_params(init_fn, *args)
        return sharded_like(avals, shardings), make

    def from_params(
        self, params: PyTree, state: PyTree, shardings: PyTree
    ) -> tuple[PyTree, MakeLeaves]:
        if state is not None:
            raise ValueError("state: use store.load(params, state, step=…) instead")
        leaves = jax.tree.leaves(params)
        return sharded_like(abstract(params), shardings), lambda _: leaves

    def params(self, like: PyTree) -> PyTree:
        return self.store.params(like)

    def make_backend(
        self, ordered: OrderedProgram, *, is_new: bool = False
    ) -> StepBackend:
        """Returns the backend of a program; if `is_new`, of a store not made yet."""
        engine, traced = self.engine, ordered.traced
        self._check_mesh(traced.mesh)
        avals = traced.params_tree.unflatten(traced.params)
        if is_new:
            subgroups = subgroups_of(engine, self._describe(avals, ordered)[1])
        else:
            subgroups = engine.files.subgroups
        program = self._optimizer(avals)
        updates = UpdatePlan(engine, ordered, program, subgroups, self.options)
        has_cuts = not (self.options.replan or engine.is_new)
        return StepBackend(
            ordered=ordered,
            needs=updates.needs,
            make_sink=partial(StoreSink, updates),
            engine=engine,
            begin_reads=partial(read_units, engine),
            version=lambda: engine.contents_version,
            updates=updates,
            make_scratch=partial(scratch_files, engine),
            kept_cuts=kept_cuts(engine, ordered) if has_cuts else None,
        )

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
        if key not in self.programs:
            extra_args = self.options.extra_args
            program = trace_update(self.tx, plain, extra_args, may_read="all")
            self.programs[key] = program
        return self.programs[key]

    def start(
        self,
        avals: PyTree,
        make: MakeLeaves,
        ordered: OrderedProgram | None,
        budget: Budget,
        plan: Callable[[StepBackend, Budget], Plan],
    ) -> PyTree:
        """Makes the first step, once that is known to fit in a budget, or resumes.

        Args:
          avals, make: Of `from_init` or `from_params`.
          ordered: The function, if a batch was given.
          plan: Plans a step; raises BudgetError.
        """
        engine = self.engine
        check_params(avals)
        self._check_mesh(mesh_of(avals))
        init, description = self._describe(avals, ordered)
        plain = jax.tree.leaves(without_shardings(avals))
        scalars, inputs = initial_inputs(init, plain)
        leaves = iter(())
        if engine.is_new:
            leaves = self._make_leaves(make, ordered, budget, plan)
        if bind_optimizer(engine, description, may_create=True, uses_budget=False):
            for number, leaf_inputs in enumerate(inputs):
                self._write_leaf(description, number, leaves, leaf_inputs)
            engine.steps.commit_written_step(0, scalars)
        return_freed_memory()  # of traces and of the first params
        return avals

    def _make_leaves(
        self,
        make: MakeLeaves,
        ordered: OrderedProgram | None,
        budget: Budget,
        plan: Callable[[StepBackend, Budget], Plan],
    ) -> Iterator[Any]:
        """Returns an iterator that makes the leaves, which fit, as does a step."""
        group, backend = self.engine.group, None
        if ordered is not None:
            make_backend = partial(self.make_backend, ordered, is_new=True)
            backend = group.in_all("the optimizer's programs", make_backend)

        def fit(budget: Budget) -> Iterator[Any]:
            host_bytes = budget.memory_bytes
            num_bytes = min(budget.device_memory_bytes or host_bytes, host_bytes)
            leaves = group.in_all("the first params", lambda: make(num_bytes))
            if backend is not None:
                plan(backend, budget)
            return iter(leaves)

        return plan_or_advise(budget, fit, advises=group.is_alone)

    def _describe(
        self, avals: PyTree, ordered: OrderedProgram | None
    ) -> tuple[InitProgram, StoreDescription]:
        """Returns the optimizer's first state, traced, and the store for a program."""
        options, update = self.options, self._optimizer(avals)
        pieces = () if ordered is None else tuple(ordered.graph.gradients)
        is_alone = self.engine.group.is_alone
        passes_for(update, pieces, is_alone=is_alone)
        init = trace_init(self.tx, without_shardings(avals))
        leaves = jax.tree.leaves(avals)
        on_devices = [] if is_alone else on_mesh(leaves, mesh_of(avals))
        return init, describe_store(
            update,
            init,
            part_counts(leaves, pieces),
            shards=[held_shards(leaf.sharding, leaf.shape) for leaf in on_devices],
            average=options.average,
            compression=options.compress,
        )

    def _write_leaf(
        self,
        description: StoreDescription,
        number: int,
        leaves: Iterator[Any],
        inputs: LeafInputs,
    ) -> None:
        """Makes the next leaf, and writes its params and first state; blocks."""
        files = self.engine.files
        files.mover.drain()
        files.fleet.limit_memory(0)  # idle buffers leave the leaf their memory
        shards = shards_with_origin(next(leaves))
        files.limit_memory(self.options.memory_bytes // BUFFERS_SHARE)
        for origin, shard in shards:
            first = InitialParams(number, shard, origin, inputs)
            initialise_leaves(files, description, [first])
