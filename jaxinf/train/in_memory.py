"""Plain optax with all state in memory: the baseline.

Invariant: non-finite gradients have the effect that they have in the other modes, and
losses are the other modes' to the bit, since no jit computes an update and adds it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import ScheduleFreeState

from jaxinf.compress import sparsify
from jaxinf.errors import NonFiniteGradientError
from jaxinf.train.config import TrainConfig
from jaxinf.train.devices import Devices, placed
from jaxinf.train.freezing import with_zeros
from jaxinf.train.modes import Mode, first_params, with_params
from jaxinf.train.optimizers import make_clipping, make_optimizer
from jaxinf.typing import PyTree


def in_memory(config: TrainConfig, devices: Devices) -> Mode:
    """Trains by plain optax, which treats non-finite gradients like `smart_update`."""
    tx = make_optimizer(config)
    if config.compression is not None:
        tx = optax.chain(make_clipping(config), sparsify(config.compression), tx)
    tx = optax.apply_if_finite(tx, max_consecutive_errors=2**31 - 1)
    tx = with_zeros(tx) if config.frozen else tx

    def num_skipped(state: Any) -> int:
        if (num := int(state.total_notfinite)) and config.nonfinite == "error":
            raise NonFiniteGradientError(
                "NaN or Inf in a gradient: the run ends before it reaches the params. "
                "Lower the learning rate or clip the gradients, or give --nonfinite "
                "skip to go on without such batches"
            )
        return num

    shapes = devices.shapes(config.abstract[1])
    params = held_params(placed(first_params(config), shapes))
    return with_params(
        *(config, tx, params, _initial(tx, params), "split"),
        num_skipped=num_skipped,
        average=_average,
    )


def held_params(params: PyTree) -> PyTree:
    """Reads params onto the JAX device, unless they are there."""
    return jax.tree.map(
        lambda x: x if isinstance(x, jax.Array) else jnp.asarray(np.asarray(x)), params
    )


def _initial(tx: optax.GradientTransformation, params: PyTree) -> Any:
    """Returns the first state; on a mesh a param's state is sharded like the param."""
    leaves, shardings = jax.tree.leaves(params), None
    if isinstance(leaves[0].sharding, NamedSharding):
        like = {leaf.shape: leaf.sharding for leaf in leaves}
        whole = NamedSharding(leaves[0].sharding.mesh, PartitionSpec())
        state = jax.eval_shape(tx.init, params)
        shardings = jax.tree.map(lambda one: like.get(one.shape, whole), state)
    return jax.jit(tx.init, out_shardings=shardings)(params)


def _average(params: PyTree, state: Any) -> PyTree:
    """Returns a schedule-free optimizer's average; `check` refuses --ema in memory."""

    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ScheduleFreeState))
    (held,) = [one for one in leaves if isinstance(one, ScheduleFreeState)]

    def averaged(y: jax.Array, z: Any) -> jax.Array:
        is_frozen = isinstance(z, optax.MaskedNode)
        return y if is_frozen else (y - (1 - held.b1) * z) / held.b1

    return jax.tree.map(averaged, params, held.z)
