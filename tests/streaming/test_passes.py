"""Passes over gradients: how many an optimizer needs, their bits, their failures."""

import re
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import passes_run
import pytest
from passes_run import (
    CHUNKS,
    CLIP,
    MEMORY_BYTES,
    NORMALIZE,
    SHAPES,
    THREE,
    linear,
    tree,
)
from streaming import (
    assert_near,
    assert_same_bits,
    no_room_for_gradients,
    spill_beyond,
)
from zoo import ZOO

import jaxinf
from jaxinf.errors import UnsupportedTransformError
from jaxinf.streaming import passes_for, trace_optimizer
from jaxinf.streaming.update.passes import PassRunner

pytestmark = pytest.mark.optimized

PROGRAM = Path(passes_run.__file__)


def scaled(growth=2.0):
    """Dynamic loss scaling, as for fp16: gradients come with a factor."""

    def init(params):
        del params
        return jnp.float32(1024.0)

    def update(updates, scale, params=None):
        del params
        leaves = jax.tree.leaves(updates)
        is_finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in leaves]))
        updates = jax.tree.map(
            lambda g: jnp.where(is_finite, g / scale, jnp.zeros_like(g)), updates
        )
        return updates, jnp.where(is_finite, growth * scale, scale / 4)

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    ("tx", "num_passes"),
    [
        (optax.adamw(1e-2), 1),
        (optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)), 1),
        (optax.chain(optax.centralize(), optax.sgd(0.1)), 1),
        (optax.lamb(0.1), 1),
        (optax.adafactor(0.1), 1),
        (optax.apply_if_finite(optax.adam(0.1), 3), 2),
        (optax.chain(scaled(), optax.adam(0.1)), 2),
        (optax.chain(CLIP, optax.lamb(0.1)), 2),
        (optax.contrib.prodigy(), 2),
        (THREE, 3),
    ],
)
def test_passes(tx, num_passes):
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    program = trace_optimizer(tx, params)
    assert passes_for(program).num_passes == num_passes


def test_too_many_passes_are_refused_by_name(open_store):
    tx = optax.chain(CLIP, NORMALIZE, optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    program = ZOO["l2_penalty"](depth=2)
    step = jaxinf.stream(program.loss, tx, open_store(), memory_bytes=MEMORY_BYTES)
    with pytest.raises(
        UnsupportedTransformError,
        match=r"at most 3 passes .* needs 4, for \w+ \(from .*clip_by_global_norm",
    ):
        step.load(program.params)
    assert not step.store.exists


def test_more_than_numbers_of_each_leaf_is_refused(open_store):
    tx = optax.chain(optax.flatten(optax.centralize()), optax.sgd(0.1))
    program = ZOO["l2_penalty"](depth=2)
    step = jaxinf.stream(program.loss, tx, open_store(), memory_bytes=MEMORY_BYTES)
    with pytest.raises(UnsupportedTransformError, match="a few numbers of each leaf"):
        step.load(program.params)


# --- bits -------------------------------------------------------------------------


def optax_params(tx, batches):
    """Params by optax: update and sum a jit each."""
    update, apply = jax.jit(tx.update), jax.jit(optax.apply_updates)
    params = tree(0)
    state = jax.jit(tx.init)(params)
    for batch in batches:
        updates, state = update(batch, state, params)
        params = apply(params, updates)
    return params


def streamed(open_store, tx, batches, *, name="store", store=None, **options):
    """Params after streamed steps, and the store."""
    store = store or open_store(name, **CHUNKS)
    with jaxinf.stream(linear, tx, store, memory_bytes=MEMORY_BYTES, **options) as step:
        step.load(tree(0), batch=batches[0])
        for batch in batches:
            step(batch)
        store.wait()
        return store.params(like=tree(0))


@pytest.mark.long
@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(CLIP, optax.adamw(1e-2)),
        optax.apply_if_finite(optax.adam(1e-2), 3),
    ],
    ids=["clipped", "finite"],
)
def test_bits_are_those_of_jitted_optax(tx, open_store):
    batches = [tree(seed) for seed in range(1, 4)]
    assert_same_bits(streamed(open_store, tx, batches), optax_params(tx, batches))


