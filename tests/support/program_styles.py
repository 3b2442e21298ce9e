"""Training programs with checkpoints of their own, beside those of `public_styles`.

A program is a function of an optax transformation and a `Run`. It restores the last
checkpoint if there is one, trains, and saves every second step. None knows of a store.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxinf

WIDTH = 8
NUM_STEPS = 6
EVERY = 2


class Killed(Exception):
    """Ends a program where a signal would: nothing is told to the store."""


@dataclass
class Run:
    """What a program is run with.

    Attributes:
      place: an empty directory, or one with a checkpoint.
      mesh: the devices; None for one.
      kill: called with the number of a step before it begins.
      losses: the loss of each step, by its number.
    """

    place: Path
    mesh: Any = None
    kill: Callable[[int], None] = lambda number: None
    losses: dict[int, float] = field(default_factory=dict)

    @property
    def store(self) -> Path:
        """The store of a program that names one."""
        return self.place / "store"

    def shared(self, tree: Any) -> Any:
        """Arrays on all devices."""
        if self.mesh is None:
            return tree
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec()))

    def batch(self, number: int) -> jax.Array:
        """The batch of a step, divided among the devices."""
        self.kill(number)
        rows = jax.random.normal(jax.random.key(number % 2), (8, WIDTH))
        if self.mesh is None:
            return rows
        return jax.device_put(rows, NamedSharding(self.mesh, PartitionSpec("d")))


def loss_of(outputs: jax.Array, rows: jax.Array) -> jax.Array:
    """Every program learns the same function."""
    return jnp.mean((outputs - jnp.sin(rows)) ** 2)


class LinenNetwork(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, rows):
        return nn.Dense(WIDTH)(nn.relu(nn.Dense(16)(rows)))


class NnxNetwork(nnx.Module):
    """Two layers."""

    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.second = nnx.Linear(16, WIDTH, rngs=rngs)

    def __call__(self, rows):
        return self.second(nnx.relu(self.first(rows)))


def nnx_optimizer(tx: Any, run: Run) -> None:
    """An `nnx.Optimizer`, saved as its pure state with Orbax."""
    model = NnxNetwork(nnx.Rngs(0))
    nnx.update(model, run.shared(nnx.state(model)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    both = (model, optimizer)
    kept = [run.place / f"{n}" for n in range(NUM_STEPS + 1)]
    first = max((n for n, path in enumerate(kept) if path.exists()), default=0)
    with ocp.StandardCheckpointer() as checkpointer:
        if first:
            restored = checkpointer.restore(kept[first], nnx.state(both))
            nnx.update(both, run.shared(restored))

        @nnx.jit
        def step(model, optimizer, rows):
            loss, gradients = nnx.value_and_grad(lambda m: loss_of(m(rows), rows))(
                model
            )
            optimizer.update(model, gradients)
            return loss

        for number in range(first, NUM_STEPS):
            loss = step(model, optimizer, run.batch(number))
            run.losses[number] = float(loss)
            if (number + 1) % EVERY == 0:
                checkpointer.save(kept[number + 1], nnx.state(both))
                checkpointer.wait_until_finished()


def manager(tx: Any, run: Run) -> None:
    """A loop over dicts of arrays with Orbax's `CheckpointManager`."""
    keys = jax.random.split(jax.random.key(0))
    params = {
        "first": 0.3 * jax.random.normal(keys[0], (WIDTH, 16)),
        "blocks": [{"out": 0.3 * jax.random.normal(keys[1], (16, WIDTH))}],
    }
    params = run.shared(params)
    state = tx.init(params)

    @jax.jit
    def step(params, state, rows):
        def loss(params):
            hidden = jax.nn.gelu(rows @ params["first"])
            return loss_of(hidden @ params["blocks"][0]["out"], rows)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    with ocp.CheckpointManager(run.place / "steps") as steps:
        first = steps.latest_step() or 0
        if first:
            like = ocp.args.StandardRestore({"params": params, "state": state})
            kept = steps.restore(first, args=like)
            params, state = kept["params"], kept["state"]
        for number in range(first, NUM_STEPS):
            params, state, loss = step(params, state, run.batch(number))
            run.losses[number] = float(loss)
            if (number + 1) % EVERY == 0:
                kept = {"params": params, "state": state}
                steps.save(number + 1, args=ocp.args.StandardSave(kept))


