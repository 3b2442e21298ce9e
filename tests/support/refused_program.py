"""Misuses of a store in several processes; prints the error of each, and goes on."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxinf


def replicated(mesh, value=1.0):
    whole = np.full((64, 8), value, np.float32)
    sharding = NamedSharding(mesh, P())
    return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)


def trained(store, params, tx):
    tx = jaxinf.smart_update(tx, store)
    state = tx.init(params)
    step = jax.jit(lambda p, s: tx.update(jax.tree.map(jnp.ones_like, p), s, p))
    jax.block_until_ready(step(params, state))
    store.wait()


def different_paths(place, mesh, number):
    del mesh
    shared = place / ("odd" if number == 2 else "common")
    jaxinf.open_store(shared, timeout_s=20)


def missing_process(place, mesh, number):
    del mesh
    if number == 0:
        jaxinf.open_store(place / "lonely", timeout_s=1)


def no_mesh(place, mesh, number):
    del mesh, number
    with jaxinf.open_store(place / "no-mesh") as store:
        jaxinf.smart_update(optax.adam(1e-3), store).init({"w": jnp.ones((64, 8))})


def mesh_of_some(place, mesh, number):
    some = Mesh(mesh.devices[:2], ("d",))
    with jaxinf.open_store(place / "some") as store:
        params = {"w": replicated(some) if number < 2 else jnp.ones((64, 8))}
        jaxinf.smart_update(optax.adam(1e-3), store).init(params)


def shared_roots(place, mesh, number):
    del number
    with jaxinf.open_store(place / "roots", csds=[place]) as store:
        jaxinf.smart_update(optax.adam(1e-3), store).init({"w": replicated(mesh)})


def other_optimizer(place, mesh, number):
    tx = optax.adam(1e-3) if number else optax.sgd(1e-3, momentum=0.9)
    with jaxinf.open_store(place / "optimizer") as store:
        jaxinf.smart_update(tx, store).init({"w": replicated(mesh)})


def own_paths(place, mesh, number):
    del mesh
    with jaxinf.open_store(place / f"own-{number}") as store:
        trained(store, {"w": jnp.ones((64, 8))}, optax.adam(1e-3))
        assert store._manifest.member is None
        print("trained alone", store.step)


def own_path_on_a_mesh(place, mesh, number):
    with jaxinf.open_store(place / f"own-mesh-{number}") as store:
        trained(store, {"w": replicated(mesh)}, optax.adam(1e-3))


def old_copy(place, mesh, number):
    with jaxinf.open_store(place / "copies") as store:
        params = {"w": replicated(mesh)}
        trained(store, params, optax.adam(1e-3))
    with jaxinf.open_store(place / "copies") as store:
        params = store.params(like=params)
        if number == 2:
            whole = np.asarray(params["w"]).copy()
            whole[0, 0] += 1
            sharding = params["w"].sharding
            old = jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)
            params = {"w": old}
        trained(store, params, optax.adam(1e-3))
        store.check()


CASES = (
    different_paths,
    no_mesh,
    mesh_of_some,
    shared_roots,
    other_optimizer,
    own_paths,
    own_path_on_a_mesh,
    old_copy,
    missing_process,  # last, as it puts the calls out of step
)


def main(place, arguments):
    address, count, number = arguments[1], int(arguments[3]), int(arguments[5])
    jax.distributed.initialize(address, count, number)
    mesh = Mesh(np.array(jax.devices()), ("d",))
    for case in CASES:
        try:
            case(place, mesh, number)
            print(f"{case.__name__}: went well", flush=True)
        except Exception as error:
            print(f"{case.__name__}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
