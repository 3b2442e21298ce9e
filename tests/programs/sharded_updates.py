"""Updates of sharded params on four devices: `optimizer/test_transform_sharded.py`.

    python sharded_updates.py FOLDER HOW REPEATS

An update fails beside collectives. Without arguments it serves the other functions.
"""

import shutil
import sys
import time

import callback_form
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import serve
from inject import at_each_call
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from small_stores import same

import jaxinf
from jaxinf.engine import exports
from jaxinf.optimizer.host_side import HostFunctions

SPECS = {"rows": P("d"), "columns": P(None, "d"), "both": P("d"), "scale": P()}
TWO_AXES = {"rows": P(("x", "d")), "columns": P(None, "d"), "both": P(), "scale": P()}


def make(seed):
    keys = jax.random.split(jax.random.key(seed), 4)
    return {
        "rows": jax.random.normal(keys[0], (1024, 160)),
        "columns": jax.random.normal(keys[1], (96, 4 * 512)),
        "both": jax.random.normal(keys[2], (4 * 24,)),
        "scale": jax.random.normal(keys[3], ()),
    }


def on(mesh, tree, specs=SPECS):
    return tree if mesh is None else jax.device_put(tree, shardings_of(mesh, specs))


def shardings_of(mesh, specs=SPECS):
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def four_devices():
    return jax.make_mesh((4,), ("d",))


def two_by_two():
    return jax.make_mesh((2, 2), ("x", "d"))


def smart(store, **options):
    return jaxinf.smart_update(optax.adamw(1e-2), store, **options)


def steps(tx, params, state, mesh, seeds, specs=SPECS):
    @jax.jit
    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for seed in seeds:
        params, state = step(params, state, on(mesh, make(seed), specs))
    return params, state


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def resharded(place):
    """Has the bits of one device on four, on two by two, and after a traced init."""
    mesh = four_devices()
    with jaxinf.open_store(place + "/one") as store:
        tx, params = smart(store), make(0)
        params, state = steps(tx, params, tx.init(params), None, range(1, 7))
        expected = on_host(store.params(like=params, state=state))
    with jaxinf.open_store(place + "/four") as store:
        tx, params = smart(store), on(mesh, make(0))
        params, state = steps(tx, params, tx.init(params), mesh, range(1, 4))
        for name, wanted in shardings_of(mesh).items():
            assert params[name].sharding.is_equivalent_to(wanted, params[name].ndim)
        back = store.params(like=params, state=state)
        same(on_host(back), on_host(params))
        assert back["columns"].sharding == params["columns"].sharding
        # Gradients and params; replicated leaves cross the link once.
        num = sum(value.size for value in params.values())
        assert store.metrics.traffic.link_down_bytes == 8 * num
    mesh = two_by_two()
    with jaxinf.open_store(place + "/four") as store:
        params, tx = store.params(like=on(mesh, make(0), TWO_AXES)), smart(store)
        state = tx.init(params)
        params, state = steps(tx, params, state, mesh, range(4, 7), TWO_AXES)
        same(on_host(store.params(like=params, state=state)), expected)
    mesh = four_devices()
    with (
        pytest.MonkeyPatch.context() as patch,
        jaxinf.open_store(place + "/t") as store,
    ):
        callback_form.use("start", patch)
        tx = smart(store, shardings=shardings_of(mesh))
        params = on(mesh, make(0))
        params, state = steps(tx, params, jax.jit(tx.init)(params), mesh, range(1, 7))
        counts = {leaf.name: leaf.shard_counts for leaf in store._manifest.leaves}
        assert counts["columns"] == (1, 4)
        same(on_host(store.params(like=params, state=state)), expected)
    with (
        jaxinf.open_store(place + "/one") as store,
        pytest.raises(jaxinf.StoreMismatchError, match="run on a mesh whose shards ar"),
    ):
        smart(store).init(on(mesh, make(0)))


def compressed(place):
    """Has the same bits and traffic whatever the mesh.

    Four devices make the store, whose shards then are its chunks.
    """

    def run(name, mesh, seeds, init):
        with jaxinf.open_store(f"{place}/{name}", csd="emulated") as store:
            compression = jaxinf.top_k(0.05, error_feedback=True, warmup_steps=1)
            shardings = None if mesh is None else shardings_of(mesh)
            tx = smart(store, compress=compression, shardings=shardings)
            params = on(mesh, make(0))
            params = store.params(like=params) if store.exists else params
            params, state = steps(tx, params, init(tx)(params), mesh, seeds)
            final, left = store.params(like=params, state=state), state.error_feedback
            if mesh is not None:
                own = left["columns"].sharding
                assert own.is_equivalent_to(params["columns"].sharding, 2)
            traffic = store.metrics.traffic.link_down_bytes
            return on_host((final, left)), traffic

    mesh = four_devices()
    _, first = run("four", mesh, range(1, 3), lambda tx: tx.init)
    shutil.copytree(f"{place}/four", f"{place}/alone", symlinks=True)
    four, second = run("four", mesh, range(3, 6), lambda tx: jax.jit(tx.init))
    one, third = run("alone", None, range(3, 6), lambda tx: tx.init)
    assert first == second == third
    same(four, one)
    assert 0.9 < np.mean(four[1]["columns"] != 0) < 1


