"""Passes over gradients: how many an optimizer needs, their bits, their failures."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from streaming import (
    CHUNKS,
    assert_near,
    assert_same_bits,
    moved_as_planned,
    run,
)
from zoo import ZOO

import jaxinf
from jaxinf.errors import UnsupportedTransformError
from jaxinf.streaming import passes_for, trace_optimizer
from jaxinf.streaming.update.kernel_inputs import KernelInputs

pytestmark = pytest.mark.optimized

MEMORY_BYTES = 256 << 20
CLIP, NORMALIZE = optax.clip_by_global_norm(0.1), optax.normalize_by_update_norm()
THREE = optax.chain(CLIP, NORMALIZE, optax.adamw(1e-2))
SHAPES = {"b": (48,), "w": (40, 48), "z": ()}


def linear(params, batch):
    parts = jax.tree.map(lambda p, g: jnp.sum(p * g), params, batch)
    return sum(jax.tree.leaves(parts))


def tree_of(seed):
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    pairs = zip(SHAPES.items(), keys, strict=True)
    return {name: jax.random.normal(key, shape) for (name, shape), key in pairs}


BATCHES = [tree_of(seed) for seed in range(1, 4)]
PARAMS = tree_of(0)
CLIPPED = optax.chain(CLIP, optax.adamw(1e-2))


def scaled():
    """Dynamic loss scaling, as for fp16: gradients come with a factor."""

    def update(updates, scale, params=None):
        del params
        leaves = jax.tree.leaves(updates)
        is_finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in leaves]))
        updates = jax.tree.map(
            lambda g: jnp.where(is_finite, g / scale, jnp.zeros_like(g)), updates
        )
        return updates, jnp.where(is_finite, 2 * scale, scale / 4)

    return optax.GradientTransformation(lambda params: jnp.float32(1024.0), update)


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


@pytest.fixture
def opened(open_store):
    """Opens steps of the linear loss, with its params."""

    def make(tx, name="store", store=None, **options):
        store = store or open_store(name, **CHUNKS)
        step = jaxinf.stream(linear, tx, store, memory_bytes=MEMORY_BYTES, **options)
        step.load(PARAMS)
        return step

    return make


FOUR = optax.chain(CLIP, NORMALIZE, optax.clip_by_global_norm(0.5), optax.sgd(0.1))
TOP_K = {"compress": jaxinf.top_k(0.1)}


@pytest.mark.parametrize(
    ("tx", "options", "error", "message"),
    [
        (FOUR, {}, UnsupportedTransformError, r"at most 3 .* needs 4, for \w+ \(from "),
        (
            optax.chain(optax.flatten(optax.centralize()), optax.sgd(0.1)),
            *({}, UnsupportedTransformError, "a few numbers of each leaf"),
        ),
        (optax.lamb(0.1), TOP_K, UnsupportedTransformError, "of the whole update"),
        (optax.polyak_sgd(), {}, TypeError, re.escape('extra_args={"value": 0.0}')),
    ],
)
def test_an_optimizer_is_refused_by_name(
    tx, options, error, message, opened, open_store
):
    store = open_store()
    with pytest.raises(error, match=message):
        opened(tx, store=store, **options)
    assert not store.exists


# --- bits -------------------------------------------------------------------------


def optax_params(tx, batches=BATCHES):
    """Params by optax: update and sum a jit each."""
    update, apply = jax.jit(tx.update), jax.jit(optax.apply_updates)
    params, state = PARAMS, jax.jit(tx.init)(PARAMS)
    for batch in batches:
        updates, state = update(batch, state, params)
        params = apply(params, updates)
    return params


def trained(step, batches=BATCHES):
    """Params after streamed steps."""
    with step:
        for batch in batches:
            step(batch)
        step.store.wait()
        return step.store.params(like=PARAMS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("tx", "atol"),
    [
        (CLIPPED, None),
        (optax.apply_if_finite(optax.adam(1e-2), 3), None),
        (THREE, 2e-6),
        (optax.chain(CLIP, optax.lamb(1e-2)), 2e-6),
    ],
    ids=["clipped", "finite", "three", "lamb"],
)
def test_params_are_those_of_jitted_optax(tx, atol, opened):
    found, expected = trained(opened(tx)), optax_params(tx)
    if atol is None:
        assert_same_bits(found, expected)
    else:  # norms of what other passes have changed are sums of their own
        assert_near(found, expected, atol)


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
def test_slices_of_stacks(tx, streamed):
    """Each slice's gradient arrives alone; what needs a leaf whole gets it whole."""
    program = ZOO["scan_nested"]()
    gradient = jax.jit(jax.grad(program.loss, has_aux=True))
    params, state = program.params, tx.init(program.params)
    for _ in range(2):
        gradients, _ = gradient(params, program.batch)
        updates, state = jax.jit(tx.update)(gradients, state, params)
        params = optax.apply_updates(params, updates)
    step = streamed(program, tx)
    step.load(program.params, batch=program.batch)
    run(step, program, 2)
    assert_near(step.store.params(like=program.params), params, 2e-5)


