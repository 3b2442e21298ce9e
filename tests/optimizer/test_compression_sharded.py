"""Compressed gradients of sharded params: the same bits as on one JAX device.

Each part runs in a process of its own, because the number of CPU devices is fixed when
JAX starts. The shards are whole chunks, on one JAX device too.
"""

import json
import shutil

import numpy as np
import pytest

pytestmark = pytest.mark.long

PROGRAM = """
import json, sys, jax, jax.numpy as jnp, numpy as np, optax, jaxinf
from jax.sharding import NamedSharding, PartitionSpec as P

SPECS = {"rows": P("d"), "columns": P(None, "d"), "both": P("d"), "scale": P()}
where, name, num_devices = sys.argv[1], sys.argv[2], int(sys.argv[3])
first, last, jit_init = map(int, sys.argv[4:])
mesh = jax.make_mesh((num_devices,), ("d",)) if num_devices > 1 else None

def make(seed):
    keys = jax.random.split(jax.random.key(seed), 4)
    tree = {
        "rows": jax.random.normal(keys[0], (1024, 160)) ** 3,
        "columns": jax.random.normal(keys[1], (96, 4 * 512)) ** 3,
        "both": jax.random.normal(keys[2], (4 * 24,)),
        "scale": jax.random.normal(keys[3], ()),
    }
    return {n: on(n, tree[n]) for n in tree}

def on(name, leaf):
    return leaf if mesh is None else jax.device_put(
        leaf, NamedSharding(mesh, SPECS[name])
    )

def smart(store):
    shardings = None
    if mesh is not None:
        shardings = {n: NamedSharding(mesh, s) for n, s in SPECS.items()}
    compression = jaxinf.top_k(0.05, error_feedback=True, warmup_steps=1)
    tx = optax.adamw(1e-2)
    return jaxinf.smart_update(tx, store, compress=compression, shardings=shardings)

with jaxinf.open_store(where + "/" + name, master="stored") as store:
    tx = smart(store)
    params = make(0)
    if store.exists:
        params = store.params(like=params)
    state = jax.jit(tx.init)(params) if jit_init else tx.init(params)

    @jax.jit
    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for seed in range(first, last):
        params, state = step(params, state, make(seed))
        store.check()
    final = store.params(like=params, state=state)
    if mesh is not None:
        left = state.error_feedback["columns"]
        assert left.sharding.is_equivalent_to(params["columns"].sharding, 2)
    arrays = {n: np.asarray(v) for n, v in final.items()}
    arrays |= {"left/" + n: np.asarray(v) for n, v in state.error_feedback.items()}
    np.savez(where + "/" + name + ".npz", **arrays)
    print(json.dumps(store.metrics.traffic.link_down_bytes))
"""
DEVICES = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    "PJRT_NPROC": "8",
}


def test_same_bits_whatever_the_mesh(tmp_path, run_python):
    traffic = []

    def run(*words, **environment):
        result = run_python(PROGRAM, tmp_path, *words, **environment)
        traffic.append(json.loads(result.stdout.splitlines()[-1]))

    # The store is made by four devices, whose shards then are its chunks.
    run("four", 4, 1, 3, 0, **DEVICES)
    shutil.copytree(tmp_path / "four", tmp_path / "one", symlinks=True)
    run("four", 4, 3, 6, 1, **DEVICES)
    run("one", 1, 3, 6, 0)
    assert len(set(traffic)) == 1
    four, one = (np.load(tmp_path / f"{name}.npz") for name in ("four", "one"))
    for name in four.files:
        np.testing.assert_array_equal(four[name], one[name], err_msg=name)
    left_out = np.mean(four["left/columns"] != 0)
    assert 0.9 < left_out < 1
