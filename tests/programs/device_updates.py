"""A model whose weights have four subgroups each, for updates that a device computes.

    python device_updates.py STORE POINT NUMBER

trains it with every other update on the device, and is killed at the NUMBER-th time of
a POINT: at an update on the device, as a state of it comes back, at a write, or at a
commit. With "rare" in the name of the STORE two steps have one commit.
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import small_stores
from inject import at_call, die

import jaxinf
from jaxinf.csd.host import HostCsd
from jaxinf.store import StoreDirectory
from jaxinf.streaming.update.device_updates import DeviceUpdater

WIDTH = 512
NUM_STEPS = 3
CHUNKS = {"chunk_elements": 65536, "memory_bytes": 64 << 20}
TX = optax.adamw(optax.cosine_decay_schedule(1e-2, 10), weight_decay=0.1)
POINTS = {
    "device": (DeviceUpdater, "_new_states"),
    "updated": (HostCsd, "put"),
    "write": (HostCsd, "write"),
    "commit": (StoreDirectory, "flip"),
}


def loss(params, batch):
    for layer in params:
        batch = jnp.tanh(batch @ layer["weight"] + layer["bias"])
    return jnp.mean(batch.astype(jnp.float32) ** 2)


def params_of(dtype=np.float32):
    rng = np.random.default_rng(0)
    return [
        {
            "bias": np.zeros(WIDTH, dtype),
            "weight": (rng.standard_normal((WIDTH, WIDTH)) / 20).astype(dtype),
        }
        for _ in range(2)
    ]


def batches(dtype=np.float32):
    rng = np.random.default_rng(1)
    return [rng.standard_normal((8, WIDTH)).astype(dtype) for _ in range(NUM_STEPS)]


def open_step(store, every, tx=TX, dtype=np.float32, **options):
    options = {"memory_bytes": 256 << 20, "device_updates": every} | options
    step = jaxinf.stream(loss, tx, store, **options)
    step.load(params_of(dtype), batch=batches(dtype)[0])
    return step


def open_store(path):
    durability = 2 if "rare" in path.name else "step"
    return small_stores.open_store(path, **CHUNKS, durability=durability)


def main():
    """Trains until it is killed; notes each committed step beside the store."""
    path, point, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    step = open_step(open_store(path), 2)
    owner, name = POINTS[point]
    at_call(owner, name, number, die)
    for batch in batches()[step.store.step :]:
        step(batch)
        if "rare" in path.name:
            step.store._engine.steps.join()
        else:
            step.store.wait()
        committed = step.store._engine.files.commit.step
        path.with_suffix(".step").write_text(str(committed))


if __name__ == "__main__":
    main()
