"""Puts tables in rows: each block of rows is a param of its own to what follows.

    look-up   x = select(id in block, block[id - start], x)   block after block
    head      logits = concatenate(h · block, …)
    dx        dx = dx + dlogits[:, block] · block             from the last block on
    gradient  block by block, from the last one on

So blocks that forward reads in turn, backward reads and completes in the opposite
order, as the parts of a deep model. A product for a tied table's gradient waits for the
rest of it as what it is made of, if that has no more bytes.

Invariant: rows that are looked up have the bits of the whole gather, and so have
gradients that are added to them. Sums over rows are added up block by block.
"""

from collections.abc import Container, Mapping, Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinf.program.graph import Node, Value, prune
from jaxinf.streaming.program.graph import (
    Graph,
    Number,
    Piece,
    Rewriter,
    aval_bytes,
)
from jaxinf.streaming.program.row_index import own_rows
from jaxinf.streaming.program.tables import Table, is_spread, side_of


def in_rows(
    graph: Graph, tables: Sequence[Table], bounds: Mapping[int, Sequence[int]]
) -> Graph:
    """Returns a program that reads and updates tables in blocks of rows.

    Args:
      tables: Those of its tables that are not needed whole.
      bounds: The first rows of a table's blocks, and the number of its rows, by leaf.
    """
    builder = _Builder([one for one in tables if one.leaf in bounds], bounds)
    for node in graph.nodes:
        builder.take(node)
    gradients: dict[Piece, Value] = {}
    for piece, value in graph.gradients.items():
        table = builder.by_leaf.get(piece.leaf)
        if table is None:
            gradients[piece] = builder.value(value)
            continue
        for number, rows in enumerate(pairwise(bounds[piece.leaf])):
            gradients[Piece(piece.leaf, (), rows)] = builder.part(table, value, number)
    results = tuple(map(builder.value, graph.results))
    nodes = prune(builder.nodes, (*results, *gradients.values()))
    return Graph(nodes, results, gradients)


