"""The order in which a program's nodes run, and the lifetimes of its values in bytes.

    free       cheap and of inputs alone: every program computes them again as needed
    forward    the others as traced; penalties next to the other use of their params
    backward   nodes that depend on the seed; gradients as soon as possible

Invariant: nodes can be computed in this order, and it depends on the graph alone.
Positions count the nodes of one direction; cut `c` lies before node `c`. A primitive
that is not listed as light counts as expensive.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from jaxinf.compat import LIGHT
from jaxinf.program import Graph, Node, Value
from jaxinf.streaming.program.graph import Piece, Seed, build_graph, num_bytes
from jaxinf.streaming.program.keys import Keys, stable_digest
from jaxinf.streaming.program.trace import Traced, trace
from jaxinf.typing import PyTree

_TINY_BYTES = 1024
_SCALAR_BYTES = 64
# A result smaller than its params by this factor is kept, not computed again.
_PARAMS_RATIO = 4

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Needs: TypeAlias = Mapping[Node, frozenset[Value]]
_Pieces: TypeAlias = Mapping[Node, frozenset[Piece]]


class Stay(NamedTuple):
    """Successive calls, up to `stop`, during which a tensor is or may be in memory.

    Negative bytes count as freed. The caller chooses what stands for the tensor.
    """

    start: int
    stop: int
    num_bytes: int
    tensor: Any = None


def occupancy(num_calls: int, stays: Iterable[Stay]) -> np.ndarray:
    """Returns the bytes of all stays in each call: int64, of shape (num_calls,)."""
    change = [0] * (num_calls + 1)
    for start, stop, size, _ in stays:
        change[start] += size
        change[stop] -= size
    return np.cumsum(change[:-1], dtype=np.int64)


def fill(occupied: np.ndarray, stays: Iterable[Stay], capacity: int) -> list[Stay]:
    """Adds stays for which there is room, one after another; returns those added.

    A stay that ends after the last call continues in the first ones, of the next step.
    """
    added = []
    for stay in stays:
        during = np.arange(stay.start, stay.stop) % len(occupied)
        if occupied[during].max(initial=0) + stay.num_bytes <= capacity:
            occupied[during] += stay.num_bytes
            added.append(stay)
    return added


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)  # it has all nodes
class OrderedProgram:
    """A traced function, the order of its nodes, and the costs of cuts in it.

    Attributes:
      traced: The function, of one micro-batch if there are several.
      keys: Texts of the nodes.
      forward, backward: The nodes that are not free, in the order in which they run.
      free: Nodes that no segment has; segments consist of the others.
      light: Nodes cheap enough to be computed again from kept values.
      needs: Values of ordered nodes that a node reads, through free ones too.
      pieces: Pieces of params that a node reads, through free ones too.
      sizes: Bytes of the pieces that are read, and of complete gradients.
      cache: Results of functions that are `once`.
    """

    traced: Traced
    graph: Graph
    keys: Keys
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    free: Set[Node]
    light: Set[Node]
    needs: _Needs
    pieces: _Pieces
    sizes: Mapping[Piece, int]
    cache: dict[Any, Any] = field(default_factory=dict)

    def piece_bytes(self, pieces: Iterable[Piece]) -> int:
        return sum(self.sizes[piece] for piece in pieces)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the whole computation, the same in every process."""
        graph, traced = self.graph, self.traced
        values = chain.from_iterable(node.inputs for node in graph.nodes)
        inputs = [v for v in dict.fromkeys(values) if v.origin is not None]
        lines = self.keys.describe(inputs, graph.nodes, graph.outputs)
        origins = (str(value.origin) for value in inputs)
        pieces = "\n".join(map(str, graph.gradients))
        specs: list[str] = []
        if traced.mesh is not None:
            specs = [str(a.sharding.spec) for a in (*traced.params, *traced.batch)]
        return stable_digest(chain(lines, origins, [pieces], traced.names, specs))

    # --- the costs of cuts ---------------------------------------------------------

    @cached_property
    def backward_cuts(self) -> np.ndarray:
        """The backward cut that belongs to each forward cut.

        There, all nodes after the forward cut have their gradients, and their params
        and values are needed no longer.
        """
        needs, pieces, forward = self.needs, self.pieces, self.forward
        maker = last_uses(node.outputs for node in forward)
        first_use = first_uses([pieces[node] for node in forward])
        completes = defaultdict[Node | None, list[Piece]](list)
        for piece, value in self.graph.gradients.items():
            completes[value.node] += [x for x in first_use if _overlaps(x, piece)]
        ends = np.zeros(len(forward) + 2, np.int64)
        for j, node in enumerate(self.backward):
            used = [first_use.get(x, -1) for x in (*pieces[node], *completes[node])]
            used += [maker[value] for value in needs[node] if value in maker]
            latest = max(used, default=-1)
            ends[latest + 1] = max(ends[latest + 1], j + 1)
        cuts = np.maximum.accumulate(ends[::-1])[::-1][1:]
        cuts[0] = len(self.backward)
        return cuts

    @cached_property
    def cut_bytes(self) -> np.ndarray:
        """Bytes of values that cross each forward cut and its backward cut."""
        forward = _live_bytes(self.forward, self.needs)
        return forward + _live_bytes(self.backward, self.needs)[self.backward_cuts]

    @cached_property
    def working_bytes(self) -> np.ndarray:
        """Bytes of the operands and results of each forward node."""
        used = ((*self.needs[node], *node.outputs) for node in self.forward)
        return np.array([*map(num_bytes, used)])

    @cached_property
    def kept_bytes(self) -> np.ndarray:
        """Cumulative bytes, by forward node, of results kept for backward."""
        kept = {value for node in self.backward for value in self.needs[node]}
        sizes = (
            0 if node in self.light else num_bytes(kept.intersection(node.outputs))
            for node in self.forward
        )
        return np.array([0, *accumulate(sizes)], np.int64)


