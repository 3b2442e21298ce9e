"""Compressed gradients of sharded params: `optimizer/test_compression_sharded.py`.

python sharded_compression.py FOLDER STORE NUM_DEVICES FIRST LAST JIT_INIT

Prints the bytes that have come down; leaves params and what was left out in STORE.npz.
"""

import json
import sys

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxinf

SPECS = {"rows": P("d"), "columns": P(None, "d"), "both": P("d"), "scale": P()}


def make(seed):
    keys = jax.random.split(jax.random.key(seed), 4)
    return {
        "rows": jax.random.normal(keys[0], (1024, 160)) ** 3,
        "columns": jax.random.normal(keys[1], (96, 4 * 512)) ** 3,
        "both": jax.random.normal(keys[2], (4 * 24,)),
        "scale": jax.random.normal(keys[3], ()),
    }


def main(where, name, num_devices, first, last, jit_init):
    """Makes or goes on with a store, by steps from `first` to before `last`."""
    shardings = None
    if num_devices > 1:
        mesh = jax.make_mesh((num_devices,), ("d",))
        shardings = {n: NamedSharding(mesh, spec) for n, spec in SPECS.items()}

    def placed(seed):
        made = make(seed)
        return made if shardings is None else jax.device_put(made, shardings)

    with jaxinf.open_store(where + "/" + name, csd="emulated") as store:
        compression = jaxinf.top_k(0.05, error_feedback=True, warmup_steps=1)
        options = {"compress": compression, "shardings": shardings}
        tx = jaxinf.smart_update(optax.adamw(1e-2), store, **options)
        params = placed(0)
        if store.exists:
            params = store.params(like=params)
        state = jax.jit(tx.init)(params) if jit_init else tx.init(params)

        @jax.jit
        def step(params, state, gradients):
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        for seed in range(first, last):
            params, state = step(params, state, placed(seed))
            store.check()
        final = store.params(like=params, state=state)
        if shardings is not None:
            left = state.error_feedback["columns"]
            assert left.sharding.is_equivalent_to(params["columns"].sharding, 2)
        arrays = {n: np.asarray(v) for n, v in final.items()}
        arrays |= {"left/" + n: np.asarray(v) for n, v in state.error_feedback.items()}
        np.savez(where + "/" + name + ".npz", **arrays)
        print(json.dumps(store.metrics.traffic.link_down_bytes))


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
