"""A training loop near storage, and one in memory for comparison."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference_kernel import evaluate

from jaxinf.kernels import initialise
from jaxinf.program import UpdateProgram, trace_init, trace_update


@dataclass
class Near:
    """Master params and slots in NumPy, and scalar state in JAX, as in the engine."""

    tx: Any
    params: Any
    extra_args: Any = None

    def __post_init__(self):
        leaves, self.treedef = jax.tree.flatten(self.params)
        self.program: UpdateProgram = trace_update(
            self.tx, self.params, self.extra_args
        )
        self.init = trace_init(self.tx, self.params)
        self.device = [np.asarray(leaf) for leaf in leaves]
        self.master = [np.asarray(x, np.float32).reshape(-1).copy() for x in leaves]
        scalar_state, inputs = jax.jit(self.init.prologue)(leaves)
        self.scalar_state = scalar_state
        self.slots = []
        for leaf, master, given in zip(
            self.init.leaves, self.master, inputs, strict=True
        ):
            slots = [np.full(master.size, 7, slot.dtype) for slot in leaf.slots]
            initialise(leaf.kernel, params=master, slots=slots, **flat(given))
            self.slots.append(slots)
        self.prologue = jax.jit(self.program.prologue)

    def state(self):
        """Returns the optax state tree."""
        layout = self.init.layout
        leaves: list[Any] = [None] * len(layout.avals)
        for index, value in zip(layout.scalar_indices, self.scalar_state, strict=True):
            leaves[index] = value
        for leaf, slots in zip(self.program.leaves, self.slots, strict=True):
            for slot, value in zip(leaf.slots, slots, strict=True):
                leaves[slot.state_index] = value.reshape(leaf.info.shape)
        return jax.tree.unflatten(layout.treedef, leaves)

    def step(self, gradients, **extra_args):
        """Makes a step; returns updates (fp32 leaves) or new params (16-bit leaves)."""
        gradients = jax.tree.leaves(gradients)
        extra = (extra_args,) if extra_args else ()
        self.scalar_state, inputs = self.prologue(
            gradients, self.device, self.scalar_state, *extra
        )
        outs, self.finite = [], []
        for i, leaf in enumerate(self.program.leaves):
            out = np.empty(self.master[i].size, leaf.info.dtype)
            self.finite.append(
                evaluate(
                    leaf.kernel,
                    gradient=np.asarray(gradients[i]).reshape(-1),
                    params=self.master[i],
                    slots=self.slots[i],
                    out=out,
                    **flat(inputs[i]),
                )
            )
            outs.append(out.reshape(leaf.info.shape))
            new = self.master[i].astype(leaf.info.dtype)
            self.device[i] = new.reshape(leaf.info.shape)
        return self.treedef.unflatten(outs)

    def masters(self):
        shapes = [leaf.info.shape for leaf in self.program.leaves]
        leaves = [m.reshape(s) for m, s in zip(self.master, shapes, strict=True)]
        return self.treedef.unflatten(leaves)


def flat(inputs):
    return {
        "scalars": [np.asarray(scalar) for scalar in inputs.scalars],
        "arrays": [np.asarray(array).reshape(-1) for array in inputs.arrays],
    }


def assert_close(found, expected, what, tolerance=2e-6, scale=None):
    """Compares two lists of arrays.

    The tolerance is some 17 units in the last place of the largest element of all:
    XLA fuses multiply-adds, multiplies by reciprocals and has its own exp and pow, so
    that after cancellation (``b1 * m + (1 - b1) * g``) an element differs by units of
    the terms, not of the result.
    """
    floats = [np.asarray(x, np.float32) for x in expected if is_float(x)]
    largest = max((abs(x[np.isfinite(x)]).max(initial=0) for x in floats), default=0)
    for left, right in zip(found, expected, strict=True):
        if jnp.issubdtype(right.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        assert left.dtype == right.dtype, what
        assert left.shape == right.shape, what
        limit = tolerance * (scale or largest) if is_float(right) else 0
        np.testing.assert_allclose(
            np.asarray(left, np.float64), np.asarray(right, np.float64),
            tolerance, limit, err_msg=what,
        )  # fmt: skip


def assert_state_close(near, state, what, tolerance=2e-6):
    """Compares the optimizer states, all slots of one name together."""
    found, layout = jax.tree.leaves(near.state()), near.init.layout
    expected, treedef = jax.tree.flatten(state)
    assert treedef == layout.treedef
    groups = {"scalar state": layout.scalar_indices}
    for slot in (slot for slots in layout.slots for slot in slots):
        groups[slot.name] = [*groups.get(slot.name, []), slot.state_index]
    for name, indices in groups.items():
        left, right = [found[i] for i in indices], [expected[i] for i in indices]
        assert_close(left, right, f"{name}, {what}", tolerance)


def is_float(array):
    return jnp.issubdtype(array.dtype, jnp.floating)


def compare_with_optax(tx, params, gradients, extra_args=None, **tolerances):
    """Runs both loops over `gradients`; params must be float32."""
    extra_args = extra_args or {}
    near = Near(tx, params, extra_args)
    inner = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    inner = optax.with_extra_args_support(inner)
    state = jax.jit(inner.init)(params)
    assert_state_close(near, state, "init")
    update, apply = jax.jit(inner.update), jax.jit(optax.apply_updates)
    for number, gradient in enumerate(gradients):
        updates, state = update(gradient, state, params, **extra_args)
        params = apply(params, updates)
        found, leaves = near.step(gradient, **extra_args), jax.tree.leaves(params)
        what = f"step {number}"
        assert_close(
            jax.tree.leaves(found), jax.tree.leaves(updates), what, **tolerances
        )
        assert_close(jax.tree.leaves(near.masters()), leaves, what, **tolerances)
        assert_state_close(near, state, what, tolerances.get("tolerance", 2e-6))
        # Continue from the same params: this compares steps, not trajectories.
        near.master = [np.array(x).reshape(-1) for x in leaves]
        near.device = [np.array(x) for x in leaves]
    assert near.prologue._cache_size() == 1, "the prologue was compiled again"
    return near


@pytest.fixture(name="near")
def near_fixture():
    return Near


@pytest.fixture(name="compare")
def compare_fixture():
    return compare_with_optax


@pytest.fixture(name="tree")
def tree_fixture():
    """Makes random trees of one structure: 0-d, 1-d, 2-d, nested, with None."""

    def make(seed, scale=1.0):
        rng = np.random.default_rng(seed)

        def normal(*shape):
            return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)

        return {
            "scale": normal(),
            "blocks": [{"bias": normal(3), "kernel": normal(4, 5)}, None],
            "head": (normal(2, 1, 3), {"kernel": normal(1)}),
        }

    return make
