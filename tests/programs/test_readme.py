"""The README's program with its own Orbax loop, run as printed."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxinf

README = Path(__file__).parents[2] / "README.md"


def snippet():
    """Returns the section's code, with paths and numbers of steps to fill in."""
    section = README.read_text().split("### With your own Orbax loop")[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found
    code = found.group(1).replace("keep_steps=100", "keep_steps=2")
    return code.replace("% 100 == 0", "% 2 == 0")


def init_params():
    return {"w": jnp.ones((40, 30)), "b": jnp.zeros((30,))}


@partial(jax.jit, static_argnums=0)
def step(tx, params, state, batch):
    def loss_of(params):
        return jnp.mean((batch @ params["w"] + params["b"] - 1.0) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def batch(number):
    return jax.random.normal(jax.random.key(number), (8, 40))


class Killed(Exception):
    """Ends the program like a kill, without a call of the store."""


def run(place, num_steps, *, killed_at=None):
    """Runs the snippet; returns params, state and the store at its end."""

    def watched(number):
        if number == killed_at:
            raise Killed
        return batch(number)

    code = snippet().replace("/mnt/nvme0", str(place))
    names = {
        "jaxinf": jaxinf,
        "optax": optax,
        "init_params": init_params,
        "num_steps": num_steps,
        "step": step,
        "batch": watched,
    }
    try:
        exec(compile(code, "README.md", "exec"), names)
    except Killed:
        return names
    finally:
        names["store"].close()
    return names


@pytest.mark.parametrize("killed_at", [4, 5])
def test_the_orbax_loop_goes_on_to_the_bit(place, killed_at):
    (place / "whole").mkdir()
    (place / "parts").mkdir()
    whole = run(place / "whole", 7)
    run(place / "parts", 7, killed_at=killed_at)
    with jaxinf.open_store(place / "parts" / "run") as store:
        assert store.step == killed_at
    parts = run(place / "parts", 7)
    assert parts["first"] == 4
    for one in ("params", "state"):
        jax.tree.map(np.testing.assert_array_equal, parts[one], whole[one])
