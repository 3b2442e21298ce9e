"""Updates of sharded params: `optimizer/test_transform_sharded.py`.

python sharded_updates.py FOLDER RUN …
python sharded_updates.py FOLDER failure HOW REPEATS
python sharded_updates.py FOLDER compressed STORE FIRST LAST JIT_INIT
"""

import json
import sys
import time

import callback_form
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

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
    if mesh is None:
        return tree
    shardings = {name: NamedSharding(mesh, specs[name]) for name in tree}
    return jax.device_put(tree, shardings)


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


def save(path, tree):
    np.savez(path, **{name: np.asarray(value) for name, value in tree.items()})


def one(place):
    with jaxinf.open_store(place + "/one") as store:
        tx = smart(store)
        params = make(0)
        params, state = steps(tx, params, tx.init(params), None, range(1, 7))
        save(place + "/one.npz", store.params(like=params, state=state))


def four(place):
    """Prints the number of params, and the bytes that have come down."""
    mesh = four_devices()
    with jaxinf.open_store(place + "/four") as store:
        tx = smart(store)
        params = on(mesh, make(0))
        params, state = steps(tx, params, tx.init(params), mesh, range(1, 4))
        for name, value in params.items():
            wanted = NamedSharding(mesh, SPECS[name])
            assert value.sharding.is_equivalent_to(wanted, value.ndim)
        back = store.params(like=params, state=state)
        assert all(bool((back[n] == params[n]).all()) for n in params)
        assert back["columns"].sharding == params["columns"].sharding
        num_bytes = store.metrics.traffic.link_down_bytes
        num = sum(value.size for value in params.values())
        print(json.dumps({"num": num, "down": num_bytes}))


def other_mesh(place):
    """Goes on with the store of `four`."""
    mesh = two_by_two()
    with jaxinf.open_store(place + "/four") as store:
        params = store.params(like=on(mesh, make(0), TWO_AXES))
        tx = smart(store)
        state = tx.init(params)
        params, state = steps(tx, params, state, mesh, range(4, 7), TWO_AXES)
        save(place + "/four.npz", store.params(like=params, state=state))


def traced_init(place):
    patch = pytest.MonkeyPatch()
    callback_form.use("start", patch)
    mesh = four_devices()
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    with jaxinf.open_store(place + "/traced") as store:
        tx = smart(store, shardings=shardings)
        params = on(mesh, make(0))
        state = jax.jit(tx.init)(params)
        params, state = steps(tx, params, state, mesh, range(1, 7))
        counts = {leaf.name: leaf.shard_counts for leaf in store._manifest.leaves}
        assert counts["columns"] == (1, 4)
        save(place + "/traced.npz", store.params(like=params, state=state))
    patch.undo()


def out_shardings(place):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    with jaxinf.open_store(place + "/out") as store:
        tx = smart(store)

        def init():
            params = make(0)
            return params, tx.init(params)

        with jax.set_mesh(mesh):
            out = shardings, NamedSharding(mesh, P())
            params, state = jax.jit(init, out_shardings=out)()
            with pytest.raises(jaxinf.StoreMismatchError) as raised:
                steps(tx, params, state, mesh, range(1, 2))
    print(raised.value)


def refused_mesh(place):
    """The store of `one` is not made for such shards."""
    with jaxinf.open_store(place + "/one") as store:
        try:
            smart(store).init(on(four_devices(), make(0)))
        except jaxinf.StoreMismatchError as error:
            print(error)


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


