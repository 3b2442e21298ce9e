"""A training program for one of several processes, or for one with all devices.

It prints the loss of each step with all its bits, and at the end a digest of the state.
"""

import argparse
import ctypes
import errno
import hashlib
import json
import math
import os
import signal
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.multihost_utils import reached_preemption_sync_point
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxinf
import jaxinf.engine.engine
import jaxinf.engine.opening
import jaxinf.engine.store
from jaxinf.engine import divide_for
from jaxinf.engine.steps import StepEngine
from jaxinf.processes import Group, group
from jaxinf.store import StoreDirectory

POINTS = {
    "create": (jaxinf.engine.opening, "create_store"),
    "initialise": (jaxinf.engine.engine, "initialise"),
    "unpublish": (StoreDirectory, "unpublish"),
    "update": (StepEngine, "update"),
    "sync": (StoreDirectory, "sync"),
    "record": (StoreDirectory, "write_record"),
    "meet": (Group, "barrier"),
    "flip": (StoreDirectory, "flip"),
    "checkpoint": (jaxinf.engine.store, "save_checkpoint"),
    "restore": (jaxinf.engine.opening, "restore_checkpoint"),
    "recover": (jaxinf.engine.opening, "to_step"),
    "agree": (Group, "gather"),
}
"""The functions of the real code at which a process can be told to die."""

LAYOUTS = {
    "fsdp": {"up": P(None, "d"), "down": P("d"), "bias": P("d"), "gain": P("d")},
    "replicated": dict.fromkeys(("up", "down", "bias", "gain"), P()),
    "mixed": {"up": P(None, "d"), "down": P("d"), "bias": P(), "gain": P()},
}
WIDTH, HIDDEN = 64, 8192


def parsed(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--distributed", help="HOST:PORT,N,I")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--more", type=int, help="steps after those of the store")
    parser.add_argument("--layout", choices=[*LAYOUTS, "mesh2d"], default="mixed")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--heartbeat", type=int, default=10)
    parser.add_argument("--init", choices=["eager", "traced"], default="eager")
    parser.add_argument("--compress", type=float)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--limit", type=float, default=group.LIMIT_S)
    parser.add_argument("--checkpoint-at", type=int)
    parser.add_argument("--print-sums", action="store_true")
    parser.add_argument("--carry", action="store_true", help="a mean of the losses")
    parser.add_argument("--kill", help="POINT:NUMBER:before or after")
    parser.add_argument("--hang", help="POINT:NUMBER")
    parser.add_argument("--stop", help="POINT:NUMBER: until SIGCONT")
    parser.add_argument("--fail", help="STEP:CALL:PATH: EIO from then on")
    parser.add_argument("--clock", type=int, help="seconds by which it is wrong")
    parser.add_argument("--stops", action="store_true", help="after SIGTERM")
    parser.add_argument("--pace", type=float, default=0, help="seconds between steps")
    return parser.parse_args(arguments)


def mesh_and_specs(layout):
    devices = np.array(jax.devices())
    if layout == "mesh2d":
        mesh = Mesh(devices.reshape(2, -1), ("r", "d"))
        return mesh, LAYOUTS["mixed"]
    return Mesh(devices, ("d",)), LAYOUTS[layout]


def first_params(dtype):
    draw = np.random.default_rng(0).standard_normal
    return {
        "up": (draw((WIDTH, HIDDEN)) / 8).astype(dtype),
        "down": (draw((HIDDEN, WIDTH)) / 90).astype(dtype),
        "bias": np.zeros(HIDDEN, dtype),
        "gain": np.ones(WIDTH, dtype),
    }


def loss_of(params, batch):
    x, y = batch
    hidden = jnp.tanh(x @ params["up"] + params["bias"])
    return jnp.mean(((hidden @ params["down"]) * params["gain"] - y) ** 2)


def on(mesh, spec, array):
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def batch_of(mesh, step, dtype):
    draw = np.random.default_rng(step + 1).standard_normal
    rows = math.lcm(16, mesh.shape["d"])
    return tuple(
        on(mesh, P("d"), draw((rows, WIDTH)).astype(np.float32).astype(dtype))
        for _ in range(2)
    )


def optimizer():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def names_of(store):
    return [info.name for info in store.checkpoints()]


def digest(store):
    whole = hashlib.sha256()
    for leaf in store._manifest.leaves:
        for state in leaf.states:
            if not state.is_beside:
                whole.update(store.read(state.name, leaf.name).tobytes())
    return whole.hexdigest()


def hang_at(point, number):
    """Makes the n-th call of a function wait for ever, as on a dead drive."""
    place, name = POINTS[point]
    original, left = getattr(place, name), [int(number)]

    def called(*args, **kwargs):
        left[0] -= 1
        while not left[0]:
            time.sleep(1)
        return original(*args, **kwargs)

    setattr(place, name, called)


