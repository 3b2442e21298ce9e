"""Training programs in the styles of public ones, each with checkpoints of its own.

A program is a function of an optax transformation and a `Run`. It restores the last
checkpoint if there is one, trains, and saves every second step. None knows of a store.
"""

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import flax.serialization
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flax.training.train_state import TrainState
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


def linen(tx: Any, run: Run) -> None:
    """A linen `TrainState`, saved with Flax's serialization."""
    network = LinenNetwork()
    params = network.init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]
    apply = network.apply
    train = TrainState.create(apply_fn=apply, params=run.shared(params), tx=tx)
    file = run.place / "train.msgpack"
    if file.exists():
        restored = flax.serialization.from_bytes(train, file.read_bytes())
        train = run.shared(restored)

    @jax.jit
    def step(train, rows):
        def loss(params):
            return loss_of(train.apply_fn({"params": params}, rows), rows)

        value, gradients = jax.value_and_grad(loss)(train.params)
        return train.apply_gradients(grads=gradients), value

    for number in range(int(train.step), NUM_STEPS):
        train, loss = step(train, run.batch(number))
        run.losses[number] = float(loss)
        if (number + 1) % EVERY == 0:
            file.write_bytes(flax.serialization.to_bytes(train))


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


def equinox(tx: Any, run: Run) -> None:
    """An Equinox module in `filter_jit`, saved leaf by leaf."""
    model = eqx.nn.MLP(WIDTH, WIDTH, 16, 1, key=jax.random.key(0))
    arrays, functions = eqx.partition(model, eqx.is_array)
    model = eqx.combine(run.shared(arrays), functions)
    state = tx.init(eqx.filter(model, eqx.is_array))
    number, file = jnp.zeros((), jnp.int32), run.place / "run.eqx"
    if file.exists():
        like = (model, state, number)
        model, state, number = eqx.tree_deserialise_leaves(file, like)
        arrays, functions = eqx.partition(model, eqx.is_array)
        model, state = eqx.combine(run.shared(arrays), functions), run.shared(state)

    @eqx.filter_jit
    def step(model, state, rows):
        def loss(model):
            return loss_of(jax.vmap(model)(rows), rows)

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        updates, state = tx.update(gradients, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    for n in range(int(number), NUM_STEPS):
        model, state, loss = step(model, state, run.batch(n))
        run.losses[n] = float(loss)
        if (n + 1) % EVERY == 0:
            whole = (model, state, jnp.asarray(n + 1, jnp.int32))
            eqx.tree_serialise_leaves(file, whole)


def haiku(tx: Any, run: Run) -> None:
    """A Haiku function with attention and an `update` over a named tuple; pickled."""

    def network(rows):
        tokens = rows[:, :, None] * jnp.ones((4,))
        mixed = hk.MultiHeadAttention(1, 4, w_init=hk.initializers.Constant(0.1))(
            tokens, tokens, tokens
        )
        return hk.Linear(1)(tokens + mixed)[..., 0]

    transformed = hk.without_apply_rng(hk.transform(network))
    params = transformed.init(jax.random.key(0), jnp.ones((1, WIDTH)))
    params = run.shared(params)
    state, first, file = tx.init(params), 0, run.place / "run.pickle"
    if file.exists():
        first, kept = pickle.loads(file.read_bytes())
        params, state = run.shared(kept)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, rows):
        def loss(params):
            return loss_of(transformed.apply(params, rows), rows)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    for number in range(first, NUM_STEPS):
        params, state, loss = update(params, state, run.batch(number))
        run.losses[number] = float(loss)
        if (number + 1) % EVERY == 0:
            kept = jax.tree.map(np.asarray, (params, state))
            file.write_bytes(pickle.dumps((number + 1, kept)))


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
    "linen": linen,
    "nnx": nnx_optimizer,
    "equinox": equinox,
    "haiku": haiku,
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
