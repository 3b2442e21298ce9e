"""A streamed step without a store: params and optax's state are in memory.

    batch ─► programs, one after another ─► gradients ─► optax's update
              values that backward needs may wait on a drive

Invariant: updates have the bits of jitted optax on the same gradients. A step that ends
  early leaves params and state as they were.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxinf.activations import Scratch, writing_bytes
from jaxinf.errors import NonFiniteGradientError, StreamError
from jaxinf.io import ByteCounts
from jaxinf.stream.bound import Options
from jaxinf.stream.graph import Piece, aval_bytes
from jaxinf.stream.interrupts import Interrupts
from jaxinf.stream.memory import (
    DeviceLimit,
    Division,
    device_limit,
    return_freed_memory,
)
from jaxinf.stream.micro import first_part, parts_of, together
from jaxinf.stream.plan import Plan, Prepared, prepare
from jaxinf.stream.run import (
    Executables,
    Runner,
    compiled_bytes,
    compiled_temp_bytes,
)
from jaxinf.stream.trace import abstract, check_params
from jaxinf.stream.values import Offloaded, Values
from jaxinf.typing import PathLikeStr, PyTree

__all__ = ["InMemoryStep"]


@dataclass(frozen=True)
class _Bound:
    """The plan and runner for batches of one shape."""

    runner: Runner
    values: Values


class InMemoryStep:
    """Made by `jaxinf.stream` without a store; also a context manager.

    ``loss, aux = step(batch)`` runs one step; aux is None without `has_aux`. Params
    come by `load` or `init`, and leave by `params`. Not thread-safe.

    Args:
      loss_fn: The loss function.
      tx: Any optax optimizer.
      options: Memory, policy and so on.
      scratch: A folder on a drive for values of ``"offload"``.
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
        self._optimizer = _Optimizer(tx)
        self._bound: dict[Any, _Bound] = {}
        self._last: _Bound | None = None
        self._executables: Executables = {}
        self._interrupts = Interrupts()
        self._num_skipped = 0
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

    def params(self) -> PyTree:
        """Returns the params, which later steps leave alone."""
        return self._optimizer.lend().params

    def state(self) -> PyTree:
        """Returns optax's state, which later steps leave alone."""
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
        return self._bound_for(batch).runner.plan

    def __call__(self, batch: PyTree) -> tuple[jax.Array, PyTree]:
        """Runs one step.

        Returns:
          The loss, and aux; None without `has_aux`.

        Raises:
          NonFiniteGradientError: The step was refused.
        """
        bound = self._last = self._bound_for(batch)
        bound.values.counts()
        count = self._options.micro_batches
        gradients = _Gradients(bound.runner.plan, count)
        with self._interrupts.held_back():
            results = [
                self._run(bound, part, gradients) for part in parts_of(batch, count)
            ]
            loss, aux = together(results)
            handed = {id(leaf) for leaf in jax.tree.leaves(results)}
            self._update(bound.runner.plan, gradients.take(handed))
        return loss, aux if self._options.has_aux else None

    def _run(
        self, bound: _Bound, batch: PyTree, gradients: "_Gradients"
    ) -> tuple[jax.Array, PyTree]:
        leaves = jax.tree.leaves(self._optimizer.params)

        def fetch(number: int, piece: Piece) -> jax.Array:
            self._interrupts.check()
            leaf = leaves[piece.leaf]
            return piece.of(leaf) if piece.index or piece.rows else leaf

        try:
            loss, aux = bound.runner(batch, fetch, gradients.add)
        finally:
            bound.runner.settle()
        assert loss is not None, "a step has a loss"
        return loss, aux

    def _update(self, plan: Plan, gradients: list[jax.Array]) -> None:
        names, policy = plan.traced.names, self._options.nonfinite
        if policy != "allow":
            finite = _are_finite(gradients)
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
        (device,) = jnp.zeros(()).devices()
        return device_limit(device, self._options.device_memory_bytes)

    def _bound_for(self, batch: PyTree) -> _Bound:
        leaves, tree = jax.tree.flatten(abstract(batch))
        key = (tree, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._bound:
            params = abstract(self._optimizer.params)
            self._bound[key] = self._bind(self._prepare(params, batch))
            return_freed_memory()  # of planning and compilation
        return self._bound[key]

    def _prepare(self, params: PyTree, batch: PyTree) -> Prepared:
        part = first_part(batch, self._options.micro_batches)
        return prepare(self._loss_fn, params, part, has_aux=self._options.has_aux)

    def _bind(self, ready: Prepared) -> _Bound:
        plan, budget = self._planned(ready)
        values = Values()
        if plan.is_offloaded:
            temps = compiled_temp_bytes(plan, self._executables)
            plan = plan.fitted(budget, temps)
            values = Offloaded(plan.calls, Scratch([self._scratch]))
        return _Bound(Runner(plan, self._executables, values=values), values)

    def _planned(self, ready: Prepared) -> tuple[Plan, int]:
        """Returns a plan, and the memory for its programs beside params and so on."""
        division = self._division()
        traced = ready.traced
        kept = sum(map(aval_bytes, traced.params))
        held = 2 * kept + self._optimizer.state_bytes(
            traced.params_tree.unflatten(traced.params)
        )
        if held > division.programs:
            raise StreamError(
                f"{division.limit}: expected room for params, gradients and optax's "
                f"state, {held} bytes, found {division.programs}; raise "
                f"{division.limit}, or give a store, which keeps the state on drives"
            )

        def beside(plan: Plan) -> Plan:
            pieces = {p for call in plan.calls.calls for p in call.pieces}
            whole = frozenset(p for p in pieces if not p.index and not p.rows)
            return replace(plan, calls=replace(plan.calls, resident=whole))

        plan = ready.plan(
            division.programs,
            self._options.policy,
            lambda plan: held + compiled_bytes(beside(plan), self._executables),
            division.limit,
        )
        peak = plan.peak_bytes - held
        plan = replace(beside(plan), peak_bytes=peak, kept_bytes=kept)
        return plan, division.programs - held

    def _division(self) -> Division:
        options, limit = self._options, self._limit
        num_bytes, name = options.memory_bytes, "memory_bytes"
        own = limit.num_bytes
        if own is not None and (not limit.is_host or own < num_bytes):
            num_bytes, name = own, "device_memory_bytes"
        division = Division(0, 0, num_bytes, 0, 0, name)
        if options.policy == "offload":
            if not limit.is_host:
                raise StreamError(
                    'policy="offload": not supported yet on a device with memory of '
                    'its own; use "recompute" or "keep"'
                )
            division = division.without(writing_bytes(1))
        return division

    # --- control -------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan of the last step; None before the first."""
        return None if self._last is None else self._last.runner.plan

    @property
    def traffic(self) -> ByteCounts | None:
        """Bytes of activations on the drive in a step; None before the first."""
        if self._last is None:
            return None
        moved = self._last.values.num_bytes * self._options.micro_batches
        return ByteCounts(drive_read_bytes=moved, drive_write_bytes=moved)

    @property
    def num_skipped(self) -> int:
        """Number of steps skipped for a non-finite gradient, with ``"skip"``."""
        return self._num_skipped

    def close(self) -> None:
        """Frees memory and files; idempotent. The params stay available."""
        for bound in self._bound.values():
            bound.values.close()
        self._bound.clear()

    def __enter__(self) -> "InMemoryStep":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True)
