"""Streaming on four devices: as on one, shard by shard.

Each test runs a program with four CPU devices in a process of its own, because their
number is fixed when JAX starts.
"""

import pytest

FOUR = "--xla_force_host_platform_device_count=4"

COMMON = """
import importlib, sys
import jax, jax.numpy as jnp, numpy as np, optax, jaxinf
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxinf.errors import StreamError
from jaxinf.streaming import Runner, prepare
from sharded import SPECS, make, trained
from streaming import assert_near, assert_same_bits

importlib.import_module("jaxinf.streaming.program.units")._MIN_SLICE_BYTES = 4096
ROOT = sys.argv[1]
MEMORY_BYTES = 64 << 20

def opened(name, **options):
    options = {"chunk_elements": 4096, "memory_bytes": 16 << 20, **options}
    return jaxinf.open_store(f"{ROOT}/{name}", **options)

def streamed(one, store, tx=optax.adam(1e-2), **options):
    return jaxinf.stream(one.loss, tx, store, memory_bytes=MEMORY_BYTES, **options)

def on_one_device(one, tx=optax.adam(1e-2), num_steps=3):
    vg = jax.jit(jax.value_and_grad(one.plain_loss))
    update, add = jax.jit(tx.update), jax.jit(optax.apply_updates)
    params, batch = one.on_host
    state, losses = jax.jit(tx.init)(params), []
    for _ in range(num_steps):
        loss, gradients = vg(params, batch)
        updates, state = update(gradients, state, params)
        params = add(params, updates)
        losses.append(float(loss))
    return losses, params

def assert_moves_as_planned(step):
    step.store.wait()
    found, planned = step.store.metrics.traffic, step.traffic
    assert found.drive_read_bytes == planned.drive_read_bytes, (found, planned)
    assert found.drive_write_bytes == planned.drive_write_bytes, (found, planned)

def refusal(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except StreamError as error:
        return str(error)
    raise AssertionError("not refused")
"""

PROGRAMS = """
kind = sys.argv[2]
one = make(kind)
with one.entered():
    expected = jax.jit(jax.value_and_grad(one.loss))(one.params, one.batch)
    ready = prepare(one.loss, one.params, one.batch)
held = jax.tree.leaves(one.params)
largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected[1]))
found = {}
for policy in ("recompute", "keep"):
    plan = ready.plan(600_000, policy)
    gradients = found[policy] = {}

    def part(_, piece):
        array = held[piece.leaf]
        sharding = array.sharding
        spec = P(*sharding.spec[len(piece.index):])
        return jax.device_put(piece.of(array), sharding.update(spec=spec))

    loss, _ = Runner(plan, {})(one.batch, part, gradients.__setitem__)
    assert abs(float(loss) - float(expected[0])) < 1e-6, kind
assert set(found["keep"]) == set(found["recompute"]) == set(ready.gradient_pieces)
assert len(found["keep"]) == 3 * 3 + 2, "stacks come out in slices"
for piece, gradient in found["keep"].items():
    name, leaf = sorted(SPECS)[piece.leaf], jax.tree.leaves(expected[1])[piece.leaf]
    assert_same_bits(gradient, found["recompute"][piece])
    error = np.abs(np.asarray(gradient) - np.asarray(leaf)[piece.index]).max()
    assert error <= 1e-6 * largest, (kind, piece)
    spec = P(*tuple(SPECS[name])[len(piece.index):])
    there = NamedSharding(one.mesh, spec)
    assert gradient.sharding.is_equivalent_to(there, gradient.ndim), (kind, piece)
"""

