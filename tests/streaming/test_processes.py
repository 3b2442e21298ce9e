"""Two processes of one JAX program: what is on devices of both is refused by name."""

import os
import socket
import subprocess
import sys

PROGRAM = """
import sys
from pathlib import Path
import jax
root, number = Path(sys.argv[1]) / sys.argv[3], int(sys.argv[3])
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, number)
import numpy as np, optax, jaxinf
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxinf.errors import StreamError

assert jax.process_count() == 2
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
rows, whole = (NamedSharding(mesh, spec) for spec in (P("data"), P()))
W, X = np.ones((4, 4), np.float32), np.ones((8, 4), np.float32)

def on(sharding, array):
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

def loss(params, batch):
    return ((batch @ params["w"]) ** 2).mean()

def constrained(params, batch):
    return loss(params, jax.lax.with_sharding_constraint(batch, rows))

def made(name, loss=loss, **options):
    return jaxinf.stream(
        loss, optax.adam(1e-2), root / name, memory_bytes=64 << 20, **options
    )

def refused(name, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except StreamError as error:
        assert f"devices of this process, found {name} on a mesh of" in str(error)
        assert "jax.local_devices()" in str(error)
    else:
        raise AssertionError(f"{name} is not refused")

refused("w", made("params").load, {"w": on(whole, W)})
refused("w", made("init").init, lambda: {"w": W}, shardings={"w": whole})
refused("the loss function", made("fn", constrained).load, {"w": W}, batch=X)
with jax.set_mesh(mesh):
    refused("the mesh of jax.set_mesh", made("set").load, {"w": W}, batch=X)
assert not root.exists(), "nothing is written"

kept = jaxinf.stream_in_memory(
    loss, optax.adam(1e-2), memory_bytes=64 << 20
)
for step in (made("batch"), kept):
    step.load({"w": W})
    refused("the array", step, on(rows, X))
    own, _ = step(X)
    assert float(own) == 16.0, "each process may train on devices of its own"
    step.close()
print("refused")
"""


def test_devices_of_another_process_are_refused(place):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, place, str(port), str(number)],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        told = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, text in zip(running, told, strict=True):
        assert process.returncode == 0, text
        assert text.endswith("refused\n")
