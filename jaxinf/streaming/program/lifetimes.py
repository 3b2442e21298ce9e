"""The order in which a program's nodes run, and the lifetimes of its values in bytes.

    forward    as traced; penalties next to the other use of their params
    backward   gradients as soon as possible

Invariant: nodes can be computed in this order, and it depends on the graph alone.
Positions count the nodes of one direction; cut `c` lies before node `c`.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxinf.program.graph import Graph, Node, Value
from jaxinf.streaming.program.classify import TINY_BYTES, Classes, classify
from jaxinf.streaming.program.graph import Piece, aval_bytes, num_bytes


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
      sizes: Bytes of the parts of params that are read, and of complete gradients.
      backward_cuts: The backward cut that belongs to each forward cut. There, the part
        after the forward cut has its gradients and no longer needs its params and
        values.
      cut_bytes: Bytes of values that cross each forward cut and its backward cut.
      working_bytes: Bytes of the operands and results of each forward node.
      kept_bytes: Cumulative bytes, by forward node, of results kept for backward.
    """

    graph: Graph
    classes: Classes
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    sizes: Mapping[Piece, int]
    backward_cuts: np.ndarray
    cut_bytes: np.ndarray
    working_bytes: np.ndarray
    kept_bytes: np.ndarray

    def piece_bytes(self, pieces: Iterable[Piece]) -> int:
        return sum(self.sizes[piece] for piece in pieces)


def ordered(graph: Graph) -> Lifetimes:
    classes = classify(graph)
    needs = classes.needs
    nodes = [node for node in graph.nodes if node not in classes.free]
    forward = _penalties_early([n for n in nodes if n not in classes.backward], classes)
    backward = [node for node in nodes if node in classes.backward]
    backward = _gradients_early(backward, graph, classes)
    cuts = _backward_cuts(graph, classes, forward, backward)
    kept = {value for node in backward for value in needs[node]}
    heavy = [
        0 if node in classes.light else num_bytes(kept.intersection(node.outputs))
        for node in forward
    ]
    return Lifetimes(
        graph,
        classes,
        tuple(forward),
        tuple(backward),
        _sizes(graph),
        cuts,
        _live_bytes(forward, classes) + _live_bytes(backward, classes)[cuts],
        np.array([num_bytes(needs[n]) + num_bytes(n.outputs) for n in forward]),
        np.concatenate([[0], np.cumsum(heavy, dtype=np.int64)]),
    )


def _sizes(graph: Graph) -> dict[Piece, int]:
    sizes = {p: aval_bytes(v.aval) for p, v in graph.gradients.items()}
    for node in graph.nodes:
        for value in node.inputs:
            if isinstance(value.origin, Piece):
                sizes[value.origin] = aval_bytes(value.aval)
    return sizes


def _made(nodes: Sequence[Node]) -> dict[Value, int]:
    return {value: i for i, node in enumerate(nodes) for value in node.outputs}


def _live_bytes(nodes: Sequence[Node], classes: Classes) -> np.ndarray:
    """Bytes of the values of one direction that cross each cut in it."""
    made, last = _made(nodes), dict[Value, int]()
    for i, node in enumerate(nodes):
        last.update(dict.fromkeys(classes.needs[node] & made.keys(), i))
    stays = (Stay(made[v] + 1, end + 1, aval_bytes(v.aval)) for v, end in last.items())
    return occupancy(len(nodes) + 1, stays)


def _backward_cuts(
    graph: Graph, classes: Classes, forward: Sequence[Node], backward: Sequence[Node]
) -> np.ndarray:
    made, first_use = _made(forward), dict[Piece, int]()
    for i, node in enumerate(forward):
        for piece in classes.pieces[node]:
            first_use.setdefault(piece, i)
    finished = _finished_pieces(graph, first_use)
    last = np.zeros(len(forward) + 2, np.int64)
    for j, node in enumerate(backward):
        pieces = (*classes.pieces[node], *finished.get(node, ()))
        used = [first_use.get(piece, -1) for piece in pieces]
        used += [made[value] for value in classes.needs[node] if value in made]
        latest = max(used, default=-1)
        last[latest + 1] = max(last[latest + 1], j + 1)
    cuts = np.maximum.accumulate(last[::-1])[::-1][1:]
    cuts[0] = len(backward)
    return cuts


def _finished_pieces(
    graph: Graph, pieces: Iterable[Piece]
) -> Mapping[Node, list[Piece]]:
    """Maps nodes to those of the pieces whose gradients they complete."""
    by_leaf: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_leaf.setdefault(piece.leaf, []).append(piece)
    finished: dict[Node, list[Piece]] = {}
    for target, value in graph.gradients.items():
        if value.node is not None:
            own = by_leaf.get(target.leaf, ())
            found = (piece for piece in own if _overlaps(piece, target))
            finished.setdefault(value.node, []).extend(found)
    return finished


def _overlaps(piece: Piece, target: Piece) -> bool:
    """Whether one of two pieces contains the other."""
    index, own = target.index, piece.index
    if index[: len(own)] != own and own[: len(index)] != index:
        return False
    if piece.rows is None or len(index) <= len(own):
        return True
    return piece.rows[0] <= index[len(own)] < piece.rows[1]


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
