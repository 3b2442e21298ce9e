"""Steps without a store: optax in memory, activations on a drive, Orbax's own saves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from streaming import assert_same_bits
from zoo import ZOO, normal

import jaxinf
from jaxinf.errors import StreamError

pytestmark = pytest.mark.optimized

MEMORY_BYTES = 64 << 20
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def made(program, tx=TX, memory_bytes=MEMORY_BYTES, **options):
    return jaxinf.stream_in_memory(
        program.loss,
        tx,
        memory_bytes=memory_bytes,
        has_aux=program.has_aux,
        **options,
    )


def run(step, program, num_steps=3):
    return [float(step(program.batch)[0]) for _ in range(num_steps)]


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
    losses = run(step, program)

    gradient = jax.jit(jax.value_and_grad(program.loss))
    update, add = jax.jit(tx.update), jax.jit(optax.apply_updates)
    params, state = program.params, jax.jit(tx.init)(program.params)
    for gradients, loss in zip(step.state()[0], losses, strict=True):
        value, near = gradient(params, program.batch)
        assert loss == pytest.approx(float(value), rel=1e-5)
        for one, other in zip(*map(jax.tree.leaves, (gradients, near)), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
        updates, state = update(gradients, state, params)
        params = add(params, updates)
    assert_same_bits(step.params(), params)
    assert_same_bits(step.state(), state)
    half = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    assert_same_bits(step.params(like=half), half)
    with pytest.raises(ValueError, match="like: expected the shapes"):
        step.params(like=jax.tree.leaves(params))


def wide(params, batch):
    x = batch
    for w in params["layers"]:
        x = jnp.tanh(x @ w) + jnp.sin(x)
    return jnp.mean(x**2)


LAYERS = {"layers": [normal(i, 32, 32) / 6 for i in range(12)]}


@pytest.mark.long
def test_activations_alone_go_to_a_drive(place):
    batch = normal(100, 4096, 32)
    losses, peaks = [], []
    for policy, memory_bytes in (("keep", MEMORY_BYTES), ("offload", 13 << 20)):
        step = jaxinf.stream_in_memory(
            wide,
            TX,
            memory_bytes=memory_bytes,
            policy=policy,
            scratch=place,
        )
        step.load(LAYERS)
        losses.append([float(step(batch)[0]) for _ in range(2)])
        assert step.plan is not None
        peaks.append(step.plan.peak_bytes)
        assert step.traffic is not None
        assert (step.traffic.drive_write_bytes > 0) == (policy == "offload")
        step.close()
    assert losses[0] == losses[1]
    assert peaks[1] < 0.8 * peaks[0]
    assert not list(place.iterdir())


@pytest.mark.long
def test_the_programs_own_orbax_saves_and_restores(tmp_path):
    program = ZOO["l2_penalty"](depth=2)
    whole = made(program)
    whole.init(lambda: jax.tree.map(jnp.asarray, program.params), batch=program.batch)
    expected = run(whole, program, 4)

    first = made(program)
    first.load(program.params)
    found = run(first, program, 2)
    saved = {"params": first.params(), "state": first.state()}
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "checkpoint", saved)
        run(first, program, 1)  # what was handed out is left alone
        saver.wait_until_finished()
        restored = saver.restore(tmp_path / "checkpoint", saved)
    second = made(program)
    second.load(restored["params"], state=restored["state"])
    found += run(second, program, 2)
    assert found == expected
    assert_same_bits(second.params(), whole.params())


@pytest.mark.long
def test_results_survive_later_steps():
    program = ZOO["scan_nested"]()
    step = made(program)
    step.load(program.params)
    results = []
    for _ in range(3):  # of which each reuses the memory that no one else has
        step(program.batch)
        results.append((step(program.batch), step.params(), step.state()))
        results.append(jax.tree.map(np.array, results[-1]))
    for found, expected in zip(results[::2], results[1::2], strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("nonfinite", ["error", "skip"])
def test_a_refused_step_changes_nothing(nonfinite):
    program = ZOO["l2_penalty"](depth=2)
    step = made(program, nonfinite=nonfinite)
    step.load(program.params)
    run(step, program, 1)
    before = jax.tree.map(np.array, (step.params(), step.state()))
    bad = jax.tree.map(lambda x: x * np.float32(np.nan), program.batch)
    if nonfinite == "error":
        with pytest.raises(jaxinf.NonFiniteGradientError, match="NaN or Inf"):
            step(bad)
    else:
        step(bad)
        assert step.num_skipped == 1
    assert_same_bits((step.params(), step.state()), before)
    run(step, program, 1)


@pytest.mark.long
def test_too_little_memory_is_refused():
    program = ZOO["l2_penalty"](depth=2)
    step = made(program, memory_bytes=4 << 10)
    with pytest.raises(StreamError, match=r"call step.init or step.load first"):
        step.params()
    with pytest.raises(StreamError, match="room for params, gradients and optax's"):
        step.load(program.params, batch=program.batch)
    held = 4 * sum(leaf.nbytes for leaf in jax.tree.leaves(program.params))
    step = made(program, memory_bytes=held + 4096)
    with pytest.raises(StreamError, match=r"memory_bytes=.* works"):
        step.load(program.params, batch=program.batch)