def once(compute: Callable[..., _Result]) -> Callable[..., _Result]:
    """Lets a function of an ordered program and hashable values run once for each."""

    @wraps(compute)
    def wrapped(ordered: OrderedProgram, *args: Hashable) -> _Result:
        if (compute, args) not in ordered.cache:
            ordered.cache[compute, args] = compute(ordered, *args)
        return ordered.cache[compute, args]

    return wrapped


def order_program(
    fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    *,
    has_loss: bool = True,
    has_aux: bool = False,
) -> OrderedProgram:
    """Traces a function and orders its nodes.

    Arguments and errors are those of `trace`; `batch` is one micro-batch.
    """
    traced, closed = trace(fn, params, batch, has_loss=has_loss, has_aux=has_aux)
    graph = build_graph(traced, closed)
    sizes = {piece: value.num_bytes for piece, value in graph.gradients.items()}
    read = (v for node in graph.nodes for v in node.inputs)
    sizes |= {v.origin: v.num_bytes for v in read if isinstance(v.origin, Piece)}
    needs: dict[Node, frozenset[Value]] = {}
    pieces: dict[Node, frozenset[Piece]] = {}
    free, light, after_seed = set[Node](), set[Node](), set[Node]()
    for node in graph.nodes:
        values, through = node.inputs, [v.node for v in node.inputs if v.node in free]
        computed = (v for v in values if v.node is not None and v.node not in free)
        read = (v.origin for v in values if isinstance(v.origin, Piece))
        needs[node] = frozenset(computed).union(*map(needs.__getitem__, through))
        pieces[node] = frozenset(read).union(*map(pieces.__getitem__, through))
        if any(isinstance(v.origin, Seed) or v.node in after_seed for v in values):
            after_seed.add(node)
        params_bytes = sum(sizes[piece] for piece in pieces[node])
        is_small = params_bytes <= _PARAMS_RATIO * num_bytes(node.outputs)
        if node.name in LIGHT and is_small:
            light.add(node)
            if _is_free(node, needs[node], pieces[node]):
                free.add(node)
    forward, backward = list[Node](), list[Node]()
    for node in graph.nodes:
        if node not in free:
            (backward if node in after_seed else forward).append(node)
    return OrderedProgram(
        traced=traced,
        graph=graph,
        keys=Keys(),
        forward=(*_penalties_early(forward, needs, pieces),),
        backward=(*_gradients_early(backward, graph, needs, light),),
        free=free,
        light=light,
        needs=needs,
        pieces=pieces,
        sizes=sizes,
    )


