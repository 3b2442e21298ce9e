"""Finds the tables of a program: params that it needs only row by row.

    table ─ casts, scalings, transposes ─┬─ gather of whole rows      an embedding
                                         └─ product of matrices       a head, its dx
    gradient ◄─ sums, casts, transposes ─┬─ scatter-add of rows
                                         └─ product of matrices

Invariant: what is found reads no other param's row, and nothing else reads it whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinf.program.graph import Node, Value
from jaxinf.streaming.program.classify import POINTWISE
from jaxinf.streaming.program.graph import Graph, Piece, aval_bytes

_MODES = frozenset(
    {
        lax.GatherScatterMode.CLIP,
        lax.GatherScatterMode.FILL_OR_DROP,
        lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    }
)


@dataclass(eq=False)
class Table:
    """A param of a program, and what the program does with it.

    Attributes:
      why: Why it is needed whole; None if it is not.
      reads: Values that have its rows on an axis, and that axis: the param, and what
        follows from it element by element.
      made: Values that have its gradient's rows, in the same way.
      products: The products that its gradient is a sum of, among others.
    """

    value: Value
    why: str | None = None
    reads: dict[Value, int] = field(default_factory=dict)
    made: dict[Value, int] = field(default_factory=dict)
    products: list[Node] = field(default_factory=list)
    is_gathered: bool = False

    @property
    def leaf(self) -> int:
        return self.value.origin.leaf

    @property
    def num_rows(self) -> int:
        return self.value.shape[0]

    @property
    def num_bytes(self) -> int:
        return aval_bytes(self.value.aval)


def find_tables(graph: Graph) -> list[Table]:
    """Returns the matrices that `graph` reads, in the order of leaves."""
    readers: dict[Value, list[Node]] = {}
    inputs: dict[int, list[Value]] = {}
    for node in graph.nodes:
        for value in dict.fromkeys(node.inputs):
            readers.setdefault(value, []).append(node)
            if isinstance(value.origin, Piece):
                own = inputs.setdefault(value.origin.leaf, [])
                if value not in own:
                    own.append(value)
    found = []
    for leaf, values in sorted(inputs.items()):
        value = values[0]
        if len(values) == 1 and value.origin == Piece(leaf) and len(value.shape) == 2:
            table = Table(value)
            table.why = _why_whole(table, graph, readers)
            found.append(table)
    _check_products(graph, found)
    return found


def _check_products(graph: Graph, tables: Sequence[Table]) -> None:
    """Notes tables that meet another one, or that another one's gradient reads."""
    fit = {value: one for one in tables if one.why is None for value in one.reads}
    products = {node for one in tables for node in one.products}
    for node in graph.nodes:
        read = {value for value in node.inputs if value in fit}
        if len(read) > 1 or node in products:
            for value in read:
                fit[value].why = f"{node.name} reads it with another one"


def _why_whole(
    table: Table, graph: Graph, readers: Mapping[Value, Sequence[Node]]
) -> str | None:
    why = _follow(table, graph, readers)
    gradient = graph.gradients.get(Piece(table.leaf))
    if why is None and gradient is not None:
        why = _trace_back(table, gradient)
        inside = {value.node for value in table.made} | {*table.products}
        others = (v for piece, v in graph.gradients.items() if piece.leaf != table.leaf)
        results = {*graph.results, *others}
        for value in [] if why else table.made:
            outside = [node for node in readers.get(value, ()) if node not in inside]
            if not is_spread(value) and (outside or value in results):
                return f"{outside[0].name if outside else 'a result'} has its gradient"
    return why


def _follow(
    table: Table, graph: Graph, readers: Mapping[Value, Sequence[Node]]
) -> str | None:
    """Notes what follows from a table; returns what needs it whole."""
    table.reads[table.value] = 0
    stack, results = [table.value], {*graph.outputs}
    while stack:
        value = stack.pop()
        axis = table.reads[value]
        if value in results:
            return "it is a result"
        for node in readers.get(value, ()):
            if node.name == "transpose":
                other = list(node.params["permutation"]).index(axis)
            elif _is_pointwise(node) and all(
                one is value or not one.shape for one in node.inputs
            ):
                other = axis
            elif _looks_up(node, value, axis):
                table.is_gathered = True
                continue
            elif node.name == "dot_general" and _multiplies(node, value, axis):
                continue
            else:
                return f"{node.name} reads it"
            table.reads[node.outputs[0]] = other
            stack.append(node.outputs[0])
    return None


