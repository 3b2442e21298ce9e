"""Steps on four devices by callbacks and on streams: `optimizer/test_on_stream.py`.

Leaves are sharded, partly sharded and replicated, so that every device has calls of its
own, and some call for others.
"""

import os
import sys

import jax
import jax.numpy as jnp
import late_device
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxinf

SPECS = {"both": ("x", "y"), "rows": ("x",), "whole": ()}


def main(place: str) -> None:
    """Compares params after five steps."""
    late_device.connect()
    mesh = jax.make_mesh((2, 2), ("x", "y"))
    shardings = {k: NamedSharding(mesh, PartitionSpec(*v)) for k, v in SPECS.items()}

    def make(seed: int) -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.key(seed), len(SPECS))
        arrays = {
            name: jax.random.normal(key, (512, 256))
            for name, key in zip(SPECS, keys, strict=True)
        }
        return jax.device_put(arrays, shardings)

    found = {}
    for form in ("io", "stream"):
        os.environ["JAXINF_CALLBACK"] = form
        with jaxinf.open_store(f"{place}/{form}") as store:
            tx = jaxinf.smart_update(optax.adamw(1e-2), store)
            params, update = make(0), jax.jit(tx.update)
            state = tx.init(params)
            for seed in range(1, 6):
                updates, state = update(make(seed), state, params)
                params = jax.tree.map(jnp.add, params, updates)
            found[form] = jax.tree.map(np.asarray, params)
    jax.tree.map(np.testing.assert_array_equal, found["io"], found["stream"])
    model = late_device.library()
    assert model.late_device_count(b"cuStreamWaitValue32") == 5 * (4 + 2 + 1)
    assert model.late_device_faults() == b""


if __name__ == "__main__":
    main(sys.argv[1])
