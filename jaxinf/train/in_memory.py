"""Plain optax with all state in memory: the baseline.

Invariant: non-finite gradients have the effect that they have in the other modes, and
losses are the other modes' to the bit, since no jit computes an update and adds it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import ScheduleFreeState

from jaxinf.compress import sparsify
from jaxinf.errors import NonFiniteGradientError
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.freezing import with_zeros
from jaxinf.train.metrics import NO_TRAFFIC, Costs
from jaxinf.train.optimizers import make_clipping
from jaxinf.train.pretrained import held_params, is_deferred
from jaxinf.train.processes import placed
from jaxinf.train.step import TrainStep, compile_train_step
from jaxinf.typing import JsonValue, PyTree

_MOST = 2**31 - 1


class InMemory:
    """Plain optax, which treats non-finite gradients like `smart_update`."""

    store = None
    needs_all = False

    def __init__(
        self, config: TrainConfig, optimizer: optax.GradientTransformation
    ) -> None:
        self._config = config
        if config.compression is not None:
            sparse = sparsify(config.compression)
            optimizer = optax.chain(make_clipping(config), sparse, optimizer)
        tx = optax.apply_if_finite(optimizer, max_consecutive_errors=_MOST)
        self._tx = with_zeros(tx) if config.frozen else tx

    def init(
        self,
        new_params: Callable[[], PyTree],
        like: PyTree,
        first: Mapping[str, JsonValue],
        batch: Batch,
    ) -> tuple[Any, Any]:
        params = placed(new_params(), like)
        params = held_params(params) if is_deferred(params) else params
        init = jax.jit(self._tx.init, out_shardings=_beside(params, self._tx))
        return params, init(params)

    def compile_step(self, graphdef: Any, *example: Any) -> TrainStep:
        return compile_train_step(self._config, graphdef, self._tx, "split", *example)

    def function(
        self, fn: Callable[[PyTree, Any], Any], *, average: bool = False
    ) -> Callable[[PyTree, Any], Any]:
        return jax.jit(fn)

    def average(self, params: PyTree, state: Any) -> PyTree:
        def is_found(node: Any) -> bool:
            return isinstance(node, ScheduleFreeState)

        # Only a schedule-free optimizer has one here: check refuses --ema in memory.
        (held,) = filter(is_found, jax.tree.leaves(state, is_leaf=is_found))

        def averaged(y: jax.Array, z: Any) -> jax.Array:
            is_frozen = isinstance(z, optax.MaskedNode)
            return y if is_frozen else (y - (1 - held.b1) * z) / held.b1

        return jax.tree.map(averaged, params, held.z)

    def costs(self, state: Any, *, is_skipped: bool) -> Costs:
        return lambda: NO_TRAFFIC

    def num_skipped(self, state: Any) -> int:
        num = int(state.total_notfinite)
        if num and self._config.nonfinite == "error":
            raise NonFiniteGradientError(
                "NaN or Inf in a gradient: the run ends before it reaches the params. "
                "Lower the learning rate or clip the gradients, or give --nonfinite "
                "skip to go on without such batches"
            )
        return num

    def committed_step(self, state: Any) -> int:
        return 0

    def close(self) -> None:
        """Does nothing."""


def _beside(params: PyTree, tx: optax.GradientTransformation) -> Any:
    """Returns the shardings of the state of params on a mesh, or None.

    State of a param's shape is sharded like it, the rest is replicated.
    """
    leaves = jax.tree.leaves(params)
    if not isinstance(leaves[0].sharding, NamedSharding):
        return None
    like = {leaf.shape: leaf.sharding for leaf in leaves}
    whole = NamedSharding(leaves[0].sharding.mesh, PartitionSpec())
    state = jax.eval_shape(tx.init, params)
    return jax.tree.map(lambda one: like.get(one.shape, whole), state)
