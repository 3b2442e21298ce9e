"""Programs that save every third step in their own way, killed and started again.

    python saving_programs.py PLACE FORM sync|background NUM_POINTS POINT…

Each run is a child forked before JAX has started. A killed one ends at a point of its
file operations, numbered from 1 to `NUM_POINTS`, evenly spread over those of a whole
run; then the program runs again, and goes on from its own last checkpoint.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flax.training import checkpoints
from flax.training.train_state import TrainState

import jaxinf

NUM_STEPS, EVERY = 11, 3
OPERATIONS = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.symlink")


def loss_of(params: Any, number: int) -> jax.Array:
    """The loss of a step's batch."""
    rows = jax.random.normal(jax.random.key(number), (8, 16))
    return jnp.mean((jnp.tanh(rows @ params["first"]) @ params["second"] - 1.0) ** 2)


def first_params() -> Any:
    """The same in every run."""
    keys = jax.random.split(jax.random.key(7))
    shapes = {"first": (16, 24), "second": (24, 16)}
    pairs = zip(shapes.items(), keys, strict=True)
    return {n: 0.3 * jax.random.normal(k, shape) for (n, shape), k in pairs}


def lm1b(store: Any, tx: Any, own: Path, log: Any, *, background: bool) -> None:
    """A `TrainState`, saved after the step whose number divides, with Flax."""
    flax.config.update("flax_use_orbax_checkpointing", False)
    manager = checkpoints.AsyncManager() if background else None
    train = TrainState.create(apply_fn=None, params=first_params(), tx=tx)
    train = checkpoints.restore_checkpoint(own, train)

    @jax.jit
    def step(train, number):
        loss, gradients = jax.value_and_grad(loss_of)(train.params, number)
        return train.apply_gradients(grads=gradients), loss

    for number in range(int(train.step), NUM_STEPS):
        train, loss = step(train, number)
        log(number, loss)
        if number % EVERY == 0 or number == NUM_STEPS - 1:
            store.checkpoint(state=train.opt_state)
            checkpoints.save_checkpoint(
                own, train, number, keep=2, overwrite=True, async_manager=manager
            )
    if manager is not None:
        manager.wait_previous_save()


def nanodo(store: Any, tx: Any, own: Path, log: Any, *, background: bool) -> None:
    """A manager of Orbax's, which is asked at each step and saves some."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2,
        save_interval_steps=EVERY,
        enable_async_checkpointing=background,
    )
    params = first_params()
    run, first = {"params": params, "state": tx.init(params)}, 0

    @jax.jit
    def step(run, number):
        loss, gradients = jax.value_and_grad(loss_of)(run["params"], number)
        updates, state = tx.update(gradients, run["state"], run["params"])
        return {
            "params": optax.apply_updates(run["params"], updates),
            "state": state,
        }, loss

    with ocp.CheckpointManager(own, options=options) as manager:
        if manager.latest_step() is not None:
            first = manager.latest_step() + 1
            restore = ocp.args.StandardRestore(run)
            run = manager.restore(manager.latest_step(), args=restore)
        for number in range(first, NUM_STEPS):
            run, loss = step(run, number)
            log(number, loss)
            if manager.should_save(number):
                store.checkpoint(state=run["state"])
            manager.save(number, args=ocp.args.StandardSave(run))


class Model(nnx.Module):
    """The params as a module's."""

    def __init__(self) -> None:
        params = first_params()
        self.first, self.second = (
            nnx.Param(params["first"]),
            nnx.Param(params["second"]),
        )


