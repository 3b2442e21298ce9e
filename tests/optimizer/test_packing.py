"""Short operands of a call travel together, with their bits."""

import callback_form
import jax
import jax.extend
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxinf
from jaxinf.optimizer.callback import PACKED_BYTES, pack

pytestmark = pytest.mark.optimized("long")

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.uint32, np.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_kept(dtype):
    """Denormals and NaN included, in arrays that do not fill their last word."""
    rng = np.random.default_rng(0)
    itemsize = np.dtype(dtype).itemsize
    shapes = [(), (0,), (1,), (3, 5), (7,), (PACKED_BYTES // itemsize,)]
    arrays = [
        rng.integers(0, 256, int(np.prod(s)) * itemsize, np.uint8)
        .view(dtype)
        .reshape(s)
        for s in shapes
    ]
    tree = {"short": arrays[:-1], "flag": np.array([True, False]), "long": arrays[-1]}
    sent = [np.asarray(x) for x in jax.jit(lambda tree: pack(tree)[0])(tree)]
    assert [x.nbytes for x in sent[:-1]] == [PACKED_BYTES]
    found = pack(tree)[1](sent)
    for old, new in zip(jax.tree.leaves(tree), jax.tree.leaves(found), strict=True):
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        assert new.tobytes() == old.tobytes()


def test_a_single_short_array_travels_as_it_is():
    tree = [np.ones(300, np.float32), np.int32(3)]
    arrays, unpack = pack(tree)
    assert [x.shape for x in arrays] == [(300,), ()]
    assert unpack([np.asarray(x) for x in tree])[1] == 3


def operands(jaxpr):
    """Returns the bytes of the operands of each call, conditionals included."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "io_callback":
            found.append([x.aval.size * x.aval.dtype.itemsize for x in eqn.invars])
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            found += operands(inner)
    return found


@pytest.mark.parametrize("form", ["start", "io"])
def test_a_call_has_at_most_one_short_operand(tmp_path, monkeypatch, form):
    callback_form.use(form, monkeypatch)
    params = {f"kernel{n}": jnp.ones((512, 512)) for n in range(3)}
    params |= {f"bias{n}": jnp.ones(64) for n in range(9)}
    tx = jaxinf.smart_update(optax.adamw(1e-3), tmp_path / "store")
    state = tx.init(params)
    closed = jax.make_jaxpr(tx.update)(params, state, params)
    calls = operands(closed.jaxpr)
    # A call for each kernel, and one for what is short; comparisons; the step itself.
    assert len(calls) == (4 if form == "io" else 8) + 4 + 3
    for call in calls:
        assert sum(num_bytes < PACKED_BYTES for num_bytes in call) <= 1
    jaxinf.close(tmp_path / "store")
