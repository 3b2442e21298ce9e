"""The snippets of docs/streaming.md, each with a store of its own."""

import re
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from zoo import normal

import jaxinf

PAGE = (Path(__file__).parents[2] / "docs" / "streaming.md").read_text()
SECTION = PAGE.partition("## In each library\n")[2].partition("\n## ")[0]
COMMON, *SNIPPETS = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
NAMES = re.findall(r"^\*\*(.*?)\.\*\*", SECTION, re.MULTILINE)


def test_there_is_a_snippet_for_each_library():
    assert NAMES == ["Flax NNX", "Flax linen", "Equinox", "Haiku", "JAX alone"]
    assert len(SNIPPETS) == len(NAMES)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[:-1]),
        NAMES[-1],
    ],
)
def test_snippets_run(name, place):
    snippet = SNIPPETS[NAMES.index(name)]
    names = {
        "eqx": eqx,
        "hk": hk,
        "jax": jax,
        "jaxinf": jaxinf,
        "jnp": jnp,
        "nn": nn,
        "nnx": nnx,
        "optax": optax,
        "path": place / "store",
        "x": normal(1, 4, 8),
        "y": normal(2, 4, 8),
    }
    exec(COMMON + snippet, names)
    assert float(names["loss"]) > 0
    # Its last line is the call of a step, which can be called again.
    exec(snippet.splitlines()[-1], names)
    with names["step"] as step:
        assert step.store.step == 2
