"""Classifies a program's nodes: forward or backward, free or not, and their inputs.

Invariant: a free node is cheap and needs only inputs (and a few bytes besides). Every
program that needs it computes it again, and it is not part of a segment's order. A
primitive that is not named here is kept whole and counts as expensive.
"""

from dataclasses import dataclass, field

from jaxinf.compat import ELEMENTWISE
from jaxinf.program.graph import Graph, Node, Value
from jaxinf.streaming.program.graph import Piece, Seed, num_bytes

POINTWISE = ELEMENTWISE | frozenset(
    """
    acos acosh add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type clz copy copy_p cosh digamma erf erf_inv erfc imag is_finite
    lgamma mul optimization_barrier population_count real shift_left
    sharding_constraint shift_right_arithmetic shift_right_logical sinh stop_gradient
    tan
    """.split()
)
"""Primitives that compute each element from the elements at the same position."""

LIGHT = POINTWISE | frozenset(
    """
    argmax argmin broadcast_in_dim concatenate dynamic_slice dynamic_update_slice
    expand_dims gather iota pad random_bits random_clone random_fold_in random_seed
    random_split random_unwrap random_wrap reduce_and reduce_max reduce_min reduce_or
    reduce_prod reduce_sum reshape rev shift slice split squeeze stack threefry2x32
    transpose unstack
    """.split()
)
"""Primitives whose repeated computation costs less than keeping the result."""

TINY_BYTES = 1024
_SCALAR_BYTES = 64
# A result smaller than its params by this factor is kept, not computed again.
_PARAMS_RATIO = 4


@dataclass(frozen=True)
class Classes:
    """The classes of a graph's nodes.

    Attributes:
      free: Nodes that no segment has; segments consist of the others.
      light: Nodes cheap enough to be computed again from kept values.
      needs: Values of ordered nodes that a node needs, through free ones too.
      pieces: Parts of params that a node reads, through free ones too.
    """

    free: set[Node] = field(default_factory=set)
    backward: set[Node] = field(default_factory=set)
    light: set[Node] = field(default_factory=set)
    needs: dict[Node, frozenset[Value]] = field(default_factory=dict)
    pieces: dict[Node, frozenset[Piece]] = field(default_factory=dict)


def classify(graph: Graph) -> Classes:
    found = Classes()
    params_of: dict[Node, set[Value]] = {}
    for node in graph.nodes:
        needs: set[Value] = set()
        params: set[Value] = set()
        for value in node.inputs:
            if value.node in found.free:
                needs |= found.needs[value.node]
                params |= params_of[value.node]
            elif value.node is not None:
                needs.add(value)
            elif isinstance(value.origin, Piece):
                params.add(value)
            if isinstance(value.origin, Seed) or value.node in found.backward:
                found.backward.add(node)
        params_of[node] = params
        found.needs[node] = frozenset(needs)
        found.pieces[node] = frozenset(value.origin for value in params)
        most = _PARAMS_RATIO * num_bytes(node.outputs)
        if node.name in LIGHT and num_bytes(params) <= most:
            found.light.add(node)
            if _is_free(node, needs, params):
                found.free.add(node)
    return found


def _is_free(node: Node, needs: set[Value], params: set[Value]) -> bool:
    out_bytes = num_bytes(node.outputs)
    # If a count or a key depends on the previous layer's, computing it again would
    # start at the first layer, in longer and longer programs.
    is_made_of = any(value.constant is None for value in node.inputs)
    is_count = is_made_of and not params and out_bytes <= _SCALAR_BYTES
    is_spread = any(
        num_bytes(needs) <= limit < out_bytes for limit in (TINY_BYTES, _SCALAR_BYTES)
    )
    return is_spread or not (needs or is_count)
