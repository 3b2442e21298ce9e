"""Updates in `pmap` and `shard_map`: `optimizer/test_transformed_by_jax.py`.

python updates_on_devices.py STORE
"""

import sys

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import jaxinf


def main(path):
    """Prints why four devices are refused; one has a step."""
    params = {"w": jnp.ones((300, 20))}
    with jaxinf.open_store(path) as store:
        tx = jaxinf.smart_update(optax.adam(1e-2), store)
        tree = params, tx.init(params), params
        four = jax.tree.map(lambda x: jnp.stack([x] * 4), tree)
        mesh = jax.make_mesh((4,), ("d",))
        specs = {"in_specs": P(), "out_specs": P(), "check_vma": False}
        whole = jax.shard_map(tx.update, mesh=mesh, **specs)
        for call in (
            lambda: jax.pmap(tx.update, axis_name="i")(*four),
            lambda: jax.pmap(tx.init)(four[0]),
            lambda: jax.jit(whole)(*tree),
        ):
            try:
                call()
            except ValueError as error:
                print(error)
        assert store.step == 0
        one = jax.tree.map(lambda x: x[None], tree)
        assert jax.pmap(tx.update)(*one)[1].step.tolist() == [1]


if __name__ == "__main__":
    main(sys.argv[1])
