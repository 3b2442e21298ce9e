"""Sharded params: the same bits as on one device, and resume on another mesh.

Each test runs a program with four CPU devices in a process of its own, because their
number is fixed when JAX starts.
"""

import json

import numpy as np
import pytest
from families import BEYOND
from hlo_order import called_lines, computations, numbers

import jaxinf

COMMON = """
import json, sys, jax, jax.numpy as jnp, numpy as np, optax, jaxinf
from jax.sharding import NamedSharding, PartitionSpec as P

SPECS = {"rows": P("d"), "columns": P(None, "d"), "both": P("d"), "scale": P()}

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
    put = lambda x, s: jax.device_put(x, NamedSharding(mesh, s))
    return {name: put(tree[name], specs[name]) for name in tree}

def adamw():
    return optax.adamw(1e-2)

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
"""

ONE_DEVICE = (
    COMMON
    + """
store = jaxinf.open_store(sys.argv[1] + "/one")
tx = jaxinf.smart_update(adamw(), store)
params = make(0)
params, state = steps(tx, params, tx.init(params), None, range(1, 7))
save(sys.argv[1] + "/one.npz", store.params(like=params, state=state))
"""
)

FOUR_DEVICES = (
    COMMON
    + """
mesh = jax.make_mesh((4,), ("d",))
store = jaxinf.open_store(sys.argv[1] + "/four")
tx = jaxinf.smart_update(adamw(), store)
params = on(mesh, make(0))
params, state = steps(tx, params, tx.init(params), mesh, range(1, 4))
for name, value in params.items():
    assert value.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[name]), value.ndim)
back = store.params(like=params, state=state)
assert all(bool((back[n] == params[n]).all()) for n in params)
assert back["columns"].sharding == params["columns"].sharding
traffic = store.metrics.traffic
num = store._manifest.num_params
print(json.dumps({"num": num, "down": traffic.link_down_bytes}))
"""
)

OTHER_MESH = (
    COMMON
    + """
mesh = jax.make_mesh((2, 2), ("x", "d"))
specs = {"rows": P(("x", "d")), "columns": P(None, "d"), "both": P(), "scale": P()}
store = jaxinf.open_store(sys.argv[1] + "/four")
params = store.params(like=on(mesh, make(0), specs))
tx = jaxinf.smart_update(adamw(), store)
state = tx.init(params)
params, state = steps(tx, params, state, mesh, range(4, 7), specs)
save(sys.argv[1] + "/four.npz", store.params(like=params, state=state))
"""
)

TRACED_INIT = (
    COMMON
    + """
mesh = jax.make_mesh((4,), ("d",))
store = jaxinf.open_store(sys.argv[1] + "/traced")
shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
tx = jaxinf.smart_update(adamw(), store, shardings=shardings)
params = on(mesh, make(0))
state = jax.jit(tx.init)(params)
params, state = steps(tx, params, state, mesh, range(1, 7))
assert {l.name: l.shard_counts for l in store._manifest.leaves}["columns"] == (1, 4)
save(sys.argv[1] + "/traced.npz", store.params(like=params, state=state))
"""
)

OUT_SHARDINGS = (
    COMMON
    + """
mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
store = jaxinf.open_store(sys.argv[1] + "/out")
tx = jaxinf.smart_update(adamw(), store)
shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}

def init():
    params = make(0)
    return params, tx.init(params)

with jax.set_mesh(mesh):
    out = shardings, NamedSharding(mesh, P())
    params, state = jax.jit(init, out_shardings=out)()
    params, state = steps(tx, params, state, mesh, range(1, 7))
for name, value in params.items():
    assert value.sharding.is_equivalent_to(shardings[name], value.ndim), name
save(sys.argv[1] + "/out.npz", store.params(like=params, state=state))
"""
)

SECOND_INIT = (
    COMMON
    + """
meshes = [(jax.make_mesh((4,), ("d",)), SPECS),
          (jax.make_mesh((2, 2), ("x", "d")),
           {"rows": P(("x", "d")), "columns": P(None, "d"), "both": P(), "scale": P()})]
store = jaxinf.open_store(sys.argv[1] + "/twice")
tx = jaxinf.smart_update(adamw(), store)
params = make(0)
for (mesh, specs), eager, seeds in zip(meshes, (1, 3), (range(2, 3), range(4, 7))):
    params = on(mesh, params, specs)
    state = tx.init(params)
    updates, state = tx.update(on(mesh, make(eager), specs), state, params)
    params = optax.apply_updates(params, updates)
    params, state = steps(tx, params, state, mesh, seeds, specs)
    assert {s.mesh for s in store._training.shardings} == {mesh}
    params = store.params(like=params, state=state)
    assert params["rows"].sharding.is_equivalent_to(
        NamedSharding(mesh, specs["rows"]), 2
    )
    params = {name: np.asarray(value) for name, value in params.items()}
save(sys.argv[1] + "/twice.npz", params)
"""
)

REFUSED_MESH = (
    COMMON
    + """
mesh = jax.make_mesh((4,), ("d",))
store = jaxinf.open_store(sys.argv[1] + "/one")
tx = jaxinf.smart_update(adamw(), store)
try:
    tx.init(on(mesh, make(0)))
except jaxinf.StoreMismatchError as error:
    print(error)
"""
)

