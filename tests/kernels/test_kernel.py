"""Kernels on chunks: sizes, buffers, dtypes, finiteness, flushed denormals."""

import threading
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinf.kernels import evaluate, initialise
from jaxinf.program import trace_init, trace_update

BFLOAT16 = jnp.bfloat16.dtype
SIZES = [0, 1, 1023, 32767, 32768, 32769, 100001]
SCALARS = [np.float32(0.1), np.float32(0.001)]  # of adam: 1 - b1 ** t, 1 - b2 ** t


def adamw_kernel():
    return trace_update(optax.adamw(1e-2), jnp.zeros(8)).leaves[0].kernel


def chunk(num, seed=0, num_arrays=4):
    """Gradient, params, mu, nu."""
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(num, np.float32) for _ in range(num_arrays)]
    arrays[-1] = np.abs(arrays[-1])
    return arrays


def run(kernel, gradient, params, slots, scalars=SCALARS, dtype=np.float32, arrays=()):
    out = np.empty(params.size, dtype)
    finite = evaluate(
        kernel,
        gradient=gradient, params=params, slots=slots,
        scalars=scalars, arrays=arrays, out=out,
    )  # fmt: skip
    return out, finite


@pytest.mark.parametrize("num", SIZES)
def test_blocks_do_not_show(num):
    """Chunks of any size give the bits of element-by-element work."""
    gradient, params, mu, nu = chunk(num)
    expected = [array.copy() for array in (params, mu, nu)]
    m = np.float32(0.1) * gradient + np.float32(0.9) * expected[1]
    v = np.float32(0.001) * (gradient * gradient) + np.float32(0.999) * expected[2]
    u = (m / SCALARS[0]) / (np.sqrt(v / SCALARS[1] + np.float32(0)) + np.float32(1e-8))
    u = np.float32(-1e-2) * (u + np.float32(1e-4) * params)
    out, finite = run(adamw_kernel(), gradient, params, [mu, nu])

    assert finite
    for found, wanted in ((out, u), (params, expected[0] + u), (mu, m), (nu, v)):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, wanted)


@settings(deadline=None, max_examples=20)
@given(num=st.integers(1, 70000), cut=st.integers(0, 70000), seed=st.integers(0, 99))
def test_a_chunk_may_be_cut_anywhere(num, cut, seed):
    kernel, cut = adamw_kernel(), min(cut, num)
    gradient, *whole = chunk(num, seed)
    parts = [array.copy() for array in whole]
    out, _ = run(kernel, gradient, whole[0], whole[1:])
    outs = []
    for part in (slice(0, cut), slice(cut, num)):
        views = [array[part] for array in parts]
        outs.append(run(kernel, gradient[part], views[0], views[1:])[0])

    np.testing.assert_array_equal(np.concatenate(outs), out)
    for left, right in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)])
def test_16_bit_gradients_and_outputs(dtype):
    gradient, params, mu, nu = chunk(40000)
    narrow = gradient.astype(dtype)
    wide = [params.copy(), mu.copy(), nu.copy()]
    run(adamw_kernel(), narrow.astype(np.float32), wide[0], wide[1:])
    narrow.flags.writeable = False
    out, finite = run(adamw_kernel(), narrow, params, [mu, nu], dtype=dtype)

    assert finite
    np.testing.assert_array_equal(params, wide[0])
    np.testing.assert_array_equal(mu, wide[1])
    np.testing.assert_array_equal(out, params.astype(dtype))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 32768, 70000])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16])
def test_non_finite_gradients_are_told(bad, where, dtype):
    frozen = trace_update(optax.set_to_zero(), jnp.zeros(8)).leaves[0].kernel
    gradient, params, mu, nu = chunk(70001)
    gradient[where] = bad
    gradient = gradient.astype(dtype)

    assert not run(adamw_kernel(), gradient, params, [mu, nu])[1]
    assert not run(frozen, gradient, params, [], scalars=[])[1]