@pytest.mark.long
@pytest.mark.parametrize(
    "tx",
    [
        THREE,
        optax.chain(CLIP, optax.lamb(1e-2)),
    ],
    ids=["three", "lamb"],
)
def test_numbers_of_what_is_clipped(tx, open_store):
    batches = [tree(seed) for seed in range(1, 4)]
    assert_near(streamed(open_store, tx, batches), optax_params(tx, batches), 2e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_block_rms(0.1), optax.adam(1e-2)),
        optax.chain(optax.centralize(), optax.sgd(0.1)),
        optax.lamb(1e-2),
        optax.chain(CLIP, optax.sgd(0.1)),
    ],
    ids=["sums", "whole", "lamb", "norm"],
)
def test_slices_of_stacks(tx, open_store):
    """Each slice's gradient arrives alone; what needs a leaf whole gets it whole."""
    program = ZOO["scan_nested"]()
    vg = jax.jit(jax.grad(program.loss, has_aux=program.has_aux))
    params, state = program.params, tx.init(program.params)
    for _ in range(2):
        gradients = vg(params, program.batch)
        gradients = gradients[0] if program.has_aux else gradients
        updates, state = jax.jit(tx.update)(gradients, state, params)
        params = optax.apply_updates(params, updates)
    step = jaxinf.stream(
        program.loss,
        tx,
        open_store(**CHUNKS),
        memory_bytes=MEMORY_BYTES,
        has_aux=program.has_aux,
    )
    step.load(program.params, batch=program.batch)
    for _ in range(2):
        step(program.batch)
    assert_near(step.store.params(like=program.params), params, 2e-5)


@pytest.mark.long
# --- failures -----------------------------------------------------------------------


@pytest.mark.long
def test_killed_between_passes_the_committed_step_is_whole(
    open_store, run_python, place
):
    killed = run_python(PROGRAM, place / "store", "4", check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with jaxinf.open_store(place / "store") as store:
        assert store.step == 1  # of two calls a step the second of step 2
    rest = [tree(2), tree(3)]
    found = streamed(open_store, THREE, rest)
    whole = [tree(seed) for seed in range(1, 4)]
    assert_same_bits(found, streamed(open_store, THREE, whole, name="whole"))


def test_a_failure_between_passes_gives_the_step_up(open_store, monkeypatch):
    batches = [tree(seed) for seed in range(1, 4)]
    expected = streamed(open_store, THREE, batches, name="whole")
    step = jaxinf.stream(linear, THREE, open_store(**CHUNKS), memory_bytes=MEMORY_BYTES)
    step.load(tree(0), batch=batches[0])
    step(batches[0])
    real = PassRunner.advance

    def fail(self):
        raise RuntimeError("between passes")

    monkeypatch.setattr(PassRunner, "advance", fail)
    with pytest.raises(RuntimeError, match="between passes"):
        step(batches[1])
    monkeypatch.setattr(PassRunner, "advance", real)
    assert step.store.step == 1
    for batch in batches[1:]:
        step(batch)
    step.store.wait()
    assert_same_bits(step.store.params(like=tree(0)), expected)


@pytest.mark.long
def test_a_spill_without_room_gives_the_step_up(open_store, monkeypatch):
    spill_beyond(monkeypatch, 0)
    batches = [tree(seed) for seed in range(1, 3)]
    step = jaxinf.stream(linear, THREE, open_store(**CHUNKS), memory_bytes=MEMORY_BYTES)
    step.load(tree(0), batch=batches[0])
    step(batches[0])
    refused = pytest.raises(jaxinf.StoreSpaceError, match=r"file of gradients.*write")
    with no_room_for_gradients(), refused:
        step(batches[1])
    step(batches[1])
    step.store.wait()
    assert_near(step.store.params(like=tree(0)), optax_params(THREE, batches), 2e-6)


# --- compression, cards, other arguments ----------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("compress", "tx"),
    [
        (jaxinf.top_k(0.1), optax.chain(CLIP, optax.adamw(1e-2))),
        (
            jaxinf.top_k(0.1, warmup_steps=1, error_feedback=True),
            optax.adamw(1e-2),
        ),
    ],
    ids=["clipped", "feedback"],
)
def test_compressed_as_without_streaming(compress, tx, open_store):
    batches = [tree(seed) for seed in range(1, 4)]
    store = open_store("smart", **CHUNKS)
    smart = jaxinf.smart_update(tx, store, compress=compress)
    params = tree(0)
    state = smart.init(params)
    update = jax.jit(smart.update)
    for batch in batches:
        updates, state = update(batch, state, params)
        params = optax.apply_updates(params, updates)
    store.wait(state)
    assert_same_bits(streamed(open_store, tx, batches, compress=compress), params)


