"""Training by `jaxinf.stream`: against optax in memory, resumed, spilled."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import family
from golden_streams import streams
from streaming_cases import (
    assert_near,
    assert_same_bits,
    by_optax,
    bytes_held,
    moved_as_planned,
    run,
    spill_beyond,
)
from zoo import ZOO

import jaxinf
from jaxinf.streaming.program import initial

SGD, ADAM = optax.sgd(0.1), optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAM)


def assert_is_optax(step, program, tx, batches):
    _, expected = by_optax(program, tx, batches)
    assert_near(step.store.params(like=program.params), expected, 2e-5)


TRAINED = [("l2_penalty", ADAM), ("stack_by_index", CLIPPED), ("scan_nested", SGD)]
TRAINED += [("scan_twice_cast", ADAM), ("tied_and_unused", CLIPPED)]


@pytest.mark.parametrize(("name", "tx"), family(TRAINED, short=TRAINED[1:3]))
def test_training_is_that_of_optax(name, tx, streamed):
    program = ZOO[name]()
    step = streamed(program, tx)
    step.load(program.params, batch=program.batch)
    losses, aux = zip(*(step(program.batch) for _ in range(3)), strict=True)
    if program.has_aux:
        _, expected = jax.jit(program.loss)(program.params, program.batch)
        assert_near(aux[0], expected, 1e-5)
    else:
        assert aux == (None,) * 3
    expected, _ = by_optax(program, tx, [program.batch] * 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert_is_optax(step, program, tx, [program.batch] * 3)


def test_slices_of_a_store_made_for_whole_leaves(streamed, open_store):
    """Chunks that no slice is whole in: leaves are read, and gradients gathered."""
    program = ZOO["scan_remat_reverse"]()
    store = open_store("whole", memory_bytes=16 << 20)
    params = jax.tree.map(jnp.asarray, program.params)
    jaxinf.smart_update(SGD, store).init(params)
    step = streamed(program, SGD, store=store)
    step.load(program.params, batch=program.batch)
    run(step, program, 2)
    assert_is_optax(step, program, SGD, [program.batch] * 2)


@pytest.mark.optimized
def test_leaves_are_made_as_jitted_init_makes_them(streamed, monkeypatch):
    weights = np.arange(64, dtype=np.float32)
    scaled = jax.jit(lambda key: jax.random.normal(key, (64,)) * weights)

    def init(key):
        keys = jax.random.split(key, 9)
        return {
            "folded": jax.random.normal(jax.random.fold_in(keys[0], 7), 9),
            "normal": 0.02 * jax.random.normal(keys[0], (3, 64, 64)),
            "ones": jnp.ones(64),
            "scaled": scaled(keys[1]),  # which closes over an array
            "split": [jax.random.normal(jax.random.split(k)[1], 9) for k in keys[4:]],
            "truncated": jax.random.truncated_normal(keys[2], -2, 2, (64, 501)) / 8,
            "uniform": jax.random.uniform(keys[3], (501, 64), minval=-0.1, maxval=0.1),
        }

    compiled, compile_program = [], initial.compile_program
    monkeypatch.setattr(
        initial, "compile_program", lambda x: compiled.append(x) or compile_program(x)
    )
    key = jax.random.key(5)
    step = streamed(replace(ZOO["l2_penalty"](), loss=lambda p, b: jnp.sum(b)), SGD)
    step.init(init, key)
    expected = jax.jit(init)(key)
    assert_same_bits(step.store.params(like=expected), expected)
    assert len(compiled) == 6  # however keys are made, leaves of a shape share one


def test_batches_of_two_shapes_have_a_plan_each(streamed):
    program = ZOO["l2_penalty"](depth=3)
    half = jax.tree.map(lambda x: x[:4], program.batch)
    batches = [program.batch, half, program.batch]
    step = streamed(program, SGD)
    step.load(program.params)
    pool = step.store._engine.files.csds[0].memory
    for batch in batches:
        step(batch)
        assert len(bytes_held()) == 1  # one plan has the memory at a time
        assert pool.capacity_bytes + step.plan.peak_bytes <= 256 << 20
    assert_is_optax(step, program, SGD, batches)
    step.store.wait()
    assert len(streams(step.store.path)) == 2


def test_drives_move_what_the_plan_says(streamed, monkeypatch):
    program = ZOO["stack_by_index"]()
    # Gradients that wait do so in memory up to here, then on the drive.
    spill_beyond(monkeypatch, 8192)
    step = streamed(program, CLIPPED)
    step.load(program.params, batch=program.batch)
    run(step, program, 3)
    planned = moved_as_planned(step)
    # Params, and two moments that are not read, as they stay in memory; gradients.
    all_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(program.params))
    assert planned.drive_write_bytes >= 3 * all_bytes
    assert planned.drive_read_bytes >= all_bytes
    assert step.metrics.spilled_drive_bytes > 0