def test_denormals_are_flushed():
    tiny = np.float32(1e-40)
    kernel = adamw_kernel()
    gradient = np.full(5, 1e-39, np.float32)
    params, mu, nu = (np.full(5, tiny) for _ in range(3))
    out, finite = run(kernel, gradient, params, [mu, nu])
    assert finite
    assert not mu.any()
    assert not nu.any()

    shrink = trace_update(optax.scale(0.5), jnp.zeros(8)).leaves[0].kernel
    gradient = np.array([1.5e-38, -1.5e-38, 4e-38, 0, np.nan], np.float32)
    params = np.array([0, tiny, -4e-38, tiny, 1], np.float32)
    out, _ = run(shrink, gradient, params, [], scalars=[])
    np.testing.assert_array_equal(out, np.float32([0, 0, 2e-38, 0, np.nan]))
    np.testing.assert_array_equal(params, np.float32([0, 0, -2e-38, 0, np.nan]))


def test_slots_that_trade_places():
    def update(updates, state, params=None):
        del params
        return state["a"], {"a": state["b"], "b": updates, "c": state["c"]}

    def init(params):
        return dict.fromkeys("abc", params)

    program = trace_update(optax.GradientTransformation(init, update), jnp.zeros(8))
    kernel = program.leaves[0].kernel
    gradient, params, a, b = chunk(50000)
    old, c = [params.copy(), a.copy(), b.copy()], np.zeros_like(a)
    out, _ = run(kernel, gradient, params, [a, b, c], scalars=[])

    assert kernel.slots == ("a", "b", "c")
    assert kernel.unchanged == {"c"}
    np.testing.assert_array_equal(out, old[1])
    np.testing.assert_array_equal(params, old[0] + old[1])
    np.testing.assert_array_equal(a, old[2])
    np.testing.assert_array_equal(b, gradient)


def test_threads_share_a_kernel():
    kernel = adamw_kernel()
    gradient, *expected = chunk(100001)
    run(kernel, gradient, expected[0], expected[1:])
    chunks = [chunk(100001) for _ in range(8)]
    threads = [
        threading.Thread(target=run, args=(kernel, g, p, [m, v]))
        for g, p, m, v in chunks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, *found in chunks:
        for left, right in zip(found, expected, strict=True):
            np.testing.assert_array_equal(left, right)


def test_memory_does_not_grow_with_the_chunk():
    kernel = adamw_kernel()
    peaks = []
    for num in (1 << 16, 1 << 20):
        gradient, params, mu, nu = chunk(num)
        out = np.empty(num, np.float32)
        tracemalloc.start()
        evaluate(
            kernel,
            gradient=gradient, params=params, slots=[mu, nu],
            scalars=SCALARS, arrays=[], out=out,
        )  # fmt: skip
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.1 < 2 << 20


def test_wrong_chunks_are_refused():
    kernel = adamw_kernel()
    gradient, params, mu, nu = chunk(10)
    with pytest.raises(ValueError, match="slots: the kernel expects 2, found 1"):
        run(kernel, gradient, params, [mu])
    with pytest.raises(ValueError, match=r"gradient: .* shape \(10,\), found \(9,\)"):
        run(kernel, gradient[:9], params, [mu, nu])
    with pytest.raises(TypeError, match=r"slots\[1\]: .* float32, found float64"):
        run(kernel, gradient, params, [mu, nu.astype(np.float64)])
    with pytest.raises(TypeError, match=r"scalars\[0\]: .* 0-d float32, found float64"):
        run(kernel, gradient, params, [mu, nu], scalars=[np.float64(1)] * 2)


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
    assert kernel.reads_params
    assert [str(x.dtype) for x in scalar_state] == ["int32", "key<fry>"]
    assert program.layout.scalar_paths == ("['count']", "['key']")
    assert trace_update(tx, params).num_scalar_state == 2
