"""A training loop with Orbax's manager of its own; as a program, one that is killed.

    python orbax_loop.py FOLDER {step:N | file:N}
    python orbax_loop.py FOLDER mesh

The first is killed before a step, or at an operation on a file, and prints how many of
these there were. The second runs on all devices of its process.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import jaxinf

WIDTH, NUM_STEPS, EVERY = 8, 6, 2


class Killed(Exception):
    """Ends a program where a signal would: nothing is told to the store."""


def first_params() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return {
        "first": 0.3 * jax.random.normal(keys[0], (WIDTH, 16)),
        "second": 0.3 * jax.random.normal(keys[1], (16, WIDTH)),
    }


def put(mesh: Any, array: Any, *spec: str) -> Any:
    if mesh is None:
        return array
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def train(
    place: Path,
    *,
    plain: bool = False,
    mesh: Any = None,
    kill: Callable[[int], None] = lambda number: None,
) -> dict[int, float]:
    """Trains up to the end, or to the interruption; returns the loss of each step.

    Args:
      place: an empty directory, or one with the program's checkpoints.
      plain: whether optax alone updates.
      kill: called with the number of a step before it begins.
    """
    losses: dict[int, float] = {}
    schedule = optax.warmup_cosine_decay_schedule(1e-2, 3e-2, 2, 20)
    tx: Any = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    params, store = put(mesh, first_params()), None
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
            def step(params: Any, state: Any, rows: Any) -> Any:
                def loss(params: Any) -> jax.Array:
                    outputs = jnp.tanh(rows @ params["first"]) @ params["second"]
                    return jnp.mean((outputs - jnp.sin(rows)) ** 2)

                value, gradients = jax.value_and_grad(loss)(params)
                updates, state = tx.update(gradients, state, params)
                return optax.apply_updates(params, updates), state, value

            for number in range(first, NUM_STEPS):
                kill(number)
                rows = jax.random.normal(jax.random.key(number % 2), (8, WIDTH))
                params, state, loss = step(params, state, put(mesh, rows, "d"))
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


def killed(place: Path, what: str, at: int) -> None:
    """Runs the program, and kills it at a step or at an operation on a file."""
    count = 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def operation(event: str, _: Any) -> None:
        nonlocal count
        if event in FILE_OPERATIONS:
            count += 1
            if what == "file" and count == at:
                die()

    sys.addaudithook(operation)
    train(place, kill=lambda n: die() if what == "step" and n == at else None)
    print(count)


def on_a_mesh(place: Path) -> None:
    """Plain, with a store, and after a stop and restart, on all devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("d",))

    def stop(number: int) -> None:
        if number == 5:
            raise Killed

    plain = train(place / "plain", plain=True, mesh=mesh)
    first = train(place / "near", mesh=mesh, kill=stop)
    rest = train(place / "near", mesh=mesh)
    assert ([*first], [*rest]) == ([0, 1, 2, 3, 4], [4, 5])
    assert rest[4] == first[4]
    found = [(first | rest)[n] for n in range(NUM_STEPS)]
    np.testing.assert_allclose(found, [*plain.values()], rtol=1e-4)
    print("agrees")


if __name__ == "__main__":
    place, asked = Path(sys.argv[1]), sys.argv[2]
    if asked == "mesh":
        on_a_mesh(place)
    else:
        killed(place, asked.split(":")[0], int(asked.split(":")[1]))
