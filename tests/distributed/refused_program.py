"""Misuses of a store in three processes; prints the error of each, and goes on.

A case is a function of a directory, the mesh of all devices and the process's number.
"""

import contextlib
import ctypes
import errno
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from distributed_program import on
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from msgspec import structs
from raw_stores import bytes_below

import jaxinf
from jaxinf.engine import opening
from jaxinf.processes import group
from jaxinf.store import Manifest, package_versions
from jaxinf.streaming.plan import memory

ADAM = optax.adam(1e-3)
EARLY = []
"""The store that is opened before `jax.distributed.initialize`."""


def replicated(mesh):
    return on(mesh, P(), np.ones((64, 8), np.float32))


def made(store, params, tx=ADAM):
    jaxinf.smart_update(tx, store).init({"w": params})


def trained(store, params, steps=1):
    tx = jaxinf.smart_update(ADAM, store)
    state = tx.init(params)
    step = jax.jit(lambda p, s: tx.update(jax.tree.map(jnp.ones_like, p), s, p))
    for _ in range(steps):
        updates, state = step(params, state)
        params = optax.apply_updates(params, updates)
    jax.block_until_ready(params)
    store.wait()


# --- stores that members do not agree on -------------------------------------------


def different_paths(place, mesh, number):
    jaxinf.open_store(place / ("odd" if number == 2 else "common"))


def mesh_of_some(place, mesh, number):
    some = Mesh(mesh.devices[:2], ("d",))
    with jaxinf.open_store(place / "some") as store:
        made(store, replicated(some) if number < 2 else jnp.ones((64, 8)))


def other_optimizer(place, mesh, number):
    tx = ADAM if number else optax.sgd(1e-3, momentum=0.9)
    with jaxinf.open_store(place / "optimizer") as store:
        made(store, replicated(mesh), tx)


def own_paths(place, mesh, number):
    with jaxinf.open_store(place / f"own-{number}") as store:
        trained(store, {"w": jnp.ones((64, 8))})
        assert store._manifest.member is None


def old_copy(place, mesh, number):
    """Makes the store that the cases after it copy; then one has other params."""
    with jaxinf.open_store(place / "copies") as store:
        params = {"w": replicated(mesh)}
        trained(store, params)
    with jaxinf.open_store(place / "copies") as store:
        params = store.params(like=params)
        if number == 2:
            whole = np.asarray(params["w"]).copy()
            whole[0, 0] += 1
            params = {"w": on(mesh, P(), whole)}
        trained(store, params)
        store.check()


def other_version(place, mesh, number):
    if number == 1:
        opening.package_versions = lambda: {"jax": "0.4.0"}
    try:
        with jaxinf.open_store(place / "version") as store:
            made(store, replicated(mesh))
    finally:
        opening.package_versions = package_versions


def opened_before(place, mesh, number):
    with EARLY[0] as store:
        made(store, replicated(mesh))


# --- copies of a run of which something is wrong -----------------------------------


def member(place, name, number):
    return place / name / f"process-{number:05d}"


def changed(place, name, number, **values):
    """Opens a copy whose members are said to be others."""
    target = copied(place, name, number)
    manifest = Manifest.read(target / "jaxinf.json")
    changed = structs.replace(manifest.member, **values)
    structs.replace(manifest, member=changed).write(target / "jaxinf.json")
    opened_unchanged(place, name, number)


def other_count(place, mesh, number):
    changed(place, "count", number, count=4)


def other_runs(place, mesh, number):
    changed(place, "runs", number, run=f"{number == 1:032x}")


def missing_member(place, mesh, number):
    if number != 2:
        copied(place, "lost", number)
    opened_unchanged(place, "lost", number)


def member_twice(place, mesh, number):
    copied(place, "twice", number, source=0 if number == 1 else None)
    opened_unchanged(place, "twice", number)


def copied(place, name, number, source=None):
    """Copies a member of a run, by default this process's, to its place in another."""
    target = member(place, name, number)
    source = member(place, "copies", number if source is None else source)
    shutil.copytree(source, target, symlinks=True)
    return target


def opened_unchanged(place, name, number):
    """Opens a run, and sees to it that a refusal leaves this process's member alone."""
    before = bytes_below(member(place, name, number))
    try:
        jaxinf.open_store(place / name).close()
    finally:
        assert bytes_below(member(place, name, number)) == before


