"""State that stays in memory between the steps of a stream: bits and traffic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_stores
from families import family
from streaming import CHUNKS
from zoo import Program, normal

import jaxinf

pytestmark = pytest.mark.optimized("long")

MEMORY_BYTES = 256 << 20
ADAM = optax.adam(1e-2)


@functools.cache
def small():
    """A table that is read at both ends, a stack, and a leaf that nothing reads."""

    def loss(params, batch):
        x = params["table"][batch["tokens"]]
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
        return batch["scale"] * jnp.mean((x @ params["table"].T) ** 2)

    params = {"table": normal(0, 64, 32), "layers": normal(1, 3, 32, 32) / 5}
    params["unused"] = normal(2, 8)
    batch = {"tokens": np.arange(8, dtype=np.int32), "scale": np.float32(1)}
    return Program(loss, params, batch)


def test_what_checkpoints_alone_write_is_none_of_a_steps(open_store):
    program = small()
    options = {**CHUNKS, "durability": "checkpoint"}
    store = open_store("store", **options)
    with jaxinf.stream(program.loss, ADAM, store, memory_bytes=MEMORY_BYTES) as step:
        step.load(program.params, batch=program.batch)
        meters = store._engine.opened.meters
        for name in ("first", "second"):
            before = meters.snapshot()
            for _ in range(3):
                step(program.batch)
            step.store._engine.opened.join()
            moved = meters.snapshot() - before
            assert moved.drive_write_bytes == 3 * step.traffic.drive_write_bytes
            store.checkpoint(name)
            assert meters.snapshot().drive_write_bytes > (
                before.drive_write_bytes + moved.drive_write_bytes
            )


@pytest.mark.parametrize(
    ("durability", "tx"),
    family([("step", "adam"), (2, "adam"), (2, "lamb")], short=[("step", "adam")]),
)
def test_state_that_stays_moves_fewer_bytes(open_store, durability, tx, monkeypatch):
    tx = getattr(optax, tx)(1e-2)
    program, found = small(), []
    for name in ("kept", "none kept"):
        if name == "none kept":
            small_stores.keep_nothing(monkeypatch)
        store = open_store(name, **CHUNKS, durability=durability)
        with jaxinf.stream(program.loss, tx, store, memory_bytes=MEMORY_BYTES) as step:
            step.load(program.params, batch=program.batch)
            losses = [float(step(program.batch)[0]) for _ in range(4)]
            store.wait()
            moved = [store.metrics_of(n).traffic for n in (3, 4)]
            planned = step.traffic
            assert {one.drive_read_bytes for one in moved} == {planned.drive_read_bytes}
            written = [one.drive_write_bytes for one in moved]
            assert sum(written) == 2 * planned.drive_write_bytes
            params = store.params(like=program.params)
            assert store.metrics_of(4).hit_share == (name == "kept")
        found.append((losses, planned, jax.tree.leaves(params)))
    (losses, kept, params), (same_losses, plain, same_params) = found
    assert losses == same_losses
    for one, other in zip(params, same_params, strict=True):
        np.testing.assert_array_equal(one, other)
    assert kept.drive_read_bytes < plain.drive_read_bytes
    assert (kept.drive_write_bytes < plain.drive_write_bytes) == (durability == 2)
