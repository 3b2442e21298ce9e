"""`--optimizer` by optax's names, `--optimizer-args`, and the reference for bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jaxinf_models import GPT2Config, make_model, split

from jaxinf.command_line import UsageError
from jaxinf.compat import all_equations
from jaxinf.train.config import TrainConfig
from jaxinf.train.optimizers import check_optimizer, make_optimizer, make_schedule
from jaxinf.train.step import make_value_and_grad

pytestmark = pytest.mark.optimized("long")

TINY = GPT2Config(32, 8, num_layers=1, num_heads=1, num_features=8)
PARAMS = {"w": jnp.linspace(-1, 1, 12).reshape(3, 4), "b": jnp.ones(4)}
FIXED = {"schedule": "constant", "warmup_steps": 0, "clip_norm": 0.0}


def config(optimizer="adamw", *words, learning_rate=0.01, **options):
    options = FIXED | options
    return TrainConfig(
        optimizer=optimizer,
        optimizer_args=words,
        learning_rate=learning_rate,
        **options,
    )


def updates_of(tx, num_steps=3):
    state = tx.init(PARAMS)
    for _ in range(num_steps):
        updates, state = tx.update(PARAMS, state, PARAMS)
    return updates


@pytest.mark.parametrize(
    ("optimizer", "words", "expected"),
    [
        ("adamw", (), optax.adamw(0.01, weight_decay=0.1)),
        ("adamw", ("weight_decay=0",), optax.adamw(0.01, weight_decay=0.0)),
        ("adamw", ("b2=0.9", "mu_dtype=bfloat16", "mask=none"),
         optax.adamw(0.01, b2=0.9, weight_decay=0.1, mu_dtype="bfloat16")),
        ("sgd", ("nesterov=True",), optax.sgd(0.01, 0.9, nesterov=True)),
        ("sgd", ("momentum=none",), optax.sgd(0.01)),
        ("radam", ("threshold=2",), optax.radam(0.01, threshold=2)),
        ("prodigy", ("betas=0.8,0.9",), optax.contrib.prodigy(0.01, (0.8, 0.9))),
    ],
)  # fmt: skip
def test_arguments_are_optaxs(optimizer, words, expected):
    found = updates_of(make_optimizer(config(optimizer, *words)))
    for name, value in updates_of(expected).items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 8 / 9, 7 / 9, 5 / 9, 1 / 9]),
        ("wsd", [0.5, 1, 1, 1, 1, 0.5]),
    ],
)
def test_schedules(schedule, expected):
    options = {"schedule": schedule, "warmup_steps": 1, "steps": 10}
    rate = make_schedule(config(learning_rate=1.0, **options))
    found = [float(rate(count)) for count in (0, 1, 2, 3, 5, 9)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.long
def test_gradients_of_parts_and_computed_again_are_those_of_the_whole():
    graphdef, params = split(make_model(TINY, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (6, 9), np.int32)
    weights = rng.integers(0, 2, (6, 8)) * np.arange(6)[:, None].astype(bool)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    batch |= {"weights": weights.astype(np.float32)}  # a row has none
    found, products = [], []
    for own in ({"policy": "keep"}, {"policy": "recompute"}, {"micro_batches": 3}):
        config = TrainConfig(freeze=("wte/*", "wpe*"), **own)
        function = make_value_and_grad(config, graphdef)
        found.append(jax.jit(function)(params, batch))
        equations = all_equations(jax.make_jaxpr(function)(params, batch).jaxpr)
        names = [eqn.primitive.name for eqn in equations]
        products.append(names.count("dot_general"))
    assert products[1] > products[0]  # XLA of a CPU saves no memory by it
    whole, *others = found
    assert len(jax.tree.leaves(whole)) < len(jax.tree.leaves((0, params)))
    for other in others:
        assert jax.tree.structure(whole) == jax.tree.structure(other)
        for one, two in zip(*map(jax.tree.leaves, (whole, other)), strict=True):
            assert one.dtype == two.dtype
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "words", "expected"),
    [
        ("adamz", (), "got 'adamz'; did you mean adam or "),
        ("xyz", (), "got 'xyz'; docs/optimizers.md names them"),
        ("chain", (), "expected an optimizer of optax or optax.contrib"),
        ("adamw", ("b3=1",), "b3=1: expected .* once; adamw has b1, b2, eps, "),
        ("adamw", ("b2=",), "b2=: expected KEY=VALUE"),
        ("adamw", ("b1=true",), "b1=true: expected a number"),
        ("adamw", ("b2=high",), "b2=high: expected arguments that optax takes"),
        ("adamw", ("weight_decay=high",), "could not convert string to float"),
        ("adamw", ("b2=0.9", "b2=0.8"), "b2=0.8: expected KEY=VALUE, each key once"),
        ("adamw", ("learning_rate=1",), r"\(and --learning-rate\)"),
        ("lbfgs", ("memory_size=2.5",), "memory_size=2.5: expected arguments that opt"),
        ("prodigy", ("betas=0.9",), "betas=0.9: .*optax says: "),
        ("dpsgd", ("seed=0",), "missing 2 required .*: 'l2_norm_clip' and 'noise_mult"),
        ("momo", (), "an optimizer that trains on gradients and params alone"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(optimizer, words, expected):
    with pytest.raises(UsageError, match=expected):
        check_optimizer(config(optimizer, *words))
    with pytest.raises(UsageError, match="give --schedule constant --warmup-steps 0"):
        make_optimizer(config("sm3", warmup_steps=5))
    check_optimizer(config("lamb"))


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("--optimizer", "adamw"),
        ("--optimizer", "sgd", "--learning-rate", "0.1", "--clip-norm", 0),
        ("--micro-batches", 2),
    ],
    ids=["adamw", "sgd", "parts"],
)
def test_losses_are_the_split_references_to_the_bit(words, run, losses, tmp_path):
    words = (*words, "--steps", 20, "--schedule", "cosine", "--warmup-steps", 5)
    if "sgd" in words:
        words += ("--optimizer-args", "momentum=0")
    assert run("--store", tmp_path / "store", *words) == 0
    assert run("--log-dir", tmp_path / "memory", *words, "--mode", "memory") == 0
    assert losses(tmp_path / "store-log") == losses(tmp_path / "memory")
