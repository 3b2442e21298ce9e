"""Training by `jaxinf.stream`: against optax in memory, resumed, spilled."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import family
from golden_streams import streams
from streaming import (
    CHUNKS,
    assert_near,
    assert_same_bits,
    bytes_held,
    run,
    spill_beyond,
    states,
)
from zoo import ZOO

import jaxinf
from jaxinf.transfer.pages import page_ceil

CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3))


def in_memory(program, tx, batches):
    """Losses and params by plain optax, gradients, update and sum each a jit."""
    vg = jax.jit(jax.value_and_grad(program.loss, has_aux=program.has_aux))
    update, apply = jax.jit(tx.update), jax.jit(optax.apply_updates)
    params, losses = program.params, []
    state = jax.jit(tx.init)(params)
    for batch in batches:
        value, gradients = vg(params, batch)
        updates, state = update(gradients, state, params)
        params = apply(params, updates)
        losses.append(float(value[0] if program.has_aux else value))
    return losses, params


ADAM = optax.adamw(1e-3)
TRAINED = [("l2_penalty", ADAM), ("stack_by_index", CLIPPED)]
TRAINED += [("scan_twice_cast", ADAM), ("tied_and_unused", CLIPPED)]


@pytest.mark.parametrize(("name", "tx"), family(TRAINED, short=TRAINED[:2]))
def test_training_is_that_of_optax(name, tx, streamed):
    program = ZOO[name]()
    step = streamed(program, tx)
    step.load(program.params, batch=program.batch)
    results = [step(program.batch) for _ in range(3)]
    assert all(aux is None for _, aux in results)
    losses = [float(loss) for loss, _ in results]
    expected, params = in_memory(program, tx, [program.batch] * 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert_near(step.store.params(like=program.params), params, 2e-5)
    assert step.store.step == 3


def test_aux_comes_with_the_loss(streamed):
    program = ZOO["scan_nested"]()
    step = streamed(program, optax.sgd(0.1))
    step.load(program.params, batch=program.batch)
    loss, aux = step(program.batch)
    expected, means = jax.jit(program.loss)(program.params, program.batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(aux, means, rtol=1e-5)


@pytest.mark.long
def test_resumed_is_uninterrupted(streamed):
    program, tx = ZOO["stack_by_index"](depth=3), optax.adam(1e-2)
    whole = streamed(program, tx, "whole")
    whole.load(program.params, batch=program.batch)
    expected = run(whole, program, 4)

    first = streamed(program, tx, "parts", policy="keep")
    first.load(program.params, batch=program.batch)
    found = run(first, program, 2)
    first.close()
    second = streamed(program, tx, "parts")
    second.init(lambda: jax.tree.map(jnp.zeros_like, program.params))
    found += run(second, program, 2)
    assert found == expected
    held = states(whole.store)
    assert {name for name, _ in held} == {"params", "mu", "nu"}
    for key, array in states(second.store).items():
        np.testing.assert_array_equal(array, held[key])


@pytest.mark.long
def test_a_store_goes_to_smart_update_and_back(streamed, open_store):
    program, tx = ZOO["stack_by_index"](), optax.adam(1e-2)
    step = streamed(program, tx)
    step.load(program.params, batch=program.batch)
    run(step, program, 1)
    step.close()
    store = open_store("store", **CHUNKS)
    params = store.params(like=program.params)
    smart = jaxinf.smart_update(tx, store)
    state = smart.init(params)
    gradients = jax.jit(jax.grad(program.loss))(params, program.batch)
    updates, state = smart.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    store.wait(state)
    store.close()
    again = streamed(program, tx)
    again.load(params, batch=program.batch)
    run(again, program, 1)
    _, expected = in_memory(program, tx, [program.batch] * 3)
    assert_near(again.store.params(like=params), expected, 2e-5)


def test_slices_of_a_store_made_for_whole_leaves(streamed, open_store):
    """Chunks that no slice is whole in: leaves are read, and gradients gathered."""
    program, tx = ZOO["scan_remat_reverse"](), optax.sgd(0.1)
    store = open_store("whole", memory_bytes=16 << 20)
    smart = jaxinf.smart_update(tx, store)
    smart.init(jax.tree.map(jnp.asarray, program.params))
    step = streamed(program, tx, store=store)
    step.load(program.params, batch=program.batch)
    run(step, program, 2)
    _, expected = in_memory(program, tx, [program.batch] * 2)
    assert_near(store.params(like=program.params), expected, 2e-5)


def test_leaves_are_made_as_jitted_init_makes_them(streamed):
    def init(key):
        draw, fold = jax.random.normal, jax.random.fold_in
        return {
            "w": draw(key, (3, 64, 64)),
            "b": jnp.zeros(64),
            "c": draw(fold(key, 7), (64, 64)),
            "d": draw(fold(key, 8), (64, 64)),
        }

    key = jax.random.key(5)
    program = replace(ZOO["l2_penalty"](), loss=lambda p, b: jnp.sum(b))
    step = streamed(program, optax.sgd(0.1))
    step.init(init, key)
    expected = jax.jit(init)(key)
    assert_same_bits(step.store.params(like=expected), expected)
    assert step.store.step == 0


def test_init_with_a_batch_traces_once(streamed):
    program, counts = ZOO["l2_penalty"](depth=3), {"loss": 0, "update": 0}
    plain = optax.sgd(0.1)

    def counted(name, fn, *args):
        counts[name] += 1
        return fn(*args)

    step = streamed(
        replace(program, loss=partial(counted, "loss", program.loss)),
        optax.GradientTransformation(
            plain.init, partial(counted, "update", plain.update)
        ),
    )
    step.init(lambda: program.params, batch=program.batch)
    in_init = dict(counts)
    step(program.batch)
    assert counts == in_init
    step.dry_run(program.batch, params=jax.eval_shape(lambda: program.params))
    assert counts == {name: 2 * count for name, count in in_init.items()}


def test_a_skipped_step_changes_nothing_and_is_counted(streamed):
    program = ZOO["l2_penalty"](depth=3)
    step = streamed(program, optax.adam(0.1), nonfinite="skip")
    step.load(program.params)
    bad = jax.tree.map(lambda x: x * np.float32(np.nan), program.batch)
    step(bad)
    run(step, program, 2)
    _, expected = in_memory(program, optax.adam(0.1), [program.batch] * 2)
    assert_near(step.store.params(like=program.params), expected, 2e-5)
    assert (step.store.step, step.store.skipped_steps) == (2, 1)


def test_batches_of_two_shapes_have_a_plan_each(streamed):
    program, tx = ZOO["l2_penalty"](depth=3), optax.sgd(0.1)
    half = jax.tree.map(lambda x: x[:4], program.batch)
    step = streamed(program, tx)
    step.load(program.params)
    pool = step.store._engine.opened.csds[0].memory
    idle = []
    for batch in (program.batch, half, program.batch):
        step(batch)
        idle.append(len(bytes_held()))
        assert pool.capacity_bytes + step.plan.peak_bytes <= 256 << 20
    assert idle == [1, 1, 1]  # one plan has the memory at a time
    _, expected = in_memory(program, tx, [program.batch, half, program.batch])
    assert_near(step.store.params(like=program.params), expected, 2e-5)
    step.store.wait()
    assert len(streams(step.store.path)) == 2


def test_a_commit_has_the_payload_of_its_step(streamed):
    program = ZOO["l2_penalty"](depth=2)
    step = streamed(program, optax.sgd(0.1))
    step.load(program.params)
    for number in range(1, 5):
        step.annotate({"batch": number})  # while the step before may still be written
        step(program.batch)
    step.store.wait()
    assert (step.store.step, step.store.payload) == (4, {"batch": 4})


def test_spilled_to_the_drive_has_the_bits_of_memory(streamed, monkeypatch):
    program = ZOO["tied_and_unused"]()
    held = streamed(program, CLIPPED, "held")
    held.load(program.params)
    run(held, program, 2)
    assert not held.metrics.spilled_drive_bytes

    spill_beyond(monkeypatch, 0)
    spilled = streamed(program, CLIPPED, "spilled")
    spilled.load(program.params)
    run(spilled, program, 2)
    assert spilled.metrics.spilled_drive_bytes == sum(
        page_ceil(leaf.nbytes) for leaf in jax.tree.leaves(program.params)
    )
    assert_same_bits(
        *(step.store.params(like=program.params) for step in (held, spilled))
    )


def test_drives_move_what_the_plan_says(streamed, monkeypatch):
    program = ZOO["stack_by_index"]()
    # Gradients that wait do so in memory up to here, then on the drive.
    spill_beyond(monkeypatch, 8192)
    step = streamed(program, CLIPPED)
    step.load(program.params, batch=program.batch)
    run(step, program, 3)
    step.store.wait()
    traffic, planned = step.store.metrics.traffic, step.traffic
    assert traffic.drive_read_bytes == planned.drive_read_bytes
    assert traffic.drive_write_bytes == planned.drive_write_bytes
    # Params, and two moments that are not read, as they stay in memory; gradients.
    all_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(program.params))
    assert traffic.drive_write_bytes >= 3 * all_bytes
    assert traffic.drive_read_bytes >= all_bytes
    assert step.metrics.spilled_drive_bytes > 0
