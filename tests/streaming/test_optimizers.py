"""Every optimizer of optax, streamed: params against those of jitted optax.

The loss is linear in the params, so that gradients have the same bits in any program,
and every difference is the optimizer's.
"""

import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from classify_optimizers import BITS, cases
from families import family
from inject import raising
from streaming_cases import (
    CHUNKS,
    assert_near,
    assert_same_bits,
    by_optax,
    planned_bytes,
    run,
)
from zoo import ZOO

import jaxinf
from jaxinf.errors import UnsupportedTransformError
from jaxinf.streaming.update.gradient_passes import PassRunner

pytestmark = pytest.mark.optimized

PAGE = Path(__file__).parents[2] / "docs/optimizers.md"
ROWS = re.findall(
    r"^\| `([\w.]+)`(, \w+)? \| \w+ \| ([\w, ]+) \|", PAGE.read_text(), re.MULTILINE
)
STREAMED = [name + form for name, form, how in ROWS if how != "refused"]
# Transformations of which other optimizers are made are tested as parts of these.
TESTED = [name for name in STREAMED if "scale_by" not in name]
CASES = cases()
# `make test` has one optimizer for each way of working, of a family of a hundred.
IN_SHORT = {"adamw", "lamb", "contrib.prodigy"}
# One pass, element by element: as adamw, but for kernels, which their contract has.
AT_ONCE = {name + form for name, form, how in ROWS if how == "at once"}
AS_ADAMW = {*TESTED} & AT_ONCE - IN_SHORT
NUM_STEPS = 3
MEMORY_BYTES = 64 << 20
# Units in the last place of a leaf's largest element, after all steps.
MOST_UNITS = 17


def tree(seed):
    kernel, bias = jax.random.split(jax.random.key(seed))
    return {
        "bias": jax.random.normal(bias, (48,)),
        "kernel": jax.random.normal(kernel, (40, 48)),
    }


def linear(params, batch):
    parts = jax.tree.map(lambda p, g: jnp.sum(p * g), params, batch)
    return sum(jax.tree.leaves(parts))


def quadratic(params, *_, **__):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)) / 2


def make(name):
    case = CASES[name]
    with warnings.catch_warnings(action="ignore"):  # optax deprecates some
        tx = case.make()
    tx = tx if case.descends else optax.chain(tx, optax.sgd(0.1))
    extra_args = {"value": 0.0, "obj_fn": quadratic}
    return tx, {name: extra_args[name] for name in case.extra_args(tree(0))}


def in_memory(tx, extra_args, params, batches, losses):
    """Params by optax, update and sum a jit each, after each step."""
    tx = optax.with_extra_args_support(tx)
    update = jax.jit(lambda g, s, p, given: tx.update(g, s, p, **extra_args | given))
    apply, state = jax.jit(optax.apply_updates), jax.jit(tx.init)(params)
    for batch, loss in zip(batches, losses, strict=True):
        given = {"value": loss} if "value" in extra_args else {}
        updates, state = update(batch, state, params, given)
        params = apply(params, updates)
    return params


def units(found, expected):
    """The largest difference, in units of the leaf's largest element."""
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    unit = np.spacing(np.float32(np.abs(expected).max(initial=1e-30)))
    return np.abs(found - expected).max(initial=0) / unit


def train(name, open_store):
    tx, extra_args = make(name)
    params = CASES[name].params(tree(0))
    batches = [CASES[name].params(tree(seed)) for seed in range(1, NUM_STEPS + 1)]
    step = jaxinf.stream(
        linear, tx, open_store(), memory_bytes=MEMORY_BYTES, extra_args=extra_args
    )
    step.load(params, batch=batches[0])
    losses = [step(batch)[0] for batch in batches]
    step.store.wait()
    expected = in_memory(tx, extra_args, params, batches, losses)
    return step, expected


@pytest.mark.long
@pytest.mark.parametrize("name", family(TESTED, short=IN_SHORT, beyond=AS_ADAMW))
def test_an_optimizer_is_that_of_optax(name, open_store):
    has_bits = name.split(",")[0] in BITS
    step, expected = train(name, open_store)
    found = step.store.params(like=expected)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        assert units(one, other) <= (0 if has_bits else MOST_UNITS)
    traffic, planned = step.store.metrics.traffic, planned_bytes(step)
    assert traffic.drive_read_bytes <= planned.drive_read_bytes
    assert traffic.drive_write_bytes <= planned.drive_write_bytes


@pytest.mark.long
def test_what_optax_wraps_is_known_by_its_state(place):
    def loss_of(params, rows):
        return jnp.mean(rows @ params["w"])

    params, rows = {"w": jnp.ones((8, 4))}, jnp.ones((2, 8))
    tx = optax.apply_if_finite(optax.sgd(1.0), 2)
    given = {"memory_bytes": 1 << 26, "nonfinite": "allow"}
    stored = jaxinf.stream(loss_of, tx, place / "store", **given)
    in_memory = jaxinf.stream_in_memory(loss_of, tx, **given)
    for step in (stored, in_memory):
        step.init(lambda: params, batch=rows)
        step(rows * jnp.inf)
        assert [float(step(rows)[0]), float(step(rows)[0]) < 8] == [8, True]
    stored.close()


