"""Options of compilation: a program keeps to the memory that XLA reports, and its bits.

Invariant: the options depend on the program and on JAX alone, not on a policy or a
budget, so all plans that run a program run it with the same bits.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from jaxinf import compat
from jaxinf.program.graph import Node
from jaxinf.streaming.program.graph import aval_bytes

__all__ = ["compiler_options", "sums_large_products"]

# glibc keeps smaller blocks anyway, so a plan is not exact to within their size.
LARGE_BYTES = 32 << 20
# The product of arrays with fewer axes is summed in tiles, and takes no memory
# (docs/decisions/0027).
NUM_AXES = 4


def compiler_options(
    nodes: Sequence[Node], *, is_deterministic: bool = True
) -> dict[str, Any] | None:
    """Returns XLA's options for a program of these nodes; None for the default ones.

    Args:
      nodes: The program's nodes.
      is_deterministic: Whether it has the same bits in each run.
    """
    if jax.default_backend() != "cpu":
        return compat.deterministic_options(is_deterministic)
    if not sums_large_products(nodes):
        return None
    return compat.without_library_reductions()


def sums_large_products(nodes: Iterable[Node]) -> bool:
    """Whether two large arrays are multiplied and the product summed, as in softmax's
    backward part; XLA's library on a CPU then holds the product in its own memory."""
    products: set[int] = set()
    for name, inputs, outputs in _equations(nodes):
        if name == "reduce_sum" and id(inputs[0]) in products:
            return True
        is_product = name == "mul" and all(map(_is_large, inputs))
        is_cast = name == "convert_element_type" and id(inputs[0]) in products
        if is_product or is_cast:
            products.add(id(outputs[0]))
    return False


def _is_large(value: Any) -> bool:
    shape = getattr(value.aval, "shape", ())
    return len(shape) >= NUM_AXES and aval_bytes(value.aval) >= LARGE_BYTES


def _equations(
    nodes: Iterable[Node],
) -> Iterator[tuple[str, Sequence[Any], Sequence[Any]]]:
    for node in nodes:
        yield node.name, node.inputs, node.outputs
        for inner in compat.inner_jaxprs(node.params):
            for eqn in compat.all_equations(inner):
                yield eqn.primitive.name, eqn.invars, eqn.outvars
