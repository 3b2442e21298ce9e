"""Builds the graph of a traced function, with scans over stacked params unrolled.

Extends `jaxinf.program`'s inliner, whose graph, nodes and values these are. A value
with an `origin` is an input; one with a `constant` is a literal, part of the program's
text.

Invariant: the results that an unrolled scan collects are stacked only if a node reads
the whole. So a layer's params are an input of their own, and their gradient an output.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxinf import compat
from jaxinf.compat import POINTWISE
from jaxinf.program import Graph, Inliner, Node, Value, prune
from jaxinf.streaming.program.meshes import item_aval, struct, typed_sharding
from jaxinf.streaming.program.trace import Traced

_CONSTRAINT = "sharding_constraint"


# The names of these classes and of their fields are in the fingerprints of programs.


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a param leaf that an equation reads, or whose gradient is complete.

    Attributes:
      index: Position on its leading axes; empty for the whole.
      rows: First and last (exclusive) position on the next axis; None for all.
    """

    leaf: int
    index: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None

    def of(self, array: Any) -> Any:
        """Returns the piece of a whole leaf's array."""
        array = array[self.index] if self.index else array
        return array if self.rows is None else array[slice(*self.rows)]


@dataclass(frozen=True, slots=True)
class Batch:
    """A leaf of the batch."""

    leaf: int


@dataclass(frozen=True, slots=True)
class Const:
    """An array that the loss function closed over."""

    number: int


@dataclass(frozen=True, slots=True)
class Seed:
    """The cotangent of the loss; nodes that depend on it are backward."""


@dataclass(frozen=True, slots=True)
class Number:
    """An index that is passed as an argument, so programs do not depend on it."""

    number: int


Origin: TypeAlias = Piece | Batch | Const | Seed | Number


def num_bytes(values: Iterable[Value]) -> int:
    return sum(value.num_bytes for value in values)


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Stack:
    """Values along a leading axis, which do not exist as one array."""

    aval: Any
    items: tuple["Atom", ...]


Atom: TypeAlias = Value | Stack


def build_graph(traced: Traced, closed: Any) -> Graph:
    has_loss = traced.seed_dtype is not None
    origins: list[Origin] = [*map(Piece, range(len(traced.params)))]
    origins += [*map(Batch, range(len(traced.batch))), *([Seed()] * has_loss)]
    unroller = _Unroller(traced.consts)
    inputs, outputs = unroller.unroll(closed, origins)
    num_results = traced.aux_tree.num_leaves + has_loss
    results = tuple(map(unroller.computed, outputs[:num_results]))
    gradients = {
        piece: unroller.computed(value)
        for leaf, atom in enumerate(outputs[num_results:])
        for piece, value in _pieces(Piece(leaf), atom)
    }
    wanted = (*results, *gradients.values())
    nodes = _with_turned_products(prune(unroller.nodes, wanted), wanted)
    return Graph(inputs, nodes, results, gradients)


def graph_of_init(closed: Any, consts: Sequence[Any]) -> Graph:
    """Builds the graph of a function that makes params; its arguments are a batch."""
    unroller = _Unroller(consts)
    origins = map(Batch, range(len(closed.jaxpr.invars)))
    inputs, outputs = unroller.unroll(closed, [*origins])
    return Graph(inputs, prune(unroller.nodes, outputs), tuple(outputs))


def _pieces(piece: Piece, atom: Atom) -> Iterator[tuple[Piece, Atom]]:
    if isinstance(atom, Value):
        yield piece, atom
        return
    for i, item in enumerate(atom.items):
        yield from _pieces(Piece(piece.leaf, (*piece.index, i)), item)


def _with_turned_products(
    nodes: Sequence[Node], wanted: Iterable[Value]
) -> tuple[Node, ...]:
    """Exchanges the operands of products whose result is only transposed.

        transpose(dot(ct, x))  ─►  dot(x, ct)

    The gradient of `x @ w` by `w` is such a product. XLA's CPU compiler takes two to
    three times as long for it as for the product with exchanged operands.
    """
    num_reads = Counter(value for node in nodes for value in node.inputs)
    num_reads.update(wanted)
    kept: dict[Node, None] = {}
    for node in nodes:
        product = node.inputs[0].node if node.name == "transpose" else None
        if product and num_reads[node.inputs[0]] == 1:
            turned = _turned(product, node)
            if turned is not None:
                del kept[product]
                node = turned
        kept[node] = None
    return tuple(kept)


