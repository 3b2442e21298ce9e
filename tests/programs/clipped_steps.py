"""Steps of `MultiSteps` around a clip; as a program, killed.

python clipped_steps.py killed FOLDER
"""

import sys

import jax
import numpy as np
import optax
from inject import at_call, die
from small_stores import steps

import jaxinf


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
    gradients = map(make, range(first, first + num))
    return steps(tx, params, gradients, state, each=lambda _, state: each(state))


def killed(place):
    """Is killed when the second step has read what the first one has stored."""
    store = jaxinf.open_store(place + "/store")
    tx = jaxinf.smart_update(clipped(2), store)
    params, state = train(tx, 1)
    store.wait(state)
    np.savez(place + "/params.npz", **params)

    def last():
        print("read", flush=True)
        die()

    at_call(store._engine.steps, "read_states", 1, last, after=True)
    tx.update(make(2), state, params)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
