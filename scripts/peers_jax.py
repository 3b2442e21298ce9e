"""jaxinf and plain optax as contenders of scripts/bench_peers.py.

Invariant: each is used as its own documentation has it.
"""

import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxinf_models import GPT2, PRESETS, abstract_params, loss, num_params, split
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
        rig.engine.join()

    return Contender(_about(given["params"]), _timed(step), lambda: time.sleep(REST_S))


def update_in_memory(given: dict[str, Any]) -> Contender:
    """A jitted update of optax alone, which reuses the memory of params and state."""
    tx = optax.adamw(1e-3)
    sizes = np.full(-(-given["params"] // (1 << 24)), 1 << 24)
    sizes[-1] -= sizes.sum() - given["params"]
    gradients = [jnp.full(size, 1e-3) for size in sizes]
    params = [jnp.full(size, 0.5) for size in sizes]
    held = params, tx.init(params)

    def new(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(new, donate_argnums=(0, 1))

    def step() -> None:
        nonlocal held
        held = jax.block_until_ready(jitted(*held, gradients))

    return Contender(_about(given["params"]), _timed(step))


def streamed(given: dict[str, Any]) -> Contender:
    """A whole step of jaxinf; params and state are on the drive.

    A step pays for what the step before has left, such as its commit.
    """
    loss_fn, init, data = _model(given)
    step = jaxinf.stream(
        loss_fn,
        optax.adamw(3e-4),
        Path(given["place"]) / "store",
        memory_bytes=given["memory"],
        policy=given["policy"],
        micro_batches=given["micro_batches"],
    )
    step.init(init, batch=data)

    def rest() -> None:
        step.store.wait()
        time.sleep(REST_S)

    return Contender(_about(given["params"]), _timed(lambda: step(data)), rest)


def in_memory(given: dict[str, Any]) -> Contender:
    """A whole step of JAX and optax in one jit, in memory."""
    loss_fn, init, data = _model(given)
    tx, num_parts = optax.adamw(3e-4), given["micro_batches"]
    params = jax.jit(init)()
    held = params, tx.init(params)
    parts = jax.tree.map(lambda a: a.reshape(num_parts, -1, a.shape[1]), data)

    def new(params: Any, state: Any, parts: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            _, gradients = jax.value_and_grad(loss_fn)(params, part)
            return jax.tree.map(jnp.add, total, gradients), None

        if num_parts == 1:
            first = jax.tree.map(lambda a: a[0], parts)
            _, gradients = jax.value_and_grad(loss_fn)(params, first)
        else:
            total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
            gradients = jax.tree.map(lambda g: g / num_parts, total)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(new, donate_argnums=(0, 1))

    def step() -> None:
        nonlocal held
        held = jax.block_until_ready(jitted(*held, parts))

    return Contender(_about(given["params"]), _timed(step))


def _timed(step: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    return seconds


def _model(given: dict[str, Any]) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """The loss function of a GPT-2, what makes its params, and a batch."""
    config = PRESETS[given["preset"]]
    graphdef, _ = abstract_params(config)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        model = nnx.merge(graphdef, params)
        return loss(model, batch["tokens"], batch["targets"])

    def init() -> Any:
        return split(GPT2(config, rngs=nnx.Rngs(0)))[1]

    given["params"] = num_params(config)
    shape = given["micro_batches"] * given["batch_size"], given["seq_len"] + 1
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=shape)
    tokens = tokens.astype(np.int32)
    return loss_fn, init, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def _about(params: int) -> dict[str, Any]:
    return {"params": params, **{name: version(name) for name in ("jax", "optax")}}


CONTENDERS = {
    "update": update,
    "update in memory": update_in_memory,
    "step": streamed,
    "step in memory": in_memory,
}

if __name__ == "__main__":
    serve(lambda given: CONTENDERS[given["contender"]](given))
