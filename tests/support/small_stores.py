"""Stores with shorter chunks, or other workers, than the engine would choose.

Invariant: what a call sets holds in this process until another call, or `reset`, which
follows each test.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxinf
from jaxinf.engine import options, subgroup_table
from jaxinf.layout import grid

_CHUNK_ELEMENTS = grid.DEFAULT_CHUNK_ELEMENTS
_FULL_RATE_BYTES = subgroup_table._FULL_RATE_BYTES
_WORKERS = options.MIN_WORKERS, options.WORKERS_PER_DRIVE


def reset(*, chunk_elements=None, num_workers=None):
    """Sets the longest chunk of new stores and the number of workers, or neither."""
    longest = chunk_elements or _CHUNK_ELEMENTS
    grid.DEFAULT_CHUNK_ELEMENTS = longest
    subgroup_table.DEFAULT_CHUNK_ELEMENTS = longest
    # So small a store leaves memory for a part of its state, as a large one does.
    subgroup_table._FULL_RATE_BYTES = _FULL_RATE_BYTES if chunk_elements is None else 0
    workers = _WORKERS if num_workers is None else (num_workers, 0)
    options.MIN_WORKERS, options.WORKERS_PER_DRIVE = workers


def open_store(path, *, chunk_elements=None, num_workers=None, **given):
    """As `jaxinf.open_store`, after `reset`."""
    reset(chunk_elements=chunk_elements, num_workers=num_workers)
    return jaxinf.open_store(path, **given)


def train(store, tx, params, gradients, *, each=lambda params, state: None, **options):
    """Takes `steps` from the store's params, if it has some, or else from these.

    Returns the optimizer near storage, params and state.
    """
    tx = jaxinf.smart_update(tx, store, **options)
    params = store.params(like=params) if store.exists else params
    return tx, *steps(tx, params, gradients, each=each)


def steps(tx, params, gradients, state=None, *, each=lambda params, state: None):
    """Takes a step by each gradient, which may be a function of the params.

    The gradient, the update and the sum are a jit each, as every claim about bits has
    it. Calls `each` after each step; returns params and state.
    """
    state = tx.init(params) if state is None else state
    update, add = jax.jit(tx.update), jax.jit(optax.apply_updates)
    for gradient in gradients:
        given = jax.jit(gradient)(params) if callable(gradient) else gradient
        updates, state = update(given, state, params)
        params = add(params, updates)
        each(params, state)
    return params, state


def same(found, expected):
    """Compares two trees of arrays to the bit; random keys by their data."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert one.dtype == other.dtype
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
