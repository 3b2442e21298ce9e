"""Products of matrices whose result is transposed at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from streaming import prepared
from zoo import ZOO

from jaxinf.streaming.plan.fit import prepare

pytestmark = pytest.mark.optimized


def nodes_of(loss, params, batch):
    return prepare(loss, params, batch).lifetimes.graph.nodes


def transposed_products(nodes):
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
    traced = jax.make_jaxpr(jax.grad(loss))(params, batch)
    assert "transpose[" in str(traced)
    nodes = nodes_of(loss, params, batch)
    assert not any(node.name == "transpose" for node in nodes)
    shapes = [n.outputs[0].shape for n in nodes if n.name == "dot_general"]
    assert shapes == [(4, 5, 6), (8, 6)]


def test_a_product_with_batch_axes_is_turned_round():
    def loss(params, batch):
        product = jnp.einsum("bik,bjk->bij", batch, params["w"])
        return jnp.sum(jnp.tanh(product.transpose(0, 2, 1)) ** 2)

    params, batch = {"w": random(3, 4, 5)}, random(3, 6, 5)
    ready = prepare(loss, params, batch)
    assert not transposed_products(ready.lifetimes.graph.nodes)


def test_other_permutations_stay():
    def loss(params, batch):
        product = jnp.einsum("bik,bjk->bij", batch, params["w"])
        return jnp.sum(jnp.tanh(product.transpose(1, 0, 2)))

    params, batch = {"w": random(3, 4, 5)}, random(3, 6, 5)
    assert transposed_products(nodes_of(loss, params, batch))


def test_a_product_that_is_read_as_it_is_stays():
    def loss(params, batch):
        product = batch @ params["w"]
        return jnp.sum(product * product.T)

    params, batch = {"w": random(4, 4)}, random(4, 4)
    nodes = nodes_of(loss, params, batch)
    first = next(node for node in nodes if node.name == "dot_general")
    readers = [node.name for node in nodes if first.outputs[0] in node.inputs]
    assert "transpose" in readers
    assert len(readers) > 1


@pytest.mark.parametrize("name", ["linen", "recurrent"])
def test_no_matrix_of_a_model_is_transposed_after_its_product(name):
    transposed = transposed_products(prepared(ZOO[name]()).lifetimes.graph.nodes)
    assert all(node.params["permutation"] != (1, 0) for node in transposed)