def stop_at(point, number):
    """Makes the process stop itself before the n-th call of a function."""
    place, name = POINTS[point]
    original, left = getattr(place, name), [int(number)]

    def called(*args, **kwargs):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*args, **kwargs)

    setattr(place, name, called)


def break_drive(call, path):
    """Makes calls of the operating system on a path fail; see tests/faults/shim.c."""
    shim = ctypes.CDLL(None)
    shim.fault_set(call.encode(), path.encode(), errno.EIO, 0)


def die_at(point, number, when):
    """Makes the process kill itself before or after the n-th call of a function."""
    place, name = POINTS[point]
    original, left = getattr(place, name), [int(number)]

    def called(*args, **kwargs):
        left[0] -= 1
        if not left[0] and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(place, name, called)


def begin(given):
    """Does what happens before the store is opened: faults that are asked for, JAX."""
    # A shell starts jobs in the background with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if given.clock:
        ctypes.CDLL(None).clock_shift(given.clock)
        print("clock", int(time.time()), flush=True)
    group.LIMIT_S = given.limit
    if given.kill:
        die_at(*given.kill.split(":"))
    if given.hang:
        hang_at(*given.hang.split(":"))
    if given.stop:
        stop_at(*given.stop.split(":"))
    if given.distributed:
        address, *numbers = given.distributed.split(",")
        jax.distributed.initialize(
            address,
            *map(int, numbers),
            heartbeat_timeout_seconds=given.heartbeat,
            shutdown_timeout_seconds=3 * given.heartbeat,
        )


def main(arguments):
    given = parsed(arguments)
    begin(given)
    dtype = jnp.dtype(given.dtype)
    mesh, specs = mesh_and_specs(given.layout)
    shardings = {n: NamedSharding(mesh, spec) for n, spec in specs.items()}
    if given.options.pop("divide", False):
        divide_for(given.store, shardings)
    store = jaxinf.open_store(given.store, **given.options)
    params = {n: on(mesh, specs[n], a) for n, a in first_params(dtype).items()}
    compress = None if given.compress is None else jaxinf.top_k(given.compress)
    tx = jaxinf.smart_update(optimizer(), store, compress=compress, shardings=shardings)
    if store.exists:
        params = store.params(like=params)
    init = tx.init if given.init == "eager" else jax.jit(tx.init)
    state = init(params)
    seen = None
    if given.carry:
        rows = on(mesh, P("d"), np.zeros(mesh.size, np.float32))
        seen = {"mean": jnp.zeros(()), "key": jax.random.key(0), "rows": rows}
    if given.carry and int(state.step):
        seen = store.carried(like=seen)

    @jax.jit
    def step(params, state, batch, seen):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        if seen is not None:
            key = jax.random.split(seen["key"])[0]
            share = jax.random.uniform(key)
            mean = share * seen["mean"] + (1 - share) * loss
            seen = {"mean": mean, "key": key, "rows": seen["rows"] + mean}
        updates, state = tx.update(grads, state, params, carry=seen)
        return optax.apply_updates(params, updates), state, loss, seen

    first = int(state.step)
    print(f"at {first}", flush=True)
    last = given.steps if given.more is None else first + given.more
    for number in range(first, last):
        if given.stops and reached_preemption_sync_point(number):
            break
        time.sleep(given.pace)
        if number == first + 2:
            began_s = time.monotonic()
        if given.fail and number == int(given.fail.split(":")[0]):
            break_drive(*given.fail.split(":")[1:])
        batch = batch_of(mesh, number, dtype)
        params, state, loss, seen = step(params, state, batch, seen)
        if given.fail:
            jax.block_until_ready(state)
        bits = np.asarray(loss, np.float32).view(np.uint32)
        if number + 1 == given.checkpoint_at and "kept" not in names_of(store):
            store.checkpoint("kept", state=state)
        print(f"loss {number} {int(bits):08x} {float(loss):.6f}", flush=True)
    store.wait(state)
    if last - first > 2:
        took_s = (time.monotonic() - began_s) / (last - first - 2)
        print(f"step_s {took_s:.4f}", flush=True)
    print(f"state {digest(store)}", flush=True)
    if given.carry:
        found = store.carried(like=seen)
        row = float(found["rows"].addressable_shards[0].data[0])
        words = [float(x["mean"]).hex() for x in (found, seen)]
        print(f"carried {words[0]} {row.hex()} in memory {words[1]}", flush=True)
    for leaf in store._manifest.leaves if given.print_sums else ():
        for one in leaf.states:
            whole = store.read(one.name, leaf.name).astype(np.float64)
            print("sum", one.name, leaf.name, repr(float(whole.sum())), flush=True)
    metrics = store.metrics
    if metrics is not None:
        last_ones = [store.metrics_of(n) for n in range(store.step + 1)]
        commits_s = [one.commit_s for one in last_ones if one is not None]
        print(f"commit_s {statistics.median(commits_s):.5f}", flush=True)
        print(f"written {metrics.traffic.drive_write_bytes}", flush=True)
    store.close()
    print("closed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
