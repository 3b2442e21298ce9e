"""Snapshots beside a training run, through the public interface."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_stores
from raw_stores import read_array

import jaxinf
from jaxinf.store import StoreDirectory, pinned_step

NUM_SNAPSHOTS = 50


@pytest.mark.long
def test_each_is_one_step_of_a_run(place):
    """All elements of a state are equal, and differ from step to step."""
    roots = [place / "csd0", place / "csd1"]
    for root in roots:
        root.mkdir()
    params = {
        "layers": [jnp.ones((60, 1025)), jnp.ones((4096 * 5,))],
        "scale": jnp.ones(()),
    }
    values = {}
    stop, stepped = threading.Event(), threading.Event()
    seen = []
    with small_stores.open_store(
        place / "store", csds=roots, memory_bytes=1 << 22, chunk_elements=4096
    ) as store:
        tx = jaxinf.smart_update(optax.adamw(1e-2), store)

        @jax.jit
        def train_step(params, state):
            gradients = jax.tree.map(jnp.ones_like, params)
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        state = tx.init(params)
        values[0] = 1.0

        def train(params, state):
            for step in range(1, 100_000):
                if stop.is_set():
                    return
                params, state = train_step(params, state)
                values[step] = float(params["scale"])
                stepped.set()

        thread = threading.Thread(target=train, args=(params, state))
        thread.start()
        try:
            for _ in range(NUM_SNAPSHOTS):
                assert stepped.wait(60)
                stepped.clear()
                with pinned_step(StoreDirectory.open(store.path)) as step:
                    seen.append(read_one(step))
        finally:
            stop.set()
            thread.join()
        store.check()
    assert len({step for step, *_ in seen}) > 1
    assert [step for step, *_ in seen] == sorted(step for step, *_ in seen)
    for step, master, _, nu, count in seen:
        assert count == step
        assert master == values[step]
        np.testing.assert_allclose(nu, 1 - 0.999**step, rtol=1e-4)
    assert len({(step, *rest) for step, *rest in seen}) == len({s for s, *_ in seen})
    assert not list((place / "store" / "snapshots").iterdir())


def read_one(step):
    """Returns the step and the only value of each state; fails if there are two."""
    record = step.commit
    found = [record.step]
    for state in ("params", "mu", "nu"):
        parts = [
            read_array(step.path, leaf, state).ravel() for leaf in step.manifest.leaves
        ]
        (value,) = np.unique(np.concatenate(parts))
        found.append(float(value))
    (count,) = (int(s.value) for s in record.scalar_state if s.path.endswith("count"))
    return (*found, count)
