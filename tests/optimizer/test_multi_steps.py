"""`MultiSteps` around a clip: the last micro-step takes the norm of the stored sum."""

import signal
from pathlib import Path

import clipped_steps
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clipped_steps import clipped, train
from small_stores import same

import jaxinf

pytestmark = pytest.mark.optimized

PROGRAM = Path(clipped_steps.__file__)


@pytest.mark.parametrize(
    ("most", "use_grad_mean", "durability"),
    [
        (0.5, True, "step"),
        pytest.param(1e9, True, 3, marks=pytest.mark.long),
        pytest.param(0.5, False, "step", marks=pytest.mark.long),
    ],
)
def test_adamw_with_a_schedule_of_steps(open_store, most, use_grad_mean, durability):
    tx = optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(most), optax.adamw(1e-2)),
        lambda step: jnp.where(jnp.less(step, 1), 2, 3),
        use_grad_mean=use_grad_mean,
    )
    expected, _ = train(tx.gradient_transformation(), 8)
    store = open_store(durability=durability)
    found, state = train(jaxinf.smart_update(tx, store), 8)
    for name in ("w", "b"):
        np.testing.assert_array_equal(found[name], expected[name])
    # XLA computes a leaf of one element beside the scalars, with other roundings.
    np.testing.assert_allclose(found["scale"], expected["scale"], 1e-6)
    assert int(state.optimizer.gradient_step) == 3
    same(store.params(like=found), found)


@pytest.mark.long
def test_only_the_last_micro_step_hands_the_sum_back(open_store):
    store, up_bytes = open_store(), []

    def count(state):
        store.wait(state)
        up_bytes.append(store.metrics.traffic.link_up_bytes)

    train(jaxinf.smart_update(clipped(3), store), 6, each=count)
    one = 4 * store._manifest.num_params
    assert up_bytes == [one, one, 2 * one] * 2


@pytest.mark.long
def test_the_sum_is_exact_beside_state_in_fewer_bits(open_store):
    inner = optax.adam(1e-2)
    plain = clipped(2, inner).gradient_transformation()
    store = open_store(state="int8")
    tx = jaxinf.smart_update(clipped(2, inner), store)
    found, state = train(tx, 3)
    expected, held = train(plain, 3)
    same(found, expected)
    store.wait()
    for name in found:
        np.testing.assert_array_equal(
            store.read("acc_grads", name), held.acc_grads[name]
        )
    codecs = {s.name: s.codec for s in store._manifest.leaves[2].states}
    assert (codecs["mu"], codecs["acc_grads"]) == ("int8", "")
    found, _ = train(tx, 3, params=found, state=state, first=4)
    expected, _ = train(plain, 6)
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=0.01)


@pytest.mark.long
def test_killed_between_the_rounds(open_store, run_python, place):
    result = run_python(PROGRAM, "killed", place, check=False)
    assert (result.returncode, result.stdout) == (-signal.SIGKILL, "read\n")
    store = open_store()
    assert store.step == 1
    _, held = train(clipped(2).gradient_transformation(), 1)
    np.testing.assert_array_equal(store.read("acc_grads", "w"), held.acc_grads["w"])
    params = {k: jnp.asarray(v) for k, v in np.load(place / "params.npz").items()}
    tx = jaxinf.smart_update(clipped(2), store)
    found, _ = train(tx, 3, params=params, state=tx.init(params), first=2)
    same(found, train(clipped(2).gradient_transformation(), 4)[0])


@pytest.mark.long
def test_bytes_written_of_accumulation(open_store):
    store, per_step = open_store(), []
    tx = jaxinf.smart_update(optax.MultiSteps(optax.adam(1e-2), 3), store)
    params = {"big": jnp.full((1 << 20,), 0.5), "small": jnp.full((1 << 13,), 0.5)}
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
        store.wait(state)
        per_step.append(store.metrics.traffic.drive_write_bytes)
    found = store.params(like=params)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    num = (1 << 20) + (1 << 13)
    # The accumulator alone, or all; what is read is in memory, or not.
    assert per_step[1:] == [4 * num, 16 * num, 4 * num]