def mesh_step(tx: Any, run: Run) -> None:
    """Params and state sharded by `jit`'s shardings; saved as flat NumPy arrays."""
    keys = jax.random.split(jax.random.key(0))
    params = {
        "first": 0.3 * jax.random.normal(keys[0], (WIDTH, 16)),
        "second": 0.3 * jax.random.normal(keys[1], (16, WIDTH)),
    }
    if run.mesh is not None:
        rows_of = NamedSharding(run.mesh, PartitionSpec("d"))
        params = jax.device_put(params, rows_of)
    state = tx.init(params)

    def place_of(array):
        if run.mesh is None or isinstance(array.sharding, NamedSharding):
            return array.sharding
        return NamedSharding(run.mesh, PartitionSpec())

    placed = jax.tree.map(place_of, (params, state))
    params, state = jax.device_put((params, state), placed)

    def step(params, state, rows):
        def loss(params):
            return loss_of(jnp.tanh(rows @ params["first"]) @ params["second"], rows)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*placed, None))
    first, file = 0, run.place / "run.npz"
    if file.exists():
        kept = np.load(file)
        first, flat = int(kept["step"]), [kept[f"{n}"] for n in range(len(kept) - 1)]
        like = jax.tree.structure((params, state))
        params, state = jax.device_put(like.unflatten(flat), placed)
    for number in range(first, NUM_STEPS):
        params, state, loss = step(params, state, run.batch(number))
        run.losses[number] = float(loss)
        if (number + 1) % EVERY == 0:
            flat = {f"{n}": x for n, x in enumerate(jax.tree.leaves((params, state)))}
            np.savez(file, step=number + 1, **flat)


STYLES: dict[str, Callable[[Any, Run], None]] = {
    "nnx": nnx_optimizer,
    "manager": manager,
    "mesh": mesh_step,
}


def make_tx() -> optax.GradientTransformation:
    """The optimizer of every program."""
    schedule = optax.warmup_cosine_decay_schedule(1e-2, 3e-2, 2, 20)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def run_plain(style: str, place: Path, mesh: Any = None) -> dict[int, float]:
    """The program as it is; its losses."""
    place.mkdir(parents=True)
    run = Run(place, mesh=mesh)
    STYLES[style](make_tx(), run)
    return run.losses


def run_changed(style: str, place: Path, **options: Any) -> dict[int, float]:
    """The program with the optimizer's line changed; the losses up to its end.

    The store keeps the steps that the program saves.
    """
    (place / "own").mkdir(parents=True, exist_ok=True)
    store = jaxinf.open_store(place / "store", keep_steps=(EVERY, 2))
    run = Run(place / "own", **options)
    try:
        STYLES[style](jaxinf.smart_update(make_tx(), store), run)
    except Killed:
        pass
    finally:
        store.close()
    return run.losses


def main(place: Path, *styles: str) -> None:
    """On all devices of this process: plain, changed, and after a stop and restart."""
    mesh = jax.make_mesh((jax.device_count(),), ("d",))

    def kill(number: int) -> None:
        if number == 5:
            raise Killed

    for style in styles:
        plain = run_plain(style, place / style / "plain", mesh)
        first = run_changed(style, place / style / "changed", mesh=mesh, kill=kill)
        rest = run_changed(style, place / style / "changed", mesh=mesh)
        assert [*first] == [0, 1, 2, 3, 4]
        assert [*rest] == [4, 5]
        assert rest[4] == first[4], style
        found = [(first | rest)[n] for n in range(NUM_STEPS)]
        expected = [plain[n] for n in range(NUM_STEPS)]
        np.testing.assert_allclose(found, expected, rtol=1e-4, err_msg=style)
        print(style, "agrees")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
