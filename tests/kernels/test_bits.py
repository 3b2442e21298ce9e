"""Compiled kernels against jitted optax on XLA's CPU backend: not one bit differs.

The reference is three jits: gradients, ``tx.update``, ``optax.apply_updates``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import family

from jaxinf.kernels import compiled
from jaxinf.program import trace_init, trace_update

pytestmark = pytest.mark.optimized
BF16 = jnp.bfloat16
SCHEDULE = optax.linear_schedule(0.1, 0.01, 10)
SPECIAL = np.float32([
    0, -0.0, 1e-40, -1e-40, 1.5e-38, -1e-38, 2e-38, 1e-30, -1e-30, 1e-19, 3e-23,
    1e15, -1e15, 1e18, -1e12, 1, -1,
])  # fmt: skip
CASES = {
    "adam": optax.adam(1e-2),
    "adam_schedule": optax.adam(SCHEDULE),
    "adam_eps_root": optax.adam(1e-2, eps_root=1e-8),
    "adam_bfloat16": optax.adam(1e-2, mu_dtype=BF16),
    "adam_nesterov": optax.adam(1e-2, nesterov=True),
    "adamw": optax.adamw(1e-2),
    "adamw_all": optax.adamw(
        SCHEDULE, 0.8, 0.99, 1e-6, eps_root=1e-9, mu_dtype=BF16, weight_decay=0.1
    ),
    "adamw_no_decay": optax.adamw(1e-2, weight_decay=0.0),
    "adamw_clipped": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE, weight_decay=0.1)
    ),
    "adam_clipped_by_half": optax.chain(
        optax.clip_by_global_norm(0.5), optax.adam(1e-2)
    ),
    "adam_hardly_clipped": optax.chain(
        optax.clip_by_global_norm(1e9), optax.adam(1e-2)
    ),
    "sgd": optax.sgd(0.1),
    "sgd_schedule": optax.sgd(SCHEDULE),
    "sgd_rate_1": optax.sgd(1.0),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "momentum_rate_1": optax.sgd(1.0, momentum=0.9),
    "momentum_bfloat16": optax.sgd(SCHEDULE, momentum=0.9, accumulator_dtype=BF16),
    "nesterov": optax.sgd(SCHEDULE, momentum=0.9, nesterov=True),
    "nesterov_bfloat16": optax.sgd(
        0.1, momentum=0.9, nesterov=True, accumulator_dtype=BF16
    ),
    "sgd_decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "adagrad": optax.adagrad(0.1),
    "adagrad_schedule": optax.adagrad(
        SCHEDULE, initial_accumulator_value=0.0, eps=1e-3
    ),
    "lion": optax.lion(1e-2),
    "lion_bfloat16": optax.lion(SCHEDULE, mu_dtype=BF16),
    "lion_no_decay": optax.lion(1e-2, weight_decay=0.0),
    "lion_one_beta": optax.lion(1e-2, b1=0.9, b2=0.9),
}


def numbers(rng, shape):
    """Draws many magnitudes, some denormal or zero, none too large for a square."""
    values = rng.standard_normal(shape) * np.exp(rng.uniform(-12, 3, shape))
    special = rng.choice(SPECIAL, shape)
    picked = (rng.random(shape) < 0.3) & (np.prod(shape) > 1)
    return jnp.asarray(np.where(picked, special, values.astype(np.float32)))


def num_differing(found, expected):
    found, expected = np.ravel(found), np.ravel(expected)
    assert found.dtype == expected.dtype
    words = [x.view(f"u{x.itemsize}") for x in (found, expected)]
    both_nan = np.isnan(found.astype(np.float32)) & np.isnan(expected)
    return int(((words[0] != words[1]) & ~both_nan).sum())


def differing_bits(tx, shapes, num_steps):
    """Counts differing elements of master params, updates, slots over all steps."""
    rng = np.random.default_rng(0)
    params = [numbers(rng, shape) for shape in shapes]
    program, layout = trace_update(tx, params), trace_init(tx, params).layout
    kernels = [compiled(leaf.kernel) for leaf in program.leaves]
    prologue = jax.jit(program.prologue)
    update, apply = jax.jit(tx.update), jax.jit(optax.apply_updates)
    state = jax.jit(tx.init)(params)
    masters = [np.array(value).reshape(-1) for value in params]
    flat = jax.tree.leaves(state)
    slots = [
        [np.array(flat[slot.state_index]).reshape(-1) for slot in leaf.slots]
        for leaf in program.leaves
    ]
    scalars = [flat[i] for i in layout.scalar_indices]
    counts = {"params": 0, "updates": 0, "slots": 0}
    for _ in range(num_steps):
        gradients = [numbers(rng, shape) for shape in shapes]
        scalars, inputs = prologue(
            gradients, [m.reshape(s) for m, s in zip(masters, shapes, strict=True)],
            scalars,
        )  # fmt: skip
        updates, state = update(gradients, state, params)
        params = apply(params, updates)
        flat = jax.tree.leaves(state)
        for index, leaf in enumerate(program.leaves):
            out = np.empty_like(masters[index])
            kernels[index].run(
                gradient=np.asarray(gradients[index]).reshape(-1),
                params=masters[index], slots=slots[index], out=out,
                scalars=[np.asarray(scalar) for scalar in inputs[index].scalars],
                arrays=[np.ravel(array) for array in inputs[index].arrays]
            )  # fmt: skip
            counts["params"] += num_differing(masters[index], params[index])
            counts["updates"] += num_differing(out, updates[index])
            for slot, found in zip(leaf.slots, slots[index], strict=True):
                counts["slots"] += num_differing(found, flat[slot.state_index])
    return counts


NONE = {"params": 0, "updates": 0, "slots": 0}


@pytest.mark.parametrize(
    "name", family(CASES, short=["adamw", "lion_bfloat16", "sgd", "sgd_schedule"])
)
def test_no_bit_differs_from_jitted_optax(name):
    tx = CASES[name]
    assert differing_bits(tx, [(1023,)], 20) == NONE
    # XLA compiles another program for several leaves, which share their scalars.
    assert differing_bits(tx, [(100,), (33, 32), (4, 5, 6), (7,)], 20) == NONE


@pytest.mark.parametrize(
    "name",
    family(
        [
            "adam_eps_root", "adam_bfloat16", "adamw", "adamw_all", "sgd", "nesterov",
            "adagrad", "lion_bfloat16",
        ],
        short=["adamw", "sgd"],
    ),
)  # fmt: skip
def test_leaves_of_one_element(name):
    for shapes in ([(1,)], [()], [(8,), (), (1, 1)]):
        assert differing_bits(CASES[name], shapes, 20) == NONE


@pytest.mark.parametrize("name", family(["adamw", "nesterov", "lion"], short=["lion"]))
def test_a_million_elements(name):
    """XLA splits the loops of such leaves among its threads."""
    assert differing_bits(CASES[name], [(1_000_003,)], 4) == NONE
