"""The update of 16-bit params: the difference to the new ones.

Invariant: the difference is taken to the params that are really on the JAX device, so
that what one update does not reach, the next one does.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxinf.optimizer.host_side import EXACT


def change(
    result: jax.Array | None, params: jax.Array | None, dtype: DTypeLike
) -> tuple[jax.Array | None, jax.Array]:
    """Returns the update for a host's result, and the difference that it leaves.

    There is no result, and no update, for a leaf that stays as it is. Float32 results
    are the update. For others no update may lead exactly from the old params to the
    new: in float32 only from a power of two to far below its last bit, or between
    denormals; in 16 bits also if an element loses more than half of its magnitude, or
    changes its sign. Then the updated params are one rounding of the update away from
    the store's, and the next step must not use them in place of those.

    Args:
      result: the new params of 16 bits, or the float32 update; or None.
      params: the params before the step.
      dtype: dtype of the update of 16-bit params.

    Returns:
      The update; and the greatest difference, float32, between the params after it and
      `result`, or `EXACT` if they are equal to the bit.
    """
    if result is None or result.dtype == jnp.float32:
        return result, jnp.float32(EXACT)
    assert params is not None
    new, old = result.astype(jnp.float32), params.astype(jnp.float32)
    update = _rounded(new - old, dtype)
    reached = _rounded(old + update, result.dtype)
    bits = [
        lax.bitcast_convert_type(x.astype(result.dtype), jnp.uint16)
        for x in (reached, result)
    ]
    difference = jnp.max(jnp.abs(reached - new), initial=0.0)
    bound = jnp.where(jnp.isfinite(difference), difference, jnp.finfo(jnp.float32).max)
    differs = jnp.any(bits[0] != bits[1])
    return update.astype(dtype), jnp.where(differs, bound, EXACT)


def _rounded(value: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds float32 to a dtype's numbers; XLA may drop a cast to it and back."""
    if dtype == jnp.float32:
        return value
    info = jnp.finfo(dtype)
    rounded = lax.reduce_precision(value, info.nexp, info.nmant)
    if dtype != jnp.float16:
        return rounded
    # reduce_precision flushes the denormals of float16, multiples of 2^-24.
    shift = jnp.float32(0.75)
    denormal = (value + shift) - shift
    return jnp.where(jnp.abs(value) < info.tiny, denormal, rounded)
