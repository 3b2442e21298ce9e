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


def test_a_state_that_is_a_plain_tuple_compiles(open_store, caplog):
    def init(params):
        return jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params)

    def update(updates, state, params=None):
        step, nu = state
        nu = jax.tree.map(lambda v, u: 0.998 * v + 0.002 * (u * u), nu, updates)
        scaled = jax.tree.map(lambda u, v: u / (jnp.sqrt(v) + 1e-8), updates, nu)
        return scaled, (step + 1, nu)

    own = optax.chain(optax.GradientTransformation(init, update), optax.scale(-1e-3))
    tx = jaxinf.smart_update(own, open_store())
    params, _ = take_steps(tx, PARAMS, tx.init(PARAMS), 2)
    plain, _ = take_steps(own, PARAMS, own.init(PARAMS), 2)
    np.testing.assert_array_equal(params["w"], plain["w"])
    assert "error" not in caplog.text


SLOW = """
import shutil, sys, jax, jax.numpy as jnp, optax, jaxinf

@jax.jit
def slow(params):
    def turn(_, p):
        return jax.tree.map(lambda x: x + 1e-6 * jnp.sin(x), p)
    return jax.lax.fori_loop(0, 2000, turn, params)
"""
IN_FLIGHT = (
    SLOW
    + """
for run in range(2):
    tx = jaxinf.smart_update(optax.adamw(1e-2), sys.argv[1], on_existing="restart")
    params = {"w": jnp.ones((400, 400))}
    state = tx.init(params)
    update = jax.jit(tx.update)
    for n in range(8):
        updates, state = update(slow(params), state, params)
        params = optax.apply_updates(params, updates)
jax.block_until_ready(params)
store = jaxinf.store_of(sys.argv[1])
store.wait()
print("step", store.step, [one.name for one in store.checkpoints()])
"""
)


@pytest.mark.long
def test_a_restart_waits_for_steps_in_flight(run_python, place):
    done = run_python(IN_FLIGHT, place / "store", check=False)
    assert "step 8 ['step-8-before-restart']" in done.stdout, done.stderr[-2000:]


def test_update_leaks_no_tracers(open_store):
    tx = jaxinf.smart_update(optax.adamw(1e-2), open_store())
    with jax.checking_leaks():
        state = tx.init(PARAMS)
        updates, _ = jax.jit(tx.update)(PARAMS, state, PARAMS)
        jax.block_until_ready(updates)


DOUBLE = """
import sys, jax, jax.numpy as jnp, optax, jaxinf
jax.config.update("jax_enable_x64", True)
params = {"w": jnp.ones(64, jnp.float32)}
gradients = {"w": jnp.ones(64, jnp.float64)}
tx = jaxinf.smart_update(optax.sgd(1e-2), sys.argv[1])
state = tx.init(params)
update = jax.jit(tx.update)
try:
    update.lower(gradients, state, params)
except Exception as error:
    assert "w" in str(error) and "float64" in str(error), error
    print("refused while tracing")
else:
    updates, state = update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    assert params["w"].dtype == jnp.float32 and abs(params["w"][0] - 0.99) < 1e-6
    print("as optax")
"""


@pytest.mark.long
def test_a_double_gradient_is_cast_or_refused_while_tracing(run_python, place):
    done = run_python(DOUBLE, place / "store", check=False)
    assert done.stdout in ("as optax\n", "refused while tracing\n"), done.stderr[-2000:]


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
