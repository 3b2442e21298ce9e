"""Three steps of a store that is not closed: `optimizer/test_transform.py`.

python store_without_close.py STORE
"""

import sys

import jax
import jax.numpy as jnp
import optax

import jaxinf

tx = jaxinf.smart_update(optax.adam(1e-2), sys.argv[1])
params = {"w": jnp.ones((1000, 100))}
state = tx.init(params)
update = jax.jit(lambda p, s: tx.update(p, s, p))
for _ in range(3):
    updates, state = update(params, state)
    params = optax.apply_updates(params, updates)