def _turned(product: Node, transposed: Node) -> Node | None:
    """Returns the product that computes the transposed result, if there is one."""
    if product.name != "dot_general" or product.params.get("out_sharding") is not None:
        return None
    (left, right), (left_batch, right_batch) = product.params["dimension_numbers"]
    x, y = product.inputs
    num_batch = len(left_batch)
    middle = len(x.shape) - len(left)
    end = middle + len(y.shape) - num_batch - len(right)
    exchanged = *range(num_batch), *range(middle, end), *range(num_batch, middle)
    precision = product.params["precision"]
    if isinstance(precision, tuple):
        precision = precision[::-1]
    elif not (precision is None or isinstance(precision, lax.Precision)):
        return None  # an algorithm may treat its operands differently
    if tuple(transposed.params["permutation"]) != exchanged:
        return None
    params = {
        **product.params,
        "dimension_numbers": ((right, left), (right_batch, left_batch)),
        "precision": precision,
    }
    node = replace(product, inputs=(y, x), params=params, outputs=transposed.outputs)
    transposed.outputs[0].node = node
    return node


class _Unroller(Inliner):
    """Unrolls scans over params; the results that they collect are stacks."""

    def __init__(self, consts: Iterable[Any]) -> None:
        super().__init__()
        self._numbers = {id(const): i for i, const in enumerate(consts)}
        self._inputs: dict[tuple[Origin, Any], Value] = {}
        self._items: dict[tuple[Value, int], Value] = {}
        self._whole: dict[Stack, Value] = {}
        self._stacked: set[Value] = set()  # computed of stacks, element by element
        self._zeros: set[Value] = set()
        self._sliced_shapes: set[tuple[int, ...]] = set()

    def unroll(
        self, closed: Any, origins: Sequence[Origin]
    ) -> tuple[tuple[Value, ...], list[Any]]:
        """Returns the inputs with these origins, and the results, of a jaxpr."""
        pairs = zip(origins, closed.jaxpr.invars, strict=True)
        inputs = [self.input(origin, var.aval) for origin, var in pairs]
        return tuple(inputs), self.inline(closed, inputs)

    def input(self, origin: Origin, aval: Any) -> Value:
        key = origin, aval.dtype
        return self._inputs.setdefault(key, Value(aval, origin=origin))

    def const(self, array: Any) -> Value:
        return self.input(Const(self._numbers[id(array)]), jax.typeof(array))

    def computed(self, atom: Atom) -> Value:
        value = self._value(atom)
        if value.node is None:
            return self.append(Node(lax.copy_p, (value,), {}), [value.aval])[0]
        return value

    def append(self, node: Node, avals: Sequence[Any]) -> tuple[Value, ...]:
        outputs, inputs = super().append(node, avals), node.inputs
        if _is_pointwise(node, inputs, avals) and any(map(self._is_stacked, inputs)):
            self._stacked.update(outputs)
        return outputs

    def callee(self, eqn: Any) -> Any:  # what a checkpoint repeats stays together
        return compat.called_jaxpr(eqn.primitive.name, eqn.params, checkpoints=False)

    def call(self, eqn: Any, callee: Any, inputs: Sequence[Atom]) -> list[Atom]:
        inputs = self._constrained(inputs, eqn.params.get("in_shardings", ()))
        outputs = super().call(eqn, callee, inputs)
        return self._constrained(outputs, eqn.params.get("out_shardings", ()))

    def equation(self, eqn: Any, inputs: list[Atom]) -> Sequence[Atom]:
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            xs = inputs[params["num_consts"] + params["num_carry"] :]
            if any(map(self._is_stacked, xs)):
                return self._unroll(eqn, inputs)
        avals = [var.aval for var in eqn.outvars]
        special = _SPECIAL.get(name)
        result = special and special(self, params, avals[0], *inputs)
        if result is not None:
            return [result]
        has_stacks = any(isinstance(atom, Stack) for atom in inputs)
        if has_stacks and self.callee(eqn) is None:
            node = Node(eqn.primitive, (), params, context=eqn.ctx)
            if _is_pointwise(node, inputs, avals):
                return [self._on_items(node, avals[0], inputs)]
            inputs = [*map(self._value, inputs)]
        return super().equation(eqn, inputs)

    def _constrained(
        self, atoms: Sequence[Atom], shardings: Sequence[Any]
    ) -> list[Atom]:
        """Returns the values of a jit with the shardings that it gives them."""
        constrained = list(atoms)
        for i, (atom, sharding) in enumerate(zip(atoms, shardings, strict=False)):
            is_named = isinstance(sharding, NamedSharding) and sharding.mesh.size > 1
            if is_named and isinstance(atom, Value):
                constrain = partial(lax.with_sharding_constraint, shardings=sharding)
                constrained[i] = self._call(constrain, atom)
        return constrained

    def _append(self, like: Node, inputs: Sequence[Atom], aval: Any) -> Value:
        values = tuple(map(self._value, inputs))
        return self.append(replace(like, inputs=values), [aval])[0]

    def _value(self, atom: Atom) -> Value:
        """Returns an atom as one value; concatenates a stack once."""
        if isinstance(atom, Value):
            return atom
        if atom not in self._whole:
            items = [self._value(item) for item in atom.items]
            self._whole[atom] = self._call(lambda *xs: jnp.stack(xs), *items)
        return self._whole[atom]

    def _call(self, function: Callable[..., Any], *args: Value) -> Value:
        """Appends the nodes of `function`, traced on the types of `args`."""
        types = (struct(value.aval, typed_sharding(value.aval)) for value in args)
        return self._value(self.inline(jax.make_jaxpr(function)(*types), args)[0])

    # Scans.

    def _is_stacked(self, atom: Atom) -> bool:
        """Whether an atom's items are available without the whole."""
        if isinstance(atom, Stack) or isinstance(atom.origin, Piece):
            return True
        return atom in self._stacked

    def _unroll(self, eqn: Any, inputs: list[Atom]) -> list[Atom]:
        params = eqn.params
        num_consts, num_carry = params["num_consts"], params["num_carry"]
        consts, xs = inputs[:num_consts], inputs[num_consts + num_carry :]
        carry = inputs[num_consts : num_consts + num_carry]
        order = range(params["length"])
        rows: dict[int, list[Atom]] = {}
        for i in reversed(order) if params["reverse"] else order:
            args = [*consts, *carry, *(self._item(x, i) for x in xs)]
            outputs = self.inline(params["jaxpr"], args)
            carry, rows[i] = outputs[:num_carry], outputs[num_carry:]
        stacks = [
            Stack(var.aval, tuple(rows[i][j] for i in order))
            for j, var in enumerate(eqn.outvars[num_carry:])
        ]
        return [*carry, *stacks]

    def _item(self, atom: Atom, i: int) -> Atom:
        if isinstance(atom, Stack):
            return atom.items[i]
        if isinstance(piece := atom.origin, Piece):
            row = i + (piece.rows[0] if piece.rows else 0)
            item = Piece(piece.leaf, (*piece.index, row))
            return self.input(item, item_aval(atom.aval))
        if (atom, i) not in self._items:
            self._items[atom, i] = self._computed_item(atom, i)
        return self._items[atom, i]

    def _computed_item(self, value: Value, i: int) -> Value:
        node, aval = value.node, item_aval(value.aval)
        dims = node.params.get("broadcast_dimensions", (0,)) if node else (0,)
        if node is not None and 0 not in dims:
            params = {
                **node.params,
                "shape": aval.shape,
                "broadcast_dimensions": tuple(dim - 1 for dim in dims),
                "sharding": typed_sharding(aval),
            }
            return self._append(replace(node, params=params), node.inputs, aval)
        if node is not None and self._is_stacked(value):
            return self._append(_for_item(node), self._items_of(node.inputs, i), aval)
        number = self.input(Number(i), jax.typeof(np.int32(0)))
        return self._call(_take, value, number)

    def _items_of(self, atoms: Sequence[Atom], i: int) -> list[Atom]:
        return [self._item(atom, i) if atom.aval.shape else atom for atom in atoms]

    def _on_items(self, node: Node, aval: Any, inputs: Sequence[Atom]) -> Stack:
        node, item = _for_item(node), item_aval(aval)
        rows = (self._items_of(inputs, i) for i in range(aval.shape[0]))
        return Stack(aval, tuple(self._on_item(node, item, row) for row in rows))

    def _on_item(self, node: Node, aval: Any, inputs: list[Atom]) -> Atom:
        if node.name == "add_any":
            nonzero = [atom for atom in inputs if atom not in self._zeros]
            if len(nonzero) < 2:
                return (nonzero or inputs)[0]
        if any(isinstance(atom, Stack) for atom in inputs):
            return self._on_items(node, aval, inputs)
        return self._append(node, inputs, aval)

    # Special cases for stacks and slices of params; None for the ordinary treatment.

    def _slice(self, params: Any, aval: Any, atom: Atom) -> Atom | None:
        starts, limits = params["start_indices"], params["limit_indices"]
        shape = tuple(atom.aval.shape)
        has_all = not any(starts[1:]) and tuple(limits[1:]) == shape[1:]
        if not shape or params["strides"] is not None or not has_all:
            return None
        first, last = int(starts[0]), int(limits[0])
        if isinstance(atom, Stack):
            return Stack(aval, atom.items[first:last])
        piece = atom.origin
        if not isinstance(piece, Piece):
            return None
        self._sliced_shapes.add(shape)
        base = piece.rows[0] if piece.rows else 0
        rows = base + first, base + last
        return self.input(Piece(piece.leaf, piece.index, rows), aval)

    def _squeeze(self, params: Any, aval: Any, atom: Atom) -> Atom | None:
        del params  # the shapes tell
        if aval.shape != atom.aval.shape[1:] or atom.aval.shape[0] != 1:
            return None
        is_slice = isinstance(atom, Stack) or (
            isinstance(atom.origin, Piece) and atom.origin.rows is not None
        )
        return self._item(atom, 0) if is_slice else None

    def _pad(self, params: Any, aval: Any, atom: Atom, padding: Atom) -> Atom | None:
        """Returns the gradient of a slice of a stack without making its zeros."""
        (low, high, inner), *others = params["padding_config"]
        zero = padding.constant if isinstance(padding, Value) else None
        is_gradient = zero is not None and zero == 0 and aval.ndim > 1
        is_gradient &= tuple(aval.shape) in self._sliced_shapes and not any(
            map(any, others)
        )
        if not is_gradient or min(low, high) < 0 or inner:
            return None
        rows = [self._item(atom, i) for i in range(atom.aval.shape[0])]
        if low + high:
            item = item_aval(aval)
            zero = self._call(lambda: jnp.zeros(item.shape, item.dtype))
            self._zeros.add(zero)
            rows = [*[zero] * low, *rows, *[zero] * high]
        return Stack(aval, tuple(rows))


