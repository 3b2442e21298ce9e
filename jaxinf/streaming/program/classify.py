"""Classifies a program's nodes: forward or backward, free or not, and their inputs.

Invariant: a free node is cheap and needs only inputs (and a few bytes besides). Every
program that needs it computes it again, and it is not part of a segment's order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxinf.program.graph import Node, Value
from jaxinf.streaming.program.graph import Graph, Piece, Seed, is_literal, num_bytes
from jaxinf.streaming.program.primitives import LIGHT

__all__ = ["Classes", "classify"]

TINY_BYTES = 1024
_SCALAR_BYTES = 64
# A result smaller than its params by this factor is kept, not computed again.
_PARAMS_RATIO = 4


@dataclass(frozen=True)
class Classes:
    """The classes of a graph's nodes.

    Attributes:
      ordered: Nodes that are not free; segments consist of these.
      free: The others.
      backward: Nodes that depend on the cotangent.
      light: Nodes cheap enough to be computed again from kept values.
      needs: Values of ordered nodes that a node needs, through free ones too.
      pieces: Parts of params that a node reads, through free ones too.
    """

    ordered: tuple[Node, ...]
    free: frozenset[Node]
    backward: frozenset[Node]
    light: frozenset[Node]
    needs: Mapping[Node, frozenset[Value]]
    pieces: Mapping[Node, frozenset[Piece]]


def classify(graph: Graph) -> Classes:
    """Divides the nodes of `graph`."""
    builder = _Builder()
    for node in graph.nodes:
        builder.add(node)
    return Classes(
        tuple(node for node in graph.nodes if node not in builder.free),
        frozenset(builder.free),
        frozenset(builder.backward),
        frozenset(builder.light),
        builder.needs,
        builder.pieces,
    )


class _Builder:
    def __init__(self) -> None:
        self.free: set[Node] = set()
        self.backward: set[Node] = set()
        self.light: set[Node] = set()
        self.needs: dict[Node, frozenset[Value]] = {}
        self.pieces: dict[Node, frozenset[Piece]] = {}
        self._params: dict[Node, frozenset[Value]] = {}

    def add(self, node: Node) -> None:
        needs: set[Value] = set()
        params: set[Value] = set()
        for value in node.inputs:
            self._collect(value, needs, params)
            if isinstance(value.origin, Seed) or value.node in self.backward:
                self.backward.add(node)
        self.needs[node] = frozenset(needs)
        self._params[node] = frozenset(params)
        self.pieces[node] = frozenset(
            value.origin for value in params if isinstance(value.origin, Piece)
        )
        self._judge(node, needs, params)

    def _collect(self, value: Value, needs: set[Value], params: set[Value]) -> None:
        if value.node is None:
            if isinstance(value.origin, Piece):
                params.add(value)
        elif value.node in self.free:
            needs |= self.needs[value.node]
            params |= self._params[value.node]
        else:
            needs.add(value)

    def _judge(self, node: Node, needs: set[Value], params: set[Value]) -> None:
        out_bytes = num_bytes(node.outputs)
        if node.name not in LIGHT:
            return
        if num_bytes(params) > _PARAMS_RATIO * out_bytes:
            return
        self.light.add(node)
        # If a count or a key depends on the previous layer's, computing it again would
        # start at the first layer, in longer and longer programs.
        is_made_of = any(not is_literal(value) for value in node.inputs)
        is_count = is_made_of and not params and out_bytes <= _SCALAR_BYTES
        is_spread = any(
            num_bytes(needs) <= limit < out_bytes
            for limit in (TINY_BYTES, _SCALAR_BYTES)
        )
        if is_spread or not (needs or is_count):
            self.free.add(node)
