"""jaxinf and plain optax as contenders of scripts/bench_peers.py.

Invariant: each is used as its own documentation has it.
"""

import time
from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from bench_train import batch_of, model
from peer_turns import Contender, serve
from update_rig import UpdateRig

import jaxinf

REST_S = 0.5


def update(given: dict[str, Any]) -> Contender:
    """jaxinf's update alone; a step ends when it is committed, or else written.

    At rest it waits for reading ahead, which the memory budget ends.
    """
    options = {name: given[name] for name in ("state", "durability")}
    rig = UpdateRig(Path(given["place"]) / "store", given["params"], **options)

    def step() -> None:
        rig.step()
        rig.engine.steps.join()

    return _timed(given, step, lambda: time.sleep(REST_S))


def update_in_memory(given: dict[str, Any]) -> Contender:
    """A jitted update of optax alone, which reuses the memory of params and state."""
    tx = optax.adamw(1e-3)
    sizes = np.full(-(-given["params"] // (1 << 24)), 1 << 24)
    sizes[-1] -= sizes.sum() - given["params"]
    gradients = [jnp.full(size, 1e-3) for size in sizes]
    params = [jnp.full(size, 0.5) for size in sizes]
    return _in_memory(given, tx, params, gradients, lambda params, given: given)


def streamed(given: dict[str, Any]) -> Contender:
    """A whole step of jaxinf; params and state are on the drive.

    A step pays for what the step before has left, such as its commit.
    """
    loss_fn, init = model(given["preset"])
    data = _batch(given)
    step = jaxinf.stream(
        loss_fn,
        optax.adamw(3e-4),
        Path(given["place"]) / "store",
        memory_bytes=given["memory"],
        policy="keep",
        micro_batches=given["micro_batches"],
    )
    step.init(init, batch=data)

    def rest() -> None:
        step.store.wait()
        time.sleep(REST_S)

    return _timed(given, lambda: step(data), rest)


def in_memory(given: dict[str, Any]) -> Contender:
    """A whole step of JAX and optax in one jit, in memory."""
    (loss_fn, init), num_parts = model(given["preset"]), given["micro_batches"]
    parts = jax.tree.map(lambda a: a.reshape(num_parts, -1, a.shape[1]), _batch(given))

    def gradients(params: Any, parts: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(params, part)), None

        if num_parts == 1:
            return jax.grad(loss_fn)(params, jax.tree.map(lambda a: a[0], parts))
        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        return jax.tree.map(lambda g: g / num_parts, total)

    params = jax.jit(init)()
    return _in_memory(given, optax.adamw(3e-4), params, parts, gradients)


def _in_memory(
    given: dict[str, Any],
    tx: optax.GradientTransformation,
    params: Any,
    data: Any,
    gradients: Callable[[Any, Any], Any],
) -> Contender:
    def new(params: Any, state: Any, data: Any) -> Any:
        updates, state = tx.update(gradients(params, data), state, params)
        return optax.apply_updates(params, updates), state

    jitted, held = jax.jit(new, donate_argnums=(0, 1)), (params, tx.init(params))

    def step() -> None:
        nonlocal held
        held = jax.block_until_ready(jitted(*held, data))

    return _timed(given, step)


def _timed(
    given: dict[str, Any], step: Callable[[], object], *rest: Callable[[], object]
) -> Contender:
    def seconds() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    about = {"params": given["params"]}
    about |= {name: version(name) for name in ("jax", "optax")}
    return Contender(about, seconds, *rest)


def _batch(given: dict[str, Any]) -> dict[str, np.ndarray]:
    whole = given | {"batch_size": given["micro_batches"] * given["batch_size"]}
    return batch_of(Namespace(**whole), 0)


CONTENDERS = {
    "update": update,
    "update in memory": update_in_memory,
    "step": streamed,
    "step in memory": in_memory,
}

if __name__ == "__main__":
    serve(lambda given: CONTENDERS[given["contender"]](given))
