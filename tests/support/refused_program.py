"""Misuses of a store in several processes; prints the error of each, and goes on."""

import ctypes
import errno
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from msgspec import structs

import jaxinf
from jaxinf.engine import members
from jaxinf.processes import group
from jaxinf.store import Manifest

EARLY = []
"""The store that is opened before `jax.distributed.initialize`."""


def replicated(mesh, value=1.0):
    whole = np.full((64, 8), value, np.float32)
    sharding = NamedSharding(mesh, P())
    return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)


def trained(store, params, tx, steps=1):
    tx = jaxinf.smart_update(tx, store)
    state = tx.init(params)
    step = jax.jit(lambda p, s: tx.update(jax.tree.map(jnp.ones_like, p), s, p))
    for _ in range(steps):
        updates, state = step(params, state)
        params = optax.apply_updates(params, updates)
    jax.block_until_ready(params)
    store.wait()


def different_paths(place, mesh, number):
    del mesh
    shared = place / ("odd" if number == 2 else "common")
    jaxinf.open_store(shared)


def other_version(place, mesh, number):
    if number == 1:
        members.version = lambda name: "0.4.0" if name == "jax" else "1"
    try:
        with jaxinf.open_store(place / "version") as store:
            jaxinf.smart_update(optax.adam(1e-3), store).init({"w": replicated(mesh)})
    finally:
        members.version = version


def other_version_later(place, mesh, number):
    del mesh
    if number == 1:
        members.version = lambda name: "0.4.0" if name == "jax" else "1"
    try:
        jaxinf.open_store(place / "copies").close()
    finally:
        members.version = version


def member(place, name, number):
    return place / name / f"process-{number:05d}"


def copied(place, name, number, source=None):
    """Copies a member of a run, by default this process's, to its place in another."""
    target = member(place, name, number)
    source = member(place, "copies", number if source is None else source)
    shutil.copytree(source, target, symlinks=True)
    return target


def contents(target):
    """Returns the bytes of a member's files but for those of its locks."""
    return {
        file: file.read_bytes()
        for file in target.rglob("*")
        if file.is_file() and not file.name.endswith("lock")
    }


def opened_unchanged(place, name, number, **options):
    """Opens a run, and sees to it that a refusal leaves this process's member alone."""
    before = contents(member(place, name, number))
    try:
        jaxinf.open_store(place / name, **options).close()
    finally:
        assert contents(member(place, name, number)) == before


def moved(place, name, number, member_of):
    """Copies this process's member of a run, with another manifest."""
    target = copied(place, name, number)
    manifest = Manifest.read(target / "jaxinf.json")
    own = structs.replace(manifest, member=member_of(manifest.member))
    own.write(target / "jaxinf.json")
    opened_unchanged(place, name, number)


def other_count(place, mesh, number):
    del mesh
    moved(place, "count", number, lambda member: structs.replace(member, count=4))


def other_runs(place, mesh, number):
    del mesh
    run = f"{number == 1:032x}"
    moved(place, "runs", number, lambda member: structs.replace(member, run=run))


def missing_member(place, mesh, number):
    del mesh
    if number != 2:
        copied(place, "lost", number)
    opened_unchanged(place, "lost", number)


def member_twice(place, mesh, number):
    del mesh
    copied(place, "twice", number, source=0 if number == 1 else None)
    opened_unchanged(place, "twice", number)


def damaged(place, name, number, file, damage, victim=1):
    """Opens a run after one process's file has been damaged."""
    target = copied(place, name, number)
    if number == victim:
        [path] = target.glob(file)
        path.write_bytes(damage(path.read_bytes()))
    opened_unchanged(place, name, number)


def damaged_manifest(place, mesh, number):
    del mesh
    file = "jaxinf.json"
    damaged(place, "manifest", number, file, lambda x: x.replace(b'"w"', b'"v"'))


def damaged_record(place, mesh, number):
    del mesh
    damaged(place, "record", number, "current/commit.json", lambda x: x[:-9])


def damaged_chunk(place, mesh, number):
    """Reads params of which the only chunk, which process 0 holds, is damaged."""
    target = copied(place, "chunk", number)
    if number == 0:
        [path] = target.glob("current/params.w/c/*/*")
        path.write_bytes(b"\xff" + path.read_bytes()[1:])
    with jaxinf.open_store(place / "chunk") as store:
        store.params(like={"w": replicated(mesh)})


def without_locks(place, mesh, number):
    del mesh
    copied(place, "locks", number)
    if number == 1:
        shim = ctypes.CDLL(None)
        shim.fault_set(b"flock", b"process-00001/lock", errno.ENOLCK, 0)
    try:
        opened_unchanged(place, "locks", number)
    finally:
        if number == 1:
            shim.fault_set(b"", b"", 0, 0)


def from_a_backup(place, mesh, number):
    """Replaces a member by its copy of two steps before."""
    target, backup = member(place, "backup", number), place / f"copy-{number}"
    params = {"w": replicated(mesh)}
    with jaxinf.open_store(place / "backup") as store:
        trained(store, params, optax.adam(1e-3))
        store.checkpoint("kept")
        params = store.params(like=params)
    shutil.copytree(target, backup, symlinks=True)
    with jaxinf.open_store(place / "backup") as store:
        trained(store, params, optax.adam(1e-3), steps=2)
    if number == 2:
        shutil.rmtree(target)
        backup.rename(target)
    opened_unchanged(place, "backup", number)


def restored_after_a_backup(place, mesh, number):
    del mesh, number
    with jaxinf.open_store(place / "backup", restore="kept") as store:
        assert store.step == 1


def export_of_one(place, mesh, number):
    del mesh
    export = {"export_every": 2, "export_to": f"file://{place}/export"}
    jaxinf.open_store(place / "options", **(export if number == 1 else {}))


def bad_option_of_one(place, mesh, number):
    del mesh
    jaxinf.open_store(place / "options", durability=0 if number == 1 else "step")


def missing_process(place, mesh, number):
    del mesh
    if number == 0:
        group.LIMIT_S = 1
        jaxinf.open_store(place / "lonely")


def checkpoint_of_one(place, mesh, number):
    """One process makes a call, while the others are there and make none."""
    del mesh
    told = place / "told"
    group.LIMIT_S = 4
    with jaxinf.open_store(place / "copies") as store:
        try:
            if number == 0:
                store.checkpoint("alone")
        finally:
            while number and not told.exists():
                time.sleep(0.01)
            told.touch()
            assert "alone" not in {one.name for one in store.checkpoints()}


def another_call(place, mesh, number):
    del mesh
    with jaxinf.open_store(place / "copies") as store:
        if number == 0:
            store.checkpoint("alone")
        with store.snapshot():
            pass


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


def opened_before(place, mesh, number):
    del place, number
    with EARLY[0] as store:
        jaxinf.smart_update(optax.adam(1e-3), store).init({"w": replicated(mesh)})


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
    member_twice,
    damaged_manifest,
    damaged_record,
    damaged_chunk,
    without_locks,
    opened_before,
    from_a_backup,
    restored_after_a_backup,
    another_call,
    export_of_one,
    bad_option_of_one,
    checkpoint_of_one,
    missing_process,  # last, as it puts the calls out of step
)


def main(place, arguments):
    address, *numbers = arguments[1].split(",")  # behind --distributed
    count, number = map(int, numbers)
    EARLY.append(jaxinf.open_store(place / "early"))
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