class Trainer:
    """A library's: it makes optimizer and manager itself, and knows nothing of a store.

    Args:
      tx: all that it takes from the program.
    """

    def __init__(self, tx: Any, own: Path, *, background: bool) -> None:
        model = Model()
        self._parts = model, nnx.Optimizer(model, tx, wrt=nnx.Param)
        self._first = 0
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2,
            save_interval_steps=EVERY,
            enable_async_checkpointing=background,
        )
        self._manager = ocp.CheckpointManager(own, options=options)
        latest = self._manager.latest_step()
        if latest is not None:
            like = ocp.args.StandardRestore(nnx.state(self._parts))
            nnx.update(self._parts, self._manager.restore(latest, args=like))
            self._first = latest + 1

    def train(self, log: Any) -> None:
        """Trains and saves."""

        @nnx.jit
        def step(model, optimizer, number):
            def loss(model):
                params = {"first": model.first[...], "second": model.second[...]}
                return loss_of(params, number)

            value, gradients = nnx.value_and_grad(loss)(model)
            optimizer.update(model, gradients)
            return value

        for number in range(self._first, NUM_STEPS):
            log(number, step(*self._parts, number))
            state = ocp.args.StandardSave(nnx.state(self._parts))
            self._manager.save(number, args=state)
        self._manager.close()


def trainer(store: Any, tx: Any, own: Path, log: Any, *, background: bool) -> None:
    """A library's trainer; the store keeps the steps that it saves, by itself."""
    Trainer(tx, own, background=background).train(log)


FORMS = {"lm1b": lm1b, "nanodo": nanodo, "trainer": trainer}
KEPT = {"trainer": (EVERY, 2, 1)}
"""The steps that a store keeps for a program that does not ask for it; else (0, 2)."""


def has_saved(own: Path) -> bool:
    """Whether a program has a checkpoint to start from."""
    with ocp.CheckpointManager(own) as manager:
        found = manager.latest_step() is not None
    return found or checkpoints.latest_checkpoint(own) is not None


def run(place: Path, form: str, way: str, last: int | None) -> int:
    """Runs a program up to an operation on files; returns the number of these."""
    num = 0

    def count(event: str, _: Any) -> None:
        nonlocal num
        if event in OPERATIONS:
            num += 1
            if num == last:
                os.kill(os.getpid(), signal.SIGKILL)

    own = place / "own"
    own.mkdir(parents=True, exist_ok=True)
    # A program that has nothing to come back to begins anew.
    existing = "resume" if has_saved(own) else "restart"
    sys.addaudithook(count)
    with open(place / "losses", "a", buffering=1) as losses:

        def log(number: int, loss: jax.Array) -> None:
            losses.write(f"{number} {float(loss).hex()}\n")

        store = jaxinf.open_store(place / "store", keep_steps=KEPT.get(form, (0, 2)))
        tx = jaxinf.smart_update(optax.adam(1e-2), store, on_existing=existing)
        FORMS[form](store, tx, own, log, background=way == "background")
        store.close()
    return num


def in_child(place: Path, *arguments: Any) -> int:
    """Runs a program in a fork; returns its exit status, negative for a signal."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            num = run(place, *arguments)
            (place / "operations").write_text(str(num))
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def losses(place: Path) -> list[tuple[int, str]]:
    """The losses that a program has logged, in its order."""
    lines = (place / "losses").read_text().splitlines()
    return [(int(number), loss) for number, loss in map(str.split, lines)]


def main(place: Path, form: str, way: str, num_points: int, *points: int) -> None:
    """Prints a line for each point."""
    assert in_child(place / "whole", form, way, None) == 0
    num = int((place / "whole" / "operations").read_text())
    whole = dict(losses(place / "whole"))
    assert len(whole) == NUM_STEPS
    for point in points:
        parts = place / str(point)
        status = in_child(parts, form, way, num * point // (num_points + 1))
        assert status in (-signal.SIGKILL, 0), status
        before = len(losses(parts))
        assert in_child(parts, form, way, None) == 0, f"point {point} of {num_points}"
        found = losses(parts)
        assert set(found) == set(whole.items()), (point, found)
        first = found[before][0] if before < len(found) else NUM_STEPS
        print(f"killed after step {before}, went on after step {first}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:]))
