"""Orders a program's nodes: forward as traced, gradients as soon as possible.

Invariant: nodes can be computed in this order, and it depends on the graph alone.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from jaxinf.program.graph import Node
from jaxinf.streaming.program.classify import TINY_BYTES, Classes
from jaxinf.streaming.program.graph import Graph, Piece, num_bytes

__all__ = ["Order", "ordered"]


@dataclass(frozen=True)
class Order:
    """Nodes that are not free, in the order in which they run."""

    forward: tuple[Node, ...]
    backward: tuple[Node, ...]


def ordered(graph: Graph, classes: Classes) -> Order:
    """Orders the nodes of `graph`."""
    ordered = [node for node in graph.nodes if node not in classes.free]
    forward = [node for node in ordered if node not in classes.backward]
    backward = [node for node in ordered if node in classes.backward]
    return Order(
        tuple(_penalties_early(forward, classes)),
        tuple(_gradients_early(backward, graph, classes)),
    )


def _penalties_early(forward: list[Node], classes: Classes) -> list[Node]:
    """Moves reductions of params next to another use, so that one fetch serves both."""
    hosts = _hosts(forward, classes)
    while True:
        waiting = _Waiting(forward, classes)
        for node, host in hosts.items():
            waiting.wait(node, host)
        order = waiting.ordered()
        if len(order) == len(forward):
            return order
        # Hosts need these themselves (normalised weights, say), so they stay in place.
        for node in set(forward) - set(order):
            hosts.pop(node, None)


def _hosts(forward: list[Node], classes: Classes) -> dict[Node, Node]:
    """Maps nodes on params alone, with a small result, to the params' other reader."""
    penalties = {
        node
        for node in forward
        if not classes.needs[node] and num_bytes(node.outputs) <= TINY_BYTES
    }
    first_use: dict[Piece, Node] = {}
    for node in forward:
        if node not in penalties:
            for piece in classes.pieces[node]:
                first_use.setdefault(piece, node)
    found = {}
    for node in forward:
        if node in penalties:
            hosts = {first_use.get(piece) for piece in classes.pieces[node]}
            host = hosts.pop() if len(hosts) == 1 else None
            if host is not None:
                found[node] = host
    return found


def _gradients_early(
    backward: list[Node], graph: Graph, classes: Classes
) -> list[Node]:
    """Runs cheap nodes that only lead to gradients as soon as their inputs are there.

    Otherwise a cast of all params, whose transposes come last, would hold every
    gradient until the end.
    """
    early = _only_gradients(backward, graph, classes)
    order = _Waiting(backward, classes, early).ordered()
    assert len(order) == len(backward), "every node runs once"
    return order


class _Waiting:
    """Builds an order; a node requested too early is appended when it can be.

    Args:
      nodes: All nodes.
      classes: The nodes' classes and needs.
      eager: Nodes that are appended as soon as possible, without a request.
    """

    def __init__(
        self, nodes: list[Node], classes: Classes, eager: Iterable[Node] = ()
    ) -> None:
        self._nodes = nodes
        self._order: list[Node] = []
        self._asked = set(eager)
        self._done: set[Node] = set()
        self._missing: dict[Node, set[Node]] = {}
        self._readers: dict[Node, list[Node]] = {}
        own = set(nodes)
        for node in nodes:
            self._missing[node] = set()
            for value in classes.needs[node]:
                if value.node in own:
                    self.wait(node, value.node)

    def wait(self, node: Node, other: Node) -> None:
        """Makes `node` wait for `other`."""
        if other not in self._missing[node]:
            self._missing[node].add(other)
            self._readers.setdefault(other, []).append(node)

    def ordered(self) -> list[Node]:
        """Returns the nodes in an order without those that wait for each other."""
        for node in self._nodes:
            self._emit(node)
        return self._order

    def _emit(self, node: Node) -> None:
        """Appends a node, once its needs are met, and the nodes that waited for it."""
        self._asked.add(node)
        ready = deque([] if self._missing[node] else [node])
        while ready:
            current = ready.popleft()
            if current not in self._asked or current in self._done:
                continue
            self._done.add(current)
            self._order.append(current)
            for reader in self._readers.get(current, ()):
                self._missing[reader].discard(current)
                if not self._missing[reader]:
                    ready.append(reader)


def _only_gradients(backward: list[Node], graph: Graph, classes: Classes) -> set[Node]:
    """Returns cheap backward nodes whose results reach only gradients."""
    read_by_others = {value.node for value in graph.results}
    found: set[Node] = set()
    for node in reversed(backward):
        if node in classes.light and node not in read_by_others:
            found.add(node)
        else:
            read_by_others.update(value.node for value in classes.needs[node])
    return found
