"""Every optimizer: prologue and kernels against jitted optax, step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import family

from jaxinf.program import trace_init, trace_update

pytestmark = pytest.mark.optimized

DECAY = optax.linear_schedule(0.1, 0.01, 3)


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def labels(params):
    return jax.tree.map(lambda leaf: "adam" if leaf.ndim > 1 else "frozen", params)


def scheduled(learning_rate):
    return optax.inject_hyperparams(optax.adamw)(learning_rate=learning_rate)


OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "adam_nesterov": optax.adam(1e-2, nesterov=True, eps_root=1e-8),
    "adamw": optax.adamw(DECAY, weight_decay=0.1),
    "adamw_mask": optax.adamw(1e-2, weight_decay=0.1, mask=matrices),
    "adamax": optax.adamax(1e-2),
    "adabelief": optax.adabelief(1e-2),
    "adadelta": optax.adadelta(1e-2),
    "adan": optax.adan(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "add_decayed_weights": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "add_noise": optax.chain(
        optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.adam(1e-2)
    ),
    "adagrad": optax.adagrad(1e-1),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "centralize": optax.chain(optax.centralize(), optax.sgd(0.1, momentum=0.9)),
    "clip": optax.chain(optax.clip(0.5), optax.sgd(0.1)),
    "clip_by_block_rms": optax.chain(optax.clip_by_block_rms(0.5), optax.adam(0.1)),
    "clip_by_global_norm": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(DECAY)
    ),
    "clip_by_global_norm_loose": optax.chain(
        optax.clip_by_global_norm(1e3), optax.adamw(DECAY)
    ),
    "ema": optax.chain(optax.ema(0.9), optax.scale(-0.1)),
    "empty": optax.identity(),
    "inject_hyperparams": scheduled(DECAY),
    "lars": optax.lars(0.1),
    "lion": optax.lion(1e-2),
    "masked": optax.masked(optax.adam(1e-2), matrices),
    "multi_steps": optax.MultiSteps(optax.adamw(DECAY), 2),
    "multi_steps_transformation": optax.MultiSteps(
        optax.chain(optax.clip(0.5), optax.sgd(0.1, momentum=0.9)), 3
    ).gradient_transformation(),
    "multi_transform": optax.multi_transform(
        {"adam": optax.adam(1e-2), "frozen": optax.set_to_zero()}, labels
    ),
    "nadamw": optax.nadamw(1e-2),
    "novograd": optax.novograd(1e-2),
    "optimistic_adam": optax.optimistic_adam_v2(1e-2),
    "radam": optax.radam(1e-2, threshold=2.0),
    "rmsprop": optax.rmsprop(1e-2, centered=True, momentum=0.9),
    "rprop": optax.rprop(1e-2),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "sgd": optax.sgd(0.1),
    "sgd_momentum": optax.sgd(DECAY, momentum=0.9),
    "sgd_nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sign": optax.sign_sgd(0.1),
    "yogi": optax.yogi(1e-2),
}


# Masks, a reduction of all leaves, and those whose compilation is quick.
QUICK = ("adamw_mask", "clip_by_global_norm")
QUICK += ("add_decayed_weights", "clip", "ema", "empty", "sgd", "sign")


@pytest.mark.parametrize("name", family(OPTIMIZERS, short=QUICK))
def test_a_program_computes_what_optax_computes(name, compare, tree):
    gradients = [tree(seed) for seed in range(1, 6)]
    # The update of schedule_free is a difference of params, with errors of their size.
    scale = 3.0 if name == "schedule_free" else None
    compare(OPTIMIZERS[name], tree(0), gradients, scale=scale)


def by_factor(updates, state, params=None, *, factor, flags, **_):
    del params
    sign = -1.0 if flags["negate"] else 1.0
    return jax.tree.map(lambda g: sign * factor * g, updates), state


def test_extra_args_are_inputs_or_fixed(near, tree):
    tx = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), by_factor)
    traced = {"factor": 1.0, "flags": {"negate": True}}
    program = trace_update(tx, tree(0), traced)
    leaves = jax.tree.leaves(tree(0))

    def scalars(extra_args):
        _, inputs = program.prologue(leaves, leaves, [], extra_args)
        return [float(scalar) for scalar in inputs[0].scalars]

    assert scalars({**traced, "factor": 2.0}) == [-2.0]
    assert scalars({**traced, "factor": jnp.float32(3.0)}) == [-3.0]
    with pytest.raises(ValueError, match=r"expected True, as .* traced, found False"):
        scalars({"factor": 2.0, "flags": {"negate": False}})
    with pytest.raises(ValueError, match="extra_args: expected PyTreeDef"):
        scalars({"factor": 2.0})
    with pytest.raises(ValueError, match=r"extra_args: expected ShapeDtypeStruct"):
        scalars({**traced, "factor": jnp.ones(2)})


@pytest.mark.long
def test_reduce_on_plateau_takes_the_loss(compare, tree):
    tx = optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1))
    gradients = [tree(seed) for seed in range(1, 5)]
    compare(tx, tree(0), gradients, {"value": jnp.float32(3.0)})


def test_everything_works_inside_a_trace(near, tree):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    outside = near(tx, tree(0))

    @jax.jit
    def prologue(params, gradients):
        leaves = jax.tree.leaves(params)
        program, init = trace_update(tx, params), trace_init(tx, params)
        scalar_state = init.prologue(leaves)[0]
        return program.prologue(jax.tree.leaves(gradients), leaves, scalar_state)

    found = prologue(tree(0), tree(1))
    expected = outside.prologue(
        jax.tree.leaves(tree(1)), outside.device, outside.scalar_state
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "name",
    family(["adamw", "clip_by_global_norm", "lion", "sgd"], short=["lion", "sgd"]),
)
def test_16_bit_params_have_a_float32_master(name, dtype, near, tree):
    """The reference: optax on the float32 master with widened gradients."""
    tx = OPTIMIZERS[name]
    narrow = jax.tree.map(lambda x: x.astype(dtype), tree(0))
    loop = near(tx, narrow)
    master = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    state = tx.init(master)
    for seed in range(1, 4):
        gradient = jax.tree.map(lambda x: x.astype(dtype), tree(seed))
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), gradient)
        updates, state = jax.jit(tx.update)(wide, state, master)
        master = optax.apply_updates(master, updates)
        new = loop.step(gradient)
        for found, kept, expected in zip(
            jax.tree.leaves(new), jax.tree.leaves(loop.masters()),
            jax.tree.leaves(master), strict=True,
        ):  # fmt: skip
            assert found.dtype == dtype
            assert (found == kept.astype(dtype)).all()
            assert abs(kept - expected).max() <= 4e-6 * abs(expected).max()


@pytest.mark.long
def test_bfloat16_moments(compare, tree):
    """XLA may keep excess precision between bfloat16 operations: 2 units of 2**-8."""
    tx = optax.adam(1e-2, mu_dtype=jnp.bfloat16)
    near = compare(tx, tree(0), [tree(1)], tolerance=2**-7)
    (mu, nu) = near.program.leaves[0].slots
    assert (mu.name, str(mu.dtype)) == ("mu", "bfloat16")
    assert (nu.name, str(nu.dtype)) == ("nu", "float32")