class _Builder(Rewriter):
    def __init__(
        self, tables: Sequence[Table], bounds: Mapping[int, Sequence[int]]
    ) -> None:
        super().__init__()
        self.by_leaf = {table.leaf: table for table in tables}
        self._bounds = bounds
        self._of_reads = {value: one for one in tables for value in one.reads}
        self._of_gradients = {
            value: one for one in tables for value in one.made if not is_spread(value)
        }
        self._values: dict[Value, Value] = {}
        self._parts: dict[tuple[Table, Value, int], Value] = {}
        self._taken: set[Node | None] = {None}
        self._kept: dict[Node, Value] = {}

    def value(self, value: Value) -> Value:
        return self._values.get(value, value)

    def take(self, node: Node) -> None:
        """Appends what a node of the old program is in the new one."""
        self._taken.add(node)
        made = self._of_gradients.get(node.outputs[0]) if node.outputs else None
        if made is not None:
            if node in made.products and not _is_early(made, node):
                self._keep(made, node)
            if made.made and node.outputs[0] is next(iter(made.made)):  # the gradient
                for number in reversed(range(self._num_blocks(made))):
                    self.part(made, node.outputs[0], number)
            return
        read = [value for value in node.inputs if value in self._of_reads]
        if not read:
            self._again(node)
        elif node.outputs[0] not in self._of_reads:
            table = self._of_reads[read[0]]
            rule = self._looked_up if node.name == "gather" else self._multiplied
            self._values[node.outputs[0]] = rule(table, node, read[0])

    def part(self, table: Table, value: Value, number: int) -> Value:
        """Returns a block of a value that has a table's rows, or its gradient's."""
        key = table, value, number
        if key not in self._parts:
            axis = table.reads.get(value)
            if axis is not None:
                self._parts[key] = self._read_part(table, value, number, axis)
            else:
                self._parts[key] = self._made_part(table, value, number)
        return self._parts[key]

    # --- what programs read --------------------------------------------------------

    def _read_part(self, table: Table, value: Value, number: int, axis: int) -> Value:
        node = value.node
        shape = self._part_shape(table, value, number, axis)
        aval = value.aval.update(shape=shape)
        if node is None:
            return self.input(Piece(table.leaf, (), self._rows(table, number)), aval)
        inputs = [
            self.part(table, one, number) if one.shape else self.value(one)
            for one in node.inputs
        ]
        return self.append(node, inputs, aval)

    def _looked_up(self, table: Table, node: Node, read: Value) -> Value:
        params, out = node.params, node.outputs[0]
        indices, axis = self.value(node.inputs[1]), table.reads[read]
        is_filled = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
        fill = params["fill_value"] if is_filled else 0
        fill = np.nan if fill is None else fill
        offset = params["dimension_numbers"].offset_dims
        kept = [dim for dim in range(len(out.shape)) if dim not in offset]

        def look_up(
            found: jax.Array, block: jax.Array, indices: jax.Array, start: jax.Array
        ) -> jax.Array:
            length = block.shape[axis]
            row, is_own = own_rows(
                indices, start, length, table.num_rows, is_clipped=not is_filled
            )
            rows = lax.gather(
                block,
                lax.select(is_own, row, lax.full_like(row, 0)),
                params["dimension_numbers"],
                params["slice_sizes"],
                mode=lax.GatherScatterMode.CLIP,
            )
            is_own = lax.squeeze(is_own, (is_own.ndim - 1,))
            mask = lax.broadcast_in_dim(is_own, out.shape, kept)
            return lax.select(mask, rows, found)

        found = self.call(
            (node, "spread"), lambda: lax.full(out.shape, fill, out.dtype)
        )
        for number in range(self._num_blocks(table)):
            block = self.part(table, read, number)
            start = self._start(table, number)
            args = found, block, indices, start
            # A single node: each block is a step of the program, which may be cut here.
            found = self.call((node, "look up"), jax.jit(look_up), *args)
        return found

    def _multiplied(self, table: Table, node: Node, read: Value) -> Value:
        side, axis = node.inputs.index(read), table.reads[read]
        contracted, _ = node.params["dimension_numbers"]
        if axis in contracted[side]:
            place = list(contracted[side]).index(axis)
            return self._summed(table, node, side, contracted[1 - side][place])
        out = node.outputs[0]
        axis = next(
            one
            for one in range(len(out.shape))
            if side_of(node, one) == (side, table.reads[read])
        )
        parts = []
        for number in range(self._num_blocks(table)):
            inputs = [*map(self.value, node.inputs)]
            inputs[side] = self.part(table, read, number)
            shape = self._part_shape(table, out, number, axis)
            parts.append(self.append(node, inputs, out.aval.update(shape=shape)))
        return self.call(
            (node, "concatenate"), lambda *xs: lax.concatenate(xs, axis), *parts
        )

    def _summed(self, table: Table, node: Node, side: int, axis: int) -> Value:
        """Returns a product that is summed over rows; with what is made beside it."""
        other, out = node.inputs[1 - side], node.outputs[0]
        dtype = jnp.promote_types(out.dtype, jnp.float32)
        params = {**node.params, "preferred_element_type": np.dtype(dtype)}
        like = Node(node.primitive, (), params, context=node.context)
        total: Value | None = None
        beside = self._made_beside(table, other)
        for number in reversed(range(self._num_blocks(table))):
            inputs = [self.part(table, node.inputs[side], number)] * 2
            inputs[1 - side] = self._sliced(table, other, number, axis)
            one = self.append(like, inputs, out.aval.update(dtype=dtype))
            if total is not None:
                one = self.call((node, "add"), lax.add, total, one)
            total = one
            for value in beside:
                self.part(table, value, number)
        assert total is not None, "a table has rows"
        if dtype == out.dtype:
            return total
        return self.call(
            (node, "convert"), lambda x: lax.convert_element_type(x, out.dtype), total
        )

    def _made_beside(self, table: Table, other: Value) -> list[Value]:
        """Parts of a gradient that are made where its blocks are read for `other`.

        A gradient that is complete then, and one that is smaller than `other`.
        """
        gradient = next(iter(table.made), None)
        found = [
            node
            for node in table.products
            if other in node.inputs and _can_take(node, self._taken)
        ]
        if gradient is None or not found:
            return []
        if len(table.products) == 1 and not table.is_gathered:
            nodes = [v.node for v in table.made if v.node is not None]
            is_complete = all(_can_take(one, self._taken, table.made) for one in nodes)
            return [gradient] if is_complete else []
        return [node.outputs[0] for node in found if _is_early(table, node)]

    def _keep(self, table: Table, product: Node) -> None:
        """Keeps a forward value for a product that is made late, as one of backward.

        Otherwise backward would have to be done with the segment that makes it only
        when the product is made, and so all segments before it.
        """
        side, _ = _side(product, table.made[product.outputs[0]])

        def keep(value: jax.Array, gradient: jax.Array) -> jax.Array:
            one = lax.slice(gradient, [0] * gradient.ndim, [1] * gradient.ndim)
            return lax.optimization_barrier((value, one))[0]

        args = self.value(product.inputs[1 - side]), self.value(product.inputs[side])
        self._kept[product] = self.call((product, "keep"), jax.jit(keep), *args)

    # --- gradients -----------------------------------------------------------------

    def _made_part(self, table: Table, value: Value, number: int) -> Value:
        node, axis = value.node, table.made[value]
        assert node is not None, "a gradient is computed"
        shape = self._part_shape(table, value, number, axis)
        aval = value.aval.update(shape=shape)
        if is_spread(value):
            own = {**node.params, "shape": shape}
            like = Node(node.primitive, (), own, context=node.context)
            return self.append(like, [self.value(node.inputs[0])], aval)
        if node.name == "dot_general":
            side, own_axis = _side(node, axis)
            other = self._kept.get(node) or self.value(node.inputs[1 - side])
            inputs = [other, other]
            inputs[side] = self._sliced(table, node.inputs[side], number, own_axis)
            return self.append(node, inputs, aval)
        if node.name == "scatter-add":
            return self._scattered(table, node, number, axis)
        inputs = [
            self.part(table, one, number) if one.shape else self.value(one)
            for one in node.inputs
        ]
        return self.append(node, inputs, aval)

    def _scattered(self, table: Table, node: Node, number: int, axis: int) -> Value:
        params = node.params
        is_clipped = params["mode"] == lax.GatherScatterMode.CLIP

        def scatter(
            block: jax.Array, indices: jax.Array, updates: jax.Array, start: jax.Array
        ) -> jax.Array:
            length = block.shape[axis]
            row, is_own = own_rows(
                indices, start, length, table.num_rows, is_clipped=is_clipped
            )
            return lax.scatter_add(
                block,
                lax.select(is_own, row, lax.full_like(row, length)),
                updates,
                params["dimension_numbers"],
                mode=lax.GatherScatterMode.FILL_OR_DROP,
            )

        operand, indices, updates = node.inputs
        args = self.part(table, operand, number), *map(self.value, (indices, updates))
        return self.call(
            (node, "scatter"), jax.jit(scatter), *args, self._start(table, number)
        )

    # --- inside --------------------------------------------------------------------

    def _sliced(self, table: Table, value: Value, number: int, axis: int) -> Value:
        """Returns the elements of an array that belong to a block of rows."""
        first, last = self._rows(table, number)

        def slice_of(array: jax.Array, start: jax.Array) -> jax.Array:
            starts = [jnp.int32(0)] * array.ndim
            starts[axis] = start
            sizes = list(array.shape)
            sizes[axis] = last - first
            return lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)

        key = "slice", axis, last - first
        return self.call(key, slice_of, self.value(value), self._start(table, number))

    def _num_blocks(self, table: Table) -> int:
        return len(self._bounds[table.leaf]) - 1

    def _rows(self, table: Table, number: int) -> tuple[int, int]:
        first, last = self._bounds[table.leaf][number : number + 2]
        return first, last

    def _part_shape(
        self, table: Table, value: Value, number: int, axis: int
    ) -> tuple[int, ...]:
        first, last = self._rows(table, number)
        return (*value.shape[:axis], last - first, *value.shape[axis + 1 :])

    def _start(self, table: Table, number: int) -> Value:
        first, _ = self._rows(table, number)
        return self.input(Number(first), jax.typeof(np.int32(0)))

    def _again(self, node: Node) -> None:
        inputs = tuple(map(self.value, node.inputs))
        if inputs == node.inputs:
            self.nodes.append(node)
            return
        again = Node(
            node.primitive, inputs, node.params, (), node.context, node.sources
        )
        again.outputs = tuple(Value(one.aval, node=again) for one in node.outputs)
        self._values.update(zip(node.outputs, again.outputs, strict=True))
        self.nodes.append(again)


def _can_take(
    node: Node, taken: Container[Node | None], made: Container[Value] = ()
) -> bool:
    """Whether a node's inputs are there, other than those in `made`."""
    return all(value in made or value.node in taken for value in node.inputs)


def _is_early(table: Table, product: Node) -> bool:
    """Whether a product waits, which has fewer bytes than what it is made of."""
    if len(table.products) == 1 and not table.is_gathered:
        return True
    side, _ = _side(product, table.made[product.outputs[0]])
    other = product.inputs[side]
    return aval_bytes(product.outputs[0].aval) < aval_bytes(other.aval)


def _side(product: Node, axis: int) -> tuple[int, int]:
    found = side_of(product, axis)
    assert found is not None, "an axis of one operand"
    return found
