"""Steps of `MultiSteps` around a clip; as a program, killed or on a mesh of two.

python clipped_steps.py killed|on_mesh FOLDER
"""

import os
import signal
import sys

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxinf

__all__ = ["clipped", "make", "train"]

APPLY = jax.jit(optax.apply_updates)


def make(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "w": jax.random.normal(keys[0], (300, 70)),
        "b": jax.random.normal(keys[1], (70,)),
        "scale": jax.random.normal(keys[2], ()),
    }


def clipped(every, inner=None, **options):
    inner = optax.sgd(1e-2) if inner is None else inner
    chain = optax.chain(optax.clip_by_global_norm(1.0), inner)
    return optax.MultiSteps(chain, every, **options)


def train(tx, num, *, params=None, state=None, first=1, each=lambda state: None):
    params = make(0) if params is None else params
    state = tx.init(params) if state is None else state
    update = jax.jit(tx.update)
    for seed in range(first, first + num):
        updates, state = update(make(seed), state, params)
        params = APPLY(params, updates)
        each(state)
    return params, state


def killed(place):
    """Is killed when the second step has read what the first one has stored."""
    store = jaxinf.open_store(place + "/store")
    tx = jaxinf.smart_update(clipped(2), store)
    params, state = train(tx, 1)
    store.wait(state)
    np.savez(place + "/params.npz", **params)
    recall = store._engine.opened.recall

    def last(*arguments):
        recall(*arguments)
        print("recalled", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    store._engine.opened.recall = last
    tx.update(make(2), state, params)


def on_mesh(place):
    """Leaves params of four steps in KIND.npz, for each kind of axis."""
    specs = {"w": P("d"), "b": P(), "scale": P()}
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
        at = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        tx = jaxinf.smart_update(clipped(2), f"{place}/{kind.name}", shardings=at)
        params = jax.device_put(make(0), at)
        state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
        for seed in range(1, 5):
            gradients = jax.device_put(make(seed), at)
            updates, state = update(gradients, state, params)
            params = APPLY(params, updates)
        np.savez(f"{place}/{kind.name}.npz", **params)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
