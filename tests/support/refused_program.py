"""Misuses of a store in several processes; prints the error of each, and goes on."""

import shutil
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxinf
from jaxinf.engine import member_opening
from jaxinf.store import Manifest


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


def other_version(place, mesh, number):
    if number == 1:
        member_opening.version = lambda name: "0.4.0" if name == "jax" else "1"
    try:
        with jaxinf.open_store(place / "version") as store:
            jaxinf.smart_update(optax.adam(1e-3), store).init({"w": replicated(mesh)})
    finally:
        member_opening.version = version


def other_version_later(place, mesh, number):
    del mesh
    if number == 1:
        member_opening.version = lambda name: "0.4.0" if name == "jax" else "1"
    try:
        jaxinf.open_store(place / "copies").close()
    finally:
        member_opening.version = version


def moved(place, name, number, manifest_of):
    """Copies this process's member of a run, with another manifest."""
    source = place / "copies" / f"process-{number:05d}"
    target = place / name / f"process-{number:05d}"
    shutil.copytree(source, target, symlinks=True)
    manifest = Manifest.read(target / "jaxinf.json")
    replace(manifest, member=manifest_of(manifest.member)).write(target / "jaxinf.json")
    jaxinf.open_store(place / name).close()


def other_count(place, mesh, number):
    del mesh
    moved(place, "count", number, lambda member: replace(member, count=4))


def other_runs(place, mesh, number):
    del mesh
    run = f"{number == 1:032x}"
    moved(place, "runs", number, lambda member: replace(member, run=run))


def missing_member(place, mesh, number):
    del mesh
    if number != 2:
        shutil.copytree(
            place / "copies" / f"process-{number:05d}",
            place / "lost" / f"process-{number:05d}",
            symlinks=True,
        )
    jaxinf.open_store(place / "lost").close()


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
    other_version,
    other_version_later,
    other_count,
    other_runs,
    missing_member,
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
