"""Training programs in the styles of public ones; as a program, one of them.

    python styles.py STYLE FOLDER [step:N | file:N]
    python styles.py mesh FOLDER STYLE …

The first is killed before a step, or at an operation on a file, and prints how many of
these there were. The second runs styles on all devices of its process.

A style is a function of a `Run`. Where it says ``run.near(tx)``, plain optax has
``tx``; where it says ``run.keep``, plain optax has nothing.
"""

import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import jaxinf

__all__ = ["NUM_STEPS", "STYLES", "Killed", "Run", "run_style"]

WIDTH, NUM_STEPS, EVERY = 8, 6, 2
ROWS = jnp.ones((1, WIDTH))


class Killed(Exception):
    """Ends a program where a signal would: nothing is told to the store."""


@dataclass
class Run:
    """What a program is run with.

    Attributes:
      place: an empty directory, or one with a checkpoint.
      is_plain: whether it is run with plain optax.
      store: where `near` puts the state, once a program has opened it.
      mesh: the devices; None for one.
      kill: called with the number of a step before it begins.
      losses: the loss of each step, by its number.
    """

    place: Path
    is_plain: bool = False
    store: jaxinf.Store | None = None
    mesh: Any = None
    kill: Callable[[int], None] = lambda number: None
    losses: dict[int, float] = field(default_factory=dict)

    def near(self, tx: Any, first: int = 0, **options: Any) -> Any:
        """The lines of the store and the optimizer.

        Args:
          first: the step of the program's own checkpoint; 0 for none.
        """
        if self.is_plain:
            return tx
        return jaxinf.smart_update(tx, self.opened(first), **options)

    def opened(self, first: int = 0) -> jaxinf.Store:
        if self.store is None:
            restore = f"own-{first}" if first else None
            self.store = jaxinf.open_store(self.place.parent / "store", restore=restore)
        return self.store

    def keep(self, state: Any, number: int) -> None:
        """Keeps the store's step before the program saves its own."""
        if not self.is_plain:
            self.opened().checkpoint(f"own-{number}", state=state, overwrite=True)

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


def first_params() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return {
        "first": 0.3 * jax.random.normal(keys[0], (WIDTH, 16)),
        "second": 0.3 * jax.random.normal(keys[1], (16, WIDTH)),
    }


def step_of(tx: Any) -> Callable[..., Any]:
    """A step of a loop over dicts of arrays."""

    def step(params, state, rows):
        def loss(params):
            return loss_of(jnp.tanh(rows @ params["first"]) @ params["second"], rows)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def manager(run: Run) -> None:
    """A loop over dicts of arrays, with Orbax's manager, which saves beside it."""
    schedule = optax.warmup_cosine_decay_schedule(1e-2, 3e-2, 2, 20)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    params = first_params()
    if run.mesh is not None:
        params = jax.device_put(params, NamedSharding(run.mesh, PartitionSpec()))
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(run.place / "steps", options=options) as steps:
        first = steps.latest_step() or 0
        tx = run.near(tx, first, on_existing="resume" if first else "restart")
        state, step = tx.init(params), jax.jit(step_of(tx))
        if first:
            like = ocp.args.StandardRestore({"params": params, "state": state})
            kept = steps.restore(first, args=like)
            params, state = kept["params"], kept["state"]
        for number in range(first, NUM_STEPS):
            params, state, loss = step(params, state, run.batch(number))
            run.losses[number] = float(loss)
            if (number + 1) % EVERY == 0:
                run.keep(state, number + 1)
                kept = {"params": params, "state": state}
                steps.save(number + 1, args=ocp.args.StandardSave(kept))


def sharded(run: Run) -> None:
    """Params and state donated, and sharded by `jit`; saved as flat NumPy arrays."""
    first, file = 0, run.place / "run.npz"
    if file.exists():
        kept = np.load(file)
        first, flat = int(kept["step"]), [kept[f"{n}"] for n in range(len(kept) - 1)]
    tx, params = run.near(optax.adamw(1e-2), first), first_params()
    if run.mesh is not None:
        params = jax.device_put(params, NamedSharding(run.mesh, PartitionSpec("d")))
    state = tx.init(params)

    def place_of(array):
        if run.mesh is None or isinstance(array.sharding, NamedSharding):
            return array.sharding
        return NamedSharding(run.mesh, PartitionSpec())

    placed = jax.tree.map(place_of, (params, state))
    params, state = jax.device_put((params, state), placed)
    step = jax.jit(step_of(tx), donate_argnums=(0, 1), out_shardings=(*placed, None))
    if first:
        like = jax.tree.structure((params, state))
        params, state = jax.device_put(like.unflatten(flat), placed)
    for number in range(first, NUM_STEPS):
        params, state, loss = step(params, state, run.batch(number))
        run.losses[number] = float(loss)
        if (number + 1) % EVERY == 0:
            run.keep(state, number + 1)
            flat = {f"{n}": x for n, x in enumerate(jax.tree.leaves((params, state)))}
            np.savez(file, step=number + 1, **flat)


