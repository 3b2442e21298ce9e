"""Random trees and chains: updates near storage equal optax's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.optimized

PARTS = {
    "clip": lambda: optax.clip(0.7),
    "global_norm": lambda: optax.clip_by_global_norm(0.9),
    "decay": lambda: optax.add_decayed_weights(0.05),
    "ema": lambda: optax.ema(0.8),
    "trace": lambda: optax.trace(0.7, nesterov=True),
    "rms": lambda: optax.scale_by_rms(0.9, eps=1e-3),
    "adam": lambda: optax.scale_by_adam(eps=1e-3),
    "schedule": lambda: optax.scale_by_schedule(optax.cosine_decay_schedule(0.1, 5)),
    "centralize": lambda: optax.centralize(),
}
STORED = ("ema", "trace", "rms", "adam")
REDUCING = ("global_norm", "centralize")

shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
trees = st.recursive(
    shapes,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3),
        st.tuples(inner, st.none()),
    ),
    max_leaves=5,
)


def is_shape(node):
    return isinstance(node, tuple) and all(isinstance(extent, int) for extent in node)


def fill(tree, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32),
        tree,
        is_leaf=is_shape,
    )


@pytest.mark.long
@settings(
    deadline=None,
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    shape_tree=trees,
    first=st.lists(st.sampled_from(sorted(PARTS)), max_size=2),
    then=st.lists(
        st.sampled_from([name for name in PARTS if name not in REDUCING]), max_size=2
    ),
    every=st.sampled_from([1, 2]),
)
def test_chains(shape_tree, first, then, every, compare):
    stored = False
    names = []
    for name in first + then:  # reductions only before the first stored state
        if not (stored and name in REDUCING):
            names.append(name)
        stored = stored or name in STORED
    tx = optax.chain(optax.scale(-0.5), *(PARTS[name]() for name in names))
    if every > 1:
        tx = optax.MultiSteps(tx, every)
        if any(name in REDUCING for name in names):
            return  # of accumulated gradients, which are stored
    # A chain of divisions and square roots accumulates errors.
    gradients = [fill(shape_tree, seed) for seed in (1, 2, 3)]
    compare(tx, fill(shape_tree, 0), gradients, tolerance=1e-5)
