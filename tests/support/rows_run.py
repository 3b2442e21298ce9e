"""A streamed run with a table in rows; as a program it is killed on the way.

    python rows_run.py STORE {init | update} NUMBER

It is killed after so many parts of the first state, or updates of the second step.
"""

import os
import signal
import sys

import jax
import jax.numpy as jnp
import optax
import small_stores

import jaxinf
from jaxinf.engine import Training
from jaxinf.engine.steps import StepEngine

NUM_ROWS, NUM_FEATURES, WIDTH = 16384, 128, 4096
LITTLE = "24MiB"
AVERAGE = jaxinf.ema(0.9, form="bf16")
OPTIONS = {"chunk_elements": 1 << 16, "memory_bytes": 16 << 20}
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
TOKENS = jax.random.randint(jax.random.key(4), (2, 16), 0, NUM_ROWS).at[0, 0].set(-1)


def params_of(*, tied=True):
    keys = jax.random.split(jax.random.key(0), 4)
    shape = NUM_ROWS, NUM_FEATURES
    held = {
        "table": jax.random.normal(keys[0], shape) * 0.1,
        "up": jax.random.normal(keys[1], (NUM_FEATURES, WIDTH)) * 0.1,
        "down": jax.random.normal(keys[2], (WIDTH, NUM_FEATURES)) * 0.1,
    }
    return held if tied else held | {"head": jax.random.normal(keys[3], shape).T * 0.1}


def loss_fn(params, tokens):
    x = params["table"][tokens]
    x = x + jnp.tanh(x @ params["up"]) @ params["down"]
    logits = x @ params.get("head", params["table"].T)
    return -jnp.mean(jax.nn.log_softmax(logits)[0, jnp.arange(15), tokens[0, 1:]])


def kill_at(owner, name, number, is_counted):
    """Kills this process when a method was called so often."""
    method, left = getattr(owner, name), [number]

    def called(self, *args):
        found = method(self, *args)
        left[0] -= is_counted(args)
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, called)


def main(path, where, number):
    if where == "init":
        kill_at(Training, "initialise", number, lambda args: True)
    else:
        kill_at(StepEngine, "update", number, lambda args: args[0] == 1)
    store = small_stores.open_store(path, **OPTIONS)
    options = {"memory_bytes": LITTLE, "average": AVERAGE}
    with jaxinf.stream(loss_fn, TX, store, **options) as step:
        step.load(params_of(), batch=TOKENS)
        for _ in range(2):
            step(TOKENS)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
