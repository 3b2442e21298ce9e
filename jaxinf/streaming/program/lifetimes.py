"""The order in which a program's nodes run, and the lifetimes of its values in bytes.

    forward    as traced; penalties next to the other use of their params
    backward   gradients as soon as possible

Invariant: nodes can be computed in this order, and it depends on the graph alone.
Positions count the nodes of one direction; cut `c` lies before node `c`.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxinf.program.graph import Node, Value
from jaxinf.streaming.program.classify import TINY_BYTES, Classes, classify
from jaxinf.streaming.program.graph import Graph, Piece, aval_bytes, num_bytes


class Stay(NamedTuple):
    """Successive calls during which a tensor is in memory, or may be.

    Attributes:
      stop: The call after the last.
      num_bytes: The tensor's bytes; negative ones count as freed.
      tensor: The tensor, as the caller knows it; hashable.
    """

    start: int
    stop: int
    num_bytes: int
    tensor: Any = None


def occupancy(num_calls: int, stays: Iterable[Stay]) -> np.ndarray:
    """Returns the bytes of all stays during each call; int64, of shape (num_calls,)."""
    change = [0] * (num_calls + 1)
    for stay in stays:
        change[stay.start] += stay.num_bytes
        change[stay.stop] -= stay.num_bytes
    return np.cumsum(change[:-1], dtype=np.int64)


def fill(occupied: np.ndarray, stays: Iterable[Stay], capacity: int) -> list[Stay]:
    """Adds stays, in the order given, if there is room; returns those added."""
    added = []
    for stay in stays:
        during = occupied[stay.start : stay.stop]
        if during.max(initial=0) + stay.num_bytes <= capacity:
            during += stay.num_bytes
            added.append(stay)
    return added


@dataclass(frozen=True)
class Lifetimes:
    """An ordered program, and the costs and consequences of cuts in it.

    Attributes:
      forward, backward: The nodes that are not free, in the order in which they run.
    """

    graph: Graph
    classes: Classes
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]

    @cached_property
    def made(self) -> Mapping[Value, int]:
        return _made(self.forward)

    @cached_property
    def live_bytes(self) -> np.ndarray:
        """Bytes of forward values that cross each cut on their way forward."""
        return self._live(self.forward, self.made)

    @cached_property
    def backward_live_bytes(self) -> np.ndarray:
        """Bytes of backward values that cross each cut of the backward order."""
        return self._live(self.backward, _made(self.backward))

    @cached_property
    def first_use(self) -> Mapping[Piece, int]:
        """Forward positions at which parts of params are first read."""
        first: dict[Piece, int] = {}
        for i, node in enumerate(self.forward):
            for piece in self.classes.pieces[node]:
                first.setdefault(piece, i)
        return first

    @cached_property
    def backward_cuts(self) -> np.ndarray:
        """The backward cut that belongs to each forward cut.

        At the backward cut, the part after the forward cut has its gradients and no
        longer needs its params and values.
        """
        num_forward = len(self.forward)
        last = np.zeros(num_forward + 2, np.int64)
        finished = self._finished_pieces()
        for j, node in enumerate(self.backward):
            made = [self.made[v] for v in self.classes.needs[node] if v in self.made]
            read = self.classes.pieces[node]
            used = [
                self.first_use.get(piece, -1)
                for piece in (*read, *finished.get(node, ()))
            ]
            latest = max((*made, *used), default=-1)
            last[latest + 1] = max(last[latest + 1], j + 1)
        after = np.maximum.accumulate(last[::-1])[::-1]
        cuts = after[1:]
        cuts[0] = len(self.backward)
        return cuts

    def piece_bytes(self, pieces: Iterable[Piece]) -> int:
        return sum(self.sizes[piece] for piece in pieces)

    @cached_property
    def sizes(self) -> Mapping[Piece, int]:
        """Bytes of the parts of params that are read, and of complete gradients."""
        sizes = {p: aval_bytes(v.aval) for p, v in self.graph.gradients.items()}
        for node in self.graph.nodes:
            for value in node.inputs:
                if isinstance(value.origin, Piece):
                    sizes[value.origin] = aval_bytes(value.aval)
        return sizes

    @cached_property
    def working_bytes(self) -> np.ndarray:
        """Bytes of the operands and results of each forward node."""
        return np.array(
            [
                num_bytes(self.classes.needs[node]) + num_bytes(node.outputs)
                for node in self.forward
            ]
        )

    @cached_property
    def kept_bytes(self) -> np.ndarray:
        """Cumulative bytes, by forward node, of results kept for backward."""
        wanted = {v for n in self.backward for v in self.classes.needs[n]}
        heavy = [
            0 if node in self.classes.light else num_bytes(wanted & set(node.outputs))
            for node in self.forward
        ]
        return np.concatenate([[0], np.cumsum(heavy, dtype=np.int64)])

    def _finished_pieces(self) -> Mapping[Node, list[Piece]]:
        """Maps nodes to the pieces that are read and whose gradients they complete."""
        by_leaf: dict[int, list[Piece]] = {}
        for piece in self.first_use:
            by_leaf.setdefault(piece.leaf, []).append(piece)
        finished: dict[Node, list[Piece]] = {}
        for target, value in self.graph.gradients.items():
            if value.node is not None:
                finished.setdefault(value.node, []).extend(
                    piece
                    for piece in by_leaf.get(target.leaf, ())
                    if _overlaps(piece, target)
                )
        return finished

    def _live(self, nodes: tuple[Node, ...], made: Mapping[Value, int]) -> np.ndarray:
        last: dict[Value, int] = {}
        for i, node in enumerate(nodes):
            last.update(dict.fromkeys(self.classes.needs[node] & made.keys(), i))
        return occupancy(
            len(nodes) + 1,
            (Stay(made[v] + 1, end + 1, aval_bytes(v.aval)) for v, end in last.items()),
        )


def _made(nodes: tuple[Node, ...]) -> dict[Value, int]:
    return {value: i for i, node in enumerate(nodes) for value in node.outputs}


def _overlaps(piece: Piece, target: Piece) -> bool:
    """Whether one of two pieces contains the other."""
    index, own = target.index, piece.index
    if index[: len(own)] != own and own[: len(index)] != index:
        return False
    if piece.rows is None or len(index) <= len(own):
        return True
    return piece.rows[0] <= index[len(own)] < piece.rows[1]


def ordered(graph: Graph) -> Lifetimes:
    classes = classify(graph)
    nodes = [node for node in graph.nodes if node not in classes.free]
    forward = [node for node in nodes if node not in classes.backward]
    backward = [node for node in nodes if node in classes.backward]
    return Lifetimes(
        graph,
        classes,
        tuple(_penalties_early(forward, classes)),
        tuple(_gradients_early(backward, graph, classes)),
    )


def _penalties_early(forward: Sequence[Node], classes: Classes) -> list[Node]:
    """Moves reductions of params next to another use, so that one fetch serves both."""
    hosts = _hosts(forward, classes)
    while True:
        order = _in_turn(forward, [*_needs(forward, classes), *hosts.items()])
        if len(order) == len(forward):
            return order
        # Hosts need these themselves (normalised weights, say), so they stay in place.
        for node in set(forward) - set(order):
            hosts.pop(node, None)


def _hosts(forward: Sequence[Node], classes: Classes) -> dict[Node, Node]:
    """Maps nodes on params alone, with a small result, to the params' other reader."""
    penalties = [
        node
        for node in forward
        if not classes.needs[node] and num_bytes(node.outputs) <= TINY_BYTES
    ]
    others = set(forward).difference(penalties)
    first_use: dict[Piece, Node] = {}
    for node in forward:
        if node in others:
            for piece in classes.pieces[node]:
                first_use.setdefault(piece, node)
    found = {}
    for node in penalties:
        readers = {first_use.get(piece) for piece in classes.pieces[node]}
        host = readers.pop() if len(readers) == 1 else None
        if host is not None:
            found[node] = host
    return found