def _is_free(node: Node, needs: Set[Value], params: Set[Piece]) -> bool:
    out_bytes = num_bytes(node.outputs)
    # If a count or a key depends on the previous layer's, computing it again would
    # start at the first layer, in longer and longer programs.
    has_operands = any(value.constant is None for value in node.inputs)
    is_count = has_operands and not params and out_bytes <= _SCALAR_BYTES
    is_broadcast = any(
        num_bytes(needs) <= limit < out_bytes for limit in (_TINY_BYTES, _SCALAR_BYTES)
    )
    return is_broadcast or not (needs or is_count)


def first_uses(uses: Sequence[Iterable[_Item]]) -> dict[_Item, int]:
    """Returns for each item the number of the first of `uses` that has it."""
    return {item: i for i in reversed(range(len(uses))) for item in uses[i]}


def last_uses(uses: Iterable[Iterable[_Item]]) -> dict[_Item, int]:
    """Returns for each item the number of the last of `uses` that has it."""
    return {item: i for i, items in enumerate(uses) for item in items}


def _live_bytes(nodes: Sequence[Node], needs: _Needs) -> np.ndarray:
    maker = last_uses(node.outputs for node in nodes)
    last = last_uses(needs[node] for node in nodes)
    crossing = maker.keys() & last.keys()
    stays = (Stay(maker[v] + 1, last[v] + 1, v.num_bytes) for v in crossing)
    return occupancy(len(nodes) + 1, stays)


def _overlaps(piece: Piece, other: Piece) -> bool:
    """Whether a piece overlaps another one, which has all rows."""
    depth = min(len(piece.index), len(other.index))
    if piece.leaf != other.leaf or piece.index[:depth] != other.index[:depth]:
        return False
    if piece.rows is None or len(other.index) <= len(piece.index):
        return True
    return piece.rows[0] <= other.index[len(piece.index)] < piece.rows[1]


def _penalties_early(
    forward: Sequence[Node], needs: _Needs, pieces: _Pieces
) -> list[Node]:
    """Moves reductions of params next to another use, so that one read serves both."""
    penalties = {
        node: None
        for node in forward
        if not needs[node] and num_bytes(node.outputs) <= _TINY_BYTES
    }
    others = [node for node in forward if node not in penalties]
    first_use = first_uses([pieces[node] for node in others])
    hosts: dict[Node, Node] = {}
    for node in penalties:
        readers = {first_use.get(piece) for piece in pieces[node]}
        number = readers.pop() if len(readers) == 1 else None
        if number is not None:
            hosts[node] = others[number]
    while True:
        order = _by_need(forward, needs, hosts)
        if len(order) == len(forward):
            return order
        # Hosts need these themselves (normalised weights, say), so they stay in place.
        for node in set(forward) - set(order):
            hosts.pop(node, None)


def _gradients_early(
    backward: Sequence[Node], graph: Graph, needs: _Needs, light: Set[Node]
) -> list[Node]:
    """Runs cheap nodes that only lead to gradients as soon as their inputs are there.

    Otherwise a cast of all params, whose transposes come last, would hold every
    gradient until the end.
    """
    needed = {value.node for value in graph.results}
    early: set[Node] = set()
    for node in reversed(backward):
        if node in light and node not in needed:
            early.add(node)
        else:
            needed.update(value.node for value in needs[node])
    return _by_need(backward, needs, eager=early)


def _by_need(
    nodes: Sequence[Node],
    needs: _Needs,
    hosts: Mapping[Node, Node] | None = None,
    eager: Iterable[Node] = (),
) -> list[Node]:
    """Returns nodes in their order, but each after what it needs and after its host.

    Eager nodes come as soon as they can; those that wait for each other are left out.
    """
    missing: dict[Node, set[Node]] = {node: set() for node in nodes}
    readers: defaultdict[Node, list[Node]] = defaultdict(list)
    needed = ((node, value.node) for node in nodes for value in needs[node])
    for node, other in chain(needed, (hosts or {}).items()):
        if other in missing and other not in missing[node]:
            missing[node].add(other)
            readers[other].append(node)
    may_come, order = set(eager), dict[Node, None]()
    for node in nodes:
        may_come.add(node)
        ready = deque([] if missing[node] else [node])
        while ready:
            current = ready.popleft()
            if current not in may_come or current in order:
                continue
            order[current] = None
            for reader in readers[current]:
                missing[reader].discard(current)
                if not missing[reader]:
                    ready.append(reader)
    return list(order)