def failure(place, how, repeats):
    """An update fails beside collectives; prints what calls after it raise."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    path = place + "/failing"
    tx = smart(path, **({"shardings": shardings} if how == "shardings" else {}))
    params = on(mesh, make(0))
    state = tx.init(params) if how == "eager" else jax.jit(tx.init)(params)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
    side = jax.device_put(jnp.ones((4, 512)), NamedSharding(mesh, P("d")))

    @jax.jit
    def step(params, state, factor):
        def loss(p):
            h = jnp.tanh(side[:, :96] @ p["columns"])
            return jnp.mean(h) + factor * jnp.sum(p["both"]) + jnp.mean(p["rows"] ** 2)

        gradients = jax.grad(loss)(params)  # with collectives
        updates, state = tx.update(gradients, state, params)
        beside = side
        for _ in range(6):
            beside = jnp.tanh(beside @ beside.T @ side - jnp.mean(beside))
        params = optax.apply_updates(params, updates)
        return params, state, (loss(params), jnp.sum(beside), jnp.sum(jnp.sin(side)))

    params, state, _ = step(params, state, 1.0)
    leaves, treedef = jax.tree.flatten(state)

    @jax.jit
    def unseen(params, leaves, factor):  # a call that is not given a state
        return step(params, treedef.unflatten(leaves), factor)[::2]

    if repeats:
        unseen.trace(params, leaves, 1.0)
    first, _, _ = step(params, state, jnp.nan)
    assert all(bool(jnp.isnan(p).all()) for p in first.values())
    if how == "last":
        sys.exit()  # and nothing asks the store
    for _ in range(repeats):  # each runs as the steps do that are dispatched already
        new, others = unseen(params, leaves, 1.0)
        assert all(bool(jnp.isnan(p).all()) for p in new.values())
        assert not any(bool(jnp.isnan(x)) for x in others[1:])
    store = jaxinf.store_of(path)
    for call in (
        lambda: step(params, state, 1.0),
        lambda: tx.init(params),
        store.check,
        lambda: tx.update(params, state, params),
        store.wait,
    ):
        try:
            call()
        except jaxinf.NonFiniteGradientError as error:
            print(error)


def bound(place):
    """Compiles a step on a mesh; returns it as XLA has scheduled it."""
    mesh = two_by_two()
    params = {
        "rows": jax.device_put(jnp.ones((64, 256)), NamedSharding(mesh, P("x"))),
        "whole": jax.device_put(jnp.zeros(256), NamedSharding(mesh, P())),
    }
    with jaxinf.open_store(place + "/bound") as store:
        tx = smart(store)
        state = tx.init(params)
        lowered = jax.jit(tx.update).lower(params, state, params)
        return lowered.compile().as_text()


def exporting(place):
    """Tells in which order the exports end and the updates of replicas begin."""
    mesh, order, whole = four_devices(), [], dict.fromkeys(SPECS, P())

    def slow_export(*_, **__):
        time.sleep(2)
        order.append("export")

    options = {"export_every": 1, "export_to": f"file://{place}/out"}
    with (
        pytest.MonkeyPatch.context() as patch,
        jaxinf.open_store(place + "/exporting", **options) as store,
    ):
        patch.setattr(exports, "export_url", slow_export)
        at_each_call(patch, HostFunctions, "update", lambda *_: order.append("update"))
        tx, params = smart(store), on(mesh, make(0), whole)
        state = tx.init(params)
        params, state = steps(tx, params, state, mesh, range(1, 3), whole)
        jax.block_until_ready(params)
    return order


def mapped(place):
    """Tells why four devices are refused in `pmap` and `shard_map`; one has a step."""
    said, params = [], {"w": jnp.ones((300, 20))}
    with jaxinf.open_store(place + "/mapped") as store:
        tx = smart(store)
        tree = params, tx.init(params), params
        four = jax.tree.map(lambda x: jnp.stack([x] * 4), tree)
        specs = {"in_specs": P(), "out_specs": P(), "check_vma": False}
        whole = jax.shard_map(tx.update, mesh=four_devices(), **specs)
        for call in (
            lambda: jax.pmap(tx.update, axis_name="i")(*four),
            lambda: jax.pmap(tx.init)(four[0]),
            lambda: jax.jit(whole)(*tree),
        ):
            with pytest.raises(ValueError, match="is called in") as error:
                call()
            said.append(str(error.value))
        assert store.step == 0
        one = jax.tree.map(lambda x: x[None], tree)
        assert jax.pmap(tx.update)(*one)[1].step.tolist() == [1]
    return said


if __name__ == "__main__":
    callback_form.use_given()
    if sys.argv[1:]:
        failure(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        serve(resharded, compressed, bound, exporting, mapped)
