"""Trains with an optimizer of three passes; in a process of its own, it is killed.

    python passes_run.py STORE CALL

It is killed at the given call of what begins a pass.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import small_stores
from inject import at_call, die

import jaxinf
from jaxinf.streaming.update.kernel_inputs import KernelInputs

__all__ = [
    "CHUNKS",
    "CLIP",
    "MEMORY_BYTES",
    "NORMALIZE",
    "SHAPES",
    "THREE",
    "linear",
    "tree",
]

CHUNKS: dict[str, Any] = {"chunk_elements": 4096, "memory_bytes": 16 << 20}
MEMORY_BYTES = 256 << 20
CLIP, NORMALIZE = optax.clip_by_global_norm(0.1), optax.normalize_by_update_norm()
THREE = optax.chain(CLIP, NORMALIZE, optax.adamw(1e-2))
SHAPES = {"b": (48,), "w": (40, 48), "z": ()}


def linear(params, batch):
    parts = jax.tree.map(lambda p, g: jnp.sum(p * g), params, batch)
    return sum(jax.tree.leaves(parts))


def tree(seed):
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    pairs = zip(SHAPES.items(), keys, strict=True)
    return {name: jax.random.normal(key, shape) for (name, shape), key in pairs}


def main(path, killed_at):
    """Trains three steps; the process is killed at a call."""
    at_call(KernelInputs, "advance", killed_at, die)
    store = small_stores.open_store(path, **CHUNKS)
    step = jaxinf.stream(linear, THREE, store, memory_bytes=MEMORY_BYTES)
    step.load(tree(0))
    for seed in range(1, 4):
        step(tree(seed))


if __name__ == "__main__":
    main(*sys.argv[1:])