TRAINING = """
kind = sys.argv[2]
one = make(kind)
losses = {}
for policy in ("recompute", "keep"):
    with opened(policy) as store:
        step = streamed(one, store, policy=policy)
        with one.entered():
            step.load(one.params, batch=one.batch)
        losses[policy] = trained(step, one, 2)
        assert_moves_as_planned(step)
    with opened(policy) as store:
        step = streamed(one, store, policy=policy)
        step.load(one.params)
        losses[policy] += trained(step, one, 1)
        back = store.params(like=one.params)
        assert back["up"].sharding == one.params["up"].sharding
        if policy == "recompute":
            recomputed = back
with opened("whole") as store:
    step = streamed(one, store)
    with one.entered():
        step.load(one.params, batch=one.batch)
    assert trained(step, one, 3) == losses["keep"] == losses["recompute"]
    assert_same_bits(store.params(like=one.params), back)
    counts = {leaf.name: leaf.shard_counts for leaf in store.manifest.leaves}
    assert counts["first"] == (1, 2) and counts["out"] == (2, 2), counts
assert_same_bits(recomputed, back)
expected, params = on_one_device(one)
np.testing.assert_allclose(losses["keep"], expected, rtol=1e-5)
assert_near(back, params, 2e-5)
"""


OPTIONS = """
clipped = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2))
CASES = {
    "keep": (optax.adam(1e-2), {}, {"resident": "params"}),
    "keep_some": (clipped, {}, {"resident": 40_000}),
    "clipped": (clipped, {}, {}),
    "ratios": (optax.lamb(1e-2), {}, {}),
    "kept_ratios": (optax.lamb(1e-2), {}, {"resident": "params"}),
    "parts": (clipped, {}, {"micro_batches": 2}),
    "typed_parts": (clipped, {}, {"micro_batches": 2}),
    "rewritten": (optax.adam(1e-2), {"durability": 4}, {"resident": "params"}),
    "compressed": (optax.adam(1e-2), {}, {"compress": jaxinf.top_k(0.5)}),
    "bf16": (optax.adam(1e-2), {"state": "bf16"}, {}),
}
for name in sys.argv[2:]:
    tx, of_store, options = CASES[name]
    one = make("explicit" if name == "typed_parts" else "named")
    with opened(name, **of_store) as store:
        step = streamed(one, store, tx, **options)
        with one.entered():
            step.load(one.params, batch=one.batch)
        losses = trained(step, one, 3)
        assert_moves_as_planned(step)
        found = store.params(like=one.params)
        if "keep" in options:
            assert step.plan.kept_bytes
        if options.get("keep") == "params":
            assert step.metrics.fetched_drive_bytes == 0
    with opened(name + "_one", **of_store) as store:
        step = jaxinf.stream(one.plain_loss, tx, store, memory_bytes=MEMORY_BYTES,
                             **{**options, "resident": None})
        step.load(one.on_host[0], batch=one.on_host[1])
        expected = [float(step(one.on_host[1])[0]) for _ in range(3)]
        # Chunks decide which elements are sent, and how moments are rounded.
        by_chunk = name in ("compressed", "bf16")
        rtol = 2e-2 if by_chunk else 1e-4
        np.testing.assert_allclose(losses, expected, rtol=rtol, err_msg=name)
        if not by_chunk:
            assert_near(found, store.params(like=one.on_host[0]), 2e-5)
"""

OWN_MEMORY = """
one = make("named")
losses = []
for name, tx, options in [
    ("host", optax.adam(1e-2), {}),
    ("device", optax.adam(1e-2), {"device_memory_bytes": 32 << 20}),
    ("kept", optax.adam(1e-2), {"device_memory_bytes": 32 << 20, "resident": "params"}),
]:
    if name != "host":
        memory = importlib.import_module("jaxinf.streaming.plan.memory")
        memory.device_is_host = lambda device: False
    with opened(name) as store:
        step = streamed(one, store, tx, **options)
        step.load(one.params, batch=one.batch)
        losses.append((trained(step, one, 3), store.params(like=one.params)))
        assert_moves_as_planned(step)
        assert losses[-1][0] == losses[0][0]
        assert_same_bits(losses[-1][1], losses[0][1])
"""

