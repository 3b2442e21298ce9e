"""A jaxpr as a graph: calls inlined, conditionals on arrays turned into selects.

Invariant: nodes are in an order in which they can be computed. Every value has the node
  that computes it, and a mark whether it depends on stored state.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxinf import compat


@dataclass(eq=False, slots=True, repr=False)
class Value:
    """One value of a graph; values are compared by identity.

    Attributes:
      aval: Its abstract value: shape, dtype, weak type.
      node: The node that computes it; None for inputs and constants.
      constant: The array of a constant, or the NumPy scalar of a literal.
      origin: The identity of an input, if the maker of the graph sets it.
    """

    aval: Any
    stored: bool = False
    node: "Node | None" = None
    constant: Any = None
    origin: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; empty for tokens, which have none."""
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def dtype(self) -> Any:
        """Its dtype, which may be an extended one (random keys); None for tokens."""
        return getattr(self.aval, "dtype", None)

    @property
    def is_literal(self) -> bool:
        return isinstance(self.constant, np.generic)


@dataclass(eq=False, slots=True, repr=False)
class Node:
    """One equation of the jaxpr; `sources`: where it was traced, and its callers."""

    primitive: compat.Primitive
    inputs: tuple[Value, ...]
    params: Mapping[str, Any]
    outputs: tuple[Value, ...] = ()
    context: Any = None
    sources: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return self.primitive.name

    @property
    def is_spread(self) -> bool:
        """Whether it makes an array of equal elements, from a scalar."""
        return self.name == "broadcast_in_dim" and not self.inputs[0].shape


@dataclass(frozen=True)
class Graph:
    """Inputs, nodes and outputs of one traced function."""

    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]


def build_graph(closed: compat.ClosedJaxpr, stored: Sequence[bool]) -> Graph:
    """Builds the graph of `closed`; inputs marked in `stored` are on storage."""
    inputs = tuple(
        Value(var.aval, stored=flag)
        for var, flag in zip(closed.jaxpr.invars, stored, strict=True)
    )
    builder = _Builder()
    outputs = builder.inline(closed, inputs)
    return Graph(inputs, tuple(builder.nodes), tuple(outputs))


def local_owners(
    graph: Graph, owners: Mapping[Value, int], is_elementwise: Callable[[Node], bool]
) -> dict[Value, int]:
    """Returns values that one owner's inputs reach through elementwise nodes.

    Their other operands have no owner, or are reduced over several.
    """
    mixed = -1
    found = dict(owners)
    for node in graph.nodes:
        sources = {found[value] for value in node.inputs if value in found}
        if sources:
            own = sources - {mixed}
            local = len(own) == 1 and is_elementwise(node)
            found.update(dict.fromkeys(node.outputs, own.pop() if local else mixed))
    return {value: owner for value, owner in found.items() if owner != mixed}


def prune(nodes: Iterable[Node], outputs: Iterable[Value]) -> tuple[Node, ...]:
    needed = {value.node for value in outputs}
    kept: list[Node] = []
    for node in reversed(list(nodes)):
        if node in needed:
            kept.append(node)
            needed.update(value.node for value in node.inputs)
    return tuple(reversed(kept))


def bind(node: Node, operands: Sequence[Any]) -> Sequence[jax.Array]:
    """Computes a node with JAX, in the context it was traced in; traceable."""
    return compat.bind(node.primitive, operands, node.params, node.context)


Compute: TypeAlias = Callable[[Node, Sequence[Any]], Sequence[Any]]
"""Computes a node's results from its operands, with JAX."""


def evaluate(
    nodes: Sequence[Node],
    outputs: Sequence[Value],
    env: dict[Value, Any],
    compute: Compute = bind,
) -> list[Any]:
    """Computes `outputs` with JAX; traceable.

    Args:
      nodes: The result of `prune` for `outputs`.
      env: Arrays of the graph's inputs; inputs of another floating dtype than the
        graph's are converted at their first use, so that unused ones cost nothing.
    """
    converted: set[Value] = set()

    def read(value: Value) -> Any:
        if value.constant is not None:
            return value.constant
        if value.node is None and value not in converted:
            converted.add(value)
            if env[value].dtype != value.dtype:
                env[value] = jax.lax.convert_element_type(env[value], value.dtype)
        return env[value]

    for node in nodes:
        results = compute(node, [read(value) for value in node.inputs])
        env.update(zip(node.outputs, results, strict=True))
    return [read(value) for value in outputs]