class _Trained:
    """Params and optax's state."""

    params: PyTree
    state: PyTree


class _Optimizer:
    """Plain optax: its update and the addition are each a jit."""

    def __init__(self, tx: optax.GradientTransformation) -> None:
        self._tx = tx
        self._trained: _Trained | None = None
        self._is_lent = False
        self._compiled: dict[bool, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    @property
    def params(self) -> PyTree:
        """The params; the next update may reuse their memory."""
        return self._current.params

    def state_bytes(self, params: PyTree) -> int:
        """Bytes of the state for params of these shapes."""
        return sum(
            map(aval_bytes, jax.tree.leaves(jax.eval_shape(self._tx.init, params)))
        )

    def begin(self, params: PyTree, state: PyTree) -> None:
        """Takes params and state; None for the first state."""
        if state is None:
            state = jax.jit(self._tx.init)(params)
        self._trained, self._is_lent = _Trained(params, state), False

    def lend(self) -> _Trained:
        """Returns params and state, whose memory no update reuses from now on."""
        self._is_lent = True
        return self._current

    def update(self, gradients: PyTree) -> None:
        """Updates params and state; the gradients' memory is reused."""
        held, donates = self._current, not self._is_lent
        if donates not in self._compiled:
            self._compiled[donates] = (
                jax.jit(self._tx.update, donate_argnums=(0, 1) if donates else (0,)),
                jax.jit(optax.apply_updates, donate_argnums=(0,) if donates else ()),
            )
        update, add = self._compiled[donates]
        updates, state = update(gradients, held.state, held.params)
        self._trained = _Trained(add(held.params, updates), state)
        self._is_lent = False

    @property
    def _current(self) -> _Trained:
        if self._trained is None:
            raise StreamError("jaxinf.stream: call step.init or step.load first")
        return self._trained


class _Gradients:
    """The gradients of one step, whole or in slices of stacks."""

    def __init__(self, plan: Plan, num_parts: int) -> None:
        self._dtypes = [leaf.dtype for leaf in plan.traced.params]
        self._num_parts = num_parts
        self._held: dict[int, dict[tuple[int, ...], jax.Array]] = {}

    def add(self, piece: Piece, gradient: jax.Array) -> None:
        """Takes a complete gradient of a part of the batch."""
        own = self._held.setdefault(piece.leaf, {})
        if piece.index in own:
            gradient = _sum(own[piece.index], gradient)
        elif self._num_parts > 1:
            gradient = gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))
        own[piece.index] = gradient

    def take(self, others: Collection[int]) -> list[jax.Array]:
        """Returns the gradient of each leaf, the mean over the parts.

        The update reuses their memory, so each is an array of its own.

        Args:
          others: Identities of arrays that somebody else has.
        """
        taken = set(others)
        found = []
        for leaf, dtype in enumerate(self._dtypes):
            whole = self._whole(leaf)
            if self._num_parts > 1:
                whole = _mean(whole, self._num_parts).astype(dtype)
            if id(whole) in taken:
                whole = jnp.copy(whole)
            taken.add(id(whole))
            found.append(whole)
        return found

    def _whole(self, leaf: int) -> jax.Array:
        own = self._held.pop(leaf)
        depth = len(next(iter(own)))
        for _ in range(depth):
            rows: dict[tuple[int, ...], list[jax.Array]] = {}
            for index in sorted(own):
                rows.setdefault(index[:-1], []).append(own[index])
            own = {index: jnp.stack(parts) for index, parts in rows.items()}
        return own[()]


@jax.jit
def _sum(total: jax.Array, more: jax.Array) -> jax.Array:
    return total + more


@jax.jit
def _mean(total: jax.Array, count: int) -> jax.Array:
    return total / count


@jax.jit
def _are_finite(gradients: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.all(jnp.isfinite(gradient)) for gradient in gradients]
