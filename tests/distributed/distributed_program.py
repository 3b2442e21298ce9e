"""A training program for one of several processes, or for one with all devices.

It prints the loss of each step with all its bits, and at the end a digest of the state.
With --stream it is one of `jaxinf.stream`, else one of `smart_update`.
"""

import argparse
import contextlib
import ctypes
import errno
import hashlib
import json
import math
import signal
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import small_stores
from inject import at_call, die, interrupt, stop
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from streaming_cases import planned_bytes

import jaxinf
import jaxinf.engine.binding
import jaxinf.engine.opening
import jaxinf.engine.store
import jaxinf.engine.updates
from jaxinf.engine import divide_store
from jaxinf.engine.step_runner import StepRunner
from jaxinf.processes import Group, group
from jaxinf.store import StoreDirectory
from jaxinf.streaming.update.apply_gradients import StoreSink

POINTS = {
    "create": (jaxinf.engine.binding, "create_store"),
    "initialise": (jaxinf.engine.updates, "_initial_tasks"),
    "remove_record": (StoreDirectory, "remove_record"),
    "update": (StepRunner, "update"),
    "sync": (StoreDirectory, "sync"),
    "record": (StoreDirectory, "write_record"),
    "meet": (Group, "barrier"),
    "flip": (StoreDirectory, "flip"),
    "checkpoint": (jaxinf.engine.store, "save_checkpoint"),
    "restore": (jaxinf.engine.opening, "restore_checkpoint"),
    "recover": (jaxinf.engine.opening, "go_to_step"),
    "agree": (Group, "gather"),
}
"""The functions of the real code at which a process can be told to die."""

LAYOUTS = {
    "fsdp": {"up": P(None, "d"), "down": P("d"), "bias": P("d"), "gain": P("d")},
    "replicated": dict.fromkeys(("up", "down", "bias", "gain"), P()),
    "mixed": {"up": P(None, "d"), "down": P("d"), "bias": P(), "gain": P()},
}
LAYERS = {"fsdp": P(None, "d"), "mixed": P(None, None, "d")}
WIDTH, HIDDEN, DEPTH = 64, 8192, 3


def parsed(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--distributed", help="HOST:PORT,N,I")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--more", type=int, help="steps after those of the store")
    parser.add_argument("--layout", choices=[*LAYOUTS, "mesh2d"], default="mixed")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--heartbeat", type=int, default=10)
    parser.add_argument("--init", choices=["eager", "traced"], default="eager")
    parser.add_argument("--compress", type=float)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--memory", default="256MiB", help="of a streamed step")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--optimizer", choices=["adam", "clip"], default="adam")
    parser.add_argument("--limit", type=float, default=group.LIMIT_S)
    parser.add_argument("--checkpoint-at", type=int)
    parser.add_argument("--print-sums", action="store_true")
    parser.add_argument("--carry", action="store_true", help="a mean of the losses")
    parser.add_argument("--kill", help="POINT:NUMBER:before or after")
    parser.add_argument("--hang", help="POINT:NUMBER")
    parser.add_argument("--stop", help="POINT:NUMBER: until SIGCONT")
    parser.add_argument("--interrupt", type=int, help="Ctrl-C at this gradient")
    parser.add_argument("--fail", help="STEP:CALL:PATH: EIO from then on")
    parser.add_argument("--pace", type=float, default=0, help="seconds between steps")
    return parser.parse_args(arguments)


def mesh_and_specs(layout):
    devices = np.array(jax.devices())
    if layout == "mesh2d":
        return Mesh(devices.reshape(2, -1), ("r", "d")), LAYOUTS["mixed"]
    return Mesh(devices, ("d",)), LAYOUTS[layout]


def first_params(dtype, stream):
    draw = np.random.default_rng(0).standard_normal
    params = {
        "up": (draw((WIDTH, HIDDEN)) / 8).astype(dtype),
        "down": (draw((HIDDEN, WIDTH)) / 90).astype(dtype),
        "bias": np.zeros(HIDDEN, dtype),
        "gain": np.ones(WIDTH, dtype),
    }
    if stream:
        params["layers"] = (draw((DEPTH, WIDTH, WIDTH)) / 8).astype(dtype)
    return params


def loss_of(params, batch):
    x, y = batch
    if "layers" in params:
        layers = params["layers"]
        x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, layers)
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


def digest(store):
    whole = hashlib.sha256()
    for leaf in store._manifest.leaves:
        for state in leaf.states:
            if not state.is_companion:
                whole.update(store.read(state.name, leaf.name).tobytes())
    return whole.hexdigest()


def hang():
    """Waits for ever, as on a dead drive."""
    while True:
        time.sleep(1)


def begin(given):
    """Does what happens before the store is opened: faults that are asked for, JAX."""
    # A shell starts jobs in the background with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    group.LIMIT_S = given.limit
    for asked, action in ((given.kill, die), (given.hang, hang), (given.stop, stop)):
        if asked:
            point, number, *when = asked.split(":")
            owner, name = POINTS[point]
            at_call(owner, name, number, action, after=when == ["after"])
    if given.interrupt:  # within the step, by the thread that runs it
        at_call(StoreSink, "put", given.interrupt, interrupt)
    if given.distributed:
        address, *numbers = given.distributed.split(",")
        jax.distributed.initialize(
            address,
            *map(int, numbers),
            heartbeat_timeout_seconds=given.heartbeat,
            shutdown_timeout_seconds=3 * given.heartbeat,
        )


