"""A jaxpr as a graph: nodes in an order in which they can be computed.

    Inliner     an equation a node, calls inlined
    graph_of    the graph of an optimizer, with conditionals as selects

Invariant: every value has the node that computes it. `jaxinf.streaming` extends
`Inliner` by scans over stacked params, which it unrolls.
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxinf import compat


def aval_bytes(aval: Any) -> int:
    """Returns the bytes of an array; random keys count as 16 bytes an element."""
    shape = getattr(aval, "shape", None)
    if shape is None:
        return 0
    return math.prod(shape) * getattr(aval.dtype, "itemsize", 16)


@dataclass(eq=False, slots=True, repr=False)
class Value:
    """One value of a graph; values are compared by identity.

    Attributes:
      aval: Abstract value: shape, dtype, weak type.
      stored: Whether it depends on an optimizer's stored state.
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
        """The shape; empty for tokens, which have none."""
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def dtype(self) -> Any:
        """The dtype, which may be an extended one (random keys); None for tokens."""
        return getattr(self.aval, "dtype", None)

    @property
    def num_bytes(self) -> int:
        return aval_bytes(self.aval)

    @property
    def is_literal(self) -> bool:
        return isinstance(self.constant, np.generic)


@dataclass(eq=False, slots=True, repr=False)
class Node:
    """One equation of a jaxpr; `sources` are where it was traced, and its callers."""

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
        """Whether the node makes an array of equal elements, from a scalar."""
        return self.name == "broadcast_in_dim" and not self.inputs[0].shape


@dataclass(frozen=True)
class Graph:
    """One traced function.

    Attributes:
      nodes: In an order in which they can be computed.
      gradients: Further outputs of a loss function's graph: complete gradients, by
        their part of the params.
    """

    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    results: tuple[Value, ...]
    gradients: Mapping[Any, Value] = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[Value, ...]:
        return (*self.results, *self.gradients.values())


def ancestors(
    values: Iterable[Any], is_included: Callable[[Any], bool] = lambda node: True
) -> Mapping[Any, None]:
    """Returns the nodes from which values follow, through included nodes alone."""
    nodes: dict[Any, None] = {}
    stack = [value.node for value in values]
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes and is_included(node):
            nodes[node] = None
            stack += [value.node for value in node.inputs]
    return nodes


def prune(nodes: Iterable[Node], outputs: Iterable[Value]) -> tuple[Node, ...]:
    """Returns the nodes that outputs depend on, in their order."""
    needed = ancestors(outputs)
    return tuple(node for node in nodes if node in needed)


def evaluate_node(node: Node, operands: Sequence[Any]) -> Sequence[jax.Array]:
    """Computes a node with JAX, in the context of its trace; traceable."""
    return compat.evaluate_equation(node.primitive, operands, node.params, node.context)


def evaluate(
    nodes: Sequence[Node],
    outputs: Sequence[Value],
    env: dict[Value, Any],
    compute: Callable[[Node, Sequence[Any]], Sequence[Any]] = evaluate_node,
) -> list[Any]:
    """Computes `outputs` with JAX; traceable.

    Args:
      nodes: The result of `prune` for `outputs`.
      env: Arrays of the graph's inputs; inputs of another floating dtype than the
        graph's are converted at their first use, so that unused ones cost nothing.
      compute: Computes a node's results from its operands.
    """

    def read(value: Value) -> Any:
        if value.constant is not None:
            return value.constant
        if value.node is None and env[value].dtype != value.dtype:
            env[value] = jax.lax.convert_element_type(env[value], value.dtype)
        return env[value]

    for node in nodes:
        results = compute(node, [read(value) for value in node.inputs])
        env.update(zip(node.outputs, results, strict=True))
    return [read(value) for value in outputs]


