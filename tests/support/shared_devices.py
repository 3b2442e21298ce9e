"""One of two processes: streaming refuses arrays on devices of both, by name.

python shared_devices.py FOLDER PORT NUMBER
"""

import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxinf
from jaxinf.errors import StreamError

TX, MEMORY_BYTES = optax.adam(1e-2), 64 << 20
W, X = np.ones((4, 4), np.float32), np.ones((8, 4), np.float32)


def on(sharding, array):
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def loss_fn(params, batch):
    return ((batch @ params["w"]) ** 2).mean()


def refused(name, call, *args, **kwargs):
    message = rf"devices of this process, found {name} on a mesh of.*local_devices\(\)"
    with pytest.raises(StreamError, match=f"(?s){message}"):
        call(*args, **kwargs)


def main(root):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows, whole = (NamedSharding(mesh, spec) for spec in (P("data"), P()))

    def constrained(params, batch):
        return loss_fn(params, jax.lax.with_sharding_constraint(batch, rows))

    def made(name, loss=loss_fn):
        return jaxinf.stream(loss, TX, root / name, memory_bytes=MEMORY_BYTES)

    refused("w", made("params").load, {"w": on(whole, W)})
    refused("w", made("init").init, lambda: {"w": W}, shardings={"w": whole})
    made_fn = made("fn", constrained)
    refused("the loss function", made_fn.load, {"w": W}, batch=X)
    with jax.set_mesh(mesh):
        refused("the mesh of jax.set_mesh", made("set").load, {"w": W}, batch=X)
    assert not root.exists(), "nothing is written"

    kept = jaxinf.stream_in_memory(loss_fn, TX, memory_bytes=MEMORY_BYTES)
    for step in (made("batch"), kept):
        step.load({"w": W})
        refused("the array", step, on(rows, X))
        own, _ = step(X)
        assert float(own) == 16.0, "each process may train on devices of its own"
        step.close()
    print("refused")


if __name__ == "__main__":
    folder, port, number = sys.argv[1:]
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number))
    assert jax.process_count() == 2
    main(Path(folder) / number)
