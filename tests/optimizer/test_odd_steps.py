"""Steps of odd programs: what they are warned of, odd states, leaves and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxinf

pytestmark = pytest.mark.optimized

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 64)}


def take_steps(tx, params, state, num_steps):
    update = jax.jit(tx.update)
    for n in range(num_steps):
        gradients = jax.tree.map(lambda p, n=n: (p * 0.37 + n).astype(p.dtype), params)
        updates, state = update(gradients, state, params)
        params = jax.jit(optax.apply_updates)(params, updates)
    return params, state


SLOW = """
import shutil, sys, jax, jax.numpy as jnp, optax, jaxinf

@jax.jit
def slow(params):
    def turn(_, p):
        return jax.tree.map(lambda x: x + 1e-6 * jnp.sin(x), p)
    return jax.lax.fori_loop(0, 2000, turn, params)
"""


def test_update_leaks_no_tracers(open_store):
    tx = jaxinf.smart_update(optax.adamw(1e-2), open_store())
    with jax.checking_leaks():
        state = tx.init(PARAMS)
        updates, _ = jax.jit(tx.update)(PARAMS, state, PARAMS)
        jax.block_until_ready(updates)


def adamw_bits(tx, others):
    params = {"w": jnp.linspace(-1.0, 1.0, 4), **others}
    params, _ = take_steps(tx, params, tx.init(params), 20)
    return np.asarray(params["w"])


@pytest.mark.parametrize(
    ("others", "counts"),
    [({"empty": jnp.zeros((0, 3))}, True), ({"key": jax.random.PRNGKey(1)}, False)],
    ids=["without elements", "integers"],
)
def test_a_leaf_that_is_not_trained_changes_no_bit(open_store, others, counts):
    """In optax's program integers are a second use of what divides the moments."""
    tx = optax.adamw(1e-2)
    found = adamw_bits(jaxinf.smart_update(tx, open_store()), others)
    np.testing.assert_array_equal(found, adamw_bits(tx, others if counts else {}))


def test_a_function_of_stored_state_is_refused_with_the_line_to_write(open_store):
    tx = jaxinf.smart_update(optax.adam(1e-2), open_store())
    _, state = take_steps(tx, PARAMS, tx.init(PARAMS), 2)
    with pytest.raises(jaxinf.JaxinfError, match=r"store\.state\(like="):
        optax.tree.norm(optax.tree.get(state, "mu"))


CHUNKS_VANISH = (
    SLOW
    + """
params = {f"l{n}": jnp.ones((200, 200)) for n in range(4)}
store = jaxinf.open_store(sys.argv[1])
tx = jaxinf.smart_update(optax.adam(1e-2), store)
state, update = tx.init(params), jax.jit(tx.update)
for n in range(9):
    gradients = slow(params) if n > 1 else params
    updates, state = update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    if n == 1:
        store.wait(state)
        for slot in (store.path / "slots").iterdir():
            shutil.rmtree(slot / "mu.l2" / "c")
jax.block_until_ready(params)
"""
)


@pytest.mark.long
def test_an_error_of_a_background_step_comes_once_and_last(place, run_python):
    done = run_python(CHUNKS_VANISH, place / "store", check=False)
    assert done.returncode != 0
    assert "mu.l2" in done.stderr
    assert done.stderr.count("StoreIOError") == 1
    assert done.stderr.count("Traceback") == 2  # the program's, and what JAX quotes
    assert "mu.l2" in done.stderr.strip().splitlines()[-1]