class Normalised(nn.Module):
    """A network with statistics of batches."""

    @nn.compact
    def __call__(self, rows):
        hidden = nn.BatchNorm(use_running_average=False)(nn.Dense(16)(rows))
        return nn.Dense(WIDTH)(nn.relu(hidden))


class Scaled(TrainState):
    """A state with statistics and a loss scale."""

    batch_stats: Any
    dynamic_scale: DynamicScale


def imagenet(run: Run) -> None:
    """A `TrainState` with a loss scale that begins too high, so steps are skipped."""
    network, files = Normalised(), run.place / "train"
    files.mkdir(exist_ok=True)
    first = max((int(path.name) for path in files.iterdir()), default=0)
    train = Scaled.create(
        apply_fn=network.apply,
        tx=run.near(
            optax.sgd(0.1, momentum=0.9, nesterov=True),
            first,
            nonfinite="skip",
            on_existing="resume" if first else "restart",
        ),
        dynamic_scale=DynamicScale(scale=3e38),
        **network.init(jax.random.key(0), ROWS),
    )
    if first:
        raw = (files / f"{first}").read_bytes()
        train = flax.serialization.from_bytes(train, raw)

    @jax.jit
    def step(train, rows):
        def loss(params):
            given = {"params": params, "batch_stats": train.batch_stats}
            outputs, new = train.apply_fn(given, rows, mutable=["batch_stats"])
            return 10 * loss_of(outputs, rows), new["batch_stats"]

        found = train.dynamic_scale.value_and_grad(loss, has_aux=True)(train.params)
        dynamic_scale, is_finite, (value, batch_stats), gradients = found
        new = train.apply_gradients(grads=gradients, batch_stats=batch_stats)
        select = partial(jnp.where, is_finite)
        params = jax.tree.map(select, new.params, train.params)
        opt_state = jax.tree.map(select, new.opt_state, train.opt_state)
        new = new.replace(params=params, opt_state=opt_state)
        return new.replace(dynamic_scale=dynamic_scale), value

    for number in range(int(train.step), NUM_STEPS):
        train, value = step(train, run.batch(number))
        run.losses[number] = float(value)
        if (number + 1) % EVERY == 0:
            run.keep(train.opt_state, number + 1)
            raw = flax.serialization.to_bytes(train)
            (files / f"{number + 1}").write_bytes(raw)


def flow(run: Run) -> None:
    """Params and state are pickled."""
    first, file, kept = 0, run.place / "run.pickle", None
    if file.exists():
        first, *kept = pickle.loads(file.read_bytes())
    tx, params = run.near(optax.adamw(1e-2, b1=0.9, b2=0.99), first), first_params()
    state, step = tx.init(params), jax.jit(step_of(tx))
    if kept is not None:
        params, state = kept
    for number in range(first, NUM_STEPS):
        params, state, loss = step(params, state, run.batch(number))
        run.losses[number] = float(loss)
        if (number + 1) % EVERY == 0:
            run.keep(state, number + 1)
            kept = jax.tree.map(np.asarray, (params, state))
            file.write_bytes(pickle.dumps((number + 1, *kept)))


STYLES: dict[str, Callable[[Run], None]] = {
    one.__name__: one for one in (manager, sharded, flow, imagenet)
}


def run_style(style: str, place: Path, *, plain=False, **options) -> dict[int, float]:
    """Runs a program up to its end, or to its interruption; returns its losses."""
    (place / "own").mkdir(parents=True, exist_ok=True)
    run = Run(place / "own", is_plain=plain, **options)
    try:
        STYLES[style](run)
    except Killed:
        pass
    finally:
        if run.store is not None:
            run.store.close()
    return run.losses


FILE_OPERATIONS = (
    "open",
    "os.rename",
    "os.link",
    "os.remove",
    "os.mkdir",
    "os.symlink",
)


def main(style: str, place: Path, kill: str = "file:0") -> None:
    """Runs a program, and kills it."""
    what, number = kill.split(":")
    count = 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def operation(event: str, _: Any) -> None:
        nonlocal count
        if event in FILE_OPERATIONS:
            count += 1
            if what == "file" and count == int(number):
                die()

    sys.addaudithook(operation)
    stops = what == "step"
    run_style(
        style, place, kill=lambda n: die() if stops and n == int(number) else None
    )
    print(count)


def on_a_mesh(place: Path, *styles: str) -> None:
    """Plain, with a store, and after a stop and restart, on all devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("d",))

    def stop(number: int) -> None:
        if number == 5:
            raise Killed

    for style in styles:
        plain = run_style(style, place / style / "plain", plain=True, mesh=mesh)
        first = run_style(style, place / style / "near", mesh=mesh, kill=stop)
        rest = run_style(style, place / style / "near", mesh=mesh)
        assert ([*first], [*rest]) == ([0, 1, 2, 3, 4], [4, 5])
        assert rest[4] == first[4], style
        found = [(first | rest)[n] for n in range(NUM_STEPS)]
        np.testing.assert_allclose(found, [*plain.values()], rtol=1e-4, err_msg=style)
        print(style, "agrees")


if __name__ == "__main__":
    if sys.argv[1] == "mesh":
        on_a_mesh(Path(sys.argv[2]), *sys.argv[3:])
    else:
        main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
