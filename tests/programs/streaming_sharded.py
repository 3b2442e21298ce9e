"""Streaming on four devices: functions that `tests/streaming/test_sharded.py` runs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_stores
from cases import serve
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import SPECS, make, trained
from streaming_cases import assert_near, assert_same_bits, by_optax, moved_as_planned
from zoo import ZOO, Program

import jaxinf
from jaxinf.errors import StreamError
from jaxinf.streaming.program import units

units.MIN_SLICE_BYTES = 4096
MEMORY_BYTES = 64 << 20
ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2))


def opened(place, name, **options):
    options = {"chunk_elements": 4096, "memory_bytes": 16 << 20, **options}
    return small_stores.open_store(f"{place}/{name}", **options)


def streamed(one, store, tx=ADAM, **options):
    return jaxinf.stream(one.loss, tx, store, memory_bytes=MEMORY_BYTES, **options)


def on_one_device(one, tx=ADAM, num_steps=3):
    params, batch = one.on_host
    return by_optax(Program(one.plain_loss, params, batch), tx, [batch] * num_steps)


def training(place, kind):
    """Three steps, by one policy in a store that is opened again on the way."""
    one = make(kind)
    found = {}
    for policy, parts in (("recompute", (3,)), ("keep", (2, 1))):
        losses = []
        for num_steps in parts:
            with opened(place, policy) as store:
                step = streamed(one, store, policy=policy)
                with one.entered():
                    step.load(one.params, batch=one.batch)
                losses += trained(step, one, num_steps)
                if num_steps > 1:  # state that stays in memory is read at first
                    moved_as_planned(step)
                params = store.params(like=one.params)
                assert params["up"].sharding == one.params["up"].sharding
                leaves = store._manifest.leaves
                counts = {leaf.name: leaf.shard_counts for leaf in leaves}
                assert (counts["first"], counts["out"]) == ((1, 2), (2, 2)), counts
        found[policy] = losses, params
    losses, params = found["keep"]
    assert found["recompute"][0] == losses
    assert_same_bits(found["recompute"][1], params)
    expected, whole = on_one_device(one)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_near(params, whole, 2e-5)


OPTIONS = {
    "clipped": (CLIPPED, {}, {}),
    "ratios": (optax.lamb(1e-2), {}, {}),
    "weighed": (
        ADAM,
        {},
        {"micro_batches": 2, "weights": lambda part: jnp.sum(part["x"][:2] ** 2)},
    ),
    "parts": (CLIPPED, {}, {"micro_batches": 2}),
    "typed_parts": (ADAM, {}, {"micro_batches": 2}),
    "rewritten": (ADAM, {"durability": 4}, {}),
    "compressed": (ADAM, {}, {"compress": jaxinf.top_k(0.5)}),
    "bf16": (ADAM, {"state": "bf16"}, {}),
}


def options(place, name):
    tx, of_store, options = OPTIONS[name]
    one = make("explicit" if name.startswith("typed") else "named")
    with opened(place, name, **of_store) as store:
        step = streamed(one, store, tx, **options)
        with one.entered():
            step.load(one.params, batch=one.batch)
        losses = trained(step, one, 3)
        assert not step.plan.may_offload  # values stay on several devices
        if "durability" not in of_store:  # whose plan is of a mean step
            moved_as_planned(step)
        found = store.params(like=one.params)
    with opened(place, name + "_one", **of_store) as store:
        alone = {**options, "memory_bytes": MEMORY_BYTES}
        step = jaxinf.stream(one.plain_loss, tx, store, **alone)
        params, batch = one.on_host
        step.load(params, batch=batch)
        expected = [float(step(batch)[0]) for _ in range(3)]
        # Chunks decide which elements are sent, and how moments are rounded.
        by_chunk = name in ("compressed", "bf16")
        rtol = 2e-2 if by_chunk else 1e-4
        np.testing.assert_allclose(losses, expected, rtol=rtol, err_msg=name)
        if not by_chunk:
            assert_near(found, store.params(like=params), 2e-5)


def function(place):
    one = make("named")

    def outputs(params, batch):
        return {"loss": one.loss(params, batch), "first": batch["x"] @ params["first"]}

    with opened(place, "function") as store:
        step = streamed(one, store)
        step.load(one.params, batch=one.batch)
        trained(step, one, 1)
        step.close()
    with opened(place, "function") as store:
        params = store.params(like=one.params)
        expected = jax.jit(outputs)(params, one.batch)
        # Params of which nothing is said are replicated, and read once for all devices.
        for shardings in (True, False):
            alone = jaxinf.stream_function(outputs, store, memory_bytes=MEMORY_BYTES)
            if shardings:
                alone.load(one.params)
            found = alone(one.batch)
            np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-6)
            np.testing.assert_allclose(found["first"], expected["first"], atol=1e-5)
            assert alone.metrics.fetched_drive_bytes == sum(
                leaf.nbytes for leaf in jax.tree.leaves(params)
            )
            alone.close()


def other_devices(place):
    """A store that was made on one device, whose chunks do not divide at shards."""
    one = make("named")
    expected, _ = on_one_device(one, num_steps=4)
    alone, sharded = (one.on_host, one.plain_loss), ((one.params, one.batch), one.loss)

    def on(name, loss, params, batch, **options):
        options |= {"memory_bytes": MEMORY_BYTES}
        step = jaxinf.stream(loss, ADAM, opened(place, name), **options)
        step.load(params, batch=batch)
        return step

    for name, (first, loss), (then, other) in [
        ("grown", alone, sharded),
        ("shrunk", sharded, alone),
    ]:
        step = on(name, loss, *first)
        losses = [float(step(first[1])[0]) for _ in range(2)]
        step.close()
        step = on(name, other, then[0], None)
        before = step.store.step
        had = "one device" if name == "grown" else "4 devices (data=2, model=2)"
        text = f"with other shardings of these (on {had})"
        with pytest.raises(StreamError, match=f"{re.escape(text)}.*pass replan=True"):
            step(then[1])
        step.store.wait()
        assert step.store.step == before == 2
        step.close()
        step = on(name, other, *then, replan=True)
        losses += [float(step(then[1])[0]) for _ in range(2)]
        moved_as_planned(step)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        step.close()
        step = on(name, other, *then)  # the plan is kept
        step(then[1])
        step.close()


def refused(place):
    one = make("named")
    host_params, host_batch = one.on_host
    auto = (AxisType.Auto,)
    other = jax.make_mesh((4,), ("data",), axis_types=auto)

    def there(array, mesh=other):
        return jax.device_put(array, NamedSharding(mesh, P("data")))

    moved = {**one.batch, "x": there(host_batch["x"])}
    odd = {name: there(array[:2], one.mesh) for name, array in host_batch.items()}
    half = jax.make_mesh((2,), ("data",), axis_types=auto, devices=jax.devices()[2:])
    halved = jax.device_put(host_batch, NamedSharding(half, P()))
    store, own = opened(place, "refused"), one.params
    for options, params, batch, text in [
        ({"policy": "offload"}, own, one.batch, 'policy="offload": not supported yet'),
        ({}, own, moved, "(data=2, model=2) and x on 4 devices (data=4"),
        ({"micro_batches": 2}, own, odd, "over the mesh, found 1 rows of x"),
        ({"device_updates": "auto"}, own, one.batch, "expected one device, found 4"),
        ({}, host_params, halved, "mesh of its arguments, 2 devices (data=2)"),
    ]:
        step = streamed(one, store, **options)
        with pytest.raises(StreamError, match=re.escape(text)):
            step.load(params, batch=batch)
    with pytest.raises(StreamError, match="expected a NamedSharding for each leaf"):
        streamed(one, store).init(lambda: host_params, shardings=SPECS)
    in_memory = jaxinf.stream_in_memory(
        one.loss, optax.sgd(0.1), memory_bytes=MEMORY_BYTES
    )
    with pytest.raises(StreamError, match="without a store"):
        in_memory.load(one.params, batch=one.batch)
    assert not store.exists

    # A mesh that only the loss function sets: all arrays are replicated on it.
    step = streamed(one, store)
    step.load(host_params, batch=host_batch)
    losses = [float(step(host_batch)[0]) for _ in range(2)]
    bad = {**host_batch, "x": np.full_like(host_batch["x"], np.nan)}
    with pytest.raises(jaxinf.NonFiniteGradientError, match="store stays at step 2"):
        step(bad)
    losses.append(float(step(host_batch)[0]))
    np.testing.assert_allclose(losses, on_one_device(one)[0], rtol=1e-5)
    assert step.plan.traced.mesh == one.mesh
    step.close()


def zoo(place, name):
    auto = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=auto)

    def spec(leaf):
        if not leaf.ndim or any(n % 2 for n in leaf.shape[-2:]):
            return P()
        both = ("data", "model") if leaf.ndim > 2 else (None, "model")
        return P(*[None] * (leaf.ndim - 2), *both[-leaf.ndim :])

    def rows(leaf):
        return P("data") if leaf.ndim and leaf.shape[0] % 2 == 0 else P()

    def put(leaf, spec):
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    program = ZOO[name]()
    params = jax.tree.map(
        lambda leaf: put(leaf, spec(np.asarray(leaf))), program.params
    )
    batch = jax.tree.map(lambda leaf: put(leaf, rows(leaf)), program.batch)
    found = []
    for name, tree, of, policy in [
        ("one", program.params, program.batch, "keep"),
        ("keep", params, batch, "keep"),
        ("recompute", params, batch, "recompute"),
    ]:
        with opened(place, name) as store:
            options = {"policy": policy, "has_aux": program.has_aux}
            options |= {"memory_bytes": 4 * MEMORY_BYTES}
            step = jaxinf.stream(program.loss, optax.sgd(0.1), store, **options)
            step.load(tree, batch=of)
            losses = [float(step(of)[0]) for _ in range(3)]
            moved_as_planned(step)
            found.append((losses, store.params(like=program.params)))
    one, keep, recompute = found
    assert keep[0] == recompute[0]
    assert_same_bits(keep[1], recompute[1])
    np.testing.assert_allclose(keep[0], one[0], rtol=1e-4)


def initialised(place):
    one = make("named")

    def init(key):
        shapes = one.on_host[0]
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        return {n: 0.1 * jax.random.normal(keys[n], a.shape) for n, a in shapes.items()}

    def placed(key):
        params = init(key)
        out = jax.lax.with_sharding_constraint(params["out"], P("data"))
        return {**params, "out": out}

    first, losses = jax.jit(init)(jax.random.key(3)), []
    for kind, made in (("named", init), ("specs", placed), ("explicit", init)):
        one = make(kind)
        store = opened(place, kind)
        step = streamed(one, store)
        with one.entered():  # under jax.set_mesh a new key is replicated over the mesh
            key = jax.random.key(3)
            named = {n: NamedSharding(one.mesh, spec) for n, spec in SPECS.items()}
            step.init(made, key, batch=one.batch, shardings=named)
        assert_same_bits(store.params(like=one.params), first)
        counts = {leaf.name: leaf.shard_counts for leaf in store._manifest.leaves}
        assert counts["up"] == (3, 1, 2), counts
        losses += trained(step, one, 1)
        assert "on 4 devices (data=2, model=2)" in str(step.plan)
        step.close()
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


if __name__ == "__main__":
    serve(
        training,
        options,
        function,
        other_devices,
        refused,
        zoo,
        initialised,
    )
