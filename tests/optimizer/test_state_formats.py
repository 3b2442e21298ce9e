"""The optimizer's state in 16 and 8 bits: fewer bytes, the same promises."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
import small_stores
from families import family
from raw_stores import stored

import jaxinf
from jaxinf.cli import main
from jaxinf.errors import StoreCorruptError, StoreMismatchError
from jaxinf.store import StoreDirectory, verify_step

SHAPES = {"a": (1300, 1025), "b": (5,), "c": (4096,), "d": (100, 3, 77)}
NUM_PARAMS = sum(int(np.prod(s)) for s in SHAPES.values())
TARGET = {
    name: jnp.asarray(np.random.default_rng(n).standard_normal(shape, np.float32))
    for n, (name, shape) in enumerate(SHAPES.items())
}


SMALL = {name: TARGET[name] for name in "bcd"}


def run(path, num_steps, *, params=None, tx=None, target=TARGET, **options):
    """Trains on a quadratic; returns params, stored arrays, drive bytes of a step."""
    with small_stores.open_store(path, **options) as store:
        wrapped = jaxinf.smart_update(tx or optax.adamw(1e-2), store)
        if store.exists:
            params = store.params(target)
        params = jax.tree.map(jnp.zeros_like, target) if params is None else params
        state = wrapped.init(params)

        @jax.jit
        def step(params, state, target):
            grads = jax.tree.map(jnp.subtract, params, target)
            updates, state = wrapped.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for _ in range(num_steps):
            params, state = step(params, state, target)
        store.wait()
        held = {
            (leaf.name, s.name): stored(store, s.name, leaf.name)
            for leaf in store._manifest.leaves
            for s in leaf.states
        }
        traffic = store.metrics.traffic if num_steps else None
        return jax.device_get(params), held, traffic


FORMATS = ["bf16", "int8"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("format", "num_csds", "durability"),
    [
        ("int8", 3, "step"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [("bf16", 0, "step"), ("bf16", 3, 3), ("int8", 0, 3)]
        ),
    ],
)
def test_interrupted_is_uninterrupted(place, format, num_csds, durability):
    roots = [place / f"csd{n}" for n in range(num_csds)]
    for root in roots:
        root.mkdir()
    options = {"durability": durability}
    whole = run(place / "whole", 10, state=format, csds=roots, **options)
    run(place / "parts", 4, state=format, csds=roots, **options)
    run(place / "parts", 1, **options)
    found = run(place / "parts", 5, **options)
    jax.tree.map(np.testing.assert_array_equal, whole[:2], found[:2])


@pytest.mark.long
def test_bytes_on_the_drive(place, monkeypatch):
    """Read: moments; written: master and moments. Small leaves stay as they are."""
    small_stores.keep_nothing(monkeypatch)
    wanted = {"fp32": (8, 12), "bf16": (4, 8), "int8": (2 + 2 / 64, 6 + 2 / 64)}
    for format, (read, written) in wanted.items():
        *_, traffic = run(place / format, 3, state=format)
        padding = 40 * 4096
        assert 0 <= traffic.drive_read_bytes - read * NUM_PARAMS < padding
        assert 0 <= traffic.drive_write_bytes - written * NUM_PARAMS < padding


@pytest.mark.long
@pytest.mark.parametrize(
    "tx",
    [optax.adamw(1e-2), optax.lion(1e-2), optax.sgd(0.1, momentum=0.9)],
    ids=["adamw", "lion", "momentum"],
)
def test_converges_as_fp32_does(place, tx):
    losses = {}
    for name in ("fp32", *FORMATS):
        params, *_ = run(place / name, 150, state=name, tx=tx, target=SMALL)
        error = jax.tree.map(lambda p, t: np.mean((p - t) ** 2), params, SMALL)
        losses[name] = np.mean(jax.tree.leaves(error))
    for name in FORMATS:
        assert losses[name] < losses["fp32"] * 1.1 + 1e-3


@pytest.mark.long
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_stored(place, format):
    _, held, _ = run(place / "store", 3, state=format)
    _, plain, _ = run(place / "plain", 3)
    if format == "int8":
        assert held["a", "mu"].dtype == np.uint8
        assert held["a", "mu"].shape == SHAPES["a"]
        assert held["a", "mu_scale"].dtype == np.float32
        assert held["b", "mu"].dtype == np.float32
        assert ("b", "mu_scale") not in held
    else:
        assert held["a", "mu"].dtype.name == "bfloat16"
    with jaxinf.open_store(place / "store") as store:
        decoded = store.read("nu", "a")
        assert decoded.shape == SHAPES["a"]
        scale = np.abs(plain["a", "nu"]).max()
        assert np.abs(decoded - plain["a", "nu"]).max() < 0.02 * scale
        np.testing.assert_array_equal(store.read("mu", "b"), held["b", "mu"])


@pytest.mark.long
def test_an_existing_store_knows_its_format(place):
    run(place / "store", 1, state="int8")
    run(place / "store", 1, state="int8")
    run(place / "store", 1)
    with pytest.raises(StoreMismatchError, match="state as int8, asked for was state="):
        jaxinf.open_store(place / "store", state="bf16")
    for _ in range(2):  # this state has nothing to code
        run(place / "plain", 1, state="int8", tx=optax.sgd(0.1))
    with pytest.raises(ValueError, match="state='int4': expected"):
        jaxinf.open_store(place / "new", state="int4")


@pytest.mark.parametrize("state", family(["mu", "mu_scale", "nu"], short=["mu_scale"]))
def test_a_flipped_bit_is_found(place, state):
    path = place / "store"
    run(path, 2, state="int8")
    directory = StoreDirectory.open(path)
    file = directory.chunk_file(directory.committed_slot(), 0, 0, state)
    data = bytearray(file.read_bytes())
    data[11] ^= 2
    file.write_bytes(data)
    (damage,) = verify_step(directory, path / "current")
    assert f"leaf a, {state}, chunk 0" in damage.what
    with pytest.raises(StoreCorruptError, match=f"leaf a, {state}, chunk 0"):
        step_eagerly(path)


def step_eagerly(path):
    """Makes a step that raises the original exception on failure."""
    with jaxinf.open_store(path) as store:
        params = store.params(TARGET)
        tx = jaxinf.smart_update(optax.adamw(1e-2), store)
        tx.update(params, tx.init(params), params)


@pytest.mark.long
def test_sums_of_gradients_are_not_coded(place):
    tx = optax.MultiSteps(optax.adamw(1e-2), 2)
    _, held, _ = run(place / "store", 2, state="int8", tx=tx)
    assert held["a", "acc_grads"].dtype == np.float32
    assert held["a", "mu"].dtype == np.uint8


@pytest.mark.long
def test_other_tools_get_numbers(place, capsys):
    run(place / "store", 1, state="int8")
    words = ["checkpoint", "export", str(place / "store"), str(place / "out")]
    assert main([*words, "--format", "safetensors"]) == 0
    with jaxinf.open_store(place / "store") as store:
        held = store.read("params", "a")
    exported = safetensors.numpy.load_file(place / "out" / "model.safetensors")
    np.testing.assert_array_equal(exported["a"], held)
    words = ["store", "copy", str(place / "store"), str(place / "fp32")]
    assert main([*words, "--state", "fp32"]) == 0
    assert "fp32: step 1, " in capsys.readouterr().out


@pytest.mark.cards
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "tx",
    [optax.adagrad(0.1), optax.rmsprop(1e-2, momentum=0.9)],
    ids=["adagrad", "rmsprop"],
)
def test_cards_take_roots_as_the_host_does(tmp_path, tx, dtype):
    target = jax.tree.map(lambda x: x.astype(dtype), SMALL)
    made = []
    for csd in ("emulated", "host"):  # both with the master that cards have
        run(tmp_path / csd, 0, tx=tx, target=target, csd="emulated")
        made.append(run(tmp_path / csd, 5, tx=tx, target=target, csd=csd)[:2])
    cards, host = (jax.tree.map(lambda x: np.asarray(x).tobytes(), m) for m in made)
    assert cards == host
