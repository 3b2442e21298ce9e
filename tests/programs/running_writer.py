"""Writes steps until it is killed; every element of the params is minus the step.

python running_writer.py STORE CSD …

Says "running" after the second step.
"""

import sys

import jax.numpy as jnp
import optax
import small_stores

import jaxinf

params = {"w": jnp.zeros((300, 100)), "v": jnp.zeros((9000,))}
with small_stores.open_store(
    sys.argv[1], csds=sys.argv[2:], chunk_elements=4096
) as store:
    tx = jaxinf.smart_update(optax.sgd(1.0), store)
    state = tx.init(params)
    ones = {name: jnp.ones_like(p) for name, p in params.items()}
    for step in range(100000):
        updates, state = tx.update(ones, state, params)
        params = optax.apply_updates(params, updates)
        if step == 1:
            print("running", flush=True)
