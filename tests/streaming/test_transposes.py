"""Products of matrices whose result is transposed at once are turned round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxinf.streaming.program.lifetimes import order_program

pytestmark = pytest.mark.optimized


def transposed_products(nodes):
    """The nodes that do nothing but transpose a product, if anything else reads it."""
    return [
        node
        for node in nodes
        if node.name == "transpose"
        and node.inputs[0].node is not None
        and node.inputs[0].node.name == "dot_general"
    ]


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    "precision", [None, lax.Precision.HIGHEST, ("high", "highest")]
)
def test_a_gradient_is_not_transposed_after_its_product(precision):
    def loss(params, batch):
        return jnp.sum(jnp.tanh(jnp.matmul(batch, params["w"], precision=precision)))

    params, batch = {"w": random(8, 6)}, random(4, 5, 8)
    assert "transpose[" in str(jax.make_jaxpr(jax.grad(loss))(params, batch))
    nodes = order_program(loss, params, batch).graph.nodes
    assert not any(node.name == "transpose" for node in nodes)
    shapes = [n.outputs[0].shape for n in nodes if n.name == "dot_general"]
    assert shapes == [(4, 5, 6), (8, 6)]


def product_of(params, batch):
    return jnp.einsum("bik,bjk->bij", batch, params["w"])


def read_twice(params, batch):
    product = batch[0, :4] @ params["w"][0].T
    return jnp.sum(product * product.T)


@pytest.mark.parametrize(
    ("loss", "is_turned"),
    [
        (lambda p, x: jnp.sum(jnp.tanh(product_of(p, x).transpose(0, 2, 1))), True),
        (lambda p, x: jnp.sum(jnp.tanh(product_of(p, x).transpose(1, 0, 2))), False),
        (read_twice, False),
    ],
    ids=["axes of the product", "a batch axis", "another use"],
)
def test_which_products_are_turned_round(loss, is_turned):
    params, batch = {"w": random(3, 4, 5)}, random(3, 6, 5)
    nodes = order_program(loss, params, batch).graph.nodes
    assert bool(transposed_products(nodes)) == (not is_turned)
