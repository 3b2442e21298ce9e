"""The lifetimes of the values of an ordered program, in bytes.

Invariant: positions count the nodes of one direction; cut `c` lies before node `c`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxinf.program.graph import Node, Value
from jaxinf.schedule.placement import Stay, occupancy
from jaxinf.streaming.program.classify import Classes
from jaxinf.streaming.program.graph import Graph, Piece, aval_bytes, num_bytes
from jaxinf.streaming.program.order import Order

__all__ = ["Lifetimes"]


@dataclass(frozen=True)
class Lifetimes:
    """The costs and consequences of cuts in a program."""

    graph: Graph
    classes: Classes
    order: Order

    @cached_property
    def made(self) -> Mapping[Value, int]:
        """Positions at which forward values are made."""
        return _made(self.order.forward)

    @cached_property
    def live_bytes(self) -> np.ndarray:
        """Bytes of forward values that cross each cut on their way forward."""
        return self._live(self.order.forward, self.made)

    @cached_property
    def backward_live_bytes(self) -> np.ndarray:
        """Bytes of backward values that cross each cut of the backward order."""
        return self._live(self.order.backward, _made(self.order.backward))

    @cached_property
    def first_use(self) -> Mapping[Piece, int]:
        """Forward positions at which parts of params are first read."""
        first: dict[Piece, int] = {}
        for i, node in enumerate(self.order.forward):
            for piece in self.classes.pieces[node]:
                first.setdefault(piece, i)
        return first

    @cached_property
    def backward_cuts(self) -> np.ndarray:
        """The backward cut that belongs to each forward cut.

        At the backward cut, the part after the forward cut has its gradients and no
        longer needs its params and values.
        """
        num_forward = len(self.order.forward)
        last = np.zeros(num_forward + 2, np.int64)
        finished = self._finished_pieces()
        for j, node in enumerate(self.order.backward):
            made = [self.made[v] for v in self.classes.needs[node] if v in self.made]
            pieces = (*self.classes.pieces[node], *finished.get(node, ()))
            used = [self.first_use.get(piece, -1) for piece in pieces]
            latest = max((*made, *used), default=-1)
            last[latest + 1] = max(last[latest + 1], j + 1)
        after = np.maximum.accumulate(last[::-1])[::-1]
        cuts = after[1:]
        cuts[0] = len(self.order.backward)
        return cuts

    def piece_bytes(self, pieces: Iterable[Piece]) -> int:
        """Returns the bytes of parts of params."""
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
                for node in self.order.forward
            ]
        )

    @cached_property
    def kept_bytes(self) -> np.ndarray:
        """Cumulative bytes, by forward node, of results kept for backward."""
        wanted = {v for n in self.order.backward for v in self.classes.needs[n]}
        heavy = [
            0 if node in self.classes.light else num_bytes(wanted & set(node.outputs))
            for node in self.order.forward
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
