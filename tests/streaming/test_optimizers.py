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

import jaxinf

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
# One pass, element by element, without arguments: as adamw, but for their kernels,
# which the contract of optimizers has.
AS_ADAMW = set(
    "sgd; sgd, nesterov; adam; adabelief; adadelta; adamax; adamaxw; adan; amsgrad; "
    "nadam; nadamw; optimistic_adam; optimistic_adam_v2; optimistic_gradient_descent; "
    "radam; rmsprop; rprop; sign_sgd; signum; yogi; contrib.acprop; contrib.ademamix; "
    "contrib.adopt; contrib.madgrad; contrib.simplified_ademamix; add_decayed_weights; "
    "chain; clip; ema; identity; scale; stateless; stateless_with_tree_map; trace; "
    "with_extra_args_support; zero_nans; keep_params_nonnegative; named_chain".split(
        "; "
    )
)
NUM_STEPS = 3
MEMORY_BYTES = 64 << 20
# Units in the last place of a leaf's largest element, after all steps.
MOST_UNITS = 17
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


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
    """Returns the optimizer, whose updates are steps, and examples of its arguments."""
    case = CASES[name]
    with warnings.catch_warnings(action="ignore"):  # optax deprecates some
        tx = case.make()
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
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
    traffic, planned = step.store.metrics.traffic, step.traffic
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
