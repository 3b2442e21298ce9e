"""Lets products of matrices whose result is transposed compute the transposed result.

    transpose(dot(ct, x))  ─►  dot(x, ct)

JAX's gradients have such products: that of `x @ w` by `w`, for one. XLA's CPU compiler
takes two to three times as long for them as for the product the other way round.

Invariant: a product that something else reads stays as it is.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax import lax

from jaxinf.program.graph import Node, Value


def turned_products(nodes: Sequence[Node], wanted: Iterable[Value]) -> tuple[Node, ...]:
    """Returns the nodes of a program with its transposed products turned round.

    Args:
      nodes: The nodes, in an order in which they can be computed.
    """
    reads = Counter(value for node in nodes for value in node.inputs)
    reads.update(wanted)
    found: dict[Node, None] = {}
    for node in nodes:
        product = node.inputs[0].node if node.name == "transpose" else None
        turned = None
        if product is not None and reads[node.inputs[0]] == 1:
            turned = _turned(product, node)
            if turned is not None:
                del found[product]
        found[turned or node] = None
    return tuple(found)


def _turned(product: Node, transposed: Node) -> Node | None:
    """The product with its operands exchanged, if its result is transposed so."""
    if product.name != "dot_general" or product.params.get("out_sharding") is not None:
        return None
    (left, right), (left_batch, right_batch) = product.params["dimension_numbers"]
    x, y = product.inputs
    num_batch = len(left_batch)
    num_left = len(x.shape) - num_batch - len(left)
    num_right = len(y.shape) - num_batch - len(right)
    exchanged = (
        *range(num_batch),
        *range(num_batch + num_left, num_batch + num_left + num_right),
        *range(num_batch, num_batch + num_left),
    )
    if tuple(transposed.params["permutation"]) != exchanged:
        return None
    precision = product.params["precision"]
    if isinstance(precision, tuple):
        precision = precision[::-1]
    elif not (precision is None or isinstance(precision, lax.Precision)):
        return None  # an algorithm may treat its operands differently
    params: Mapping[str, Any] = {
        **product.params,
        "dimension_numbers": ((right, left), (right_batch, left_batch)),
        "precision": precision,
    }
    node = Node(
        product.primitive,
        (y, x),
        params,
        transposed.outputs,
        product.context,
        product.sources,
    )
    transposed.outputs[0].node = node
    return node
