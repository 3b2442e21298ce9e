"""A training loop with Orbax's manager of its own; as a program, one that is killed.

    python orbax_loop.py FOLDER {step:N | file:N}

It is killed before a step, or at an operation on a file; prints the number of these.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from inject import die

import jaxinf

WIDTH, NUM_STEPS, EVERY = 8, 6, 2


class Killed(Exception):
    """Ends a program where a signal would: nothing is told to the store."""


def first_params():
    keys = jax.random.split(jax.random.key(0))
    return {
        "first": 0.3 * jax.random.normal(keys[0], (WIDTH, 16)),
        "second": 0.3 * jax.random.normal(keys[1], (16, WIDTH)),
    }


def train(place, *, plain=False, kill=lambda number: None):
    """Trains up to the end, or to the interruption; returns the loss of each step.

    Calls `kill` with the number of a step before it begins. If it is plain, optax alone
    updates.
    """
    losses = {}
    schedule = optax.warmup_cosine_decay_schedule(1e-2, 3e-2, 2, 20)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    params, store = first_params(), None
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    try:
        with ocp.CheckpointManager(place / "own", options=options) as steps:
            first = steps.latest_step() or 0
            if not plain:
                restore = f"own-{first}" if first else None
                store = jaxinf.open_store(place / "store", restore=restore)
                on_existing = "resume" if first else "restart"
                tx = jaxinf.smart_update(tx, store, on_existing=on_existing)
            state = tx.init(params)
            if first:
                like = ocp.args.StandardRestore({"params": params, "state": state})
                kept = steps.restore(first, args=like)
                params, state = kept["params"], kept["state"]

            @jax.jit
            def step(params, state, rows):
                def loss(params):
                    outputs = jnp.tanh(rows @ params["first"]) @ params["second"]
                    return jnp.mean((outputs - jnp.sin(rows)) ** 2)

                value, gradients = jax.value_and_grad(loss)(params)
                updates, state = tx.update(gradients, state, params)
                return optax.apply_updates(params, updates), state, value

            for number in range(first, NUM_STEPS):
                kill(number)
                rows = jax.random.normal(jax.random.key(number % 2), (8, WIDTH))
                params, state, loss = step(params, state, rows)
                losses[number] = float(loss)
                if (number + 1) % EVERY == 0:
                    if store is not None:  # the store's step before the program's own
                        name = f"own-{number + 1}"
                        store.checkpoint(name, state=state, overwrite=True)
                    kept = {"params": params, "state": state}
                    steps.save(number + 1, args=ocp.args.StandardSave(kept))
    except Killed:
        pass
    finally:
        if store is not None:
            store.close()
    return losses


FILE_OPERATIONS = {"open"}.union(
    f"os.{name}" for name in ("rename", "link", "remove", "mkdir", "symlink")
)


def killed(place, what, at):
    """Runs the program, and kills it at a step or at an operation on a file."""
    count = 0

    def operation(event, _):
        nonlocal count
        if event in FILE_OPERATIONS:
            count += 1
            if what == "file" and count == int(at):
                die()

    sys.addaudithook(operation)
    train(place, kill=lambda n: die() if what == "step" and n == int(at) else None)
    print(count)


if __name__ == "__main__":
    killed(Path(sys.argv[1]), *sys.argv[2].split(":"))