def _trace_back(table: Table, gradient: Value) -> str | None:
    """Notes what a gradient is made of; returns what makes it whole."""
    stack = [(gradient, 0)]
    while stack:
        value, axis = stack.pop()
        if table.made.get(value, axis) != axis:
            return "its gradient meets its transpose"
        if value in table.made:
            continue
        table.made[value], node = axis, value.node
        if is_spread(value):
            continue
        if node is None:
            return "its gradient is an input"
        if node.name == "transpose":
            stack.append((node.inputs[0], node.params["permutation"][axis]))
        elif _is_pointwise(node):
            stack += [(one, axis) for one in node.inputs if one.shape]
        elif node.name == "scatter-add" and _adds_rows(node, axis):
            stack.append((node.inputs[0], axis))
        elif node.name == "dot_general" and side_of(node, axis) is not None:
            table.products.append(node)
        else:
            return f"{node.name} makes its gradient"
    return None


def is_spread(value: Value) -> bool:
    return value.node is not None and value.node.is_spread


def side_of(node: Node, axis: int) -> tuple[int, int] | None:
    """Returns the operand of a product that has an axis of the result, and its axis.

    None if both have it.
    """
    contracted, batch = node.params["dimension_numbers"]
    place = len(batch[0])
    if axis < place:
        return None
    for side, value in enumerate(node.inputs):
        taken = {*contracted[side], *batch[side]}
        free = [one for one in range(len(value.shape)) if one not in taken]
        if axis < place + len(free):
            return side, free[axis - place]
        place += len(free)
    raise AssertionError("the result has the free axes")


def _is_pointwise(node: Node) -> bool:
    return (
        node.name in POINTWISE
        and len(node.outputs) == 1
        and all(one.shape in ((), node.outputs[0].shape) for one in node.inputs)
    )


def _multiplies(node: Node, table: Value, axis: int) -> bool:
    """Whether a product sums over rows of a table, or has them in its result."""
    if node.params.get("out_sharding") is not None:
        return False
    if node.inputs[0] is node.inputs[1]:
        return False
    _, batch = node.params["dimension_numbers"]
    return axis not in batch[node.inputs.index(table)]


def _looks_up(node: Node, table: Value, axis: int) -> bool:
    """Whether a node gathers whole rows of a table."""
    if node.name != "gather" or node.inputs[0] is not table or table in node.inputs[1:]:
        return False
    numbers = node.params["dimension_numbers"]
    whole = list(table.shape)
    whole[axis] = 1
    return (
        tuple(numbers.start_index_map) == (axis,)
        and not numbers.operand_batching_dims
        and list(node.params["slice_sizes"]) == whole
        and node.params["mode"] in _MODES
        and _is_index(node.inputs[1])
        and jnp.issubdtype(table.dtype, jnp.inexact)
    )


def _adds_rows(node: Node, axis: int) -> bool:
    numbers = node.params["dimension_numbers"]
    operand, indices, updates = node.inputs
    window = [updates.shape[dim] for dim in numbers.update_window_dims]
    whole = list(operand.shape)
    if tuple(numbers.inserted_window_dims) == (axis,):
        del whole[axis]
    elif not numbers.inserted_window_dims:
        whole[axis] = 1
    return (
        tuple(numbers.scatter_dims_to_operand_dims) == (axis,)
        and not numbers.operand_batching_dims
        and window == whole
        and node.params["mode"] in _MODES
        and _is_index(indices)
    )


def _is_index(value: Value) -> bool:
    return np.issubdtype(value.dtype, np.integer) and value.shape[-1:] == (1,)