REPLICAS = """
from jaxinf.streaming.program.units import Unit
from jaxinf.streaming.move.windows import HostWindow

mesh = make("named").mesh
spec, shape = P(None, "model"), (16, 50)
unit = Unit(0, (), shape, np.dtype(np.float32), NamedSharding(mesh, spec))
expected = np.arange(16 * 50, dtype=np.float32).reshape(shape)

def read(shards):
    for box, shard in zip(unit.shards, shards, strict=True):
        shard[...] = expected[box.slices]

window = HostWindow(4 * 4096)
brought = window.bring(unit, read, lambda: False, is_for_update=False)
np.testing.assert_array_equal(brought.on_device, expected)
assert len(brought.shards) == 2
there = {
    (shard.index[1].start or 0, shard.data.unsafe_buffer_pointer())
    for shard in brought.on_device.addressable_shards
}
first, second = brought.shards
assert there == {(0, first.ctypes.data), (25, second.ctypes.data)}, there
"""

FUNCTION = """
one = make("named")

def outputs(params, batch):
    return {"loss": one.loss(params, batch), "first": batch["x"] @ params["first"]}

with opened("function") as store:
    step = streamed(one, store, resident="params")
    step.load(one.params, batch=one.batch)
    trained(step, one, 1)
    shared = step.function(outputs)
    found = shared(one.batch)
    assert shared.fetched_bytes == 0
    params = store.params(like=one.params)
    expected = jax.jit(outputs)(params, one.batch)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-6)
    np.testing.assert_allclose(found["first"], expected["first"], atol=1e-5)
    step.close()
with opened("function") as store:
    alone = jaxinf.stream_function(outputs, store, memory_bytes=MEMORY_BYTES)
    alone.load(one.params)
    assert_same_bits(alone(one.batch), found)
    assert alone.fetched_bytes == sum(p.nbytes for p in jax.tree.leaves(params))
    # Params of which nothing is said are replicated, and read once for all devices.
    whole = jaxinf.stream_function(outputs, store, memory_bytes=MEMORY_BYTES)
    np.testing.assert_allclose(whole(one.batch)["loss"], found["loss"], rtol=1e-6)
    assert whole.fetched_bytes == alone.fetched_bytes
"""

DEVICES = """
one = make("named")
expected, _ = on_one_device(one, num_steps=4)
plain = one.plain_loss

def on(name, loss, params, batch, **options):
    store = opened(name)
    step = jaxinf.stream(loss, optax.adam(1e-2), store, memory_bytes=MEMORY_BYTES,
                         **options)
    step.load(params, batch=batch)
    return store, step

# A store that was made on one device, whose chunks do not divide at shards.
for name, (first, loss), (then, other) in [
    ("grown", (one.on_host, plain), ((one.params, one.batch), one.loss)),
    ("shrunk", ((one.params, one.batch), one.loss), (one.on_host, plain)),
]:
    store, step = on(name, loss, *first)
    losses = [float(step(first[1])[0]) for _ in range(2)]
    step.close()
    store, step = on(name, other, then[0], None)
    before = store.step
    text = refusal(step, then[1])
    mesh = "4 devices (data=2, model=2)"
    had, has = ("one device", mesh) if name == "grown" else (mesh, "one device")
    assert f"the store was trained on {had}, found arrays on {has}" in text, text
    assert "pass replan=True" in text
    store.wait()
    assert store.step == before == 2
    step.close()
    store, step = on(name, other, *then, replan=True)
    losses += [float(step(then[1])[0]) for _ in range(2)]
    assert_moves_as_planned(step)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    step.close()
    store, step = on(name, other, *then)  # the plan is kept
    step(then[1])
    step.close()
"""