_SPECIAL: dict[str, Callable[..., Atom | None]] = {
    "slice": _Unroller._slice,
    "squeeze": _Unroller._squeeze,
    "pad": _Unroller._pad,
}


def _for_item(node: Node) -> Node:
    """Returns a pointwise operation for one element of a stack."""
    if node.name != _CONSTRAINT:
        return node
    sharding, free = node.params["sharding"], node.params["unconstrained_dims"]
    params = {
        **node.params,
        "sharding": sharding.update(spec=PartitionSpec(*tuple(sharding.spec)[1:])),
        "unconstrained_dims": frozenset(dim - 1 for dim in free if dim),
    }
    return replace(node, params=params)


def _is_pointwise(node: Node, inputs: Sequence[Atom], avals: Sequence[Any]) -> bool:
    """Whether elements of the one result depend on those of operands of its shape."""
    is_known = node.name in POINTWISE and len(avals) == 1
    if node.name == _CONSTRAINT:
        is_known = is_known and isinstance(node.params["sharding"], NamedSharding)
    return is_known and all(a.aval.shape in ((), avals[0].shape) for a in inputs)


def _take(array: jax.Array, i: jax.Array) -> jax.Array:
    starts = (i, *(jnp.int32(0) for _ in array.shape[1:]))
    sizes = (1, *array.shape[1:])
    row = lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)
    return lax.squeeze(row, (0,))
