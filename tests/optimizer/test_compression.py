"""`smart_update(compress=…)`: bits, bytes on the link, error feedback, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_stores import same, steps

import jaxinf
from jaxinf.compress import sparsify

pytestmark = pytest.mark.optimized

# Small chunks, and less memory than one needs: several chunks in a leaf, and several
# subgroups in a chunk.
OPTIONS = {"chunk_elements": 20_480, "memory_bytes": 1 << 20, "num_workers": 4}


def make(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)

    def heavy_tailed(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32) ** 3, dtype)

    return {
        "w": heavy_tailed(200, 300),
        "deep": [heavy_tailed(4096), heavy_tailed()],
        "none": None,
        "odd": heavy_tailed(7, 11),
        "empty": jnp.zeros((0, 3), dtype),
    }


def run(tx, params, seeds, state=None):
    return steps(tx, params, map(make, seeds), state)


LATE = jaxinf.top_k(0.05, values="bfloat16", warmup_steps=2, error_feedback=True)
MOMENTUM, TWO = optax.sgd(1e-2, momentum=0.9), optax.MultiSteps(optax.adam(1e-2), 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("compression", "tx"),
    [
        (jaxinf.top_k(0.05, error_feedback=True), MOMENTUM),
        (jaxinf.top_k(1.0, values="float16"), MOMENTUM),
        (jaxinf.top_k(0.05), TWO.gradient_transformation()),
        (LATE, optax.adamw(1e-2)),
    ],
    ids=["feedback", "everything", "accumulation", "16 bits after a warm-up"],
)
def test_bits_of_the_same_in_memory(compression, tx, open_store):
    store = open_store(**OPTIONS)
    clip = optax.clip_by_global_norm(1.0)
    reference = optax.chain(clip, sparsify(compression), tx)
    expected, held = run(reference, make(0), range(1, 6))
    smart = optax.chain(clip, jaxinf.smart_update(tx, store, compress=compression))
    found, state = run(smart, make(0), range(1, 6))
    same(found, expected)
    same(state[1].error_feedback, held[1].error_feedback)
    same(store.params(like=found, state=state), expected)


@pytest.mark.long
def test_skipped_step_leaves_no_trace(open_store):
    results = []
    for is_bad in (False, True):
        store = open_store(f"store{is_bad}", **OPTIONS)
        tx = jaxinf.smart_update(
            optax.adam(1e-2), store, compress=FEEDBACK, nonfinite="skip"
        )
        params, state = run(tx, make(0), [1, 2])
        if is_bad:
            gradients = make(3)
            # Another element is the largest, so this one is not selected.
            gradients["w"] = gradients["w"].at[3, 5].set(np.nan)
            updates, state = jax.jit(tx.update)(gradients, state, params)
            assert not any(np.any(u) for u in jax.tree.leaves(updates))
            assert int(state.skipped_steps) == 1
        results.append(run(tx, params, [4, 5], state))
    (expected, before), (found, after) = results
    same(found, expected)
    same(after.error_feedback, before.error_feedback)


FEEDBACK = jaxinf.top_k(0.1, error_feedback=True)


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
NOISY = optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1e-2))
REFUSED = {
    "kind": (optax.adam(1e-2), 0.01, "compress=0.01: expected jaxinf.top_k"),
    "durability": (optax.adam(1e-2), FEEDBACK, 'error_feedback=True.*durability="st'),
    "clipping": (CLIPPED, FEEDBACK, "put that in front: optax.chain"),
    "dense input": (NOISY, jaxinf.top_k(0.1), "nothing dense crosses the link"),
    "whole sum": (optax.MultiSteps(CLIPPED, 2), jaxinf.top_k(0.1), "the stored sum of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(open_store, place, name):
    tx, compress, message = REFUSED[name]
    store = open_store(durability=2 if name == "durability" else "step")
    errors = TypeError, ValueError, jaxinf.UnsupportedTransformError
    with pytest.raises(errors, match=message):
        jaxinf.smart_update(tx, store, compress=compress).init(make(0))
    assert not (place / "store").exists()