class Loop(NamedTuple):
    step: Any  # of a batch: the loss
    state: Any  # the last one, for a checkpoint and to wait for
    carried: Any = None  # what the last step carried


def updating(given, store, mesh, params, shardings, compress):
    clip = optax.clip_by_global_norm(1.0)
    tx = optax.chain(clip, optax.adamw(1e-3))
    tx = jaxinf.smart_update(tx, store, compress=compress, shardings=shardings)
    if store.exists:
        params = store.params(like=params)
    state = (tx.init if given.init == "eager" else jax.jit(tx.init))(params)
    seen = None
    if given.carry:
        rows = on(mesh, P("d"), np.zeros(mesh.size, np.float32))
        seen = {"mean": jnp.zeros(()), "key": jax.random.key(0), "rows": rows}
        if int(state.step):
            seen = store.carried(like=seen)

    @jax.jit
    def train(params, state, batch, seen):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        if seen is not None:
            key = jax.random.split(seen["key"])[0]
            share = jax.random.uniform(key)
            mean = share * seen["mean"] + (1 - share) * loss
            seen = {"mean": mean, "key": key, "rows": seen["rows"] + mean}
        updates, state = tx.update(grads, state, params, carry=seen)
        return optax.apply_updates(params, updates), state, loss, seen

    def step(batch):
        nonlocal params, state, seen
        params, state, loss, seen = train(params, state, batch, seen)
        if given.fail:
            jax.block_until_ready(state)
        return loss

    return Loop(step, lambda: state, lambda: seen)


def streaming(given, step, params, batch):
    if given.init == "traced":
        shardings = jax.tree.map(lambda x: x.sharding, params)
        dtype = jnp.dtype(given.dtype)
        step.init(lambda: first_params(dtype, True), batch=batch, shardings=shardings)
    else:
        step.load(params, batch=batch)
    return Loop(lambda batch: step(batch)[0], lambda: None)


def streamed_step(given, store, compress):
    adam = optax.adamw(1e-3)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adam)
    return jaxinf.stream(
        loss_of,
        clipped if given.optimizer == "clip" else adam,
        store,
        memory_bytes=given.memory,
        micro_batches=given.micro_batches,
        compress=compress,
    )


def main(arguments):
    given = parsed(arguments)
    begin(given)
    dtype = jnp.dtype(given.dtype)
    mesh, specs = mesh_and_specs(given.layout)
    specs = {**specs, "layers": LAYERS.get(given.layout, P())}
    first = first_params(dtype, given.stream)
    shardings = {n: NamedSharding(mesh, specs[n]) for n in first}
    if given.options.pop("divide", False):
        divide_store(given.store, shardings)
    options = {"chunk_elements": 65536} if given.stream else {}
    store = small_stores.open_store(given.store, **(options | given.options))
    params = {n: on(mesh, specs[n], a) for n, a in first.items()}
    compress = None if given.compress is None else jaxinf.top_k(given.compress)
    with contextlib.ExitStack() as closing:
        if given.stream:
            stream = closing.enter_context(streamed_step(given, store, compress))
            loop = streaming(given, stream, params, batch_of(mesh, 0, dtype))
        else:
            stream = None
            loop = updating(given, store, mesh, params, shardings, compress)
        train(given, store, loop, mesh, dtype)
        report(given, store, loop, stream)
    store.close()
    print("closed", flush=True)


def train(given, store, loop, mesh, dtype):
    first = int(loop.state().step) if loop.state() is not None else store.step
    print(f"at {first}", flush=True)
    last = given.steps if given.more is None else first + given.more
    for number in range(first, last):
        time.sleep(given.pace)
        if given.fail and number == int(given.fail.split(":")[0]):
            _, call, path = given.fail.split(":")  # see tests/faults/shim.c
            shim = ctypes.CDLL(None)
            shim.fault_set(call.encode(), path.encode(), errno.EIO, 0)
        loss = loop.step(batch_of(mesh, number, dtype))
        bits = np.asarray(loss, np.float32).view(np.uint32)
        if number + 1 == given.checkpoint_at:
            names = {info.name for info in store.checkpoints()}
            if "kept" not in names:
                store.checkpoint("kept", state=loop.state())
        print(f"loss {number} {int(bits):08x} {float(loss):.6f}", flush=True)
    store.wait(loop.state())


def report(given, store, loop, stream):
    print(f"state {digest(store)}", flush=True)
    if given.carry:
        seen = loop.carried()
        found = store.carried(like=seen)
        row = float(found["rows"].addressable_shards[0].data[0])
        words = [float(x["mean"]).hex() for x in (found, seen)]
        print(f"carried {words[0]} {row.hex()} in memory {words[1]}", flush=True)
    for leaf in store._manifest.leaves if given.print_sums else ():
        for one in leaf.states:
            whole = store.read(one.name, leaf.name).astype(np.float64)
            print("sum", one.name, leaf.name, repr(float(whole.sum())), flush=True)
    if store.metrics is None:
        return
    moved = store.metrics.traffic
    print(f"written {moved.drive_write_bytes}", flush=True)
    if stream is not None:
        for name, one in (("planned", planned_bytes(stream)), ("moved", moved)):
            print(name, one.drive_write_bytes, one.drive_read_bytes, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