def compressed(place, name, first, last, jit_init):
    """Makes or goes on with a store, by steps from `first` to before `last`.

    Prints the bytes that have come down; leaves params and what was left out in a file.
    """
    mesh = four_devices() if jax.device_count() > 1 else None
    with jaxinf.open_store(f"{place}/{name}", csd="emulated") as store:
        compression = jaxinf.top_k(0.05, error_feedback=True, warmup_steps=1)
        options = {"compress": compression}
        if mesh is not None:
            options["shardings"] = {n: NamedSharding(mesh, s) for n, s in SPECS.items()}
        tx, params = smart(store, **options), on(mesh, make(0))
        params = store.params(like=params) if store.exists else params
        state = (jax.jit(tx.init) if jit_init else tx.init)(params)
        params, state = steps(tx, params, state, mesh, range(first, last))
        final = store.params(like=params, state=state)
        left = state.error_feedback
        if mesh is not None:
            own = left["columns"].sharding
            assert own.is_equivalent_to(params["columns"].sharding, 2)
        save(f"{place}/{name}.npz", final | {f"left/{n}": x for n, x in left.items()})
        print(store.metrics.traffic.link_down_bytes)


def bound(place):
    """Compiles a step on a mesh and prints it, as XLA has scheduled it."""
    mesh = two_by_two()
    params = {
        "rows": jax.device_put(jnp.ones((64, 256)), NamedSharding(mesh, P("x"))),
        "whole": jax.device_put(jnp.zeros(256), NamedSharding(mesh, P())),
    }
    with jaxinf.open_store(place + "/store") as store:
        tx = smart(store)
        state = tx.init(params)
        print(jax.jit(tx.update).lower(params, state, params).compile().as_text())


def restart(place):
    """Goes on from params of the program's own, and prints why others are refused."""
    mesh = four_devices()

    def opened(restore=None):
        store = jaxinf.open_store(place + "/store", restore=restore)
        return store, smart(store)

    store, tx = opened()
    params = on(mesh, make(0))
    two = steps(tx, params, tx.init(params), mesh, range(1, 3))
    store.checkpoint(state=two[1])
    own = jax.tree.map(np.asarray, two)
    whole = steps(tx, *two, mesh, range(3, 4))
    store.wait(whole[1])
    whole = jax.tree.map(np.asarray, whole[0])
    store.close()

    store, tx = opened("2")
    state = tx.init(on(mesh, make(7)))
    devices = set(mesh.devices.flat)
    assert all(leaf.sharding.device_set == devices for leaf in jax.tree.leaves(state))
    state = jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), own[1], state)
    rest, state = steps(tx, on(mesh, own[0]), state, mesh, range(3, 4))
    store.wait(state)
    assert store.step == 3
    jax.tree.map(np.testing.assert_array_equal, whole, jax.tree.map(np.asarray, rest))
    store.close()

    store, tx = opened()
    state = tx.init(on(mesh, make(7)))
    updates, state = jax.jit(tx.update)(on(mesh, make(1)), state, on(mesh, make(7)))
    assert all(bool(jnp.isnan(u).all()) for u in jax.tree.leaves(updates))
    try:
        store.check()
    except jaxinf.StoreMismatchError as error:
        print(error)


def exporting(place):
    """Prints in which order the exports end and the updates of replicas begin."""
    mesh, order, whole = four_devices(), [], dict.fromkeys(SPECS, P())
    update = HostFunctions.update

    def slow_export(*_, **__):
        time.sleep(2)
        order.append("export")

    def noted(*arguments):
        order.append("update")
        update(*arguments)

    exports.export_url, HostFunctions.update = slow_export, noted
    options = {"export_every": 1, "export_to": f"file://{place}/out"}
    with jaxinf.open_store(place + "/exporting", **options) as store:
        tx, params = smart(store), on(mesh, make(0), whole)
        state = tx.init(params)
        params, state = steps(tx, params, state, mesh, range(1, 3), whole)
        jax.block_until_ready(params)
    print(*order)


if __name__ == "__main__":
    callback_form.use_given()
    if sys.argv[2] == "failure":
        failure(sys.argv[1], sys.argv[3], int(sys.argv[4]))
    elif sys.argv[2] == "compressed":
        compressed(*sys.argv[1:4:2], *map(int, sys.argv[4:]))
    else:
        for name in sys.argv[2:]:
            globals()[name](sys.argv[1])