# --- failures -----------------------------------------------------------------------


def test_a_failure_between_passes_gives_the_step_up(opened, monkeypatch):
    expected = trained(opened(THREE, "whole"))
    step = opened(THREE)
    step(BATCHES[0])

    def fail(self):
        raise RuntimeError("between passes")

    with monkeypatch.context() as patch:
        patch.setattr(KernelInputs, "advance", fail)
        with pytest.raises(RuntimeError, match="between passes"):
            step(BATCHES[1])
    assert step.store.step == 1
    assert_same_bits(trained(step, BATCHES[1:]), expected)


# --- compression, cards, other arguments ----------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("compress", "tx"),
    [
        (jaxinf.top_k(0.1), CLIPPED),
        (jaxinf.top_k(0.1, warmup_steps=1, error_feedback=True), optax.adamw(1e-2)),
    ],
    ids=["clipped", "feedback"],
)
def test_compressed_as_without_streaming(compress, tx, opened, open_store):
    store = open_store("smart", **CHUNKS)
    smart = jaxinf.smart_update(tx, store, compress=compress)
    params, state = PARAMS, smart.init(PARAMS)
    update = jax.jit(smart.update)
    for batch in BATCHES:
        updates, state = update(batch, state, params)
        params = optax.apply_updates(params, updates)
    store.wait(state)
    assert_same_bits(trained(opened(tx, compress=compress)), params)


@pytest.mark.long
def test_a_plan_counts_the_error_feedback_that_is_read(opened):
    step = opened(optax.adam(1e-2), compress=jaxinf.top_k(0.1, error_feedback=True))
    for batch in BATCHES:
        step(batch)
    moved_as_planned(step, "drive_read_bytes")


def test_a_compressed_gradient_that_is_not_finite(opened):
    step = opened(optax.adam(1e-2), **TOP_K)
    bad = BATCHES[0] | {"w": BATCHES[0]["w"].at[0, 0].set(jnp.nan)}
    with pytest.raises(jaxinf.NonFiniteGradientError, match="gradient of params/w"):
        step(bad)
    step(BATCHES[0])
    assert step.store.step == 1


@pytest.mark.cards
@pytest.mark.parametrize("options", [{}, TOP_K], ids=["dense", "sparse"])
def test_emulated_cards_have_the_bits_of_the_host(options, opened, open_store):
    found = [
        trained(opened(CLIPPED, store=open_store(csd, csd=csd, **CHUNKS), **options))
        for csd in ("host", "emulated")
    ]
    assert_same_bits(*found)


def test_extra_args_are_those_of_the_step(opened):
    def by_factor(updates, state, params=None, *, factor, **_):
        del params
        return jax.tree.map(lambda g: -factor * g, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), by_factor)
    step = opened(tx, extra_args={"factor": 0.5})
    step(BATCHES[0])
    step(BATCHES[1], {"factor": 2.0})
    step.store.wait()
    expected = jax.tree.map(lambda p, a, b: p - 0.5 * a - 2.0 * b, PARAMS, *BATCHES[:2])
    assert_near(step.store.params(like=PARAMS), expected, 1e-5)
    with pytest.raises(ValueError, match=r"extra_args: expected .*factor"):
        step(BATCHES[0], {"other": 1.0})
