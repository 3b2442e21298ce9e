"""Steps without a store: optax in memory, Orbax's own saves, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from streaming_cases import SMALL, assert_near, assert_same_bits, run
from zoo import ZOO

import jaxinf
from jaxinf.errors import StreamError

pytestmark = pytest.mark.optimized

TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def made(program=SMALL, tx=TX, memory_bytes=64 << 20, **options):
    options |= {"has_aux": program.has_aux, "memory_bytes": memory_bytes}
    return jaxinf.stream_in_memory(program.loss, tx, **options)


# Its state is the gradients of the last three steps.
RECORDED = optax.GradientTransformation(
    lambda params: [jax.tree.map(jnp.zeros_like, params)] * 3,
    lambda updates, state, params=None: (updates, [*state[1:], updates]),
)


@pytest.mark.long
def test_updates_are_those_of_jitted_optax():
    program, tx = ZOO["stack_by_index"](), optax.chain(RECORDED, TX)
    step = made(program, tx)
    step.load(program.params)
    losses = run(step, program, 3)

    gradient = jax.jit(jax.value_and_grad(program.loss))
    update, add = jax.jit(tx.update), jax.jit(optax.apply_updates)
    params, state = program.params, jax.jit(tx.init)(program.params)
    for gradients, loss in zip(step.state()[0], losses, strict=True):
        value, near = gradient(params, program.batch)
        assert loss == pytest.approx(float(value), rel=1e-5)
        assert_near(gradients, near, 1e-5)
        updates, state = update(gradients, state, params)
        params = add(params, updates)
    assert_same_bits(step.params(), params)
    assert_same_bits(step.state(), state)


@pytest.mark.long
def test_the_programs_own_orbax_saves_and_restores(tmp_path):
    whole = made()
    whole.init(lambda: jax.tree.map(jnp.asarray, SMALL.params), batch=SMALL.batch)
    expected = run(whole, SMALL, 4)

    first = made()
    first.load(SMALL.params)
    found = run(first, SMALL, 2)
    saved = {"params": first.params(), "state": first.state()}
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "checkpoint", saved)
        run(first, SMALL, 1)  # what was handed out is left alone
        saver.wait_until_finished()
        restored = saver.restore(tmp_path / "checkpoint", saved)
    second = made()
    second.load(restored["params"], state=restored["state"])
    assert found + run(second, SMALL, 2) == expected
    assert_same_bits(second.params(), whole.params())


@pytest.mark.parametrize("nonfinite", ["error", "skip"])
def test_a_refused_step_changes_nothing(nonfinite):
    step = made(nonfinite=nonfinite)
    step.load(SMALL.params)
    run(step, SMALL, 1)
    before = jax.tree.map(np.array, (step.params(), step.state()))
    bad = jax.tree.map(lambda x: x * np.float32(np.nan), SMALL.batch)
    if nonfinite == "error":
        with pytest.raises(jaxinf.NonFiniteGradientError, match="NaN or Inf"):
            step(bad)
    else:
        step(bad)
        assert step.skipped_steps == 1
    assert_same_bits((step.params(), step.state()), before)
    run(step, SMALL, 1)


@pytest.mark.long
def test_too_little_memory_is_refused():
    with pytest.raises(StreamError, match=r"call step.init or step.load first"):
        made().params()
    held = 4 * sum(leaf.nbytes for leaf in jax.tree.leaves(SMALL.params))
    for memory_bytes, message in (
        (4 << 10, "holding params, gradients and optax's state"),
        (held + 4096, r"memory_bytes=.* works"),
    ):
        with pytest.raises(StreamError, match=message):
            made(memory_bytes=memory_bytes).load(SMALL.params, batch=SMALL.batch)