REFUSED = """
one = make("named")
host_params, host_batch = one.on_host
auto = (jax.sharding.AxisType.Auto,)
other = jax.make_mesh((4,), ("data",), axis_types=auto)

def there(array, mesh=other):
    return jax.device_put(array, NamedSharding(mesh, P("data")))

moved = {**one.batch, "x": there(host_batch["x"])}
odd = {name: array[:2] for name, array in host_batch.items()}
odd = {name: there(array, one.mesh) for name, array in odd.items()}
half = jax.make_mesh((2,), ("data",), axis_types=auto, devices=jax.devices()[2:])
halved = jax.device_put(host_batch, NamedSharding(half, P()))
CASES = [
    ({"policy": "offload"}, one.batch, 'policy="offload": not supported yet on'),
    ({}, moved, "found down on 4 devices (data=2, model=2) and x on 4 devices (data=4"),
    ({"micro_batches": 2}, odd, "parts that divide over the mesh, found 1 rows of x"),
]
store = opened("refused")
for options, batch, text in CASES:
    step = streamed(one, store, **options)
    found = refusal(step.load, one.params, batch=batch)
    assert text in found, found
step = streamed(one, store)
found = refusal(step.load, host_params, batch=halved)
assert "expected a function on the mesh of its arguments, 2 devices (data=2)" in found
found = refusal(step.init, lambda: host_params, shardings=SPECS)
assert "expected a NamedSharding for each leaf" in found, found
in_memory = jaxinf.stream_in_memory(
    one.loss, optax.sgd(0.1), memory_bytes=MEMORY_BYTES
)
assert "without a store" in refusal(in_memory.load, one.params, batch=one.batch)
assert not store.exists

# A mesh that only the loss function sets: all arrays are replicated on it.
step = streamed(one, store)
step.load(host_params, batch=host_batch)
losses = [float(step(host_batch)[0]) for _ in range(2)]
bad = {**host_batch, "x": np.full_like(host_batch["x"], np.nan)}
try:
    step(bad)
except jaxinf.NonFiniteGradientError as error:
    assert "the store stays at step 2" in str(error), error
else:
    raise AssertionError("not refused")
losses.append(float(step(host_batch)[0]))
np.testing.assert_allclose(losses, on_one_device(one)[0], rtol=1e-5)
assert step.plan.traced.mesh == one.mesh
step.close()
"""

ZOO = """
from zoo import ZOO

auto = (jax.sharding.AxisType.Auto,) * 2
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=auto)

def spec(leaf):
    if not leaf.ndim or any(n % 2 for n in leaf.shape[-2:]):
        return P()
    both = ("data", "model") if leaf.ndim > 2 else (None, "model")
    return P(*[None] * (leaf.ndim - 2), *both[-leaf.ndim:])

def put(leaf, spec):
    return jax.device_put(leaf, NamedSharding(mesh, spec))

program = ZOO[sys.argv[2]]()
params = jax.tree.map(lambda leaf: put(leaf, spec(np.asarray(leaf))), program.params)
rows = lambda leaf: P("data") if leaf.ndim and leaf.shape[0] % 2 == 0 else P()
batch = jax.tree.map(lambda leaf: put(leaf, rows(leaf)), program.batch)
found = []
for name, tree, of, policy in [
    ("one", program.params, program.batch, "keep"),
    ("keep", params, batch, "keep"),
    ("recompute", params, batch, "recompute"),
]:
    with opened(name) as store:
        step = jaxinf.stream(program.loss, optax.sgd(0.1), store, policy=policy,
                             memory_bytes=4 * MEMORY_BYTES, has_aux=program.has_aux)
        step.load(tree, batch=of)
        losses = [float(step(of)[0]) for _ in range(3)]
        assert_moves_as_planned(step)
        found.append((losses, store.params(like=program.params)))
one, keep, recompute = found
assert keep[0] == recompute[0]
assert_same_bits(keep[1], recompute[1])
np.testing.assert_allclose(keep[0], one[0], rtol=1e-4)
"""

