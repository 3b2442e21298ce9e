"""A streamed training program for one of several processes, or one with all devices.

It takes the arguments of `distributed_program`, and prints the same lines.
"""

import argparse
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import small_stores
from distributed_program import (
    WIDTH,
    batch_of,
    begin,
    break_drive,
    digest,
    first_params,
    mesh_and_specs,
    names_of,
    on,
    parsed,
)
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxinf
from jaxinf.streaming.update.store_sink import StoreSink

DEPTH = 3
LAYERS = {"fsdp": P(None, "d"), "mixed": P(None, None, "d"), "replicated": P()}


def optimizer(name):
    adam = optax.adamw(1e-3)
    return optax.chain(optax.clip_by_global_norm(1.0), adam) if name == "clip" else adam


def numbers(dtype):
    draw = np.random.default_rng(9).standard_normal
    layers = (draw((DEPTH, WIDTH, WIDTH)) / 8).astype(dtype)
    return {**first_params(dtype), "layers": layers}


def interrupt_at(number):
    """Sends the process Ctrl-C when the n-th gradient is handed out.

    The thread that runs the step does that, so the signal comes within the step.
    """
    put, left = StoreSink.put, [number]

    def called(*args, **kwargs):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGINT)
        return put(*args, **kwargs)

    StoreSink.put = called


def loss_of(params, batch):
    x, y = batch
    x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
    hidden = jnp.tanh(x @ params["up"] + params["bias"])
    return jnp.mean(((hidden @ params["down"]) * params["gain"] - y) ** 2)


def main(arguments):
    own = argparse.ArgumentParser()
    own.add_argument("--optimizer", default="adam")
    own.add_argument("--micro-batches", type=int, default=1)
    own.add_argument("--interrupt", type=int, help="Ctrl-C at this gradient")
    own.add_argument("--memory", default="256MiB")
    stream, rest = own.parse_known_args(arguments)
    given = parsed(rest)
    if stream.interrupt:
        interrupt_at(stream.interrupt)
    begin(given)
    store = small_stores.open_store(
        given.store, **{"chunk_elements": 65536, **given.options}
    )
    dtype = jnp.dtype(given.dtype)
    mesh, specs = mesh_and_specs(given.layout)
    specs = {**specs, "layers": LAYERS.get(given.layout, P())}
    params = {n: on(mesh, specs[n], a) for n, a in numbers(dtype).items()}
    compress = None if given.compress is None else jaxinf.top_k(given.compress)
    step = jaxinf.stream(
        loss_of,
        optimizer(stream.optimizer),
        store,
        memory_bytes=stream.memory,
        micro_batches=stream.micro_batches,
        compress=compress,
    )
    with step:
        train(step, given, mesh, params, batch_of(mesh, 0, dtype))
    print("closed", flush=True)


def train(step, given, mesh, params, batch):
    store, dtype = step.store, jnp.dtype(given.dtype)
    if given.init == "traced":
        shardings = jax.tree.map(lambda x: x.sharding, params)
        step.init(lambda: numbers(dtype), batch=batch, shardings=shardings)
    else:
        step.load(params, batch=batch)
    first = store.step
    print(f"at {first}", flush=True)
    last = given.steps if given.more is None else first + given.more
    began_s = time.monotonic()
    for number in range(first, last):
        time.sleep(given.pace)
        if number == first + 2:
            began_s = time.monotonic()
        if given.fail and number == int(given.fail.split(":")[0]):
            break_drive(*given.fail.split(":")[1:])
        loss, _ = step(batch_of(mesh, number, dtype))
        bits = np.asarray(loss, np.float32).view(np.uint32)
        if number + 1 == given.checkpoint_at and "kept" not in names_of(store):
            store.checkpoint("kept")
        print(f"loss {number} {int(bits):08x} {float(loss):.6f}", flush=True)
    store.wait()
    if last - first > 2:
        took_s = (time.monotonic() - began_s) / (last - first - 2)
        print(f"step_s {took_s:.4f}", flush=True)
    print(f"state {digest(store)}", flush=True)
    metrics = store.metrics
    if metrics is not None:
        print(f"written {metrics.traffic.drive_write_bytes}", flush=True)
        for name, one in (("planned", step.traffic), ("moved", metrics.traffic)):
            print(name, one.drive_write_bytes, one.drive_read_bytes, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
