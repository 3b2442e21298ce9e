"""Every program of the zoo, cut: loss and gradients against one jit of the whole."""

import jax
import numpy as np
import pytest
from zoo import ZOO

from jaxinf.stream import Runner, prepare

# Programs that compute in 16 bits, where two programs round differently.
HALF = ("gpt2_bfloat16", "equinox_cast_first", "scan_twice_cast", "half_precision_loss")


def prepared(program):
    return prepare(program.loss, program.params, program.batch, has_aux=program.has_aux)


def whole(program):
    """Computes loss, aux and gradients by one jit."""
    vg = jax.jit(jax.value_and_grad(program.loss, has_aux=program.has_aux))
    value, gradients = vg(program.params, program.batch)
    loss, aux = value if program.has_aux else (value, ())
    return loss, aux, jax.tree.leaves(gradients)


def streamed(program, plan, executables):
    """Computes the same by a plan's programs; each gradient piece comes only once."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(program.params)]
    gradients = [np.full(leaf.shape, np.nan, leaf.dtype) for leaf in leaves]
    seen = []

    def hand_out(piece, gradient):
        seen.append(piece)
        gradients[piece.leaf][piece.index] = gradient

    loss, aux = Runner(plan, executables)(
        program.batch, lambda _, piece: piece.of(leaves[piece.leaf]), hand_out
    )
    assert len(seen) == len(set(seen))
    return loss, aux, gradients


def numbers(tree):
    """Returns the leaves as NumPy arrays; random keys as their data."""
    leaves = jax.tree.leaves(tree)
    is_key = [jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    return [
        np.asarray(jax.random.key_data(x) if key else x)
        for x, key in zip(leaves, is_key, strict=True)
    ]


def assert_close(found, expected, tolerance):
    """Compares gradients; the tolerance is relative to the largest of all leaves."""
    found = [x.astype(np.float64) for x in numbers(found)]
    expected = [x.astype(np.float64) for x in numbers(expected)]
    largest = max((np.abs(leaf).max(initial=0) for leaf in expected), default=0)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * largest)


def assert_same_bits(found, expected):
    for one, other in zip(numbers(found), numbers(expected), strict=True):
        assert one.tobytes() == other.tobytes()


SLOW = ("gpt2_bfloat16", "linen", "linen_dropout", "linen_remat", "linen_scan")
SLOW += ("linen_scan_remat_dropout", "conv_batch_norm")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] if n in SLOW else []) for n in ZOO],
)
def test_gradients_are_those_of_one_jit(name):
    program = ZOO[name]()
    ready = prepared(program)
    budget_bytes = ready.smallest_bytes() * 3 // 2
    executables = {}
    plan = ready.plan(budget_bytes)
    loss, aux, gradients = streamed(program, plan, executables)
    expected_loss, expected_aux, expected = whole(program)
    tolerance = 2e-2 if name in HALF else 1e-6
    assert_close(gradients, expected, tolerance)
    np.testing.assert_allclose(float(loss), float(expected_loss), rtol=tolerance)
    assert_close(aux, expected_aux, 1e-6)

    keeping = ready.plan_of(plan.cuts, "keep")
    assert_same_bits(streamed(program, keeping, executables), (loss, aux, gradients))