class Inliner(ABC):
    """Makes the values of a jaxpr, equation by equation."""

    def inline(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """Returns the results of a (closed) jaxpr applied to `args`."""
        consts = [self._const(value) for value in getattr(jaxpr, "consts", ())]
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            is_literal = isinstance(atom, compat.Literal)
            return self._literal(atom) if is_literal else env[atom]

        for eqn in jaxpr.eqns:
            outputs = self._equation(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _literal(self, literal: Any) -> Value:
        return Value(literal.aval, constant=literal.val)

    @abstractmethod
    def _const(self, array: Any) -> Value:
        """Returns the value of an array that the function closed over."""

    @abstractmethod
    def _equation(self, eqn: Any, inputs: list[Any]) -> Sequence[Any]:
        """Returns the results of an equation."""


class _Builder(Inliner):
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._callers: list[Any] = []

    def _const(self, array: Any) -> Value:
        aval = jax.ShapeDtypeStruct(np.shape(array), array.dtype)
        return Value(aval, constant=array)

    def _literal(self, literal: Any) -> Value:
        aval = literal.aval
        if aval.shape:
            return Value(aval, constant=literal.val)
        number = np.asarray(literal.val).astype(aval.dtype)[()]
        return Value(aval, constant=number)

    def _equation(self, eqn: Any, inputs: list[Value]) -> Sequence[Value]:
        name = eqn.primitive.name
        callee = compat.called_jaxpr(name, eqn.params)
        if callee is not None:
            return self._call(eqn, callee, inputs)
        branches = compat.branches(name, eqn.params)
        if branches is not None:
            return self._cond(eqn, branches, inputs)
        avals = [var.aval for var in eqn.outvars]
        if _is_identity(name, inputs, avals):
            return inputs[: len(avals)]
        return self._append(self._node(eqn, inputs), avals)

    def _call(self, eqn: Any, callee: Any, inputs: list[Value]) -> list[Value]:
        self._callers.append(eqn.source_info)
        outputs = self.inline(callee, inputs)
        self._callers.pop()
        return outputs

    def _node(self, eqn: Any, inputs: Sequence[Value]) -> Node:
        sources = (eqn.source_info, *reversed(self._callers))
        return Node(
            eqn.primitive, tuple(inputs), eqn.params, context=eqn.ctx, sources=sources
        )

    def _append(self, node: Node, avals: Sequence[Any]) -> Sequence[Value]:
        stored = any(value.stored for value in node.inputs)
        node.outputs = tuple(Value(aval, stored, node) for aval in avals)
        self.nodes.append(node)
        return node.outputs

    def _cond(
        self, eqn: Any, branches: Sequence[Any], inputs: list[Value]
    ) -> Sequence[Value]:
        """Folds, keeps or inlines a conditional.

        A conditional on scalars is kept. Otherwise all branches are computed and the
        predicate selects, because a body has no control flow.
        """
        index, *operands = inputs
        if index.is_literal:
            chosen = min(max(int(index.constant), 0), len(branches) - 1)
            return self._call(eqn, branches[chosen], operands)
        avals = [var.aval for var in eqn.outvars]
        shapes = [value.shape for value in inputs] + [aval.shape for aval in avals]
        if not any(shapes) and not any(value.stored for value in inputs):
            return self._append(self._node(eqn, inputs), avals)
        results = [self._call(eqn, branch, operands) for branch in branches]
        return [
            self._select(eqn, index, cases, aval)
            for cases, aval in zip(zip(*results, strict=True), avals, strict=True)
        ]

    def _select(
        self, eqn: Any, index: Value, cases: tuple[Value, ...], aval: Any
    ) -> Value:
        if all(case is cases[0] for case in cases):
            return cases[0]
        primitive = compat.select_primitive()
        node = Node(primitive, (index, *cases), {}, sources=(eqn.source_info,))
        return self._append(node, [aval])[0]


def _is_identity(name: str, inputs: Sequence[Value], avals: Sequence[Any]) -> bool:
    if name not in compat.IDENTITIES:
        return False
    return all(
        value.shape == tuple(aval.shape) and value.dtype == aval.dtype
        for value, aval in zip(inputs, avals, strict=False)
    )