class Inliner:
    """Makes nodes of a jaxpr's equations; calls become the equations inside.

    An equation's operands and results are values, or what a subclass makes of them.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._callers: list[Any] = []

    def inline(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """Returns the results of a jaxpr, closed or not, from its arguments' values."""
        consts = [self.const(array) for array in getattr(jaxpr, "consts", ())]
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            is_literal = isinstance(atom, compat.Literal)
            return self.literal(atom) if is_literal else env[atom]

        for eqn in jaxpr.eqns:
            outputs = self.equation(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Any, inputs: list[Any]) -> Sequence[Any]:
        """Returns an equation's results."""
        callee = self.callee(eqn)
        if callee is not None:
            return self.call(eqn, callee, inputs)
        sources = (eqn.source_info, *reversed(self._callers))
        node = Node(eqn.primitive, tuple(inputs), eqn.params, (), eqn.ctx, sources)
        return self.append(node, [var.aval for var in eqn.outvars])

    def callee(self, eqn: Any) -> Any:
        """Returns the jaxpr of an equation that is only a call; else None."""
        return compat.called_jaxpr(eqn.primitive.name, eqn.params)

    def call(self, eqn: Any, callee: Any, inputs: Sequence[Any]) -> list[Any]:
        """Returns the results of the jaxpr that an equation calls."""
        self._callers.append(eqn.source_info)
        outputs = self.inline(callee, inputs)
        self._callers.pop()
        return outputs

    def append(self, node: Node, avals: Sequence[Any]) -> tuple[Value, ...]:
        """Appends a node and returns its results, of these types."""
        stored = any(value.stored for value in node.inputs)
        node.outputs = tuple(Value(aval, stored, node) for aval in avals)
        self.nodes.append(node)
        return node.outputs

    def const(self, array: Any) -> Value:
        """Returns the value of an array that the function closed over."""
        aval = jax.ShapeDtypeStruct(np.shape(array), array.dtype)
        return Value(aval, constant=array)

    def literal(self, literal: Any) -> Value:
        """Returns the value of a literal."""
        return Value(literal.aval, constant=literal.val)


def graph_of(closed: compat.ClosedJaxpr, stored: Container[int] = ()) -> Graph:
    """Returns the graph of `closed`, with calls and conditionals on arrays inlined.

    The inputs with the numbers `stored` are on storage.
    """
    inputs = tuple(
        Value(var.aval, i in stored) for i, var in enumerate(closed.jaxpr.invars)
    )
    inliner = _WithoutConditionals()
    results = inliner.inline(closed, inputs)
    return Graph(inputs, tuple(inliner.nodes), tuple(results))


class _WithoutConditionals(Inliner):
    """Computes all branches and selects, since a kernel has no control flow."""

    def literal(self, literal: Any) -> Value:
        if literal.aval.shape:
            return super().literal(literal)
        number = np.asarray(literal.val).astype(literal.aval.dtype)[()]
        return Value(literal.aval, constant=number)

    def equation(self, eqn: Any, inputs: list[Value]) -> Sequence[Value]:
        name, avals = eqn.primitive.name, [var.aval for var in eqn.outvars]
        branches = eqn.params["branches"] if name == "cond" else None
        if branches is not None and inputs[0].is_literal:
            chosen = min(max(int(inputs[0].constant), 0), len(branches) - 1)
            return self.call(eqn, branches[chosen], inputs[1:])
        if branches is not None:
            shapes = [value.shape for value in inputs] + [aval.shape for aval in avals]
            # A conditional that neither takes nor gives more than scalars is kept.
            if any(shapes) or any(value.stored for value in inputs):
                return self._select(eqn, branches, inputs)
        is_identity = name in compat.IDENTITIES and all(
            value.shape == tuple(aval.shape) and value.dtype == aval.dtype
            for value, aval in zip(inputs, avals, strict=False)
        )
        return inputs[: len(avals)] if is_identity else super().equation(eqn, inputs)

    def _select(
        self, eqn: Any, branches: Sequence[Any], inputs: Sequence[Value]
    ) -> list[Value]:
        index, *operands = inputs
        results = [self.call(eqn, branch, operands) for branch in branches]
        select, sources = jax.lax.select_n_p, (eqn.source_info,)
        selected: list[Value] = []
        for var, cases in zip(eqn.outvars, zip(*results, strict=True), strict=True):
            if all(case is cases[0] for case in cases):
                selected.append(cases[0])
            else:
                node = Node(select, (index, *cases), {}, sources=sources)
                selected += self.append(node, [var.aval])
        return selected