CLIP, NORMALIZE = optax.clip_by_global_norm(0.1), optax.normalize_by_update_norm()
THREE = optax.chain(CLIP, NORMALIZE, optax.adamw(1e-2))


PARAMS, *BATCHES = ({**tree(seed), "scale": np.float32(seed + 1)} for seed in range(4))
CLIPPED = optax.chain(CLIP, optax.adamw(1e-2))


@pytest.fixture
def opened(open_store):
    def make(tx, name="store", store=None, **options):
        store = store or open_store(name, **CHUNKS)
        step = jaxinf.stream(linear, tx, store, memory_bytes=MEMORY_BYTES, **options)
        step.load(PARAMS)
        return step

    return make


FOUR = optax.chain(CLIP, NORMALIZE, optax.clip_by_global_norm(0.5), optax.sgd(0.1))
TOP_K, ERROR = {"compress": jaxinf.top_k(0.1)}, UnsupportedTransformError


@pytest.mark.parametrize(
    ("tx", "options", "error", "message"),
    [
        (FOUR, {}, ERROR, r"at most 3 .* needs 4, for \w+ \(from "),
        (optax.flatten(optax.centralize()), {}, ERROR, "a few numbers of each leaf"),
        (optax.lamb(0.1), TOP_K, ERROR, "a quantity of the whole, such"),
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


def params_after(step, batches=BATCHES):
    with step:
        for batch in batches:
            step(batch)
        step.store.wait()
        return step.store.params(like=PARAMS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("tx", "atol"),
    [(CLIPPED, None), (THREE, 2e-6), (optax.chain(CLIP, optax.lamb(1e-2)), 2e-6)],
    ids=["clipped", "three", "lamb"],
)
def test_params_are_those_of_jitted_optax(tx, atol, opened):
    found, expected = (
        params_after(opened(tx)),
        in_memory(tx, {}, PARAMS, BATCHES, [0.0] * 3),
    )
    if atol is None:
        assert_same_bits(found, expected)
    else:  # norms of what other passes have changed are sums of their own
        assert_near(found, expected, atol)


def of_a_shared_number():
    """Updates by a bfloat16 number that also another number of each leaf takes."""

    def update(updates, count, params=None):
        scale = 1 / (3 + count).astype(jnp.bfloat16)

        def scaled(x):
            size = jnp.max(jnp.abs(x)).astype(jnp.bfloat16) * scale
            step = x.astype(jnp.bfloat16) * scale
            return -step.astype(x.dtype) / (1 + size.astype(x.dtype))

        return jax.tree.map(scaled, updates), count + 1

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


def test_a_number_of_a_leaf_and_of_its_kernel(opened):
    tx = of_a_shared_number()
    found = params_after(opened(tx))
    # XLA may leave out that a product is rounded to 16 bits.
    assert_near(found, in_memory(tx, {}, PARAMS, BATCHES, [0.0] * 3), 2e-2)


@pytest.mark.long
@pytest.mark.parametrize(
    "tx",
    [optax.chain(optax.centralize(), optax.sgd(0.1)), optax.lamb(1e-2)],
    ids=["whole", "lamb"],
)
def test_slices_of_stacks(tx, streamed):
    """Each slice's gradient arrives alone; what needs a leaf whole gets it whole."""
    program = ZOO["scan_nested"]()
    _, params = by_optax(program, tx, [program.batch] * 2)
    step = streamed(program, tx)
    step.load(program.params, batch=program.batch)
    run(step, program, 2)
    assert_near(step.store.params(like=program.params), params, 2e-5)


def test_a_failure_between_passes_gives_the_step_up(opened, monkeypatch):
    expected = params_after(opened(THREE, "whole"))
    step = opened(THREE)
    step(BATCHES[0])
    with monkeypatch.context() as patch:
        fail = raising(RuntimeError("between passes"))
        patch.setattr(PassRunner, "advance", fail)
        with pytest.raises(RuntimeError, match="between passes"):
            step(BATCHES[1])
    assert step.store.step == 1
    assert_same_bits(params_after(step, BATCHES[1:]), expected)


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
    assert_same_bits(params_after(opened(tx, compress=compress)), params)


def test_a_compressed_gradient_that_is_not_finite(opened):
    step = opened(optax.adam(1e-2), **TOP_K)
    bad = BATCHES[0] | {"kernel": BATCHES[0]["kernel"].at[0, 0].set(jnp.nan)}
    with pytest.raises(jaxinf.NonFiniteGradientError, match="of params/kernel"):
        step(bad)
    step(BATCHES[0])
    assert step.store.step == 1


@pytest.mark.cards
@pytest.mark.parametrize("options", [{}, TOP_K], ids=["dense", "sparse"])
def test_emulated_cards_have_the_bits_of_the_host(options, opened, open_store):
    found = [
        params_after(
            opened(CLIPPED, store=open_store(csd, csd=csd, **CHUNKS), **options)
        )
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
