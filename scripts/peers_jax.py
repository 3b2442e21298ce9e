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


class Update:
    """jaxinf's update alone, of arrays in memory."""

    def __init__(self, given: dict[str, Any]) -> None:
        path = Path(given["place"]) / "store"
        options = {name: given[name] for name in ("state", "durability")}
        self._rig = UpdateRig(path, given["params"], **options)
        self.about = {"params": given["params"], **_versions()}

    def step(self) -> float:
        """A step ends when it is committed, or without commits when it is written."""
        began = time.perf_counter()
        self._rig.step()
        self._rig.store._engine.join()
        return time.perf_counter() - began

    def rest(self) -> None:
        """Waits for reading ahead, which the memory budget ends."""
        time.sleep(REST_S)


class UpdateInMemory:
    """A jitted update of optax alone, which reuses the memory of params and state."""

    def __init__(self, given: dict[str, Any]) -> None:
        tx = optax.adamw(1e-3)
        sizes = np.full(-(-given["params"] // (1 << 24)), 1 << 24)
        sizes[-1] -= sizes.sum() - given["params"]
        self._params = [jnp.full(size, 0.5) for size in sizes]
        self._gradients = [jnp.full(size, 1e-3) for size in sizes]
        self._state = tx.init(self._params)
        self.about = {"params": given["params"], **_versions()}

        def update(params: Any, state: Any, gradients: Any) -> Any:
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        self._update = jax.jit(update, donate_argnums=(0, 1))

    def step(self) -> float:
        """A step ends when the new params are there."""
        began = time.perf_counter()
        self._params, self._state = jax.block_until_ready(
            self._update(self._params, self._state, self._gradients)
        )
        return time.perf_counter() - began

    def rest(self) -> None:
        """Nothing is left."""


class Streamed:
    """A whole step of jaxinf; params and state are on the drive."""

    def __init__(self, given: dict[str, Any]) -> None:
        loss_fn, init, self._data = _model(given)
        self._step = jaxinf.stream(
            loss_fn,
            optax.adamw(3e-4),
            Path(given["place"]) / "store",
            memory_bytes=given["memory"],
            policy=given["policy"],
            micro_batches=given["micro_batches"],
        )
        self._step.init(init, batch=self._data)
        self.about = {"params": num_params(PRESETS[given["preset"]]), **_versions()}

    def step(self) -> float:
        """It pays for what the step before has left, such as its commit."""
        began = time.perf_counter()
        self._step(self._data)
        return time.perf_counter() - began

    def rest(self) -> None:
        """Waits for the commit, and for reading ahead, which the budget ends."""
        self._step.store.wait()
        time.sleep(REST_S)


class InMemory:
    """A whole step of JAX and optax in one jit, in memory."""

    def __init__(self, given: dict[str, Any]) -> None:
        loss_fn, init, data = _model(given)
        tx, num_parts = optax.adamw(3e-4), given["micro_batches"]
        self._params = jax.jit(init)()
        self._state = tx.init(self._params)
        self._data = jax.tree.map(lambda a: a.reshape(num_parts, -1, a.shape[1]), data)
        self.about = {"params": num_params(PRESETS[given["preset"]]), **_versions()}

        def step(params: Any, state: Any, parts: Any) -> Any:
            def add(total: Any, part: Any) -> Any:
                found, gradients = jax.value_and_grad(loss_fn)(params, part)
                return jax.tree.map(jnp.add, total, gradients), found

            if num_parts == 1:
                part = jax.tree.map(lambda a: a[0], parts)
                losses, gradients = jax.value_and_grad(loss_fn)(params, part)
            else:
                zeros = jax.tree.map(jnp.zeros_like, params)
                total, losses = jax.lax.scan(add, zeros, parts)
                gradients = jax.tree.map(lambda g: g / num_parts, total)
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, losses

        self._step = jax.jit(step, donate_argnums=(0, 1))

    def step(self) -> float:
        """A step ends when the new params are there."""
        began = time.perf_counter()
        self._params, self._state, _ = jax.block_until_ready(
            self._step(self._params, self._state, self._data)
        )
        return time.perf_counter() - began

    def rest(self) -> None:
        """Nothing is left."""


def _model(given: dict[str, Any]) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """The loss function of a GPT-2, what makes its params, and a batch."""
    config = PRESETS[given["preset"]]
    graphdef, _ = abstract_params(config)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        model = nnx.merge(graphdef, params)
        return loss(model, batch["tokens"], batch["targets"])

    def init() -> Any:
        return split(GPT2(config, rngs=nnx.Rngs(0)))[1]

    shape = given["micro_batches"] * given["batch_size"], given["seq_len"] + 1
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=shape)
    tokens = tokens.astype(np.int32)
    return loss_fn, init, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("jax", "optax")}


CONTENDERS: dict[str, Callable[[dict[str, Any]], Contender]] = {
    "update": Update,
    "update in memory": UpdateInMemory,
    "step": Streamed,
    "step in memory": InMemory,
}

if __name__ == "__main__":
    serve(lambda given: CONTENDERS[given["contender"]](given))