@pytest.mark.long
def test_a_plan_counts_the_error_feedback_that_is_read(open_store):
    compress = jaxinf.top_k(0.1, error_feedback=True)
    options = {"memory_bytes": MEMORY_BYTES, "compress": compress}
    step = jaxinf.stream(linear, optax.adam(1e-2), open_store(**CHUNKS), **options)
    step.load(tree(0), batch=tree(1))
    for seed in range(1, 4):
        step(tree(seed))
    step.store.wait()
    assert step.store.metrics.traffic.drive_read_bytes == step.traffic.drive_read_bytes


def test_a_compressed_gradient_that_is_not_finite(open_store):
    step = jaxinf.stream(
        linear,
        optax.adam(1e-2),
        open_store(**CHUNKS),
        memory_bytes=MEMORY_BYTES,
        compress=jaxinf.top_k(0.1),
    )
    step.load(tree(0))
    bad = tree(1)
    bad["w"] = bad["w"].at[0, 0].set(jnp.nan)
    with pytest.raises(jaxinf.NonFiniteGradientError, match="gradient of params/w"):
        step(bad)
    step(tree(1))
    assert step.store.step == 1


def test_what_compression_cannot_have_is_refused(open_store):
    step = jaxinf.stream(
        linear,
        optax.lamb(0.1),
        open_store(),
        memory_bytes=MEMORY_BYTES,
        compress=jaxinf.top_k(0.1),
    )
    with pytest.raises(UnsupportedTransformError, match="of the whole update"):
        step.load(tree(0))


@pytest.mark.cards
@pytest.mark.parametrize(
    "options", [{}, {"compress": jaxinf.top_k(0.1)}], ids=["dense", "sparse"]
)
def test_emulated_cards_have_the_bits_of_the_host(options, open_store):
    batches = [tree(seed) for seed in range(1, 4)]
    tx = optax.chain(CLIP, optax.adamw(1e-2))
    found = [
        streamed(
            open_store, tx, batches, store=open_store(csd, csd=csd, **CHUNKS), **options
        )
        for csd in ("host", "emulated")
    ]
    assert_same_bits(*found)


def test_extra_args_are_those_of_the_step(open_store):
    def by_factor(updates, state, params=None, *, factor, **_):
        del params
        return jax.tree.map(lambda g: -factor * g, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), by_factor)
    step = jaxinf.stream(
        linear,
        tx,
        open_store(**CHUNKS),
        memory_bytes=MEMORY_BYTES,
        extra_args={"factor": 0.5},
    )
    step.load(tree(0))
    step(tree(1))
    step(tree(2), {"factor": 2.0})
    step.store.wait()
    expected = jax.tree.map(
        lambda p, a, b: p - 0.5 * a - 2.0 * b, tree(0), tree(1), tree(2)
    )
    found = step.store.params(like=tree(0))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected
    )
    with pytest.raises(ValueError, match=r"extra_args: expected .*factor"):
        step(tree(1), {"other": 1.0})


def test_a_missing_argument_is_named(open_store):
    step = jaxinf.stream(
        linear, optax.polyak_sgd(), open_store(), memory_bytes=MEMORY_BYTES
    )
    with pytest.raises(TypeError, match=re.escape('extra_args={"value": 0.0}')):
        step.load(tree(0))
