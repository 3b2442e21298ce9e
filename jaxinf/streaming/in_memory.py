"""Params and optax's state in memory, for a streamed step without a store.

    batch ─► programs, one after another ─► gradients ─► optax's update
              values that backward needs may wait on a drive

Invariant: updates have the bits of jitted optax on the same gradients. A step that ends
  early leaves params and state as they were. Memory that was handed out is not reused.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxinf.errors import StreamError
from jaxinf.program import (
    path_name,
    refused_gradient,
)
from jaxinf.streaming.home import NoUpdates, StateHome, without
from jaxinf.streaming.move.params import Hold, MemoryParams, Params
from jaxinf.streaming.move.scratch import Scratch, writing_bytes
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.fit import OrderedProgram, within
from jaxinf.streaming.plan.memory import Budget, Claim, Claims
from jaxinf.streaming.plan.options import Options
from jaxinf.streaming.program.graph import Piece, aval_bytes
from jaxinf.streaming.program.initial import check_init_fn
from jaxinf.streaming.program.meshes import mesh_text
from jaxinf.streaming.program.trace import abstract, check_params
from jaxinf.streaming.update.apply_gradients import Agree
from jaxinf.typing import Array, PathLikeStr, PyTree


class InMemory(StateHome):
    """Params and the state of any optax optimizer, and the sink of their gradients.

    It holds gradients whole or in slices of stacks until a step has all. The update and
    the addition are each a jit.

    Args:
      folder: On a drive, for values of ``"offload"``.
    """

    def __init__(
        self, tx: optax.GradientTransformation, options: Options, folder: PathLikeStr
    ) -> None:
        self._tx, self._options, self._folder = tx, options, folder
        self._trained: tuple[PyTree, PyTree] | None = None
        self._is_lent = False
        self._compiled: dict[bool, tuple[Any, Any]] = {}
        self._held: dict[int, dict[tuple[int, ...], jax.Array]] = {}

    # --- params and state ----------------------------------------------------------

    @property
    def _current(self) -> tuple[PyTree, PyTree]:
        """Params and state; the next update may reuse their memory."""
        if self._trained is None:
            raise StreamError("jaxinf.stream: call step.init or step.load first")
        return self._trained

    @property
    def avals(self) -> PyTree:
        return abstract(self._current[0])

    def first(
        self, init_fn: Callable[..., PyTree], args: Sequence[Any], shardings: PyTree
    ) -> tuple[PyTree, Any]:
        without(shardings=shardings)
        check_init_fn(init_fn)
        avals = jax.eval_shape(init_fn, *args)
        check_params(avals)
        return avals, lambda: (jax.jit(init_fn)(*args), None)

    def given(
        self, params: PyTree, state: PyTree, shardings: PyTree
    ) -> tuple[PyTree, Any]:
        without(shardings=shardings)
        own = partial(jax.tree.map, lambda leaf: jnp.array(leaf, copy=True))
        return abstract(params), lambda: (own(params), own(state))

    def start(
        self,
        avals: PyTree,
        make: Callable[[], tuple[PyTree, PyTree]],
        ready: OrderedProgram | None,
        budget: Budget,
        plan: Callable[[OrderedProgram, NoUpdates, Budget], Plan],
    ) -> None:
        if ready is not None:
            within(budget, partial(plan, ready, self.updates(ready)), advises=True)
        params, state = make()
        if state is None:
            state = jax.jit(self._tx.init)(params)
        self._trained, self._is_lent = (params, state), False

    def params(self, like: PyTree) -> PyTree:
        self._is_lent = True  # no update reuses its memory from now on
        params = self._current[0]
        if like is None:
            return params
        held, asked = (jax.tree.map(jnp.shape, tree) for tree in (params, like))
        if held != asked:
            raise ValueError(f"like: expected the shapes {held}, found {asked}")

        def formed(leaf: jax.Array, to: Any) -> jax.Array:
            return jax.device_put(leaf.astype(to.dtype), getattr(to, "sharding", None))

        return jax.tree.map(formed, params, like)

    def state(self) -> PyTree:
        self._is_lent = True
        return self._current[1]

    # --- a step's plan -------------------------------------------------------------

    def updates(self, ready: OrderedProgram, avals: PyTree = None) -> NoUpdates:
        traced = ready.traced
        if traced.mesh is not None:
            raise StreamError(
                "jaxinf.stream: expected arrays on one device, found "
                f"{mesh_text(traced.mesh)}, which streaming does not use without a "
                "store; give a store, or put all arrays on one device "
                "(jax.device_put(x, jax.devices()[0]))"
            )
        params = traced.params_tree.unflatten(traced.params)
        state = jax.tree.leaves(jax.eval_shape(self._tx.init, params))
        params_bytes = sum(map(aval_bytes, traced.params))
        held_bytes = 2 * params_bytes + sum(map(aval_bytes, state))  # with gradients
        purpose = "holding params, gradients and optax's state (or give a store)"
        held = Claim(held_bytes, purpose, is_on_device=True)
        return NoUpdates(Claims(others=(held,), writing_bytes=writing_bytes(1)))

    def source(self, updates: NoUpdates, plan: Plan, hold: Hold) -> Params:
        return MemoryParams(lambda: jax.tree.leaves(self._current[0]))

    def scratch(self) -> Scratch:
        return Scratch([self._folder], content="activations")

    # --- a step --------------------------------------------------------------------

    def begin(self, extra_args: Mapping[str, Any], params: Params) -> None:
        super().begin(extra_args, params)
        self.abandon()

    def put(self, piece: Piece, gradient: jax.Array | Array) -> None:
        own = self._held.setdefault(piece.leaf, {})
        own[piece.index] = jnp.asarray(gradient)

    def finish(
        self,
        extra_args: Mapping[str, Any],
        results: PyTree,
        check: Callable[[], None],
        agree: Agree,
    ) -> bool:
        params, state = self._current
        paths, tree = jax.tree_util.tree_flatten_with_path(params)
        taken = {id(leaf) for leaf in jax.tree.leaves(results)}
        gradients = [self._taken(leaf, taken) for leaf in range(len(paths))]
        policy = self._options.nonfinite
        if policy != "allow":
            finite = zip(paths, _are_finite(gradients), strict=True)
            bad = [path_name(path) for (path, _), is_finite in finite if not is_finite]
            if bad and policy == "error":
                raise refused_gradient(bad)
            if bad:
                return False
        update, add = self.functions(donates=not self._is_lent)
        updates, state = update(tree.unflatten(gradients), state, params)
        self._trained, self._is_lent = (add(params, updates), state), False
        return True

    def functions(self, *, donates: bool) -> tuple[Any, Any]:
        """Returns the update and the addition, as jits.

        Args:
          donates: Whether they reuse the memory of state and params.
        """
        if donates not in self._compiled:
            jit = self._options.jit
            self._compiled[donates] = (
                jit(self._tx.update, donate_argnums=(0, 1) if donates else (0,)),
                jit(optax.apply_updates, donate_argnums=(0,) if donates else ()),
            )
        return self._compiled[donates]

    def abandon(self) -> None:
        self._held.clear()

    def _taken(self, leaf: int, taken: set[int]) -> jax.Array:
        """Returns and drops the gradient of a leaf.

        The update reuses its memory, so it is none of the arrays that were taken.
        """
        own = self._held.pop(leaf)
        for _ in range(len(next(iter(own)))):
            rows: dict[tuple[int, ...], list[jax.Array]] = {}
            for index in sorted(own):
                rows.setdefault(index[:-1], []).append(own[index])
            own = {index: jnp.stack(parts) for index, parts in rows.items()}
        whole = own[()]
        if id(whole) in taken:
            whole = jnp.copy(whole)
        taken.add(id(whole))
        return whole


@jax.jit
def _are_finite(gradients: Sequence[jax.Array]) -> list[jax.Array]:
    """Whether each has neither NaN nor Inf."""
    return [jnp.all(jnp.isfinite(gradient)) for gradient in gradients]
