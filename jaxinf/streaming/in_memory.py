"""Params and optax's state in memory, for a streamed step without a store.

    batch ─► programs, one after another ─► gradients ─► optax's update
              values that backward needs may wait on a drive

Invariant: updates have the bits of jitted optax on the same gradients. A step that ends
  early leaves params and state as they were. What is handed out is a copy.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxinf.errors import StreamError
from jaxinf.program import aval_bytes, nonfinite_error, path_name
from jaxinf.streaming.backend import StepBackend, without
from jaxinf.streaming.move.scratch import ScratchFiles, writing_bytes
from jaxinf.streaming.plan.memory import MemoryNeed, StepNeeds
from jaxinf.streaming.plan.options import Options
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.initial import check_init_fn
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.streaming.program.meshes import mesh_text
from jaxinf.streaming.program.trace import abstract, check_params
from jaxinf.streaming.run import Check, GetParams
from jaxinf.streaming.update.apply_gradients import Agree
from jaxinf.typing import PathLikeStr, PyTree


class MemoryHome:
    """The home of params and any optax state in memory, and the sink of gradients.

    Args:
      folder: On a drive, for values of ``"offload"``.

    Attributes:
      update, add: The optimizer's update, and its addition to params, each a jit.
    """

    has_loss = True
    closes = takes_extra_args = False
    store = engine = None
    waited_s, spilled_bytes = 0.0, (0, 0)

    def __init__(
        self, tx: optax.GradientTransformation, options: Options, folder: PathLikeStr
    ) -> None:
        self._tx, self._options, self._folder = tx, options, folder
        self.update = options.jit(tx.update, donate_argnums=(0, 1))
        self.add = options.jit(optax.apply_updates, donate_argnums=(0,))
        self._trained: tuple[PyTree, PyTree] | None = None
        # By leaf, and by index in it, until a step has all.
        self._gradients: dict[int, dict[tuple[int, ...], jax.Array]] = {}

    @property
    def _current(self) -> tuple[PyTree, PyTree]:
        """Params and state; the next update reuses their memory."""
        if self._trained is None:
            raise StreamError("jaxinf.stream: call step.init or step.load first")
        return self._trained

    def from_init(
        self, init_fn: Callable[..., PyTree], args: Sequence[Any], shardings: PyTree
    ) -> tuple[PyTree, Any]:
        without(shardings=shardings)
        check_init_fn(init_fn)
        avals = jax.eval_shape(init_fn, *args)
        check_params(avals)
        return avals, lambda: (jax.jit(init_fn)(*args), None)

    def from_params(
        self, params: PyTree, state: PyTree, shardings: PyTree
    ) -> tuple[PyTree, Any]:
        without(shardings=shardings)
        return abstract(params), lambda: (_copied(params), _copied(state))

    def start(
        self, avals: PyTree, make: Callable[[], tuple[PyTree, PyTree]], *_: Any
    ) -> PyTree:
        params, state = make()
        if state is None:
            state = jax.jit(self._tx.init)(params)
        self._trained = params, state
        return abstract(params)

    def params(self, like: PyTree) -> PyTree:
        without(like=like)
        return _copied(self._current[0])

    def state(self) -> PyTree:
        return _copied(self._current[1])

    def make_backend(
        self, ordered: OrderedProgram, *, is_new: bool = False
    ) -> StepBackend:
        traced = ordered.traced
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
        held = MemoryNeed(held_bytes, purpose, is_on_device=True)
        return StepBackend(
            ordered=ordered,
            needs=StepNeeds(others=(held,), writing_bytes=writing_bytes(1)),
            make_sink=lambda *_: self,
            params_in_memory=self._get_params,
            make_scratch=lambda: ScratchFiles([self._folder]),
        )

    def _get_params(self) -> GetParams:
        leaves = jax.tree.leaves(self._current[0])
        return lambda number, piece: piece.of(leaves[piece.leaf])

    def begin(self, extra_args: Mapping[str, Any]) -> None:
        self._gradients.clear()

    def put(self, piece: Piece, gradient: jax.Array) -> None:
        self._gradients.setdefault(piece.leaf, {})[piece.index] = gradient

    def finish(
        self,
        extra_args: Mapping[str, Any],
        results: PyTree,
        check: Check,
        agree: Agree,
    ) -> bool:
        params, state = self._current
        paths, tree = jax.tree_util.tree_flatten_with_path(params)
        taken = {id(leaf) for leaf in jax.tree.leaves(results)}
        gradients = [self._pop_gradient(leaf, taken) for leaf in range(len(paths))]
        if self._options.nonfinite != "allow":
            finite = zip(paths, _are_finite(gradients), strict=True)
            bad = [path_name(path) for (path, _), is_finite in finite if not is_finite]
            if bad and self._options.nonfinite == "error":
                raise nonfinite_error(bad)
            if bad:
                return False
        updates, state = self.update(tree.unflatten(gradients), state, params)
        self._trained = self.add(params, updates), state
        return True

    def abandon(self) -> None:
        self._gradients.clear()

    close = abandon

    def _pop_gradient(self, leaf: int, taken: set[int]) -> jax.Array:
        """Removes the gradient of a leaf; copies it if it is one of the arrays taken.

        The update reuses its memory.
        """
        pieces = self._gradients.pop(leaf)
        gradient = pieces[min(pieces)]
        if () not in pieces:  # slices, along leading axes
            counts = (number + 1 for number in max(pieces))
            slices = jnp.stack([pieces[index] for index in sorted(pieces)])
            gradient = slices.reshape(*counts, *gradient.shape)
        if id(gradient) in taken:
            gradient = jnp.copy(gradient)
        taken.add(id(gradient))
        return gradient


def _copied(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tree)


@jax.jit
def _are_finite(gradients: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.all(jnp.isfinite(gradient)) for gradient in gradients]