INIT = """
one = make("named")

def init(key):
    shapes = one.on_host[0]
    keys = dict(zip(shapes, jax.random.split(key, len(shapes))))
    return {n: 0.1 * jax.random.normal(keys[n], a.shape) for n, a in shapes.items()}

key = jax.random.key(3)
shardings = {name: NamedSharding(one.mesh, spec) for name, spec in SPECS.items()}
store = opened("init")
step = streamed(one, store)
step.init(init, key, batch=one.batch, shardings=shardings)
first = jax.jit(init)(key)
assert_same_bits(store.params(like=one.params), first)
counts = {leaf.name: leaf.shard_counts for leaf in store.manifest.leaves}
assert counts["up"] == (3, 1, 2) and counts["shift"] == (1, 2), counts
losses = trained(step, one, 2)
step.close()
store = opened("init")
step = streamed(one, store)
step.init(init, key, shardings=shardings)
assert store.step == 2
assert trained(step, one, 1)[0] < losses[0]
assert "on 4 devices (data=2, model=2)" in str(step.plan)
step.close()

# Under jax.set_mesh a new key is replicated over the mesh.
for kind in ("specs", "explicit"):
    one = make(kind)
    shardings = {name: NamedSharding(one.mesh, spec) for name, spec in SPECS.items()}

    def placed(key):
        params = init(key)
        if kind == "specs":
            params["out"] = jax.lax.with_sharding_constraint(params["out"], P("data"))
        return params

    store = opened(kind)
    step = streamed(one, store)
    with one.entered():
        key = jax.random.key(3)
        assert len(key.devices()) == 4
        step.init(placed, key, batch=one.batch, shardings=shardings)
    assert_same_bits(store.params(like=one.params), first)
    np.testing.assert_allclose(trained(step, one, 1)[0], losses[0], rtol=1e-5)
    step.close()
"""


@pytest.fixture
def on_four(run_python, place):
    """Runs a program with four CPU devices and a place for stores."""

    def run(program, *arguments):
        return run_python(COMMON + program, place, *arguments, XLA_FLAGS=FOUR)

    return run


LONG = pytest.mark.long
OTHER_KINDS = [
    pytest.param("specs", marks=LONG),
    pytest.param("shard_map", marks=LONG),
    pytest.param("jit", marks=LONG),
]


@pytest.mark.parametrize(
    "kind", ["explicit", pytest.param("named", marks=LONG), *OTHER_KINDS]
)
def test_programs_are_those_of_one_jit(kind, on_four):
    on_four(PROGRAMS, kind)


@pytest.mark.parametrize(
    "kind", ["named", pytest.param("explicit", marks=LONG), *OTHER_KINDS]
)
def test_training_is_that_of_one_device(kind, on_four):
    on_four(TRAINING, kind)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["tied_and_unused", "linen_scan", "scan_nested", "scan_twice_cast", "moe_map"],
)
def test_programs_of_the_zoo(name, on_four):
    on_four(ZOO, name)


@pytest.mark.long
def test_params_are_made_by_an_init_function(on_four):
    on_four(INIT)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(("keep", "clipped"), marks=LONG),
        pytest.param(("keep_some", "ratios", "kept_ratios"), marks=LONG),
        pytest.param(("parts", "typed_parts", "rewritten"), marks=LONG),
        pytest.param(("compressed", "bf16"), marks=LONG),
    ],
    ids="-".join,
)
def test_options_are_as_on_one_device(cases, on_four):
    on_four(OPTIONS, *cases)


def test_replicas_share_the_memory_that_was_read_into(on_four):
    on_four(REPLICAS)


@pytest.mark.long
def test_devices_with_memory_of_their_own(on_four):
    on_four(OWN_MEMORY)


@pytest.mark.long
def test_functions_without_a_gradient(on_four):
    on_four(FUNCTION)


@pytest.mark.long
def test_other_devices_are_refused_until_the_plan_is_replaced(on_four):
    on_four(DEVICES)


def test_what_is_refused_on_several_devices(on_four):
    on_four(REFUSED)
