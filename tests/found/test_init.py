"""`init`, and params that are not those of the store."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from found import REFUSED

import jaxinf
from jaxinf.cli import main

pytestmark = pytest.mark.optimized

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 64)}


def take_steps(tx, params, state, num_steps, *, give=True):
    update = jax.jit(tx.update)
    for _ in range(num_steps):
        updates, state = update(params, state, *((params,) if give else ()))
        params = optax.apply_updates(params, updates)
    return params, state


def test_init_again_after_steps_is_refused_with_both_ways_on(open_store):
    tx = jaxinf.smart_update(optax.adam(1e-2), open_store())
    params, state = take_steps(tx, PARAMS, tx.init(PARAMS), 3)
    jax.block_until_ready(params)
    with pytest.raises(REFUSED, match=r"on_existing=.restart."):
        tx.init(params)
    take_steps(tx, params, state, 1)


def test_init_of_a_store_that_was_opened_again_resumes(open_store):
    store = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    params, _ = take_steps(tx, PARAMS, tx.init(PARAMS), 3)
    jax.block_until_ready(params)
    store.close()
    tx = jaxinf.smart_update(optax.adam(1e-2), open_store())
    assert int(optax.tree.get(tx.init(params), "count")) == 3


def test_a_second_phase_from_init_has_moments_of_its_own(open_store):
    def phases(tx):
        params = PARAMS
        for scale in (10.0, 1.0):
            try:
                state = tx.init(params)
            except REFUSED:
                return None  # the test before reads the message
            update = jax.jit(tx.update)
            for _ in range(3):
                gradients = jax.tree.map(lambda p, scale=scale: scale * p, params)
                updates, state = update(gradients, state, params)
                params = jax.jit(optax.apply_updates)(params, updates)
        return params

    found = phases(jaxinf.smart_update(optax.adam(1e-2), open_store()))
    if found is not None:
        np.testing.assert_array_equal(found["w"], phases(optax.adam(1e-2))["w"])


def test_a_run_without_params_warns_once_of_what_it_cannot_see(open_store):
    tx = jaxinf.smart_update(optax.adam(1e-2), open_store())
    state = tx.init(PARAMS)
    with pytest.warns(UserWarning, match="params"):
        updates, state = tx.update(PARAMS, state)
    jax.block_until_ready(tx.update(updates, state))  # a second warning is an error


@pytest.mark.filterwarnings("ignore")
def test_params_that_were_never_compared_come_with_a_warning(open_store):
    store = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(2):
        updates, state = tx.update(params, state)
        halves = jax.tree.map(lambda u: 0.5 * u, updates)
        params = optax.apply_updates(params, halves)
    store.wait(state)
    with pytest.warns(UserWarning, match="params"):
        store.params(PARAMS)


@pytest.mark.filterwarnings("ignore")
def test_params_replaced_after_init_are_noticed_without_params(open_store):
    store = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    state = tx.init(jax.tree.map(jnp.zeros_like, PARAMS))
    params, state = take_steps(tx, PARAMS, state, 2, give=False)
    store.wait(state)
    with pytest.warns(UserWarning, match="params"):
        store.params(params)


@pytest.mark.filterwarnings("ignore")
def test_an_export_of_params_that_were_never_compared_warns(open_store, place, capsys):
    store = open_store()
    tx = jaxinf.smart_update(optax.adam(1e-2), store)
    take_steps(tx, PARAMS, tx.init(PARAMS), 2, give=False)
    store.close()
    words = ("checkpoint", "export", place / "store", place / "out")
    words = (*words, "--format", "safetensors")
    assert main([str(word) for word in words]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "the last 2 updates were given no params" in said


def test_params_replaced_after_init_are_refused_with_the_right_remedy(open_store):
    tx = jaxinf.smart_update(optax.adam(1e-2), open_store())
    state = tx.init(jax.tree.map(jnp.zeros_like, PARAMS))
    with pytest.raises(jaxinf.DivergedParamsError) as found:
        tx.update(PARAMS, state, PARAMS)
    assert "tx.init" in str(found.value)
    assert "take store.params" not in str(found.value)


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


IN_FLIGHT = """
import sys, jax, jax.numpy as jnp, optax, jaxinf

@jax.jit
def slow(params):
    def turn(_, p):
        return jax.tree.map(lambda x: x + 1e-6 * jnp.sin(x), p)
    return jax.lax.fori_loop(0, 2000, turn, params)

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


def test_params_in_pinned_host_memory_are_refused_by_name(open_store):
    tx = jaxinf.smart_update(optax.adam(1e-2), open_store())
    here = jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind="pinned_host"
    )
    with pytest.raises(REFUSED, match=r"w\b.*pinned_host"):
        tx.init(jax.device_put(PARAMS, here))


def test_the_refusal_of_lamb_names_stream(open_store):
    tx = jaxinf.smart_update(optax.lamb(1e-2), open_store())
    with pytest.raises(jaxinf.UnsupportedTransformError) as found:
        tx.init(PARAMS)
    assert "jaxinf.stream" in str(found.value)


@pytest.mark.xfail(strict=True, reason="both slots are made before the first step")
def test_init_of_many_leaves_makes_files_of_one_slot_alone(open_store, place):
    params = {f"leaf{number}": jnp.ones(3) for number in range(40)}
    jaxinf.smart_update(optax.adam(1e-2), open_store()).init(params)
    chunks = [path for path in place.rglob("c/*") if path.is_file()]
    assert len(chunks) == 3 * len(params)
