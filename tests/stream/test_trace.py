"""What is refused before a loss function is traced."""

SHARDED = """
import sys
import jax, optax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
import jaxinf
mesh = jax.make_mesh((4,), ("data",))
sharded = jax.device_put(
    np.ones((8, 3), np.float32), NamedSharding(mesh, PartitionSpec("data"))
)
step = jaxinf.stream(
    lambda p, b: jax.numpy.sum(b @ p["w"]),
    optax.sgd(0.1),
    sys.argv[1],
    memory_bytes=64 << 20,
)
for load in (
    lambda: step.load({"w": sharded}),
    lambda: step.load({"w": np.ones((3, 2), np.float32)}, batch=sharded),
):
    try:
        load()
    except jaxinf.StreamError as error:
        print(error)
assert not step.store.exists
step.load({"w": np.ones((3, 2), np.float32)})
try:
    step(sharded)
except jaxinf.StreamError as error:
    print(error)
step(np.asarray(sharded))
step.store.wait()
print(step.store.step)
step.close()
"""


def test_arrays_on_several_devices_are_refused(run_python, place):
    devices = "--xla_force_host_platform_device_count=4"
    said = run_python(SHARDED, place / "store", XLA_FLAGS=devices).stdout.splitlines()
    *refused, step = said
    assert step == "1"
    names = ("w", "one", "one")
    for line, name in zip(refused, names, strict=True):
        assert f"one device, the plan's, found {name} on 4; pass NumPy arrays" in line
