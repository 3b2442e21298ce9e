"""Plain optax over whole trees, and the gradients of a step for it.

Invariant: updates have the bits of jitted optax; memory that was handed out is not
reused.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxinf import compat
from jaxinf.errors import NonFiniteGradientError, StreamError
from jaxinf.program import NonFinitePolicy, effect_of_nonfinite, is_guarded
from jaxinf.streaming.move.params import Params
from jaxinf.streaming.program.graph import Piece, aval_bytes
from jaxinf.streaming.program.trace import Traced
from jaxinf.streaming.update.sink import Sink
from jaxinf.typing import Array, PyTree


class Trained(NamedTuple):
    """Params and optax's state."""

    params: PyTree
    state: PyTree


class PlainOptax:
    """Plain optax: its update and the addition are each a jit."""

    def __init__(
        self, tx: optax.GradientTransformation, *, is_deterministic: bool = True
    ) -> None:
        self._tx = tx
        self._is_deterministic = is_deterministic
        self._trained: Trained | None = None
        self._is_lent = False
        self._compiled: dict[bool, tuple[Any, Any]] = {}

    @property
    def params(self) -> PyTree:
        """The params; the next update may reuse their memory."""
        return self._current.params

    @property
    def is_guarded(self) -> bool:
        """See `jaxinf.program.is_guarded`."""
        return is_guarded(self._current.state)

    def state_bytes(self, params: PyTree) -> int:
        return sum(
            map(aval_bytes, jax.tree.leaves(jax.eval_shape(self._tx.init, params)))
        )

    def begin(self, params: PyTree, state: PyTree) -> None:
        """Takes params and state; None for the first state."""
        if state is None:
            state = jax.jit(self._tx.init)(params)
        self._trained, self._is_lent = Trained(params, state), False

    def lend(self) -> Trained:
        """Returns params and state, whose memory no update reuses from now on."""
        self._is_lent = True
        return self._current

    def update(self, gradients: PyTree) -> None:
        """Updates params and state; the gradients' memory is reused."""
        held = self._current
        update, add = self.functions(donates=not self._is_lent)
        updates, state = update(gradients, held.state, held.params)
        self._trained = Trained(add(held.params, updates), state)
        self._is_lent = False

    def functions(self, *, donates: bool) -> tuple[Any, Any]:
        """Returns the update and the addition, as jits.

        Args:
          donates: Whether they reuse the memory of state and params.
        """
        if donates not in self._compiled:
            jit = partial(
                jax.jit,
                compiler_options=compat.deterministic_options(self._is_deterministic),
            )
            self._compiled[donates] = (
                jit(self._tx.update, donate_argnums=(0, 1) if donates else (0,)),
                jit(optax.apply_updates, donate_argnums=(0,) if donates else ()),
            )
        return self._compiled[donates]

    @property
    def _current(self) -> Trained:
        if self._trained is None:
            raise StreamError("jaxinf.stream: call step.init or step.load first")
        return self._trained


class OptaxSink(Sink):
    """Updates params and state with plain optax when a step has all gradients.

    It holds these whole or in slices of stacks.

    Args:
      nonfinite: The effect of a non-finite gradient; None for the usual one.
    """

    def __init__(
        self,
        optimizer: PlainOptax,
        traced: Traced,
        nonfinite: NonFinitePolicy | None,
    ) -> None:
        self._optimizer = optimizer
        self._names, self._tree = traced.names, traced.params_tree
        self._num_leaves = len(traced.params)
        self._nonfinite: NonFinitePolicy | None = nonfinite
        self._held: dict[int, dict[tuple[int, ...], jax.Array]] = {}

    def begin(self, extra_args: Mapping[str, Any], params: Params) -> None:
        self.abandon()

    def put(self, piece: Piece, gradient: jax.Array | Array) -> None:
        own = self._held.setdefault(piece.leaf, {})
        own[piece.index] = jnp.asarray(gradient)

    def finish(
        self, extra_args: Mapping[str, Any], results: PyTree, check: Callable[[], None]
    ) -> bool:
        gradients = self._taken({id(leaf) for leaf in jax.tree.leaves(results)})
        policy = effect_of_nonfinite(
            self._nonfinite, is_guarded=self._optimizer.is_guarded
        )
        if policy != "allow":
            finite = zip(self._names, _are_finite(gradients), strict=True)
            bad = [name for name, is_finite in finite if not is_finite]
            if bad and policy == "error":
                raise NonFiniteGradientError(
                    f"NaN or Inf in the gradient of {', '.join(bad[:5])}; the step was "
                    "refused. Lower the learning rate or clip the gradients, or pass "
                    'nonfinite="skip" to go on without such steps'
                )
            if bad:
                return False
        self._optimizer.update(self._tree.unflatten(gradients))
        return True

    def abandon(self) -> None:
        self._held.clear()

    def close(self) -> None:
        """As `Sink.close`."""
        self.abandon()

    def _taken(self, taken: set[int]) -> list[jax.Array]:
        """Returns and drops the gradient of each leaf.

        The update reuses their memory, so each is an array of its own.
        """
        found = []
        for leaf in range(self._num_leaves):
            whole = self._whole(leaf)
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
def _are_finite(gradients: Sequence[jax.Array]) -> list[jax.Array]:
    """Whether each has neither NaN nor Inf."""
    return [jnp.all(jnp.isfinite(gradient)) for gradient in gradients]
