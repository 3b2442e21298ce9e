"""Kernels on chunks: denormals, the first state, work beside the update; cards."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxinf.errors import UnsupportedTransformError
from jaxinf.kernels import (
    Passage,
    card_kernel,
    compiled,
    initialise,
    named_card_kernel,
)
from jaxinf.kernels.calls import stored_arrays
from jaxinf.native import toolchain
from jaxinf.program import trace_init, trace_update

pytestmark = pytest.mark.optimized
BFLOAT16 = jnp.bfloat16.dtype


def test_denormals_are_flushed():
    """`test_bits.py` has them in every kernel; and flushing ends with the call."""
    shrink = trace_update(optax.scale(0.5), jnp.zeros(8)).leaves[0].kernel
    tiny, out = np.float32(1e-40), np.zeros(5, np.float32)
    gradient = np.array([1.5e-38, -1.5e-38, 4e-38, 0, np.nan], np.float32)
    params = np.array([0, tiny, -4e-38, tiny, 1], np.float32)
    compiled(shrink).run(gradient=gradient, params=params, out=out)
    np.testing.assert_array_equal(out, np.float32([0, 0, 2e-38, 0, np.nan]))
    np.testing.assert_array_equal(params, np.float32([0, 0, -2e-38, 0, np.nan]))
    assert np.float32(1e-30) * np.float32(1e-10) > 0


def test_initial_state_is_elementwise_in_the_params():
    def init(params):
        return {
            "half": jax.tree.map(lambda p: (0.5 * p).astype(jnp.bfloat16), params),
            "index": jax.tree.map(
                lambda p: jnp.arange(p.size, dtype=p.dtype).reshape(p.shape), params
            ),
            "count": jnp.int32(3),
            "key": jax.random.key(1),
        }

    tx = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    params = {"w": jnp.ones((2, 3), jnp.bfloat16)}
    program = trace_init(tx, params)
    scalar_state, (inputs,) = jax.jit(program.prologue)(jax.tree.leaves(params))
    kernel = program.leaves[0].kernel
    half, index = np.empty(6, BFLOAT16), np.empty(6, np.float32)
    initialise(
        kernel,
        params=np.full(6, 3, np.float32), slots=[half, index],
        scalars=inputs.scalars, arrays=[np.ravel(a) for a in inputs.arrays],
    )  # fmt: skip

    assert (half == 1.5).all()
    np.testing.assert_array_equal(index, np.arange(6))
    assert any("params" in line for line in kernel.describe())
    assert [str(x.dtype) for x in scalar_state] == ["int32", "key<fry>"]
    assert program.layout.scalar_paths == ("['count']", "['key']")


def test_a_first_state_of_literals_and_params_needs_no_kernel(monkeypatch):
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)

    def init(params):
        return {"copy": params, "zero": jnp.zeros_like(params, jnp.bfloat16)}

    tx = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    kernel = trace_init(tx, jnp.zeros(6)).leaves[0].kernel
    params = np.arange(6, dtype=np.float32)
    slots = copy, zero = [np.full(6, 7, dtype) for dtype in kernel.slot_dtypes]
    initialise(kernel, params=params, slots=slots)
    np.testing.assert_array_equal(copy, params)
    assert not zero.any()


# --- its work beside the update: that of separate passes ---------------------------


def kernel_of(tx, num_leaves=2):
    return trace_update(tx, [jnp.zeros(8)] * num_leaves).leaves[0].kernel


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-2),
    "three slots": optax.rmsprop(0.1, centered=True, momentum=0.9),
    "frozen": optax.set_to_zero(),
}


def chunk(kernel, num):
    rng = np.random.default_rng(num)
    values = [np.abs(rng.standard_normal(num, np.float32)) for _ in kernel.slots]
    return {
        "gradient": rng.standard_normal(num, np.float32),
        "params": rng.standard_normal(num, np.float32),
        "slots": values,
        "scalars": [np.float32(0.1) for _ in kernel.scalar_dtypes],
        "out": np.full(num, 7, np.float32),
    }


def stored(arguments):
    return stored_arrays(arguments["params"], arguments["slots"])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("num", "offset"),  # in elements, of the result's memory from a cache line
    [(1, 0), (513, 0), (5000, 0), ((1 << 18) + 5, 0), (1 << 18, 1), (1 << 18, 4)],
)
def test_given_params_stand_for_those_in_the_buffer(name, num, offset):
    kernel = kernel_of(OPTIMIZERS[name])
    run = compiled(kernel).run
    plain, given = chunk(kernel, num), chunk(kernel, num)
    run(passage=Passage(), **plain)
    # The caller's params are also where the new ones go.
    memory = np.zeros(num + 32, np.float32)
    first = -(memory.ctypes.data // 4) % 16 + offset
    device = memory[first : first + num]
    device[...] = given["params"]
    given["params"][...] = np.nan
    given["out"] = device
    run(passage=Passage(given=device, wants_params=True), **given)
    for left, right in zip(stored(given), stored(plain), strict=True):
        np.testing.assert_array_equal(left, right)
    np.testing.assert_array_equal(device, plain["params"])
    assert not memory[:first].any()
    assert not memory[first + num :].any()


# --- kernels of cards --------------------------------------------------------------


def test_a_kernel_is_found_by_its_name():
    for name in (
        "jaxinf_adamw_f32_update_f32",
        "jaxinf_adamw_schedule_one_leaf_f16_bf16_bf16",
        "jaxinf_sgd_momentum_bf16_f16_int8_topk",
    ):
        assert named_card_kernel(name).name == name
    for name in ("adamw", "jaxinf_adamw_f64_update_f32", "jaxinf_set_to_zero_f32_f32"):
        with pytest.raises(ValueError, match=f"card kernel: expected .* '{name}'"):
            named_card_kernel(name)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (optax.adam(0.1, mu_dtype=jnp.bfloat16), "no kernel for mu as bfloat16"),
        (optax.chain(optax.clip(1.0), optax.sgd(0.1)), "no kernel for this update"),
        (optax.set_to_zero(), "no kernel for this update; .* adamw, .* lion"),
        (optax.chain(optax.scale_by_trust_ratio(), optax.add_noise(1.0, 0.5, 0)),
         "no kernel for an update that needs more than scalars"),
    ],
)  # fmt: skip
def test_what_cards_lack_is_refused(tx, message):
    with pytest.raises(UnsupportedTransformError, match=message):
        card_kernel(kernel_of(tx), *[np.dtype(np.float32)] * 2)