def damaged_manifest(place, mesh, number):
    path = copied(place, "manifest", number) / "jaxinf.json"
    if number == 1:
        path.write_bytes(path.read_bytes().replace(b'"w"', b'"v"'))
    opened_unchanged(place, "manifest", number)


def damaged_chunk(place, mesh, number):
    """Reads params of which the only chunk, which process 0 holds, is damaged."""
    target = copied(place, "chunk", number)
    if number == 0:
        [path] = target.glob("current/params.w/c/*/*")
        path.write_bytes(b"\xff" + path.read_bytes()[1:])
    with jaxinf.open_store(place / "chunk") as store:
        store.params(like={"w": replicated(mesh)})


def without_locks(place, mesh, number):
    copied(place, "locks", number)
    shim = ctypes.CDLL(None)
    if number == 1:
        shim.fault_set(b"flock", b"process-00001/lock", errno.ENOLCK, 0)
    try:
        opened_unchanged(place, "locks", number)
    finally:
        shim.fault_set(b"", b"", 0, 0)


def from_a_backup(place, mesh, number):
    """Replaces a member by its copy of two steps before."""
    target, backup = member(place, "backup", number), place / f"copy-{number}"
    params = {"w": replicated(mesh)}
    with jaxinf.open_store(place / "backup") as store:
        trained(store, params)
        store.checkpoint("kept")
        params = store.params(like=params)
    shutil.copytree(target, backup, symlinks=True)
    with jaxinf.open_store(place / "backup") as store:
        trained(store, params, steps=2)
    if number == 2:
        shutil.rmtree(target)
        backup.rename(target)
    opened_unchanged(place, "backup", number)


def restored_after_a_backup(place, mesh, number):
    with jaxinf.open_store(place / "backup", restore="kept") as store:
        assert store.step == 1


# --- calls that not all make -------------------------------------------------------


def another_call(place, mesh, number):
    with jaxinf.open_store(place / "copies") as store:
        if number == 0:
            store.checkpoint("alone")
        with store.snapshot():
            pass


def export_of_one(place, mesh, number):
    export = {"export_every": 2, "export_to": f"file://{place}/export"}
    jaxinf.open_store(place / "options", **(export if number == 1 else {}))


def missing_process(place, mesh, number):
    if number == 0:
        group.LIMIT_S = 1
        jaxinf.open_store(place / "lonely")


# --- streamed steps ----------------------------------------------------------------

W, X = np.ones((6, 4), np.float32), np.ones((12, 6), np.float32)


def loss_fn(params, batch):
    return ((batch @ params["w"]) ** 2).mean()


def loaded(path, params, tx=ADAM):
    step = jaxinf.stream(loss_fn, tx, path, memory_bytes=64 << 20)
    step.load({"w": params})
    return step


def ratios(place, mesh, number):
    loaded(place / "ratios", on(mesh, P("d"), W), tx=optax.lamb(1e-3))


def on_own_devices(place, mesh, number):
    with loaded(place / f"alone-{number}", W) as step:
        assert float(step(X)[0]) == 36.0


def other_batch(place, mesh, number):
    with loaded(place / "batch", on(mesh, P(), W)) as step:
        x, short = (on(mesh, P("d"), rows) for rows in (X, X[:6]))
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
    if number == 1:
        memory.device_is_host = lambda device: False
    try:
        yield
    finally:
        memory.device_is_host = before


def one_device(place, mesh, number):
    with loaded(place / "later", on(mesh, P(), W)) as step, apart(number):
        step(on(mesh, P("d"), X))


STREAMS = (ratios, on_own_devices, other_batch, one_device, one_goes_on)
CASES = (different_paths, mesh_of_some, other_optimizer, own_paths, old_copy)
CASES += (other_version, other_count, other_runs, missing_member)
CASES += (member_twice, damaged_manifest, damaged_chunk, without_locks)
CASES += (opened_before, from_a_backup, restored_after_a_backup, another_call)
CASES += (export_of_one, *STREAMS)
CASES += (missing_process,)  # last, as it puts the calls out of step


def main(place, arguments):
    address, *numbers = arguments[1].split(",")  # behind --distributed
    count, number = map(int, numbers)
    EARLY.append(jaxinf.open_store(place / "early"))
    jax.distributed.initialize(address, count, number)
    mesh = jax.make_mesh((count,), ("d",), axis_types=(AxisType.Auto,))
    for case in CASES:
        try:
            case(place, mesh, number)
            text = "went well"
        except Exception as error:
            text = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(f"{case.__name__}: {text}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