FAILURE = (
    COMMON
    + """
mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
path, how, repeats = sys.argv[1] + "/failing", sys.argv[2], int(sys.argv[3])
options = {"shardings": shardings} if how == "shardings" else {}
tx = jaxinf.smart_update(adamw(), path, **options)
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
for number in range(repeats):  # each runs as the steps do that are dispatched already
    new, others = unseen(params, leaves, 1.0)
    assert all(bool(jnp.isnan(p).all()) for p in new.values())
    assert not any(bool(jnp.isnan(x)) for x in others[1:])
store = jaxinf.store_of(path)
for call in (lambda: step(params, state, 1.0), lambda: tx.init(params), store.check,
             lambda: tx.update(params, state, params), store.wait):
    try:
        call()
    except jaxinf.NonFiniteGradientError as error:
        print(error)
"""
)

RESTART = (
    COMMON
    + """
mesh = jax.make_mesh((4,), ("d",))
path = sys.argv[1] + "/store"

def opened():
    store = jaxinf.open_store(path)
    return store, jaxinf.smart_update(adamw(), store)

store, tx = opened()
params = on(mesh, make(0))
start = tx.init(params)
two = steps(tx, params, start, mesh, range(1, 3))
own = jax.tree.map(np.asarray, two)
whole = steps(tx, *two, mesh, range(3, 4))
store.wait(whole[1])
whole = jax.tree.map(np.asarray, whole[0])
store.close()

store, tx = opened()
assert int(tx.init(store.params(like=on(mesh, make(7)))).origin) == 0
state = tx.init(on(mesh, make(7)))  # no params of the store's
assert int(state.origin) == int(jax.jit(tx.init)(on(mesh, make(7))).origin) == 1
assert all(leaf.sharding.device_set == set(mesh.devices.flat)
           for leaf in jax.tree.leaves(state))
state = jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), own[1], state)
for seed in (5, 6):  # discarded; the second comes while the first is under way
    steps(tx, on(mesh, own[0]), state, mesh, (seed,))
rest, state = steps(tx, on(mesh, own[0]), state, mesh, range(3, 4))
store.wait(state)
assert store.step == 3 and int(state.origin) == 3
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
"""
)

DEVICES = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    "PJRT_NPROC": "8",
}


@pytest.mark.long
def test_same_bits_on_four_devices_and_after_changes_of_mesh(place, run_python):
    run_python(ONE_DEVICE, place)
    result = run_python(FOUR_DEVICES, place, **DEVICES)
    figures = json.loads(result.stdout.splitlines()[-1])
    # Replicated leaves cross the link once, not once for each device.
    assert figures["down"] == 8 * figures["num"]  # gradients and params
    run_python(OTHER_MESH, place, **DEVICES)
    run_python(TRACED_INIT, place, JAXINF_CALLBACK="start", **DEVICES)
    run_python(SECOND_INIT, place, **DEVICES)
    result = run_python(OUT_SHARDINGS, place, **DEVICES)
    assert result.stderr.count("init did not know how the params are sharded") == 1
    expected = np.load(place / "one.npz")
    for name in ("four", "traced", "twice", "out"):
        found = np.load(place / f"{name}.npz")
        for leaf in expected.files:
            np.testing.assert_array_equal(found[leaf], expected[leaf], err_msg=leaf)
    refused = run_python(REFUSED_MESH, place, **DEVICES)
    assert "run on a mesh whose shards are" in refused.stdout


LONG = pytest.mark.long
HOWS = [
    ("shardings", "buffer", 20),
    *[
        pytest.param(how, callback, 1000, marks=LONG if i == j else BEYOND)
        for i, how in enumerate(("shardings", "jitted", "eager"))
        for j, callback in enumerate(("buffer", "io", "start"))
    ],
]


@pytest.mark.long
@pytest.mark.parametrize(("how", "callback", "repeats"), HOWS)
def test_failure_beside_collectives(place, run_python, how, callback, repeats):
    result = run_python(
        FAILURE, place, how, repeats, JAXINF_CALLBACK=callback, **DEVICES
    )
    said = result.stdout.splitlines()
    assert len(said) == 5
    assert all("step 2: NaN or Inf in the gradient of both" in line for line in said)
    logged = [line for line in result.stderr.splitlines() if "update is NaN" in line]
    assert len(logged) == 1
    assert "failing: NonFiniteGradientError: step 2: NaN or Inf in" in logged[0]
    is_unknown = how == "jitted"
    assert result.stderr.count("shardings=jax.tree.map(lambda") == is_unknown
    with jaxinf.open_store(place / "failing") as store:
        assert store.step == 1


def test_no_device_waits_in_a_collective_while_params_are_compared(
    place, run_python, request
):
    program = request.config.rootpath / "tests/programs/bound_on_a_mesh.py"
    found = computations(run_python(program, place / "store", **DEVICES).stdout)
    lines, collective = found["ENTRY"], r" (all-|collective-|reduce-)[\w\-]*\("
    branches = {
        n: called_lines(lines[n], found) for n in numbers(lines, " conditional")
    }
    # Those of the compared leaves, and the one that binds.
    compared = min(
        n
        for n, own in branches.items()
        if len(numbers(own, r"call_target=\S*callback")) > 1
    )
    assert not numbers(branches[compared], collective)
    assert compared < numbers(lines, collective)[0]


@pytest.mark.long
def test_a_failure_that_nothing_asked_about_is_the_exit_status(place, run_python):
    result = run_python(FAILURE, place, "last", 0, check=False, **DEVICES)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "stopped by NonFiniteGradientError: step 2: NaN or Inf" in last


@pytest.mark.parametrize(
    "callback", ["buffer", pytest.param("start", marks=pytest.mark.long)]
)
def test_restart_on_four_devices(place, run_python, callback):
    result = run_python(RESTART, place, JAXINF_CALLBACK=callback, **DEVICES)
    assert "the params are not those that the store holds" in result.stdout
    assert result.stderr.count("result of the last update was discarded") == 1
