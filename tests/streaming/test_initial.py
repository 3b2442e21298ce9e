"""The first params are made in memory of a given size."""

import jax
import jax.numpy as jnp
import pytest

from jaxinf.errors import BudgetError
from jaxinf.streaming.program.initial import trace_params

pytestmark = pytest.mark.optimized


def test_a_leaf_has_room_and_leaves_some_to_the_buffers():
    """A draw takes memory beside its result; a constant leaves a quarter."""
    key, num_bytes = jax.random.key(1), 501 * 64 * 4
    _, drawn = trace_params(lambda key: {"w": jax.random.normal(key, (501, 64))}, key)
    with pytest.raises(BudgetError, match=r"leaf w takes \d+ bytes to make") as refused:
        drawn(1)
    assert refused.value.missing_bytes > 3 * num_bytes
    _, ones = trace_params(lambda: {"w": jnp.ones((501, 64))})
    least = num_bytes + num_bytes // 3
    (leaf,) = ones(least)
    assert leaf.all()
    with pytest.raises(BudgetError, match=f"leaf w takes {least} bytes to make"):
        ones(least - 1)
