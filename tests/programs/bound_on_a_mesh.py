"""Compiles a step on a mesh of four devices and prints it, as XLA has scheduled it.

python bound_on_a_mesh.py STORE
"""

import sys

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxinf

mesh = jax.make_mesh((2, 2), ("x", "y"))
rows, whole = (
    NamedSharding(mesh, PartitionSpec("x")),
    NamedSharding(mesh, PartitionSpec()),
)
params = {
    "rows": jax.device_put(jnp.ones((64, 256)), rows),
    "whole": jax.device_put(jnp.zeros(256), whole),
}
with jaxinf.open_store(sys.argv[1]) as store:
    tx = jaxinf.smart_update(optax.adamw(1e-2), store)
    state = tx.init(params)
    print(jax.jit(tx.update).lower(params, state, params).compile().as_text())
