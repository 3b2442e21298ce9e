"""What streaming refuses in two processes; prints the error of each, and goes on."""

import argparse
import contextlib
import resource
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxinf
from jaxinf.streaming.plan import memory

TX, MEMORY_BYTES = optax.adam(1e-2), 64 << 20
W, X = np.ones((4, 4), np.float32), np.ones((8, 4), np.float32)


def on(mesh, spec, array):
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def loss_fn(params, batch):
    return ((batch @ params["w"]) ** 2).mean()


def loaded(path, params, batch=None, tx=TX, **options):
    step = jaxinf.stream(loss_fn, tx, path, memory_bytes=MEMORY_BYTES, **options)
    step.load({"w": params}, batch=batch)
    return step


def ratios(place, mesh, number):
    loaded(place / "ratios", on(mesh, P("d"), W), tx=optax.lamb(1e-3))


def offload(place, mesh, number):
    loaded(place / "offload", on(mesh, P("d"), W), policy="offload")


def no_mesh(place, mesh, number):
    loaded(place / "no-mesh", W)


def own_path(place, mesh, number):
    loaded(place / f"own-{number}", on(mesh, P(), W))


def in_memory(place, mesh, number):
    step = jaxinf.stream_in_memory(loss_fn, TX, memory_bytes=MEMORY_BYTES)
    step.load({"w": W})
    step(on(mesh, P("d"), X))


def on_own_devices(place, mesh, number):
    with loaded(place / f"alone-{number}", W) as step:
        loss, _ = step(X)
        assert float(loss) == 16.0


def other_batch(place, mesh, number):
    with loaded(place / "batch", on(mesh, P(), W)) as step:
        x, short = (on(mesh, P("d"), rows) for rows in (X, X[:4]))
        step(x)
        step(short)
        step(x if number else short)


def one_goes_on(place, mesh, number):
    with loaded(place / "left", on(mesh, P(), W)) as step:
        x = on(mesh, P("d"), X)
        for _ in range(2 if number else 3):
            step(x)


@contextlib.contextmanager
def apart(number):
    """Gives process 1 a device of its own memory, which says nothing of its size."""
    before = memory.device_is_host
    if number:
        memory.device_is_host = lambda device: False
    try:
        yield
    finally:
        memory.device_is_host = before


def one_device(place, mesh, number):
    with apart(number):
        loaded(place / "device", on(mesh, P(), W), batch=on(mesh, P("d"), X))


def one_device_later(place, mesh, number):
    with loaded(place / "later", on(mesh, P(), W)) as step, apart(number):
        step(on(mesh, P("d"), X))


def one_device_of_a_function(place, mesh, number):
    path = place / "later"
    with apart(number):
        function = jaxinf.stream_function(loss_fn, path, memory_bytes=MEMORY_BYTES)
        with function:
            function.load({"w": on(mesh, P(), W)})
            function(on(mesh, P("d"), X))


def one_drive(place, mesh, number):
    """Process 1 cannot write its plan, which all have agreed on by then."""
    with loaded(place / "drive", on(mesh, P(), W)) as step:
        step.store.wait()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if number:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            step(on(mesh, P("d"), X))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


CASES = [ratios, offload, no_mesh, own_path, in_memory, on_own_devices, other_batch]
CASES += [one_device, one_device_later, one_device_of_a_function, one_drive]
CASES += [one_goes_on]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("place", type=Path)
    parser.add_argument("--distributed")
    given = parser.parse_args()
    address, *numbers = given.distributed.split(",")
    count, number = map(int, numbers)
    jax.distributed.initialize(address, count, number)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    for case in CASES:
        try:
            case(given.place, mesh, number)
            text = "went well"
        except Exception as error:
            text = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(f"{case.__name__}: {text}", flush=True)
    for name in ("ratios", "offload", "no-mesh", "device", f"own-{number}"):
        assert not list(given.place.glob(f"{name}/**/jaxinf.json")), "it was written"


if __name__ == "__main__":
    main()
