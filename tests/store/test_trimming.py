"""`jaxinf store trim`: space is freed, and a run goes on as if nothing had happened."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_stores
from families import family

import jaxinf
from jaxinf.cli import main
from jaxinf.errors import StoreFormatError, StoreLockedError
from jaxinf.store import trim_store

TX = optax.adamw(1e-2)
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 96 * 1024).reshape(96, 1024), "b": jnp.ones(7)}
CHUNKS = {"chunk_elements": 16 * 1024, "memory_bytes": 1 << 20}


def train(store, seeds):
    """Params after a step for each seed."""
    smart = jaxinf.smart_update(TX, store)
    params = PARAMS if not store.exists else store.params(like=PARAMS)
    state, update = smart.init(params), jax.jit(smart.update)
    for seed in seeds:
        key = jax.random.key(seed)
        gradients = jax.tree.map(lambda p, k=key: jax.random.normal(k, p.shape), params)
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    jax.block_until_ready(state)
    store.close()
    return params


def used_bytes(path):
    files = (os.path.join(root, f) for root, _, names in os.walk(path) for f in names)
    return sum(os.lstat(file).st_blocks * 512 for file in files)


@pytest.mark.parametrize("num_roots", family([0, 2], short=[2]))
def test_a_run_goes_on_behind_a_trimmed_store(num_roots, place, capsys):
    roots = [place / f"csd{n}" for n in range(num_roots)]
    for root in roots:
        root.mkdir()
    expected = train(small_stores.open_store(place / "whole", **CHUNKS), range(4))
    train(small_stores.open_store(place / "store", csds=roots, **CHUNKS), range(2))
    before = sum(map(used_bytes, [place / "store", *roots]))
    assert main(["store", "trim", str(place / "store")]) == 0
    after = sum(map(used_bytes, [place / "store", *roots]))
    assert "MiB freed" in capsys.readouterr().out
    assert after < 0.6 * before
    assert main(["verify", str(place / "store")]) == 0
    assert trim_store(place / "store") == 0, "there is nothing left to free"
    found = train(small_stores.open_store(place / "store", **CHUNKS), range(2, 4))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_checkpoints_keep_their_bytes(place):
    train(small_stores.open_store(place / "store", **CHUNKS), range(1))
    assert main(["checkpoint", "save", str(place / "store"), "first"]) == 0
    train(small_stores.open_store(place / "store", **CHUNKS), range(1, 3))
    trim_store(place / "store")
    assert main(["verify", str(place / "store")]) == 0


def test_an_open_store_and_one_without_a_step_are_refused(place):
    with small_stores.open_store(place / "store", **CHUNKS) as store:
        jaxinf.smart_update(TX, store).init(PARAMS)
        with pytest.raises(StoreLockedError):
            trim_store(place / "store")
    (place / "store/current").unlink()
    with pytest.raises(StoreFormatError, match="expected a committed step"):
        trim_store(place / "store")
