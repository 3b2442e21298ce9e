"""Kernels specialised to a step's scalars."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference_kernel import evaluate

import jaxinf
from jaxinf.kernels.specialise import specialise, state_read
from jaxinf.program import trace_update

pytestmark = pytest.mark.optimized

PARAMS = {"w": jnp.ones((5000,)), "b": jnp.ones((3, 2))}


def kernel_and_scalars(tx, state_scalars):
    program = trace_update(tx, PARAMS)
    gradients = jax.tree.leaves(PARAMS)
    _, inputs = program.prologue(gradients, gradients, state_scalars)
    return program.leaves[0].kernel, [np.asarray(s) for s in inputs[0].scalars]


def accumulating(mini_step):
    tx = optax.MultiSteps(optax.adamw(1e-2), 3).gradient_transformation()
    scalars = [jnp.int32(mini_step), jnp.int32(0), jnp.int32(0)]
    return kernel_and_scalars(tx, scalars)


def test_a_micro_step_touches_the_accumulator_alone():
    kernel, scalars = accumulating(1)
    micro = specialise(kernel, scalars)
    assert kernel.unchanged == frozenset()
    assert micro.unchanged == {"params", "mu", "nu"}
    assert state_read(micro) == {"acc_grads"}
    assert specialise(kernel, scalars) is micro


@pytest.mark.parametrize("mini_step", [0, 1, 2])
def test_specialised_kernels_compute_the_same(mini_step):
    kernel, scalars = accumulating(mini_step)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=4097).astype(np.float32) for _ in range(5)]
    arrays = [np.abs(a) + np.float32(0.1) for a in arrays]
    results = []
    for variant in (kernel, specialise(kernel, scalars)):
        gradient, params, *slots = (a.copy() for a in arrays)
        out = np.empty(4097, np.float32)
        assert evaluate(
            variant,
            gradient=gradient,
            params=params,
            slots=slots,
            scalars=scalars,
            out=out,
        )
        results.append([params, *slots, out])
    for whole, special in zip(*results, strict=True):
        np.testing.assert_array_equal(whole, special)


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
