"""Params and optax's state in memory, and the gradients of a step for them.

Invariant: updates have the bits of jitted optax; memory that was handed out is not
reused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxinf.errors import StreamError
from jaxinf.program import (
    effect_of_nonfinite,
    is_guarded,
    path_name,
    refused_gradient,
)
from jaxinf.streaming.move.params import MemoryParams, Params
from jaxinf.streaming.move.scratch import Scratch
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.fit import Prepared
from jaxinf.streaming.plan.memory import Division, divide_rest
from jaxinf.streaming.plan.options import StepOptions
from jaxinf.streaming.program.graph import Piece, aval_bytes
from jaxinf.streaming.program.trace import Traced
from jaxinf.streaming.update.sink import Sink
from jaxinf.typing import Array, PathLikeStr, PyTree


class OptaxSink(Sink):
    """Updates params and state with plain optax when a step has all gradients.

    It holds these whole or in slices of stacks. The update and the addition are each a
    jit. It serves batches of all shapes.

    Args:
      folder: On a drive, for values.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        options: StepOptions,
        folder: PathLikeStr,
    ) -> None:
        super().__init__(options)
        self._tx, self._folder = tx, folder
        self._trained: tuple[PyTree, PyTree] | None = None
        self._is_lent = False
        self._compiled: dict[bool, tuple[Any, Any]] = {}
        self._held: dict[int, dict[tuple[int, ...], jax.Array]] = {}

    def load(self, params: PyTree, state: PyTree) -> None:
        """Takes params and state; None for the first state."""
        if state is None:
            state = jax.jit(self._tx.init)(params)
        self._trained, self._is_lent = (params, state), False

    def like(self, options: StepOptions) -> "OptaxSink":
        """Returns one to plan with other options."""
        return OptaxSink(self._tx, options, self._folder)

    @property
    def params(self) -> PyTree:
        """The params; the next update may reuse their memory."""
        return self._current[0]

    def lend(self) -> tuple[PyTree, PyTree]:
        """Returns params and state, whose memory no update reuses from now on."""
        self._is_lent = True
        return self._current

    def functions(self, *, donates: bool) -> tuple[Any, Any]:
        """Returns the update and the addition, as jits.

        Args:
          donates: Whether they reuse the memory of state and params.
        """
        if donates not in self._compiled:
            jit = self.options.jit
            self._compiled[donates] = (
                jit(self._tx.update, donate_argnums=(0, 1) if donates else (0,)),
                jit(optax.apply_updates, donate_argnums=(0,) if donates else ()),
            )
        return self._compiled[donates]

    # --- what it takes -------------------------------------------------------------

    def divided(self, ready: Prepared, budgets: Mapping[str, int]) -> Division:
        limit = self.options.limit_within(budgets)
        return divide_rest(budgets["memory_bytes"], limit)

    def held_bytes(self, traced: Traced) -> int:
        params = traced.params_tree.unflatten(traced.params)
        state = jax.tree.leaves(jax.eval_shape(self._tx.init, params))
        params_bytes = sum(map(aval_bytes, traced.params))
        return 2 * params_bytes + sum(map(aval_bytes, state))  # with gradients

    def staying(self, plan: Plan) -> Plan:
        pieces = {piece for call in plan.calls for piece in call.reads}
        # A part of a leaf is copied for its calls.
        whole = frozenset(p for p in pieces if not p.index and not p.rows)
        params_bytes = sum(map(aval_bytes, plan.traced.params))
        return replace(plan, resident=whole, resident_bytes=params_bytes)

    def source(self, plan: Plan) -> Params:
        return MemoryParams(lambda: jax.tree.leaves(self.params))

    def scratch(self, content: str) -> Scratch:
        return Scratch([self._folder], content=content)

    # --- a step --------------------------------------------------------------------

    def begin(self, extra_args: Mapping[str, Any], params: Params) -> None:
        self.abandon()

    def put(self, piece: Piece, gradient: jax.Array | Array) -> None:
        own = self._held.setdefault(piece.leaf, {})
        own[piece.index] = jnp.asarray(gradient)

    def finish(
        self, extra_args: Mapping[str, Any], results: PyTree, check: Callable[[], None]
    ) -> bool:
        params, state = self._current
        paths, tree = jax.tree_util.tree_flatten_with_path(params)
        taken = {id(leaf) for leaf in jax.tree.leaves(results)}
        gradients = [self._taken(leaf, taken) for leaf in range(len(paths))]
        policy = effect_of_nonfinite(
            self.options.nonfinite, is_guarded=is_guarded(state)
        )
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

    def abandon(self) -> None:
        self._held.clear()

    # --- inside --------------------------------------------------------------------

    @property
    def _current(self) -> tuple[PyTree, PyTree]:
        if self._trained is None:
            raise StreamError("jaxinf.stream: call step.init or step.load first")
        return self._trained

    def _taken(self, leaf: int, taken: set[int]) -> jax.Array:
        """Returns and drops the gradient of a leaf.

        The update reuses its memory, so it is none of the arrays that were taken.
        """
        whole = self._whole(leaf)
        if id(whole) in taken:
            whole = jnp.copy(whole)
        taken.add(id(whole))
        return whole

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
def _are_finite(gradients: Sequence[jax.Array]) -> list[jax.Array]:
    """Whether each has neither NaN nor Inf."""
    return [jnp.all(jnp.isfinite(gradient)) for gradient in gradients]