def _gradients_early(
    backward: Sequence[Node], graph: Graph, classes: Classes
) -> list[Node]:
    """Runs cheap nodes that only lead to gradients as soon as their inputs are there.

    Otherwise a cast of all params, whose transposes come last, would hold every
    gradient until the end.
    """
    read_by_others = {value.node for value in graph.results}
    early: set[Node] = set()
    for node in reversed(backward):
        if node in classes.light and node not in read_by_others:
            early.add(node)
        else:
            read_by_others.update(value.node for value in classes.needs[node])
    order = _in_turn(backward, _needs(backward, classes), early)
    assert len(order) == len(backward), "every node runs once"
    return order


def _needs(nodes: Sequence[Node], classes: Classes) -> list[tuple[Node, Node]]:
    """Pairs of nodes of which the first needs the second."""
    own = set(nodes)
    return [
        (node, value.node)
        for node in nodes
        for value in classes.needs[node]
        if value.node in own
    ]


def _in_turn(
    nodes: Sequence[Node],
    waits: Iterable[tuple[Node, Node]],
    eager: Iterable[Node] = (),
) -> list[Node]:
    """Returns nodes in their order, but each after those that it waits for.

    Those that wait for each other are left out.

    Args:
      waits: Pairs of which the first waits for the second.
    """
    missing: dict[Node, set[Node]] = {node: set() for node in nodes}
    readers: defaultdict[Node, list[Node]] = defaultdict(list)
    for node, other in waits:
        if other not in missing[node]:
            missing[node].add(other)
            readers[other].append(node)
    asked, order = set(eager), dict[Node, None]()
    for node in nodes:
        asked.add(node)
        ready = deque([] if missing[node] else [node])
        while ready:
            current = ready.popleft()
            if current not in asked or current in order:
                continue
            order[current] = None
            for reader in readers[current]:
                missing[reader].discard(current)
                if not missing[reader]:
                    ready.append(reader)
    return list(order)
